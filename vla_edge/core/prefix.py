"""What of the plan in force a new chunk has to agree with: the prefix of real-time chunking.

Black, Galliker and Levine 2025, "Real-Time Execution of Action Chunking Flow Policies" (RTC), section 4: rows that will
be executed before the new chunk arrives are frozen (weight 1), the rest of the overlap guides it with a weight that
decays to 0. A prefix in delta coordinates is made anew from absolute rows for every chunk: deltas of a former chunk
refer to another pose.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from vla_edge.core.denoiser import FloatArray, Prefix

Array = npt.NDArray[np.float64]

REMEMBERED_DELAYS = 20
"""Chunks; at one every 5 ticks, those of the last second."""


class PlanningDelay:
    """How many rows of the plan in force are sent before a chunk that is being made can be merged."""

    def __init__(self, period_s: float, least_ticks: int) -> None:
        """``least_ticks`` >= 1 holds until something was measured, and as a lower bound."""
        self._period_ns = round(period_s * 1e9)
        self._least = least_ticks
        self._recent: deque[int] = deque(maxlen=REMEMBERED_DELAYS)

    def record(self, base_stamp_ns: int, finished_ns: int) -> None:
        """A chunk made from the command of ``base_stamp_ns`` was handed over at ``finished_ns``; one clock."""
        self._recent.append(max(0, finished_ns - base_stamp_ns) // self._period_ns)

    @property
    def ticks(self) -> int:
        """Rows to freeze: the longest of the recent delays and one more, at least ``least_ticks``."""
        return max(self._least, max(self._recent, default=-1) + 1)


def soft_mask(horizon: int, frozen: int, planned: int, guided: bool = True) -> FloatArray:
    """Weights float32[horizon] of a prefix.

    1 for rows below ``frozen``; then ``c (exp(c) - 1) / (e - 1)`` with ``c = (planned - k) / (planned - frozen + 1)``
    (equation 5 of the paper); 0 from ``planned`` on.

    Args:
        horizon: rows of the chunk.
        frozen: rows that will be executed before the chunk arrives.
        planned: rows that the plan in force has.
        guided: False leaves all rows free that are not frozen.
    """
    row = np.arange(horizon, dtype=np.float64)
    c = np.clip((planned - row) / max(planned - frozen + 1, 1), 0.0, 1.0)
    weights = c * np.expm1(c) / math.expm1(1.0) if guided else np.zeros(horizon)
    weights[:min(frozen, planned)] = 1.0
    weights[planned:] = 0.0
    return weights.astype(np.float32)


def make_prefix(plan: Array, position: Array, horizon: int, frozen: int, guided: bool = True) -> Prefix | None:
    """The prefix for a chunk that starts from a command.

    Args:
        plan: float64[m, n] absolute rows of the plan in force from the chunk's first tick on, rad (closure).
        position: float64[n], the command the chunk's deltas refer to.
        horizon: rows of the chunk. frozen, guided: see :func:`soft_mask`.

    Returns:
        None if nothing is planned. The difference is taken in float64 before it is rounded to float32.
    """
    planned = min(len(plan), horizon)
    if planned == 0:
        return None
    actions = np.zeros((horizon, len(position)), np.float32)
    actions[:planned] = plan[:planned] - position
    return Prefix(actions, soft_mask(horizon, frozen, planned, guided))
