"""What the cloud did, for one log line every few seconds."""

from __future__ import annotations

from vla_cloud.core.context_pacer import ContextPacer
from vla_common.metrics import Counters, Histogram

NS_PER_S = 1_000_000_000
MS_PER_S = 1_000.0
COMPUTE_WINDOW = 512


class ServingStatistics:
    """Totals since start, reported as rates since the last report. Recorded by the serving threads, read by one."""

    def __init__(self, start_ns: int) -> None:
        """Counting starts at ``start_ns``."""
        self.refused = Counters()  # by cause
        self.received = 0
        self.published = 0
        self.batches = 0
        self.text_tokens = 0
        self.text_tokens_reused = 0  # keys and values were cached
        self.images_reused = 0  # not encoded again
        self.compute_s = Histogram(COMPUTE_WINDOW)  # from receipt to answer, of the latest answers
        self._reported_ns = start_ns
        self._reported_received = 0
        self._reported_published = 0

    def report(self, now_ns: int, pacer: ContextPacer[object]) -> str:
        """The line. Rates are since the last report, counts since start; causes that never occurred are left out."""
        span_s = max(1, now_ns - self._reported_ns) / NS_PER_S
        received_hz = (self.received - self._reported_received) / span_s
        published_hz = (self.published - self._reported_published) / span_s
        self._reported_ns = now_ns
        self._reported_received, self._reported_published = self.received, self.published
        compute = self.compute_s.summary()
        reuse = self.text_tokens_reused / max(1, self.text_tokens)
        counts = pacer.counts
        answered = f"p50 {compute.p50 * MS_PER_S:.0f} p99 {compute.p99 * MS_PER_S:.0f} ms" if compute.count else "never"
        parts = [
            f"{pacer.num_robots} robots, {received_hz:.1f} observations/s, {published_hz:.1f} contexts/s",
            f"batch {self.published / max(1, self.batches):.1f}",
            f"answered after {answered}",
            f"prefix reuse {reuse:.0%}, images known {self.images_reused}",
            f"replaced {counts.replaced} late {counts.late} stale {counts.stale}",
        ]
        refused = {cause: count for cause, count in sorted(self.refused.snapshot().items()) if count}
        parts.append("refused " + (" ".join(f"{cause}={count}" for cause, count in refused.items()) or "none"))
        return "; ".join(parts)
