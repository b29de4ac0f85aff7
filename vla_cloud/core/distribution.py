"""How values are spread: since the start in fixed buckets, and over the last minute. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

NS_PER_S = 1_000_000_000


class Buckets:
    """Counts below fixed upper bounds, since the start."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` ascend; what is above the last is counted, too."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> dict[str, Any]:
        """Plain values: ``bounds``, ``counts`` (not cumulative, one more than bounds), ``sum``."""
        return {"bounds": self._bounds, "counts": list(self._counts), "sum": self._sum}


class Recent:
    """The newest values of a time window, for quantiles that a person looks at."""

    def __init__(self, window_s: float = 60.0, capacity: int = 4096) -> None:
        """Keeps at most ``capacity`` values, so that a busy server pays no more than that."""
        self.window_s = window_s
        self._values: deque[tuple[int, float]] = deque(maxlen=capacity)

    def add(self, value: float, now_ns: int) -> None:
        """Record a value; ``now_ns`` is the caller's monotonic clock."""
        self._values.append((now_ns, value))

    def summary(self, now_ns: int) -> dict[str, Any]:
        """``count``, and ``p50``, ``p95``, ``p99``: None without values."""
        self._drop_old(now_ns)
        values = sorted(value for _, value in self._values)
        named = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        return {"count": len(values), **{name: quantile(values, part) for name, part in named.items()}}

    def _drop_old(self, now_ns: int) -> None:
        oldest_ns = now_ns - round(self.window_s * NS_PER_S)
        while self._values and self._values[0][0] < oldest_ns:
            self._values.popleft()


class RecentSum:
    """Sum of the last window, in bins of a second: as large for a busy server as for an idle one."""

    def __init__(self, window_s: int = 60) -> None:
        """Nothing yet."""
        self.window_s = window_s
        self._bins: deque[tuple[int, float]] = deque(maxlen=window_s + 1)

    def add(self, value: float, now_ns: int) -> None:
        """Add a value; ``now_ns`` is the caller's monotonic clock."""
        second = now_ns // NS_PER_S
        if self._bins and self._bins[-1][0] == second:
            value += self._bins.pop()[1]
        self._bins.append((second, value))

    def total(self, now_ns: int) -> float:
        """Sum of the window that ends now."""
        oldest = now_ns // NS_PER_S - self.window_s
        return sum(value for second, value in self._bins if second > oldest)


def quantile(ascending: Sequence[float], part: float) -> float | None:
    """Nearest rank: the smallest value that at least ``part`` of all do not exceed; None without values."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(part * len(ascending)) - 1)]
