"""Rotary position embedding in the half-rotation convention of Hugging Face checkpoints, with the common fixed
extensions of the context length. (Dynamic NTK is left out: its frequencies change with the length of the sequence, so
keys in a cache would have to be rotated anew.)"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies are stretched beyond the trained length.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides only the long wavelengths, keeps the short
    ones, and blends between ``original_max_position_embeddings / low_freq_factor`` and ``.../ high_freq_factor``.
    ``yarn`` (Peng et al. 2023, https://arxiv.org/abs/2309.00071) keeps pairs that turn more than ``beta_fast`` times
    over the trained length, divides those that turn less than ``beta_slow`` times, ramps between them by the pair's
    index, and scales rotated queries and keys by ``attention_factor``, default 0.1 ln(factor) + 1.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rope scaling {self.kind!r}; known: linear, llama3, yarn")
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor {self.factor} is not positive")


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """f32[head_dim / 2], in radians per position."""
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary positions need pairs")
    # The device is explicit so that a model built on the meta device still has real frequencies.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(frequencies, theta, scaling)
    return _llama3(frequencies, scaling)


def rotary_scale(scaling: RopeScaling | None) -> float:
    """The factor on cosines and sines, 1 but for yarn."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the trained length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((torch.arange(pairs, device="cpu").float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return (1.0 - ramp) * frequencies + ramp * frequencies / scaling.factor


def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """positions i64[T] or [B, T] -> cos, sin f32[1 or B, 1, T, head_dim] times ``scale``; they broadcast over heads."""
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    if scale == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * scale, angles.sin() * scale


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates f[B, H, T, head_dim]; pair i is (x[i], x[i + head_dim / 2])."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
