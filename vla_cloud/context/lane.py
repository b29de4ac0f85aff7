"""A robot lane: batches of observations in, contexts out. What a lane process runs in place of a chat engine."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence

import numpy as np

from vla_cloud.context.checks import CheckedObservation
from vla_cloud.context.runner import ContextResult, ContextRunner, PreparedObservation
from vla_cloud.core.validation import RequestError
from vla_cloud.pools import messages as wire
from vla_cloud.pools.codec import MessageError, unpack_tokens
from vla_common.clock import NS_PER_S, Clock
from vla_common.manifest import Manifest

LOG = logging.getLogger(__name__)

MAX_BROKEN_BATCHES = 3
"""The lane ends after so many batches in a row that raised: a new process may do better."""


class RobotLane:
    """The :class:`vla_cloud.pools.worker_process.Engine` of a lane. One batch a step, in order of arrival."""

    def __init__(self, runner: ContextRunner, manifest: Manifest, clock: Clock) -> None:
        """``manifest`` is that of the runner's model."""
        self._runner, self._manifest, self._clock = runner, manifest, clock
        self._vocabulary = len(manifest.instruction.vocabulary)
        self._todo: deque[tuple[int, wire.ContextBatch]] = deque()
        self._out: list[wire.ToGateway] = []
        self._broken = 0
        self.failure: str | None = None

    def ready(self, worker: str) -> wire.LaneReady:
        """The model and the shape of its contexts."""
        manifest, context = self._manifest, self._manifest.context
        return wire.LaneReady(
            wire.PROTOCOL_VERSION, worker, os.getpid(), manifest.name, manifest.model_hash, context.num_tokens,
            context.dim,
        )  # fmt: skip

    def handle(self, message: wire.ToWorker) -> None:
        """Take a batch, or answer a Ping; a lane knows nothing else."""
        match message:
            case wire.ContextBatch():
                self._todo.append((self._clock.monotonic_ns(), message))
            case wire.Ping(sequence):
                self._out.append(wire.Pong(sequence, wire.Load(0, 0, 0, 0, 0, len(self._todo))))
            case wire.Drain():
                self._out.append(wire.Drained())
            case _:
                LOG.error("a robot lane was sent a %s", type(message).__name__)

    def step(self) -> bool:
        """Compute the next batch; False if there is none."""
        if self.failure is not None or not self._todo:
            return False
        taken_ns, batch = self._todo.popleft()
        rows = self._compute(batch)
        compute_s = (self._clock.monotonic_ns() - taken_ns) / NS_PER_S
        self._out.append(wire.Contexts(batch.number, rows, compute_s))
        if self._broken >= MAX_BROKEN_BATCHES:
            self.failure = f"{self._broken} batches in a row failed; the last: {rows[0].message}"
            self._out.append(wire.Error("INTERNAL", self.failure))
        return bool(self._todo)

    def events(self) -> list[wire.ToGateway]:
        """Messages for the gateway since the last call, in order."""
        out, self._out = self._out, []
        return out

    def wait_fds(self) -> Sequence[int]:
        """Nothing but the link wakes a lane."""
        return []

    def wait_s(self) -> float | None:
        """For ever."""
        return None

    def close(self) -> None:
        """Nothing to let go of."""

    def _compute(self, batch: wire.ContextBatch) -> list[wire.ContextAnswer]:
        """An answer for each row: one robot's fault is not another's."""
        answers: dict[int, wire.ContextAnswer] = {}
        prepared: dict[int, PreparedObservation] = {}
        for i, row in enumerate(batch.rows):
            try:
                prepared[i] = self._runner.decode(CheckedObservation(self._ids(row), row.jpeg))
            except RequestError as error:
                answers[i] = _refusal(error.cause, str(error))
            except (MessageError, MemoryError) as error:
                answers[i] = _refusal("internal_error", f"{type(error).__name__}: {error}")
        if prepared:
            try:
                results = self._runner.run(list(prepared.values()))
                answers |= {i: _answer(result) for i, result in zip(prepared, results, strict=True)}
                self._broken = 0
            except Exception as error:  # the lane outlives a failed batch; its robots are told
                LOG.exception("a batch of contexts failed")
                self._broken += 1
                told = _refusal("internal_error", f"{type(error).__name__}: {error}")
                answers |= dict.fromkeys(prepared, told)
        return [answers[i] for i in range(len(batch.rows))]

    def _ids(self, row: wire.ContextRow) -> tuple[int, ...]:
        ids = tuple(unpack_tokens(row.ids))
        if len(ids) != self._manifest.instruction.num_tokens or max(ids) >= self._vocabulary:
            raise MessageError(f"{len(ids)} token ids up to {max(ids, default=0)} are no instruction of this model")
        return ids


def _answer(result: ContextResult) -> wire.ContextAnswer:
    data = np.ascontiguousarray(result.tokens, dtype="<f4").tobytes()
    return wire.ContextAnswer(data, result.prefix_tokens_reused, result.image_cached)


def _refusal(cause: str, message: str) -> wire.ContextAnswer:
    return wire.ContextAnswer(b"", 0, False, cause, message[:4096])
