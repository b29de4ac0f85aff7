"""Traces: spans, and ids that every process computes alike, so that none has to tell another. Pure.

A trace is one chat request or one observation of a robot. Its id and those of its spans follow from what its messages
carry anyway; see docs/tracing.md for the stages. Span times are the process's own CLOCK_MONOTONIC: the exporter makes
wall-clock times of them (:mod:`vla_common.span_queue`), and no instant crosses a machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8

Value: TypeAlias = str | int | float | bool

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True)
class TracingConfig:
    """Where spans go; see ``tracing`` in config/cloud.yaml and config/edge.yaml.

    Attributes:
        sample: share of traces that are recorded, 0 (off) .. 1, chosen by trace id alone: all processes agree.
        export: ``file``: JSON lines of OTLP, a file for each process in ``folder``. ``otlp``: to ``endpoint`` over
            HTTP, which needs the extra ``otel``.
        max_file_mb: a file that has grown beyond it becomes ``<file>.1`` in the place of an older one.
        queue: spans that wait to be exported; further ones are dropped and counted.
    """

    sample: float = 0.0
    export: Literal["file", "otlp"] = "file"
    folder: str = "traces"
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    max_file_mb: float = 64.0
    queue: int = 4096

    def __post_init__(self) -> None:
        """Refuse values that would record nothing of what was asked for."""
        if not 0.0 <= self.sample <= 1.0:
            raise ValueError(f"sample must be 0 (off) .. 1, got {self.sample}")
        if not self.max_file_mb > 0.0 or self.queue < 1:
            raise ValueError("max_file_mb must be positive and queue at least 1")
        if self.export == "otlp" and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.endpoint!r} must be a URL such as http://127.0.0.1:4318/v1/traces")
        if self.export == "file" and not self.folder:
            raise ValueError("folder is empty: name one, such as traces")


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of this process.

    ``trace`` has 16 bytes, ``id`` and ``parent`` 8 (``parent`` empty: none). Times are this process's CLOCK_MONOTONIC.
    """

    trace: bytes
    id: bytes
    parent: bytes
    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""


class SpanSink(Protocol):
    """Takes spans."""

    def put(self, span: Span) -> None:
        """Take one. Never waits and never raises."""
        ...


class Tracer:
    """Makes the spans of one process. Where tracing is off there is none (None), and nothing is computed."""

    def __init__(self, sink: SpanSink, sample: float) -> None:
        """``sample``: see :class:`TracingConfig`."""
        self._sink, self._sample = sink, sample

    def samples(self, trace: bytes) -> bool:
        """Whether this trace is recorded."""
        return is_sampled(trace, self._sample)

    def span(
        self, trace: bytes, span: bytes, parent: bytes, name: str, begin_ns: int, end_ns: int, error: str = "",
        **attributes: Value,
    ) -> None:  # fmt: skip
        """Record a span of a sampled trace; it has ended. Never waits."""
        self._sink.put(Span(trace, span, parent, name, begin_ns, max(begin_ns, end_ns), attributes, error))


def trace_id(*parts: str | int) -> bytes:
    """16 bytes from what tells this trace from all others."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:TRACE_BYTES]


def span_id(trace: bytes, stage: str, *which: str | int) -> bytes:
    """8 bytes for a stage of a trace; ``which`` tells its repetitions apart, such as the number of an attempt."""
    return hashlib.sha256(trace + "\0".join([stage, *map(str, which)]).encode()).digest()[:SPAN_BYTES]


def tick_trace(robot: str, stamp_ns: int) -> bytes:
    """Id of the trace of an observation: its stamp comes back in its context and in the chunks made from that."""
    return trace_id("tick", robot, stamp_ns)


def is_sampled(trace: bytes, share: float) -> bool:
    """Whether a trace belongs to this share of all: the rule of OpenTelemetry's TraceIdRatioBased sampler."""
    return int.from_bytes(trace[TRACE_BYTES - 8 :], "big") < round(share * 2**64)


def parse_traceparent(text: str) -> tuple[bytes, bytes] | None:
    """Trace id and the caller's span id of a W3C ``traceparent`` header; None for one that is to be ignored.

    https://www.w3.org/TR/trace-context/: lower-case hexadecimal, no id of zeros, not version ff; a later version may
    append fields. The header's "sampled" flag does not count here.
    """
    found = _TRACEPARENT.fullmatch(text.strip(" \t"))
    if found is None:
        return None
    version, trace, span, _, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None) or not int(trace, 16) or not int(span, 16):
        return None
    return bytes.fromhex(trace), bytes.fromhex(span)
