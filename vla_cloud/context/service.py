"""The context service of one process: observations of all robots in, one stream of context tokens per robot out.

Two threads share the pacer: a *receiver* decodes the wire and offers each observation; the *worker* (the caller of
:meth:`ContextService.run`) takes what is due, computes and publishes (stages 2, 3, 4, 7). Nothing that one robot sends
costs another more than a place in the batch. With lanes in processes of their own: pooled_service.py.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from vla_cloud.config import ContextConfig
from vla_cloud.context.context_trace import ContextTrace
from vla_cloud.context.front import OBSERVATION, ContextFront, Publish, make_pacer
from vla_cloud.context.robots_status import robots_status
from vla_cloud.context.runner import ContextRunner, PreparedObservation
from vla_cloud.core.request import RobotRequest
from vla_cloud.core.statistics import NS_PER_S
from vla_cloud.core.validation import RequestError
from vla_common.clock import Clock
from vla_common.manifest import Manifest
from vla_common.process import StopFlag
from vla_common.zenoh_session import QueueSubscriber, Received

LOG = logging.getLogger(__name__)

MAX_WAIT_S = 0.05
"""Longest sleep of the worker: bounds how late it sees the stop flag."""
MAX_JOIN_S = 0.2

__all__ = ["OBSERVATION", "ContextService", "Publish"]


class ContextService:
    """Serves robots until told to stop."""

    def __init__(
        self, runner: ContextRunner, manifest: Manifest, publish: Publish, clock: Clock, config: ContextConfig,
        trace: ContextTrace | None = None,
    ) -> None:  # fmt: skip
        """``publish`` is called by the worker only."""
        self._runner, self._clock, self._config = runner, clock, config
        self._front = ContextFront(manifest, publish, clock, config)
        self._front.trace = trace
        self._pacer = make_pacer(config)
        self._offered = threading.Condition()  # guards the pacer
        self.statistics, self.board = self._front.statistics, self._front.board

    # --- receiver ---

    def receive(self, sample: Received) -> None:
        """Stage 2: decodes one observation and offers it to the router."""
        request = self._front.receive(sample)
        if request is None:
            return
        with self._offered:
            offer = self._pacer.offer(request)
            self._offered.notify()
        self._front.offered(request, offer)

    # --- worker ---

    def run(self, source: QueueSubscriber, stop: StopFlag, log_period_s: float) -> None:
        """Serves ``source`` until ``stop`` is set, and closes it."""
        receiver = threading.Thread(target=source.serve, args=(self.receive,), name="observations", daemon=True)
        receiver.start()
        try:
            self._work(stop, log_period_s)
        finally:
            source.close()
            receiver.join(MAX_JOIN_S)

    def _work(self, stop: StopFlag, log_period_s: float) -> None:
        report_ns = self._clock.monotonic_ns() + round(log_period_s * NS_PER_S)
        while not stop.is_set():
            if not self.step():
                self._wait()
            if self._clock.monotonic_ns() >= report_ns:
                report_ns += round(log_period_s * NS_PER_S)
                LOG.info("%s", self.report())

    def step(self) -> int:
        """Serves one batch of what is due now; gives the number of requests taken."""
        with self._offered:
            taken_ns = self._clock.monotonic_ns()
            requests = self._pacer.take(taken_ns, self._config.max_batch)
        accepted, prepared = self._prepare(requests)
        if not accepted:
            return len(requests)
        try:
            results = self._runner.run(prepared)
        except Exception as error:  # the process outlives a failed batch; the cause is logged in full and counted
            self._front.refuse("*", "internal_error", f"{type(error).__name__}: {error}", with_traceback=True)
            return len(requests)
        self.statistics.batches += 1
        computed_ns = self._clock.monotonic_ns()
        for request, result in zip(accepted, results, strict=True):
            self.statistics.images_reused += result.image_cached
            self._front.answer(request, result.tokens, result.prefix_tokens_reused)
            if self._front.trace is not None:
                self._front.trace.answered(
                    request, taken_ns, computed_ns, batch=len(accepted), image_cached=result.image_cached,
                    prefix_tokens_reused=result.prefix_tokens_reused,
                )  # fmt: skip
        return len(requests)

    def report(self) -> str:
        """One line of statistics."""
        with self._offered:
            cache = self._runner.cache.counts
            self.statistics.text_tokens = cache.tokens_requested
            self.statistics.text_tokens_reused = cache.tokens_reused
            return self.statistics.report(self._clock.monotonic_ns(), self._pacer)

    def status(self) -> dict[str, Any]:
        """See :func:`robots_status`; from any thread."""
        return robots_status(self._front, self._pacer.counts, self._config, self._clock.monotonic_ns())

    def _wait(self) -> None:
        """Until something is offered or due, but not longer than MAX_WAIT_S."""
        with self._offered:
            due_ns = self._pacer.next_due_ns()
            wait_s = MAX_WAIT_S
            if due_ns is not None:
                wait_s = min(wait_s, (due_ns - self._clock.monotonic_ns()) / NS_PER_S)
            if wait_s > 0:
                self._offered.wait(wait_s)

    def _prepare(self, requests: list[RobotRequest[Any]]) -> tuple[list[RobotRequest[Any]], list[PreparedObservation]]:
        """The requests that can be answered, and their inputs; the others are refused by name."""
        accepted, prepared = [], []
        for request in requests:
            try:
                prepared.append(self._runner.prepare(request.payload))
                accepted.append(request)
            except RequestError as error:
                self._front.refuse(request.robot, error.cause, str(error))
        return accepted, prepared
