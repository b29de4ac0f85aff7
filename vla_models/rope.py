"""Rotary position embedding in the half-rotation convention of Hugging Face checkpoints, with its two common
extensions of the context length."""

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
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope scaling {self.kind!r}; known: linear, llama3")
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
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the trained length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions i64[T] or [B, T] -> cos, sin f32[1 or B, 1, T, head_dim], ready to broadcast over heads."""
    if positions.dim() == 1:
        positions = positions.unsqueeze(0)
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates f[B, H, T, head_dim]; pair i is (x[i], x[i + head_dim / 2])."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
