"""What a message from the gateway makes the engine do. Work is refused before anything is held for it, or accepted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vla_cloud.core.generate import DeadlineExceeded, DuplicateRequest, InvalidRequest, QueueFull, RequestError
from vla_cloud.core.step_plan import Role
from vla_cloud.engine.work_ledger import Kind, Record, key_of, refused, text_of, to_request
from vla_cloud.pools import messages
from vla_cloud.pools.messages import ToWorker
from vla_common.clock import NS_PER_S

if TYPE_CHECKING:
    from vla_cloud.engine.worker_engine import WorkerEngine

LOG = logging.getLogger(__name__)

_MAX_HELD = 256  # requests that wait for their grammars

_KINDS = {messages.Reserve: Kind.RESERVE, messages.Prefill: Kind.PREFILL, messages.Generate: Kind.GENERATE}
_ROLES = {
    Kind.RESERVE: {Role.DECODE},
    Kind.PREFILL: {Role.PREFILL},
    Kind.GENERATE: {Role.DECODE, Role.BOTH},
}


Asked = messages.Reserve | messages.Prefill | messages.Generate


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
        self._held: dict[str, tuple[Asked, int]] = {}  # until their grammar is compiled, or this instant

    def take(self, message: ToWorker) -> None:
        """Act on one message. Never raises."""
        engine = self._engine
        match message:
            case messages.Reserve() | messages.Prefill() | messages.Generate():
                self._work(message)
            case messages.Abort(request_id, attempt):
                key = key_of(request_id, attempt)
                self._held.pop(key, None)
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

    @property
    def holds_any(self) -> bool:
        """Whether work waits for its grammar."""
        return bool(self._held)

    def held_until_ns(self) -> list[int]:
        """Deadlines of what waits for its grammar."""
        return [until_ns for _, until_ns in self._held.values()]

    def look(self) -> None:
        """Take the work whose grammar is compiled now."""
        self._engine.grammars.woken()
        if not self._held:
            return
        held, self._held = self._held, {}
        for message, until_ns in held.values():
            self._work(message, until_ns)

    def refuse_held(self, text: str) -> None:
        """None of what waits will be taken here; another worker may take it."""
        held, self._held = self._held, {}
        error = Refusal("UNAVAILABLE", text)
        for message, _ in held.values():
            self._engine.outbox.say(refused(message.request_id, message.attempt, error, 0.0))

    def _work(self, message: Asked, until_ns: int | None = None) -> None:
        engine = self._engine
        key = key_of(message.request_id, message.attempt)
        try:
            if not self._is_held(key, message, until_ns):
                self._accept(key, message, until_ns)
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

    def _is_held(self, key: str, message: Asked, until_ns: int | None) -> bool:
        """Keep work whose grammar is still to be compiled; ``until_ns`` if it was kept before."""
        engine, grammar = self._engine, message.work.grammar
        if grammar is None:
            return False
        if until_ns is None:
            if engine.draining:
                return False
            if key in self._held:
                raise DuplicateRequest(f"attempt {message.attempt} of {message.request_id} is under way here")
            if len(self._held) >= _MAX_HELD:
                raise QueueFull(f"{len(self._held)} requests wait for their grammars: try again")
            engine.check(to_request(key, message.work, engine.now_ns()))
            until_ns = engine.now_ns() + round(message.work.time_left_s * NS_PER_S)
        if engine.now_ns() >= until_ns:
            raise DeadlineExceeded("the deadline passed before the grammar was compiled")
        if engine.grammars.is_ready(grammar):
            return False
        self._held[key] = message, until_ns
        return True

    def _accept(self, key: str, message: Asked, deadline_ns: int | None = None) -> None:
        engine = self._engine
        kind = _KINDS[type(message)]
        if engine.role not in _ROLES[kind]:
            raise Refusal("FAILED_PRECONDITION", f"a worker of role {engine.role.value} takes no {kind.value}")
        if engine.draining and deadline_ns is None:
            raise Refusal("UNAVAILABLE", "the worker is being drained: ask another")
        if engine.ledger.get(key) is not None:
            raise DuplicateRequest(f"attempt {message.attempt} of {message.request_id} is under way here")
        request = to_request(key, message.work, engine.now_ns(), deadline_ns)
        engine.check(request)
        if kind is not Kind.GENERATE and request.sampling.max_new_tokens < 1:
            raise InvalidRequest("a transfer needs a first token: ask for max_new_tokens of at least 1")
        if isinstance(message, messages.Prefill):
            assert engine.prefill_side is not None
            engine.prefill_side.check(len(request.tokens), message.destination)
        seq = engine.scheduler.add(request, writer=key, local=kind is Kind.GENERATE)
        engine.ledger.add(Record(key, message.request_id, message.attempt, kind, seq))
        engine.grammars.begin(seq)
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


