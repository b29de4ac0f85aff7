"""From a process's spans to wherever they go: a bounded queue that nobody waits for, emptied by a thread of its own."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from vla_common.clock import Clock
from vla_common.config import ConfigError
from vla_common.span_file import SpanFile
from vla_common.tracing import Span, Tracer, TracingConfig

LOG = logging.getLogger(__name__)

PERIOD_S: Final = 0.2
"""Between exports: what a killed process loses at most."""
FAREWELL_S: Final = 1.0
"""Longest wait for the last export at the end of a process."""
_BATCH: Final = 512
_READINGS: Final = 3


class SpanExporter(Protocol):
    """Writes or sends spans; called by one thread, may wait."""

    def export(self, spans: Sequence[Span], offset_ns: int) -> None:
        """``offset_ns``: wall clock minus the clock of the spans. Raises whatever goes wrong."""
        ...

    def close(self) -> None:
        """The last call."""
        ...


class SpanQueue:
    """A :class:`vla_common.tracing.SpanSink` for any thread.

    Attributes:
        dropped: spans that found the queue full. lost: spans whose export failed.
    """

    def __init__(self, exporter: SpanExporter, clock: Clock, limit: int, period_s: float = PERIOD_S) -> None:
        """Starts its thread; :meth:`close` ends it."""
        self._exporter, self._clock, self._limit, self._period_s = exporter, clock, limit, period_s
        self._spans: deque[Span] = deque()  # append and popleft are atomic
        self._end = threading.Event()
        self.dropped = self.lost = 0
        self._told = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Take a span, or count it as dropped."""
        if len(self._spans) >= self._limit:
            self.dropped += 1
        else:
            self._spans.append(span)

    def close(self) -> None:
        """Export what is left, for FAREWELL_S at most. Safe to call twice."""
        self._end.set()
        self._thread.join(FAREWELL_S)

    def _run(self) -> None:
        while not self._end.wait(self._period_s):
            self._flush()
        self._flush()
        try:
            self._exporter.close()
        except Exception as error:  # nothing depends on it
            LOG.debug("the span exporter did not close: %s", error)

    def _flush(self) -> None:
        while self._spans:
            batch = [self._spans.popleft() for _ in range(min(_BATCH, len(self._spans)))]
            try:
                self._exporter.export(batch, self._offset_ns())
            except Exception as error:  # a full disk, a collector that is away: requests go on without their traces
                if not self.lost:
                    LOG.warning("spans cannot be exported (further failures are only counted): %s", error)
                self.lost += len(batch)
        if self.dropped + self.lost >= max(1, 2 * self._told):  # ever more rarely
            self._told = self.dropped + self.lost
            LOG.warning("spans dropped as the queue was full: %d, not exported: %d", self.dropped, self.lost)

    def _offset_ns(self) -> int:
        """Wall clock minus monotonic clock, read anew for each batch: the wall clock is set from time to time.

        Of several readings the one with the least time between its ends counts: this thread may be held up in one.
        """
        readings = []
        for _ in range(_READINGS):
            before_ns = self._clock.monotonic_ns()
            wall_ns = self._clock.wall_ns()
            after_ns = self._clock.monotonic_ns()
            readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
        return min(readings)[1]


def check_tracing(config: TracingConfig) -> None:
    """Refuse a configuration that this machine cannot serve.

    Raises:
        ConfigError: the package for ``export: otlp`` is missing.
    """
    if config.sample > 0.0 and config.export == "otlp" and importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError("tracing.export is otlp but opentelemetry is not installed: pip install 'vla-runtime[otel]', "
                          "or set tracing.export to file")


@contextmanager
def tracing(config: TracingConfig, service: str, instance: str, clock: Clock) -> Iterator[Tracer | None]:
    """The tracer of a process while the body runs; None while tracing is off.

    Args:
        config: shared by all processes. clock: that of the spans.
        service: what the process is, such as ``vla-io``. instance: which of them, such as a worker id or a robot id.

    Raises:
        ConfigError: spans cannot be written or sent; names the remedy.
    """
    if config.sample <= 0.0:
        yield None
        return
    queue = SpanQueue(_exporter(config, service, instance), clock, config.queue)
    try:
        yield Tracer(queue, config.sample)
    finally:
        queue.close()


def _exporter(config: TracingConfig, service: str, instance: str) -> SpanExporter:
    if config.export == "file":
        try:
            return SpanFile.create(config.folder, service, instance, round(config.max_file_mb * 1e6))
        except OSError as error:
            told = f"tracing.folder {config.folder}: {error.strerror}; name one that can be written"
            raise ConfigError(told) from error
    check_tracing(config)
    try:
        from vla_common.otel import OtlpExporter
    except ImportError as error:
        raise ConfigError(f"tracing.export is otlp but a package is missing or too old ({error}): "
                          "pip install 'vla-runtime[otel]'") from error
    return OtlpExporter(config.endpoint, service, instance)
