"""The serving engine as a front door sees it: a request in, tokens and an end out. Everything in one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from vla_cloud.config import ServingConfig
from vla_cloud.core import life_events as life
from vla_cloud.core.admission import Admission
from vla_cloud.core.generate import FinishReason, GenerateRequest, RequestError
from vla_cloud.core.placement import Placement
from vla_cloud.core.request_life import LifeConfig, Stage
from vla_cloud.pools import messages as wire
from vla_cloud.pools.events import Finished, TokenEvent, request_error
from vla_cloud.pools.limits import Limits
from vla_cloud.pools.live_request import LiveRequest, event_of
from vla_cloud.pools.meter import RequestMeter
from vla_cloud.pools.router_feed import RouterFeed
from vla_cloud.pools.workers import Workers
from vla_common.clock import NS_PER_S, Clock
from vla_common.metrics import Counters

LOG = logging.getLogger(__name__)


class ServingService:
    """Serves requests with the workers it is told of (it is their WorkersListener)."""

    def __init__(self, config: ServingConfig, clock: Clock) -> None:
        """No workers yet: see :meth:`attach`."""
        self._config, self._clock = config, clock
        self._life_config = LifeConfig(
            max_failures=config.retry.max_failures, capacity_wait_s=config.retry.capacity_wait_s,
            settle_s=config.lease_s, transfer_late_s=config.retry.transfer_s,
        )  # fmt: skip
        self._admission = Admission(config.admission)
        self._placement = Placement(config.placement, clock)
        self._router_feed = RouterFeed(self._placement, self._send)
        self._workers: Workers | None = None
        self._ready: dict[str, wire.Ready] = {}
        self._limits = Limits()
        self._by_id: dict[str, LiveRequest] = {}  # client's id -> not ended
        self._by_wire_id: dict[str, LiveRequest] = {}  # not settled
        self._number = 0
        self._lease_timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters = Counters("served", "failed", "refused")
        self._meter = RequestMeter()

    def attach(self, workers: Workers) -> None:
        """The pools to use, before the first request."""
        self._workers = workers

    # front door

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Finished]:
        """Serve one request: TokenEvents, then Finished. Closing the iterator aborts the request.

        Raises:
            RequestError: it was refused, or has failed; ``code`` is a gRPC status name, ``retry_after_s`` is set for
                those that may succeed later. Tokens given before remain right.
        """
        live = self._accept(request)
        try:
            while True:
                await live.wake.wait()
                live.wake.clear()
                outcome, event = live.outcome, live.take()
                if event is not None:
                    yield event
                if live.unread_tokens:
                    continue
                if isinstance(outcome, life.End):
                    yield self._finished(live, outcome)
                    return
                if outcome is not None:
                    raise request_error(outcome)
        finally:
            self._feed(live, life.Cancel())

    def abort(self, request_id: str) -> bool:
        """End a request (CANCELLED); False if it is not being served. Idempotent."""
        live = self._by_id.get(request_id)
        if live is None:
            return False
        self._feed(live, life.Cancel())
        return True

    def health(self) -> dict[str, Any]:
        """Plain values: ``serving`` (a request would be taken), ``draining``, workers, counts (``router``: its own)."""
        workers = [] if self._workers is None else [asdict(info) for info in self._workers.infos()]
        for info in workers:
            if info["load"] is not None:
                info["load"] = {name: getattr(info["load"], name) for name in wire.Load.__struct_fields__}
        return {
            "serving": self._placement.can_serve and not self._draining,
            "draining": self._draining,
            "active": self._admission.active,
            "queued": self._admission.queued,
            "unsettled": len(self._by_wire_id),
            "workers": workers,
            "router": self._placement.snapshot(),
            "queued_tokens": self._admission.queued_tokens,
            **self.counters.snapshot(),
            **self._meter.snapshot(),
        }

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those under way; what is left after the time ends with UNAVAILABLE.

        Returns:
            True if all ended by themselves.
        """
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except asyncio.TimeoutError:
            for live in list(self._by_id.values()):
                self._feed(live, life.GiveUp("UNAVAILABLE", "the server ends"))
            return False

    # admission

    def _accept(self, request: GenerateRequest) -> LiveRequest:
        """Refuse at once, or queue."""
        try:
            max_new_tokens = self._limits.check(request, self._draining, request.request_id in self._by_id)
            # The salt is the tenant's, and nobody's ("") where no keys are asked for.
            refusal = self._admission.offer(request.request_id, request.priority, len(request.tokens), request.salt)
            if refusal is not None:
                raise request_error(life.Fail("RESOURCE_EXHAUSTED", refusal.message, refusal.retry_after_s))
        except RequestError:
            self.counters.add("refused")
            raise
        self._number += 1
        live = LiveRequest(
            request, self._number, max_new_tokens, self._deadline(request), self._life_config
        )
        live.arrived_ns = self._clock.monotonic_ns()
        self._by_id[request.request_id] = self._by_wire_id[live.wire_id] = live
        if live.trace is not None:
            live.trace.queued(self._clock.monotonic_ns())
        self._idle.clear()
        self._set_timer(live)
        self._begin_waiting()
        return live

    def _deadline(self, request: GenerateRequest) -> int:
        now_ns = self._clock.monotonic_ns()
        if request.deadline_ns is None:
            return now_ns + round(self._config.deadline_s * NS_PER_S)
        return min(request.deadline_ns, now_ns + round(self._config.max_deadline_s * NS_PER_S))

    def _begin_waiting(self) -> None:
        while (request_id := self._admission.next()) is not None:
            live = self._by_id[request_id]
            live.begun = True
            self._meter.begun((self._clock.monotonic_ns() - live.arrived_ns) / NS_PER_S)
            self._feed(live, life.Tick())

    # lives

    def _feed(self, live: LiveRequest, event: life.Event) -> None:
        """An event, and all that follows from it at once."""
        pending = [event]
        was_ended = live.life.is_ended
        for event in pending:  # it grows meanwhile
            attempt, now_ns = live.life.attempt, self._clock.monotonic_ns()
            actions = live.life.handle(event, now_ns)
            if live.trace is not None:
                live.trace.saw(event, actions, now_ns)
            if live.life.attempt > attempt:
                self._meter.retried(event)
            for action in actions:
                if isinstance(action, life.Emit):
                    continue  # the row itself is kept in worker_message, with its log-probabilities
                answer = self._do(live, action)
                if answer is not None:
                    pending.append(answer)
        if live.life.is_ended and not was_ended:
            self._admission.end(live.request.request_id, self._clock.monotonic_ns())
            del self._by_id[live.request.request_id]
            if not self._by_id:
                self._idle.set()
            asyncio.get_running_loop().call_soon(self._begin_waiting)
        if live.life.is_settled:
            self._by_wire_id.pop(live.wire_id, None)
        self._set_timer(live)

    def _do(self, live: LiveRequest, action: life.Action) -> life.Event | None:
        now_ns, wire_id = self._clock.monotonic_ns(), live.wire_id
        match action:
            case life.NeedPlace(exclude, prefer):
                return self._place(live, exclude, prefer)
            case life.SendReserve(worker, attempt, writer):
                work, lease_s = live.work(now_ns), self._config.lease_s
                self._send(worker, wire.Reserve(wire_id, attempt, work, writer, lease_s))
            case life.SendPrefill(worker, attempt, decode):
                self._send(worker, wire.Prefill(wire_id, attempt, live.work(now_ns), self._destination(live, decode)))
            case life.SendGenerate(worker, attempt):
                self._send(worker, wire.Generate(wire_id, attempt, live.work(now_ns)))
            case life.SendAbort(worker, attempt):
                self._send(worker, wire.Abort(wire_id, attempt))
            case life.SendWriterDone(worker, attempt):
                self._send(worker, wire.WriterDone(wire_id, attempt))
            case life.End() | life.Fail():
                if isinstance(action, life.End) and live.placed is not None:
                    self._placement.finished(live.wire_id, live.placed, live.prompt_now())
                self._unplace(live)
                self.counters.add("served" if isinstance(action, life.End) else "failed")
                live.end(action)
        return None

    def _place(self, live: LiveRequest, exclude: frozenset[str], prefer: str | None) -> life.Event:
        self._unplace(live)
        attempt = live.life.attempt
        choice = self._placement.choose(
            live.wire_id, attempt, live.prompt_now(), live.request.salt, live.tokens_left, exclude, prefer,
            live.hashes, live.request.session,
        )  # fmt: skip
        if isinstance(choice, str):
            return life.NotPlaced(choice)
        live.placed, live.reserved = attempt, None
        self._meter.placed(attempt)
        return life.Placed(choice.prefill, choice.decode)

    def _unplace(self, live: LiveRequest) -> None:
        if live.placed is not None:
            self._placement.release(live.wire_id, live.placed)
            live.placed = None

    def _destination(self, live: LiveRequest, decode: str) -> wire.Destination:
        assert live.reserved is not None
        ready, reserved = live.reserved
        num_bytes = len(reserved.blocks) * ready.layout.block_bytes
        return wire.Destination(
            decode, ready.address, reserved.token, ready.epoch, reserved.first_block, reserved.blocks,
            self._config.retry.transfer_s(num_bytes),
        )  # fmt: skip

    def _send(self, worker: str, message: wire.ToWorker) -> None:
        # A failed send needs no answer here: the loss of the worker is told to worker_lost.
        if self._workers is not None:
            self._workers.send(worker, message)

    def _finished(self, live: LiveRequest, end: life.End) -> Finished:
        return Finished(
            live.request.request_id, FinishReason(end.reason), len(live.request.tokens), len(live.life.outputs),
            end.cached_tokens, live.life.attempt + 1,
        )  # fmt: skip

    def _set_timer(self, live: LiveRequest) -> None:
        """A Tick when its life asks for one; while it waits in the queue, at its deadline."""
        due_ns = live.life.next_wake_ns if live.begun or live.life.is_ended else live.life.deadline_ns
        if due_ns is None:
            if live.timer is not None:
                live.timer.cancel()
                live.timer = None
            return
        if live.timer is not None:
            if live.timer_ns <= due_ns:
                return  # it fires early and is set anew then: cheaper than a new timer per token
            live.timer.cancel()
        delay_s = max(0.0, (due_ns - self._clock.monotonic_ns()) / NS_PER_S)
        live.timer_ns = due_ns
        live.timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired, live)

    def _timer_fired(self, live: LiveRequest) -> None:
        live.timer = None
        due_ns = live.life.next_wake_ns if live.begun or live.life.is_ended else live.life.deadline_ns
        if due_ns is not None and self._clock.monotonic_ns() >= due_ns:
            self._feed(live, life.Tick())
        else:
            self._set_timer(live)

    # WorkersListener

    def worker_ready(self, worker_id: str, ready: wire.Ready | wire.LaneReady) -> None:
        """A worker can be given work, if its KV means the same as that of the others."""
        if isinstance(ready, wire.LaneReady):
            return
        for other_id, other in self._ready.items():
            try:
                other.layout.require(ready.layout)
            except ValueError as error:
                LOG.error("worker %s gets no work beside %s: %s", worker_id, other_id, error)
                return
        self._ready[worker_id] = ready
        self._placement.add(worker_id, ready.role, ready.total_blocks)
        self._limits.add(ready)
        if self._lease_timer is None:
            self._extend_leases()

    def worker_message(self, worker_id: str, message: wire.ToGateway) -> None:
        """A worker said something about requests, or about itself."""
        if self._router_feed.take(worker_id, message):
            return
        if isinstance(message, wire.Tokens):
            for row in message.rows:
                self._tokens(worker_id, row)
            return
        live = self._by_wire_id.get(getattr(message, "request_id", ""))
        event = event_of(worker_id, message)
        if live is None or event is None:
            return
        if isinstance(message, wire.Reserved) and message.attempt == live.life.attempt and worker_id in self._ready:
            live.reserved = (self._ready[worker_id], message)
        if isinstance(message, wire.Prefilled):
            self._placement.prefill_done(live.wire_id, message.attempt)
        self._feed(live, event)

    def _tokens(self, worker_id: str, row: wire.TokenRow) -> None:
        live = self._by_wire_id.get(row.request_id)
        if live is None:
            return
        before = len(live.life.outputs)
        self._feed(live, life.TokensCame(worker_id, row.attempt, row.position, row.tokens))
        if len(live.life.outputs) > before:
            live.add(row)
            if live.unread_tokens > self._config.max_unread_tokens:
                told = f"the client has left {live.unread_tokens} tokens unread"
                self._feed(live, life.GiveUp("RESOURCE_EXHAUSTED", told))

    def worker_draining(self, worker_id: str) -> None:
        """It gets nothing new."""
        self._placement.drain(worker_id)

    def worker_lost(self, worker_id: str, reason: str) -> None:
        """Everything known of it is dropped at once; its requests go on elsewhere."""
        self._ready.pop(worker_id, None)
        self._placement.remove(worker_id)
        self._tell(worker_id, life.WorkerLost(worker_id))

    def worker_dead(self, worker_id: str) -> None:
        """It writes nothing any more: blocks that wait for that are free."""
        self._tell(worker_id, life.WorkerDead(worker_id))

    def _tell(self, worker_id: str, event: life.Event) -> None:
        for live in list(self._by_wire_id.values()):
            if worker_id in live.life.workers:
                self._feed(live, event)

    def _extend_leases(self) -> None:
        """Every few seconds: reservations that wait for KV live on."""
        self._lease_timer = asyncio.get_running_loop().call_later(self._config.lease_extend_s, self._extend_leases)
        rows: dict[str, list[wire.LeaseRow]] = {}
        for live in self._by_wire_id.values():
            if live.life.stage in (Stage.RESERVING, Stage.PREFILLING, Stage.TRANSFERRING) and live.life.decode:
                rows.setdefault(live.life.decode, []).append(wire.LeaseRow(live.wire_id, live.life.attempt))
        for worker, leases in rows.items():
            self._send(worker, wire.LeaseExtend(leases, self._config.lease_s - 2 * self._config.lease_extend_s))

    def close(self) -> None:
        """End every request (UNAVAILABLE) and all timers."""
        for live in list(self._by_id.values()):
            self._feed(live, life.GiveUp("UNAVAILABLE", "the server ends"))
        for live in self._by_wire_id.values():
            if live.timer is not None:
                live.timer.cancel()
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None
