"""The context service over robot lanes: observations in, batches to lanes, contexts out. In one event loop.

The receiver's thread decodes and checks; pacer, dispatch and publishing run in the loop, which never waits for a lane.
:class:`vla_cloud.core.context_dispatch.ContextDispatch` decides; this file moves bytes and time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_cloud.config import ContextConfig
from vla_cloud.context.checks import CheckedObservation, ObservationChecks
from vla_cloud.context.context_trace import ContextTrace
from vla_cloud.context.front import ContextFront, Publish, make_pacer
from vla_cloud.context.robots_status import lanes_status, robots_status
from vla_cloud.core.context_dispatch import ContextDispatch, DispatchConfig, Flight
from vla_cloud.core.request import RobotRequest
from vla_cloud.core.validation import RequestError
from vla_cloud.pools import messages as wire
from vla_cloud.pools.codec import pack_tokens
from vla_cloud.pools.workers import Workers
from vla_common.clock import NS_PER_S, Clock
from vla_common.manifest import Manifest
from vla_common.process import StopFlag
from vla_common.zenoh_session import QueueSubscriber, Received

LOG = logging.getLogger(__name__)

MAX_JOIN_S = 0.2
_FORGET_EVERY = 1024
"""Observations between two looks for robots that are gone."""


@dataclass(frozen=True)
class _Payload:
    """What is kept of an observation until it is answered."""

    header: Any
    instruction: str
    checked: CheckedObservation


class PooledContextService:
    """Serves robots with the lanes it is told of (it is their WorkersListener)."""

    def __init__(
        self, manifest: Manifest, publish: Publish, clock: Clock, config: ContextConfig,
        trace: ContextTrace | None = None,
    ) -> None:  # fmt: skip
        """No lanes yet: see :meth:`attach`. ``publish`` is called in the event loop."""
        lanes = config.lanes
        self._manifest, self._clock, self._config = manifest, clock, config
        self._front = ContextFront(manifest, publish, clock, config)
        self._front.trace = self._trace = trace
        self._checks = ObservationChecks(manifest, config.max_image_bytes)
        self._pacer = make_pacer(config)
        limits = DispatchConfig(
            hedge_ns=round(lanes.hedge_s * NS_PER_S), hedge_max_ns=round(NS_PER_S / config.rate_hz),
            answer_within_ns=round(lanes.answer_within_s * NS_PER_S), max_batch=config.max_batch,
        )  # fmt: skip
        self.dispatch: ContextDispatch[Any] = ContextDispatch(self._pacer, limits)
        self._workers: Workers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[RobotRequest[Any]] = deque(maxlen=config.receive_queue)
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._offers = 0
        self._closed = False
        self.statistics, self.board = self._front.statistics, self._front.board

    def attach(self, workers: Workers) -> None:
        """The lanes to use."""
        self._workers = workers

    # --- receiver, a thread of its own ---

    def run(self, source: QueueSubscriber, stop: StopFlag, log_period_s: float) -> None:
        """Serves ``source`` until ``stop`` is set, and closes it; the event loop runs in another thread meanwhile."""
        receiver = threading.Thread(target=source.serve, args=(self.receive,), name="observations", daemon=True)
        receiver.start()
        try:
            while not stop.wait(log_period_s):
                LOG.info("%s", self.report())
        finally:
            source.close()
            receiver.join(MAX_JOIN_S)

    def receive(self, sample: Received) -> None:
        """Stage 2: decodes and checks one observation and hands it to the loop."""
        request = self._front.receive(sample)
        if request is None or self._loop is None:
            return
        try:
            checked = self._checks.check(request.payload)
        except RequestError as error:
            self._front.refuse(request.robot, error.cause, str(error))
            return
        payload = _Payload(request.payload.header, request.payload.instruction, checked)
        self._inbox.append(dataclasses.replace(request, payload=payload))  # full: the oldest goes
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._take_in)
            except RuntimeError:  # the loop has ended
                return

    # --- the event loop ---

    def _take_in(self) -> None:
        self._scheduled = False  # before looking: what comes from now on is announced again
        while self._inbox:
            request = self._inbox.popleft()
            self._front.offered(request, self._pacer.offer(request))
            self._offers += 1
            if self._offers % _FORGET_EVERY == 0:
                self.dispatch.forget()
        self.pump()

    def pump(self) -> None:
        """Sends what is due to lanes that are idle, and sets the timer for what is due later."""
        if self._closed:
            return
        now_ns = self._clock.monotonic_ns()
        for flight in self.dispatch.take(now_ns):
            self._send(flight)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = self.dispatch.next_wake_ns()
        if due_ns is not None and self._loop is not None:
            delay_s = max(0.0, (due_ns - self._clock.monotonic_ns()) / NS_PER_S)
            self._timer = self._loop.call_later(delay_s, self.pump)

    def _send(self, flight: Flight[_Payload]) -> None:
        checked = [request.payload.checked for request in flight.requests]
        rows = [wire.ContextRow(pack_tokens(one.ids), one.jpeg) for one in checked]
        traces = [] if self._trace is None else self._trace.ids_of(flight.requests)
        if self._workers is None or not self._workers.send(flight.lane, wire.ContextBatch(flight.number, rows, traces)):
            self.dispatch.lane_lost(flight.lane)  # the listener is told of its end too

    def _landed(self, lane: str, message: wire.Contexts) -> None:
        landed_ns = self._clock.monotonic_ns()
        flight = self.dispatch.landed(lane, message.number, landed_ns)
        if flight is None:
            return
        self.statistics.batches += 1
        rows = message.rows if len(message.rows) == len(flight.turns) else [_WRONG] * len(flight.turns)
        for i, (request, row) in enumerate(zip(flight.requests, rows, strict=True)):
            tokens, error = self._tokens(row), ""
            if tokens is None:
                self.dispatch.refused(flight, i)
                error = row.cause or _WRONG.cause
                self._front.refuse(request.robot, error, row.message or _WRONG.message)
            elif self.dispatch.accept(flight, i, self._clock.monotonic_ns()):
                self.statistics.text_tokens += len(request.payload.checked.ids)
                self.statistics.text_tokens_reused += row.prefix_tokens_reused
                self.statistics.images_reused += row.image_cached
                self._front.answer(request, tokens, row.prefix_tokens_reused)
            else:
                error = "too late, or answered by another lane"
            if self._trace is not None:
                self._trace.answered(request, flight.sent_ns, landed_ns, error, flight.number, lane=lane)

    def _tokens(self, row: wire.ContextAnswer) -> npt.NDArray[np.float32] | None:
        """f32[K, D], or None for a refusal or another shape."""
        context = self._manifest.context
        if row.cause or len(row.tokens) != 4 * context.num_tokens * context.dim:
            return None
        return np.frombuffer(row.tokens, dtype="<f4").reshape(context.num_tokens, context.dim).astype(np.float32)

    # WorkersListener

    def worker_ready(self, worker_id: str, ready: wire.Ready | wire.LaneReady) -> None:
        """A lane can be given work, if it holds this model."""
        self._loop = asyncio.get_running_loop()
        manifest = self._manifest
        expected = (manifest.model_hash, manifest.context.num_tokens, manifest.context.dim)
        if not isinstance(ready, wire.LaneReady) or (ready.model_hash, ready.num_tokens, ready.dim) != expected:
            LOG.error("robot lane %s holds another model than %r: it gets no work", worker_id, manifest.name)
            return
        self.dispatch.lane_ready(worker_id)
        self.pump()

    def worker_message(self, worker_id: str, message: wire.ToGateway) -> None:
        """A lane has answered."""
        if isinstance(message, wire.Contexts):
            self._landed(worker_id, message)
            self.pump()

    def worker_draining(self, worker_id: str) -> None:
        """It gets nothing new; what it has goes elsewhere."""
        self.worker_lost(worker_id, "draining")

    def worker_lost(self, worker_id: str, reason: str) -> None:
        """The newest observations of its robots go to other lanes at once."""
        self.dispatch.lane_lost(worker_id)
        self.pump()

    def worker_dead(self, worker_id: str) -> None:
        """Nothing more to do."""

    # the rest of a pool's service

    def report(self) -> str:
        """One line of statistics."""
        counts = self.dispatch.counts
        lanes = [
            f"{self.dispatch.lanes} lanes, hedged {counts.hedged_flights} lost {counts.lost_flights} flights",
            f"resent {counts.resent} given up {counts.given_up}",
            f"answers dropped: late {counts.late_answers} old {counts.old_answers}",
        ]
        return "; ".join([self.statistics.report(self._clock.monotonic_ns(), self._pacer), *lanes])

    def status(self) -> dict[str, Any]:
        """See :func:`robots_status`; from any thread."""
        now_ns = self._clock.monotonic_ns()
        status = robots_status(self._front, self._pacer.counts, self._config, now_ns)
        return {**status, **lanes_status(self._workers, self.dispatch)}

    async def drain(self, timeout_s: float) -> bool:
        """Nothing to wait for: a context under way is worth little to a robot that is left."""
        return True

    def close(self) -> None:
        """Send nothing more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_WRONG = wire.ContextAnswer(b"", cause="internal_error", message="a lane gave an answer of another shape")
