"""What a robot meets, whoever computes its context: its bytes become a request, a result becomes its message.

Whatever a robot sends, the answer is a context or a counted, named refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vla_cloud.config import ContextConfig
from vla_cloud.core.context_pacer import ContextPacer, Offer
from vla_cloud.core.request import RobotRequest
from vla_cloud.core.robot_board import RobotBoard
from vla_cloud.core.statistics import NS_PER_S, ServingStatistics
from vla_common import messages, tensors, wire
from vla_common.clock import Clock
from vla_common.manifest import Manifest
from vla_common.topics import robot_of, topic_spec
from vla_common.zenoh_session import BusError, Received

if TYPE_CHECKING:
    from vla_cloud.context.context_trace import ContextTrace

LOG = logging.getLogger(__name__)

OBSERVATION = topic_spec("observation")

MAX_LOGGED_REFUSALS = 256
"""Different refusals written to the log in full; later ones are only counted. A robot cannot flood the log."""

Publish = Callable[[str, bytes], None]
"""Sends a ContextTokens payload to a robot."""


def make_pacer(config: ContextConfig) -> ContextPacer[Any]:
    """The pacer of a configuration."""
    return ContextPacer(
        round(NS_PER_S / config.rate_hz),
        max_robots=config.max_robots,
        forget_after_ns=round(config.forget_after_s * NS_PER_S),
    )


class ContextFront:
    """Requests from bytes, messages from results. ``receive`` in one thread, the rest in one (maybe another)."""

    def __init__(self, manifest: Manifest, publish: Publish, clock: Clock, config: ContextConfig) -> None:
        """``publish`` is called by :meth:`answer` only."""
        self._manifest, self._publish = manifest, publish
        self._clock, self._config = clock, config
        self._deadline_ns = round(config.deadline_s * NS_PER_S)
        self._logged: set[tuple[str, str]] = set()
        self.trace: ContextTrace | None = None
        self.statistics = ServingStatistics(clock.monotonic_ns())
        self.board = RobotBoard(max_robots=config.max_robots, forget_after_ns=round(config.forget_after_s * NS_PER_S))

    def receive(self, sample: Received) -> RobotRequest[Any] | None:
        """Stage 2: decodes one observation; None if it was refused."""
        self.statistics.received += 1
        try:
            robot = robot_of(OBSERVATION, sample.key)
        except ValueError as error:
            self.refuse("?", "bad_robot_id", str(error))
            return None
        try:
            observation = wire.decode("Observation", sample.payload)
        except wire.WireError as error:
            self.refuse(robot, error.cause, str(error))
            return None
        return RobotRequest(
            robot,
            observation.session,
            int(observation.sequence),
            wire.stamp_ns(observation.header),
            sample.received_ns,
            sample.received_ns + self._deadline_ns,
            observation,
        )

    def offered(self, request: RobotRequest[Any], offer: Offer) -> None:
        """What the pacer made of a request."""
        if offer in (Offer.QUEUED, Offer.REPLACED_OLDER):
            self.board.observed(request.robot, request.received_ns, offer is Offer.REPLACED_OLDER)
        elif offer is Offer.TOO_MANY_ROBOTS:
            self.refuse(request.robot, offer.value, f"{self._config.max_robots} robots are served (context.max_robots)")

    def answer(self, request: RobotRequest[Any], tokens: npt.NDArray[np.float32], prefix_tokens_reused: int) -> None:
        """Stage 7's result f32[K, D] on the wire, with the observation's own stamp, session and sequence."""
        if not np.isfinite(tokens).all():
            self.refuse(request.robot, "non_finite_context", "the model gave a value that is not finite")
            return
        now_ns = self._clock.monotonic_ns()
        compute_s = (now_ns - request.received_ns) / NS_PER_S
        message = messages.new(
            "ContextTokens",
            header=wire.make_header(request.stamp_ns, request.payload.header.frame_id),
            session=request.session,
            sequence=request.sequence,
            model_id=self._manifest.name,
            model_hash=self._manifest.model_hash,
            instruction_hash=wire.instruction_hash(request.payload.instruction),
            prefix_tokens_reused=prefix_tokens_reused,
            compute_s=compute_s,
            **tensors.token_fields(tokens, self._config.wire_dtype),
        )
        try:
            self._publish(request.robot, wire.encode(message))
        except BusError as error:
            self.refuse(request.robot, "not_published", str(error))
            return
        self.board.answered(request.robot, request.received_ns, now_ns)
        self.statistics.published += 1
        self.statistics.compute_s.record(compute_s)

    def refuse(self, robot: str, cause: str, text: str, *, with_traceback: bool = False) -> None:
        """Counts a refusal; the first of its kind per robot is logged with its text."""
        self.statistics.refused.add(cause)
        self.board.refused(robot)
        if (robot, cause) not in self._logged and len(self._logged) < MAX_LOGGED_REFUSALS:
            self._logged.add((robot, cause))
            LOG.warning("robot %s: %s: %s", robot, cause, text, exc_info=with_traceback, extra={"robot": robot})
