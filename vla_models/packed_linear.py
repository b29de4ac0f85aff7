"""Products with constant weights, re-ordered once for oneDNN where torch offers that (float32 on a CPU).

A packed weight is up to three times as fast for the few rows of a decode step, and additions and activations ride
along. Elsewhere the same functions are plain torch.

oneDNN generates code for each number of rows on its first use (4 to 8 ms for a layer's products), and is slower for 1
to 3 rows than for 4: :func:`padded_rows` rounds up to few sizes, which can be tried before they are needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 32
"""Layouts chosen for one row are slow for many; the one for 32 rows is as good as any from 1 to 512 rows."""


SMALL_ROWS = 64
"""Up to here generating the code takes longer than running it."""


def padded_rows(rows: int) -> int:
    """The number of rows to compute instead of ``rows``: 0, 4, 6, 8, 12 ... 32, 40 ... 64, 80 ... by 16."""
    if rows <= 0:
        return 0
    step = 2 if rows <= 8 else 4 if rows <= 32 else 8 if rows <= SMALL_ROWS else 16
    return max(4, -(-rows // step) * step)


def can_pack(weight: Tensor) -> bool:
    """Whether this torch can pack the weight: float32 on a CPU, oneDNN built in, its operators present."""
    operators: Any = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(operators, "_linear_pointwise")
        and hasattr(operators, "_reorder_linear_weight")
    )


class PackedLinear:
    """x @ weight.T for weight f[N, K]; the original may be freed afterwards if it was packed."""

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach().contiguous()
        self.packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """f[T, K] -> f[T, N]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return F.linear(x, self._weight)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual f[T, N] + x @ weight.T."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, None, "add")
        return residual + F.linear(x, self._weight)

    def silu(self, x: Tensor) -> Tensor:
        """silu(x @ weight.T)."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "swish", [], "")
        return F.silu(F.linear(x, self._weight))

    def times(self, factor: Tensor, x: Tensor) -> Tensor:
        """factor f[T, N] * (x @ weight.T), element by element."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._weight, None, "mul")
        return factor * F.linear(x, self._weight)
