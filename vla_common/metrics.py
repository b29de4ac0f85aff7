"""Counters, histograms and rates that only record: nothing here decides, waits or prints.

Recording costs an array store and allocates nothing, so it may stand in a control loop. One writer each; a reader in
another thread may see a summary that is one sample old.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NS_PER_S = 1_000_000_000


class Counters:
    """Named counts from zero."""

    def __init__(self, *names: str) -> None:
        """Names given here are reported even while they are zero."""
        self._counts: dict[str, int] = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Add to a count."""
        self._counts[name] = self._counts.get(name, 0) + count

    def __getitem__(self, name: str) -> int:
        """Count so far, 0 for a name never added to."""
        return self._counts.get(name, 0)

    def total(self) -> int:
        """Sum of all counts."""
        return sum(self.snapshot().values())

    def snapshot(self) -> dict[str, int]:
        """Copy of all counts."""
        return dict(self._counts)


@dataclass(frozen=True)
class Summary:
    """Distribution of the recorded values, in their own unit.

    Quantiles are over the last ``window`` values, ``count`` and ``maximum`` over all; NaN while nothing is recorded.
    """

    count: int
    last: float
    p50: float
    p99: float
    p999: float
    maximum: float


class Histogram:
    """The last ``capacity`` values in a preallocated ring."""

    def __init__(self, capacity: int = 4096) -> None:
        """Reserve the ring.

        Args:
            capacity: values kept for quantiles, at least 1.
        """
        if capacity < 1:
            raise ValueError("a histogram keeps at least one value")
        self._values = np.zeros(capacity, dtype=np.float64)
        self._capacity = capacity
        self._count = 0
        self._maximum = float("-inf")

    @property
    def count(self) -> int:
        """Values recorded in all."""
        return self._count

    def record(self, value: float) -> None:
        """Store one value; NaN is stored as it comes and makes the quantiles NaN, so that it is seen."""
        self._values[self._count % self._capacity] = value
        self._count += 1
        if value > self._maximum:
            self._maximum = value

    def summary(self) -> Summary:
        """Quantiles of the ring; sorts a copy, so not for the control loop."""
        if self._count == 0:
            nan = float("nan")
            return Summary(0, nan, nan, nan, nan, nan)
        window = self._values[: min(self._count, self._capacity)]
        p50, p99, p999 = (float(q) for q in np.quantile(window, (0.5, 0.99, 0.999)))
        last = float(self._values[(self._count - 1) % self._capacity])
        return Summary(self._count, last, p50, p99, p999, self._maximum)


class RateMeter:
    """Events per second over a sliding window of the caller's monotonic clock."""

    def __init__(self, window_s: float = 2.0, capacity: int = 1024) -> None:
        """Reserve room for ``capacity`` stamps; rates above ``capacity / window_s`` are under-reported."""
        self._window_ns = round(window_s * NS_PER_S)
        self._stamps_ns = np.full(capacity, np.iinfo(np.int64).min, dtype=np.int64)
        self._next = 0
        self._first_ns: int | None = None

    def record(self, now_ns: int) -> None:
        """Note one event."""
        self._stamps_ns[self._next % len(self._stamps_ns)] = now_ns
        self._next += 1
        if self._first_ns is None:
            self._first_ns = now_ns

    def rate_hz(self, now_ns: int) -> float:
        """Rate over the window that ends now; over the time since the first event while that is shorter."""
        if self._first_ns is None:
            return 0.0
        span_ns = min(self._window_ns, now_ns - self._first_ns)
        if span_ns <= 0:
            return 0.0
        events = int(np.count_nonzero(self._stamps_ns > now_ns - self._window_ns))
        if span_ns < self._window_ns:
            events -= 1  # the first event opens the span, it does not fill it
        return events * NS_PER_S / span_ns
