"""What a message from the gateway makes the engine do. Work is refused before anything is held for it, or accepted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vla_cloud.core.generate import DuplicateRequest, InvalidRequest, RequestError
from vla_cloud.core.step_plan import Role
from vla_cloud.engine.work_ledger import Kind, Record, key_of, refused, text_of, to_request
from vla_cloud.pools import messages
from vla_cloud.pools.messages import ToWorker

if TYPE_CHECKING:
    from vla_cloud.engine.worker_engine import WorkerEngine

LOG = logging.getLogger(__name__)

_KINDS = {messages.Reserve: Kind.RESERVE, messages.Prefill: Kind.PREFILL, messages.Generate: Kind.GENERATE}
_ROLES = {
    Kind.RESERVE: {Role.DECODE},
    Kind.PREFILL: {Role.PREFILL},
    Kind.GENERATE: {Role.DECODE, Role.BOTH},
}


class Refusal(RequestError):
    """Not this worker, not now."""

    def __init__(self, code: str, text: str) -> None:
        """``code`` is a gRPC status name."""
        super().__init__(text)
        self.code = code


class Intake:
    """The engine's ear."""

    def __init__(self, engine: WorkerEngine) -> None:
        """Speaks through the engine."""
        self._engine = engine

    def take(self, message: ToWorker) -> None:
        """Act on one message. Never raises."""
        engine = self._engine
        match message:
            case messages.Reserve() | messages.Prefill() | messages.Generate():
                self._work(message)
            case messages.Abort(request_id, attempt):
                key = key_of(request_id, attempt)
                # Alive: the answer comes once nothing of it is left. Unknown: nothing is left now.
                if not engine.abort(key) and engine.ledger.get(key) is None:
                    engine.outbox.say(messages.Aborted(request_id, attempt))
            case messages.LeaseExtend(leases, lease_s):
                if engine.decode_side is not None:
                    for row in leases:
                        engine.decode_side.extend(key_of(row.request_id, row.attempt), lease_s)
            case messages.Ping(sequence):
                engine.outbox.say(messages.Pong(sequence, engine.load()))
            case messages.KvSnapshot():
                engine.tree.snapshot_events()
            case messages.Drain():
                engine.draining = True
            case messages.WriterDone():
                pass  # the connector hears the same from the writer itself, and it alone knows what is under way
            case _:
                LOG.debug("message %s is not the engine's", type(message).__name__)

    def _work(self, message: messages.Reserve | messages.Prefill | messages.Generate) -> None:
        engine = self._engine
        key = key_of(message.request_id, message.attempt)
        try:
            self._accept(key, message)
        except RequestError as error:
            engine.outbox.say(refused(message.request_id, message.attempt, error, self._retry_after_s()))
        except Exception as error:  # the attempt must end whatever its message held
            LOG.exception("could not take %s", key)
            text = f"the worker could not take the request: {text_of(error)}"
            record = engine.ledger.get(key)
            if record is None:
                engine.outbox.say(messages.Error("INTERNAL", text, message.request_id, message.attempt))
            else:
                engine.abort(key, Refusal("INTERNAL", text))

    def _accept(self, key: str, message: messages.Reserve | messages.Prefill | messages.Generate) -> None:
        engine = self._engine
        kind = _KINDS[type(message)]
        if engine.role not in _ROLES[kind]:
            raise Refusal("FAILED_PRECONDITION", f"a worker of role {engine.role.value} takes no {kind.value}")
        if engine.draining:
            raise Refusal("UNAVAILABLE", "the worker is being drained: ask another")
        if engine.ledger.get(key) is not None:
            raise DuplicateRequest(f"attempt {message.attempt} of {message.request_id} is under way here")
        request = to_request(key, message.work, engine.now_ns())
        engine.check(request)
        if kind is not Kind.GENERATE and request.sampling.max_new_tokens < 1:
            raise InvalidRequest("a transfer needs a first token: ask for max_new_tokens of at least 1")
        if isinstance(message, messages.Prefill):
            assert engine.prefill_side is not None
            engine.prefill_side.check(len(request.tokens), message.destination)
        seq = engine.scheduler.add(request, writer=key, local=kind is Kind.GENERATE)
        engine.ledger.add(Record(key, message.request_id, message.attempt, kind, seq))
        if isinstance(message, messages.Reserve):
            assert engine.decode_side is not None
            engine.decode_side.queue(key, message.lease_s)
        elif isinstance(message, messages.Prefill):
            assert engine.prefill_side is not None
            try:
                engine.prefill_side.begin(seq, message.destination)
            except RequestError as error:
                engine.abort(key, error)  # ends as PushFailed

    def _retry_after_s(self) -> float:
        """A guess: the queue ahead, one place every tenth of a second, within what a client will wait."""
        return min(5.0, max(0.1, 0.1 * len(self._engine.ledger)))


