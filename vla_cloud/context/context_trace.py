"""The cloud's spans of an observation, under the one that the robot's io process makes. See docs/tracing.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vla_cloud.core.request import RobotRequest
from vla_common.clock import Clock
from vla_common.tracing import Tracer, Value, span_id, tick_trace


class ContextTrace:
    """Of the process that hears the robots."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        """``clock``: that of the spans and of the requests' arrival."""
        self._tracer, self._clock = tracer, clock

    def id_of(self, request: RobotRequest[Any]) -> bytes:
        """The observation's trace; empty: it is not recorded."""
        trace = tick_trace(request.robot, request.stamp_ns)
        return trace if self._tracer.samples(trace) else b""

    def ids_of(self, requests: Sequence[RobotRequest[Any]]) -> list[bytes]:
        """For a batch to a lane: empty if none is recorded."""
        traces = [self.id_of(request) for request in requests]
        return traces if any(traces) else []

    def answered(
        self, request: RobotRequest[Any], taken_ns: int, computed_ns: int, error: str = "", flight: int = 0,
        **attributes: Value,
    ) -> None:  # fmt: skip
        """A request has ended: with its context, which was sent now, or with an ``error``.

        Args:
            request: the observation. taken_ns: it left the queue. computed_ns: its context was there.
            flight: number of the lane's batch; 0: this process computed.
        """
        trace = self.id_of(request)
        if not trace:
            return
        now_ns, span, root = self._clock.monotonic_ns(), self._tracer.span, span_id(trace, "observation")
        # An observation that went to two lanes ends twice; the answer that was sent is the one without an error.
        which = (flight,) if error else ()
        context = span_id(trace, "context", *which)
        span(trace, context, root, "context", request.received_ns, now_ns, error, robot=request.robot)
        span(trace, span_id(trace, "queue", *which), context, "queue", request.received_ns, taken_ns)
        if flight:
            span(trace, lane_span(trace, flight), context, "lane", taken_ns, computed_ns, **attributes)
        else:
            compute = span_id(trace, "compute", 0)
            span(trace, compute, context, "encode and prefill", taken_ns, computed_ns, **attributes)
        if not error:
            span(trace, span_id(trace, "publish"), context, "publish", computed_ns, now_ns)


def lane_span(trace: bytes, flight: int) -> bytes:
    """The gateway's span of a batch at a lane, which the lane's own span hangs under."""
    return span_id(trace, "lane", flight)
