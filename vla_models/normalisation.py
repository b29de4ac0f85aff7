"""Normalisation of joint states and actions as checkpoints carry it: by mean and deviation, or by quantiles.

Semantics after LeRobot (``lerobot/processor/normalize_processor.py``) and openpi (``openpi/transforms.py``):

* ``mean_std``: y = (x - mean) / std
* ``quantile``: y = 2 (x - q01) / (q99 - q01) - 1, so that most values lie in -1 .. 1 and rare ones beyond

Both are y = (x - centre) / scale + shift, and the inverse is exact: **neither direction clips**. A value beyond the
quantiles is rare, not wrong; limits are the business of the shield, which knows the robot.

A *constant* dimension (q99 = q01 or std = 0) holds no information. LeRobot divides by 1e-8 there and openpi by 1e-6, so
that a joint that moved a milliradian at run time becomes 1e3 .. 1e5. Here it is always given to the network as the
same number, and whatever the network answers for it becomes the constant again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CONSTANT_WIDTH = 1e-6
"""A dimension whose deviation (or half its quantile range) is not above this is constant: openpi's epsilon, and less
than an encoder of a robot resolves in rad."""


class NormalisationError(ValueError):
    """Statistics that cannot be used; the message names the dimension."""


@dataclass(frozen=True)
class Normaliser:
    """y = (x - centre) / scale + shift per dimension; make one with :meth:`mean_std` or :meth:`quantile`.

    Attributes:
        centre: float64[..., n], what 0 stands for before the shift.
        scale: float64[..., n], 0 for constant dimensions.
        shift: float64[..., n], 0, but for constant dimensions the number the network was trained with.
    """

    centre: Array
    scale: Array
    shift: Array

    @classmethod
    def mean_std(cls, mean: Any, std: Any, constant: float = 0.0) -> Normaliser:
        """From means and standard deviations of equal shape [..., n].

        Args:
            mean, std: numbers, ``std`` not negative.
            constant: what constant dimensions are given to the network as.

        Raises:
            NormalisationError: shapes differ, or a number is not finite or negative.
        """
        return cls._made("std", _numbers("mean", mean), _numbers("std", std), constant)

    @classmethod
    def quantile(cls, q01: Any, q99: Any, constant: float = 0.0) -> Normaliser:
        """From quantiles of equal shape [..., n].

        Args:
            q01, q99: numbers, ``q99`` not below ``q01``.
            constant: what constant dimensions are given to the network as; LeRobot and openpi train with -1.

        Raises:
            NormalisationError: shapes differ, a number is not finite, or the quantiles are in the wrong order.
        """
        low, high = _numbers("q01", q01), _numbers("q99", q99)
        if low.shape != high.shape:
            raise NormalisationError(f"q01 is {low.shape}, q99 is {high.shape}: they must be of one data set")
        return cls._made("q99 - q01", low + (high - low) / 2.0, (high - low) / 2.0, constant)

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any], mode: str) -> Normaliser:
        """From one feature of a checkpoint's statistics: ``{"mean": ..., "std": ..., "q01": ..., "q99": ...}``.

        Args:
            stats: lists or arrays by name, as in ``meta/stats.json`` (LeRobot) or ``norm_stats.json`` (openpi).
            mode: ``mean_std`` or ``quantile``.

        Raises:
            NormalisationError: an unknown mode, missing statistics, or numbers that cannot be used.
        """
        wanted = {"mean_std": ("mean", "std"), "quantile": ("q01", "q99")}
        if mode not in wanted:
            raise NormalisationError(f"unknown normalisation {mode!r}: use {' or '.join(wanted)}")
        missing = [name for name in wanted[mode] if stats.get(name) is None]
        if missing:
            raise NormalisationError(f"{mode} needs {', '.join(missing)}; the statistics have {sorted(stats)}: compute "
                                     "them over the whole data set (quantiles of episodes must not be averaged)")
        first, second = (stats[name] for name in wanted[mode])
        if mode == "mean_std":
            return cls.mean_std(first, second)
        return cls.quantile(first, second, constant=-1.0)

    @classmethod
    def _made(cls, what: str, centre: Array, scale: Array, constant: float) -> Normaliser:
        if centre.shape != scale.shape:
            raise NormalisationError(f"{what} is {scale.shape}, its centre {centre.shape}: take both from one data set")
        _refuse(scale < 0.0, scale, f"{what} must not be negative")
        is_constant = scale <= CONSTANT_WIDTH
        return cls(centre, np.where(is_constant, 0.0, scale), np.where(is_constant, constant, 0.0))

    @property
    def is_constant(self) -> npt.NDArray[np.bool_]:
        """bool[..., n]: dimensions without information."""
        return self.scale == 0.0

    def forward(self, x: Any) -> Array:
        """Raw values [..., n] (rad, closure) → what the network takes; not clipped."""
        safe = np.where(self.is_constant, np.inf, self.scale)
        return np.asarray((np.asarray(x, np.float64) - self.centre) / safe + self.shift)

    def inverse(self, y: Any) -> Array:
        """What the network gives [..., n] → raw values, not clipped; constant dimensions give their constant."""
        return np.asarray((np.asarray(y, np.float64) - self.shift) * self.scale + self.centre)


def floored_scale(name: str, scale: npt.NDArray[Any], floor: float) -> npt.NDArray[Any]:
    """Scales for a network that divides by them: at least ``floor``, for dimensions that (almost) never changed.

    The error of such a dimension is then at most its size / floor, instead of unbounded.

    Raises:
        NormalisationError: a scale is negative or not finite, so the samples are broken.
    """
    values = np.asarray(scale)
    _refuse(~(np.isfinite(values) & (values >= 0.0)), values, f"{name}: a scale must be finite and not negative")
    return np.maximum(values, floor)


def _numbers(name: str, values: Any) -> Array:
    numbers = np.asarray(values, np.float64)
    _refuse(~np.isfinite(numbers), numbers, f"{name} must be finite")
    return numbers


def _refuse(wrong: npt.NDArray[np.bool_], values: npt.NDArray[Any], why: str) -> None:
    if wrong.any():
        at: Sequence[int] = [int(i) for i in np.argwhere(wrong)[0]]
        raise NormalisationError(f"{why}, dimension {at} has {values[tuple(at)]}: compute the statistics again")
