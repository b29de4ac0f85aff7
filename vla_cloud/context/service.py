"""The context service: observations of all robots in, one stream of context tokens per robot out (stages 2, 3, 4, 7).

Two threads share the pacer: a *receiver* decodes the wire and offers each observation; the *worker* (the caller of
:meth:`ContextService.run`) takes what is due, computes and publishes. Whatever a robot sends, the answer is a context
or a counted, named refusal; nothing that one robot sends costs another more than a place in the batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from vla_cloud.config import ContextConfig
from vla_cloud.context.runner import ContextResult, ContextRunner, PreparedObservation
from vla_cloud.core.context_pacer import ContextPacer, Offer
from vla_cloud.core.request import RobotRequest
from vla_cloud.core.statistics import NS_PER_S, ServingStatistics
from vla_cloud.core.validation import RequestError
from vla_common import messages, tensors, wire
from vla_common.clock import Clock
from vla_common.manifest import Manifest
from vla_common.process import StopFlag
from vla_common.topics import robot_of, topic_spec
from vla_common.zenoh_session import BusError, QueueSubscriber, Received

LOG = logging.getLogger(__name__)

OBSERVATION = topic_spec("observation")

MAX_WAIT_S = 0.05
"""Longest sleep of the worker: bounds how late it sees the stop flag."""
MAX_JOIN_S = 0.2
MAX_LOGGED_REFUSALS = 256
"""Different refusals written to the log in full; later ones are only counted. A robot cannot flood the log."""

Publish = Callable[[str, bytes], None]
"""Sends a ContextTokens payload to a robot."""


class ContextService:
    """Serves robots until told to stop."""

    def __init__(
        self, runner: ContextRunner, manifest: Manifest, publish: Publish, clock: Clock, config: ContextConfig
    ) -> None:
        """``publish`` is called by the worker only."""
        self._runner, self._manifest, self._publish = runner, manifest, publish
        self._clock, self._config = clock, config
        self._deadline_ns = round(config.deadline_s * NS_PER_S)
        self._pacer: ContextPacer[Any] = ContextPacer(
            round(NS_PER_S / config.rate_hz),
            max_robots=config.max_robots,
            forget_after_ns=round(config.forget_after_s * NS_PER_S),
        )
        self._offered = threading.Condition()  # guards the pacer
        self._logged: set[tuple[str, str]] = set()
        self.statistics = ServingStatistics(clock.monotonic_ns())

    # --- receiver ---

    def receive(self, sample: Received) -> None:
        """Stage 2: decodes one observation and offers it to the router."""
        self.statistics.received += 1
        try:
            robot = robot_of(OBSERVATION, sample.key)
        except ValueError as error:
            self._refuse("?", "bad_robot_id", str(error))
            return
        try:
            observation = wire.decode("Observation", sample.payload)
        except wire.WireError as error:
            self._refuse(robot, error.cause, str(error))
            return
        request = RobotRequest(
            robot,
            observation.session,
            int(observation.sequence),
            wire.stamp_ns(observation.header),
            sample.received_ns,
            sample.received_ns + self._deadline_ns,
            observation,
        )
        with self._offered:
            offer = self._pacer.offer(request)
            self._offered.notify()
        if offer is Offer.TOO_MANY_ROBOTS:
            self._refuse(robot, offer.value, f"{self._config.max_robots} robots are served (context.max_robots)")

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
            requests = self._pacer.take(self._clock.monotonic_ns(), self._config.max_batch)
        accepted, prepared = self._prepare(requests)
        if not accepted:
            return len(requests)
        try:
            results = self._runner.run(prepared)
        except Exception as error:  # the process outlives a failed batch; the cause is logged in full and counted
            self._refuse("*", "internal_error", f"{type(error).__name__}: {error}", with_traceback=True)
            return len(requests)
        self.statistics.batches += 1
        for request, result in zip(accepted, results, strict=True):
            self._answer(request, result)
        return len(requests)

    def report(self) -> str:
        """One line of statistics."""
        with self._offered:
            return self.statistics.report(self._clock.monotonic_ns(), self._pacer, self._runner.cache.counts)

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
                self._refuse(request.robot, error.cause, str(error))
        return accepted, prepared

    def _answer(self, request: RobotRequest[Any], result: ContextResult) -> None:
        """Stage 7's result on the wire, with the observation's own stamp, session and sequence."""
        if not np.isfinite(result.tokens).all():
            self._refuse(request.robot, "non_finite_context", "the model gave a value that is not finite")
            return
        compute_s = (self._clock.monotonic_ns() - request.received_ns) / NS_PER_S
        message = messages.new(
            "ContextTokens",
            header=wire.make_header(request.stamp_ns, request.payload.header.frame_id),
            session=request.session,
            sequence=request.sequence,
            model_id=self._manifest.name,
            model_hash=self._manifest.model_hash,
            instruction_hash=wire.instruction_hash(request.payload.instruction),
            prefix_tokens_reused=result.prefix_tokens_reused,
            compute_s=compute_s,
            **tensors.token_fields(result.tokens, self._config.wire_dtype),
        )
        try:
            self._publish(request.robot, wire.encode(message))
        except BusError as error:
            self._refuse(request.robot, "not_published", str(error))
            return
        self.statistics.published += 1
        self.statistics.compute_s.record(compute_s)

    def _refuse(self, robot: str, cause: str, text: str, *, with_traceback: bool = False) -> None:
        """Counts a refusal; the first of its kind per robot is logged with its text."""
        self.statistics.refused.add(cause)
        if (robot, cause) not in self._logged and len(self._logged) < MAX_LOGGED_REFUSALS:
            self._logged.add((robot, cause))
            LOG.warning("robot %s: %s: %s", robot, cause, text, exc_info=with_traceback)
