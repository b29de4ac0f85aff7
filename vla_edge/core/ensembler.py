"""Rules that merge the part of a new chunk that overlaps the trajectory already queued.

A rule sees the rows of both for the same ticks, the next tick first, and writes the merged rows. It never changes how
far the trajectory reaches. Limits stand behind it in any case.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class MergeRule(Protocol):
    """How old and new are merged."""

    def merge(self, old: Array, new: Array, out: Array) -> None:
        """Write the merged rows.

        Args:
            old: float64[m, n], what is queued for the next m ticks, m >= 1.
            new: float64[m, n], what the new chunk says for the same ticks.
            out: float64[m, n], overwritten; never shares memory with the inputs.
        """


class Replace:
    """The new chunk from the next tick on: reacts at once, and steps by the full disagreement."""

    def merge(self, old: Array, new: Array, out: Array) -> None:
        """See :class:`MergeRule`."""
        out[:] = new


class ConstantAlpha:
    """``alpha old + (1 - alpha) new`` over the whole overlap: steps by ``1 - alpha`` of the disagreement."""

    def __init__(self, alpha: float) -> None:
        """``alpha`` is the weight of the old trajectory, 0 .. 1."""
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"ensemble alpha must be in 0 .. 1, got {alpha}")
        self._alpha = alpha

    def merge(self, old: Array, new: Array, out: Array) -> None:
        """See :class:`MergeRule`."""
        np.subtract(new, old, out=out)
        out *= 1.0 - self._alpha
        out += old


class MinimumJerkRamp:
    """From the old trajectory to the new one along ``10 x³ - 15 x⁴ + 6 x⁵`` within ``ticks`` ticks.

    The next tick is the old trajectory's, so nothing steps; the ramp is over by the end of the overlap if that is
    shorter.
    """

    def __init__(self, ticks: int, capacity: int = 256) -> None:
        """``ticks`` >= 1; ``capacity`` is the longest overlap ever merged."""
        if not 1 <= ticks <= capacity:
            raise ValueError(f"ramp must take 1 .. {capacity} ticks, got {ticks}")
        self._ticks = ticks
        self._capacity = capacity
        # One table per possible length of the ramp, made now so that merging allocates nothing that grows.
        self._weights = [self._table(length) for length in range(ticks + 1)]

    def _table(self, length: int) -> Array:
        x = np.minimum(np.arange(self._capacity) / max(length, 1), 1.0)
        return np.asarray(x**3 * (10.0 - 15.0 * x + 6.0 * x * x)).reshape(-1, 1)

    def merge(self, old: Array, new: Array, out: Array) -> None:
        """See :class:`MergeRule`."""
        rows = len(old)
        np.subtract(new, old, out=out)
        out *= self._weights[min(self._ticks, rows)][:rows]
        out += old


class SpeedRamp:
    """Ramps the *speed* from the old trajectory's to the new one's, then returns to the new positions.

    A ramp of positions makes up for the lag between both while it blends: where they differ in speed by ``d`` it passes
    that by up to 0.45 d, and a plan made meanwhile starts there. Here the distance to the new trajectory is
    ``e[k] = e[k-1] + (1 - w[k]) (difference of speeds)`` with w the minimum-jerk ramp over ``ticks``: the speed passes
    monotonically from one to the other. From there on e is faded out until the overlap ends. With plans more frequent
    than that, and made from the newest command, the fading part is replaced before it is sent; it serves late chunks.
    """

    def __init__(self, ticks: int, capacity: int = 256) -> None:
        """``ticks`` >= 1; ``capacity`` is the longest overlap ever merged."""
        self._ramp = MinimumJerkRamp(ticks, capacity)
        # Weights for every possible overlap, made now: merging happens in the motor process.
        self._weights = [_speed_ramp_weights(min(ticks, rows // 2), rows) for rows in range(capacity + 1)]

    def merge(self, old: Array, new: Array, out: Array) -> None:
        """See :class:`MergeRule`. An overlap too short for both parts is merged by the ramp of positions."""
        weights = self._weights[len(old)]
        if weights is None:
            self._ramp.merge(old, new, out)
            return
        of_speed, of_distance = weights
        np.subtract(old, new, out=out)
        out[1:] = (out[1:] - out[:-1]) * of_speed
        np.cumsum(out, axis=0, out=out)
        out *= of_distance
        out += new


def _speed_ramp_weights(ticks: int, rows: int) -> tuple[Array, Array] | None:
    """Weights of the differences of speed [rows - 1, 1] and of the distance [rows, 1]; None if the overlap is short."""
    if ticks < 2:
        return None
    k = np.arange(rows, dtype=np.float64)[:, None]
    return _fade(k[1:] / ticks), _fade((k - ticks) / (rows - ticks))


def _fade(x: Array) -> Array:
    x = np.clip(x, 0.0, 1.0)
    return np.asarray(1.0 - x**3 * (10.0 - 15.0 * x + 6.0 * x * x))


def make_rule(name: str, ramp_ticks: int = 8, alpha: float = 0.5) -> MergeRule:
    """Rule by its name in the configuration: ``ramp``, ``speed_ramp``, ``constant`` or ``replace``.

    Raises:
        ValueError: unknown name or a parameter out of range.
    """
    if name == "ramp":
        return MinimumJerkRamp(ramp_ticks)
    if name == "speed_ramp":
        return SpeedRamp(ramp_ticks)
    if name == "constant":
        return ConstantAlpha(alpha)
    if name == "replace":
        return Replace()
    raise ValueError(f"unknown ensemble rule {name!r}: use ramp, speed_ramp, constant or replace")
