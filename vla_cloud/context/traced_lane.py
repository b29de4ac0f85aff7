"""A robot lane's spans of the batches that hold traced observations, seen from what goes in and what comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vla_cloud.context.context_trace import lane_span
from vla_cloud.context.lane import RobotLane
from vla_cloud.pools import messages as wire
from vla_common.clock import Clock
from vla_common.tracing import Tracer, span_id


class TracedLane:
    """The :class:`vla_cloud.pools.worker_process.Engine` of a traced lane: its batches, one a step, in order."""

    def __init__(self, lane: RobotLane, tracer: Tracer, clock: Clock) -> None:
        """``clock``: that of the spans."""
        self._lane, self._tracer, self._clock = lane, tracer, clock
        self._todo: deque[tuple[wire.ContextBatch, int]] = deque()
        self._done: dict[int, tuple[wire.ContextBatch, int, int]] = {}

    def ready(self, worker: str) -> wire.LaneReady:
        """See the lane, as for all that follows."""
        return self._lane.ready(worker)

    def handle(self, message: wire.ToWorker) -> None:
        """A batch is remembered from its arrival on."""
        if isinstance(message, wire.ContextBatch):
            self._todo.append((message, self._clock.monotonic_ns()))
        self._lane.handle(message)

    def step(self) -> bool:
        """Compute the next batch."""
        began_ns = self._clock.monotonic_ns()
        is_busy = self._lane.step()
        if self._todo:
            batch, _ = self._todo.popleft()
            if batch.traces:
                self._done[batch.number] = (batch, began_ns, self._clock.monotonic_ns())
        return is_busy

    def events(self) -> list[wire.ToGateway]:
        """Messages for the gateway; an answer tells what its rows had cached."""
        events = self._lane.events()
        for event in events if self._done else ():
            if isinstance(event, wire.Contexts) and event.number in self._done:
                self._tell(*self._done.pop(event.number), event)
        return events

    def wait_fds(self) -> Sequence[int]:
        """Descriptors."""
        return self._lane.wait_fds()

    def wait_s(self) -> float | None:
        """How long nothing happens."""
        return self._lane.wait_s()

    @property
    def failure(self) -> str | None:
        """Why the lane has ended."""
        return self._lane.failure

    def close(self) -> None:
        """Close the lane."""
        self._lane.close()

    def _tell(self, batch: wire.ContextBatch, began_ns: int, ended_ns: int, answer: wire.Contexts) -> None:
        for trace, row in zip(batch.traces, answer.rows, strict=False):
            if trace:
                span, parent = span_id(trace, "compute", batch.number), lane_span(trace, batch.number)
                self._tracer.span(
                    trace, span, parent, "encode and prefill", began_ns, ended_ns, row.cause, batch=len(batch.rows),
                    image_cached=row.image_cached, prefix_tokens_reused=row.prefix_tokens_reused,
                )  # fmt: skip
