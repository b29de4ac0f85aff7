"""Spans to an OpenTelemetry collector over OTLP/HTTP. The only file that imports opentelemetry (extra ``otel``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from vla_common.tracing import Span

TIMEOUT_S: Final = 2.0
"""Of one export, tries again included: its thread must end with the process."""


class OtlpExporter:
    """A :class:`vla_common.span_queue.SpanExporter`. The spans keep the ids and times that they have."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """``endpoint``: such as http://127.0.0.1:4318/v1/traces. Nothing is sent yet."""
        self._endpoint = endpoint
        # It logs every failure itself, as an error; whoever exports counts them.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._scope = InstrumentationScope("vla-runtime")

    def export(self, spans: Sequence[Span], offset_ns: int) -> None:
        """Send. RuntimeError if the collector did not take them."""
        if self._exporter.export([self._readable(span, offset_ns) for span in spans]) is not SpanExportResult.SUCCESS:
            raise RuntimeError(f"the collector at {self._endpoint} did not take {len(spans)} spans")

    def close(self) -> None:
        """End the connection."""
        self._exporter.shutdown()

    def _readable(self, span: Span, offset_ns: int) -> ReadableSpan:
        status = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
        return ReadableSpan(
            span.name, _context(span.trace, span.id), _context(span.trace, span.parent) if span.parent else None,
            self._resource, dict(span.attributes), status=status, start_time=span.begin_ns + offset_ns,
            end_time=span.end_ns + offset_ns, instrumentation_scope=self._scope,
        )  # fmt: skip


def _context(trace: bytes, span: bytes) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace, "big"), int.from_bytes(span, "big"), is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )  # fmt: skip
