"""The gateway's spans of one chat request: from its door to its end, with every attempt. See docs/tracing.md.

A request that is traced carries one of these; one that is not carries None, and nothing is computed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vla_cloud.core import life_events as life
from vla_common.tracing import Tracer, Value, span_id

ROOT = "chat"


@dataclass(slots=True)
class _Attempt:
    number: int
    prefill: str
    decode: str
    begin_ns: int
    tokens: int = 0


def attempt_span(trace: bytes, attempt: int) -> bytes:
    """The span that the spans of workers hang under."""
    return span_id(trace, "attempt", attempt)


class RequestTrace:
    """Of one request, in the event loop that serves it.

    Attributes:
        trace: the id that goes to workers.
    """

    def __init__(self, tracer: Tracer, trace: bytes, parent: bytes, begin_ns: int, **attributes: Value) -> None:
        """``parent``: the client's span, or empty. ``attributes``: of the request's own span."""
        self.trace = trace
        self._tracer, self._parent, self._begin_ns = tracer, parent, begin_ns
        self._root = span_id(trace, ROOT)
        self._attributes = dict(attributes)
        self._error = ""
        self._queued_ns: int | None = None
        self._place_ns: int | None = None  # a place for an attempt was asked for
        self._waits = 0
        self._attempt: _Attempt | None = None
        self._first_ns: int | None = None

    def child(self, stage: str, begin_ns: int, end_ns: int, error: str = "", **attributes: Value) -> None:
        """A stage of the gateway that has ended."""
        span = span_id(self.trace, stage)
        self._tracer.span(self.trace, span, self._root, stage, begin_ns, end_ns, error, **attributes)

    def note(self, **attributes: Value) -> None:
        """Attributes of the request's own span."""
        self._attributes.update(attributes)

    def fail(self, error: str) -> None:
        """The request ends with an error, unless it has one."""
        self._error = self._error or error

    def end(self, now_ns: int) -> None:
        """The request is over, for its client too."""
        if self._first_ns is not None:
            self.note(first_token_s=(self._first_ns - self._begin_ns) * 1e-9)
            self.child("answer", self._first_ns, now_ns)
        self._tracer.span(
            self.trace, self._root, self._parent, ROOT, self._begin_ns, now_ns, self._error, **self._attributes
        )

    # the life of the request

    def queued(self, now_ns: int) -> None:
        """It waits for admission."""
        self._queued_ns = now_ns

    def saw(self, event: life.Event, actions: Sequence[life.Action], now_ns: int) -> None:
        """What happened to its life, and what follows from that."""
        for action in actions:
            match action:
                case life.NeedPlace():
                    self._end_queue(now_ns)
                    self._end_attempt(now_ns, cause_of(event))
                    self._place_ns = now_ns if self._place_ns is None else self._place_ns
                    self._waits += 1
                case life.SendReserve(decode, attempt, prefill):
                    self._begin_attempt(_Attempt(attempt, prefill, decode, now_ns))
                case life.SendGenerate(worker, attempt):
                    self._begin_attempt(_Attempt(attempt, "", worker, now_ns))
                case life.Emit(tokens):
                    self._first_ns = now_ns if self._first_ns is None else self._first_ns
                    if self._attempt is not None:
                        self._attempt.tokens += len(tokens)
                case life.End(reason, cached_tokens):
                    self._end_attempt(now_ns)
                    self.note(reason=reason, cached_tokens=cached_tokens)
                case life.Fail(code, message):
                    self._end_queue(now_ns)
                    self._end_attempt(now_ns, f"{code}: {message}")
                    self.fail(f"{code}: {message}")

    def _end_queue(self, now_ns: int) -> None:
        if self._queued_ns is not None:
            self.child("queue", self._queued_ns, now_ns)
            self._queued_ns = None

    def _begin_attempt(self, attempt: _Attempt) -> None:
        if self._waits > 1 and self._place_ns is not None:  # else a place was found at once
            span, begin_ns = span_id(self.trace, "place", attempt.number), self._place_ns
            self._tracer.span(self.trace, span, self._root, "place", begin_ns, attempt.begin_ns, tries=self._waits)
        self._place_ns, self._waits, self._attempt = None, 0, attempt

    def _end_attempt(self, now_ns: int, error: str = "") -> None:
        one, self._attempt = self._attempt, None
        if one is None:
            return
        self.note(attempts=one.number + 1)
        workers: dict[str, Value] = {"prefill": one.prefill} if one.prefill else {}
        self._tracer.span(
            self.trace, attempt_span(self.trace, one.number), self._root, f"attempt {one.number + 1}", one.begin_ns,
            now_ns, error, **workers, decode=one.decode, tokens=one.tokens,
        )  # fmt: skip


def cause_of(event: life.Event) -> str:
    """Why an event ends an attempt, in words."""
    match event:
        case life.WorkerLost(worker) | life.WorkerDead(worker):
            return f"worker {worker} died"
        case life.Failed(worker, _, code, message) | life.PushFailed(worker, _, code, message):
            return f"{worker}: {code}: {message}"
        case life.Refused(worker, _, code, message):
            return f"{worker} refused it: {code}: {message}"
        case life.Aborted(worker):
            return f"{worker} gave the request up"
        case life.Tick():
            return "the KV that was sent did not show in time"
        case life.TokensCame(worker) | life.WorkerFinished(worker):
            return f"{worker} sent tokens that do not fit"
    return "the attempt was ended"
