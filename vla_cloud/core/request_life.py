"""One chat request in the gateway, as a state machine: reserve, prefill, transfer, decode, and every way it can fail.

    PLACING ─▶ RESERVING ─▶ PREFILLING ─▶ TRANSFERRING ─▶ DECODING ─▶ ENDED
       └─────▶ GENERATING (one worker does both) ─────────────────────▶ ENDED

It ends once, with ``End`` or ``Fail``, at its deadline at the latest. A failure begins a new attempt in PLACING with
the prompt and the tokens streamed so far: elsewhere after a death, on another D with the same P (whose cache holds the
prompt) after a failed or late transfer, then on another P as well. When D is the first to say that KV will not come,
P may just have died: it is given a moment to be heard of, so that one death is one failure and no other D is asked in
vain. A worker's name stands for one process: after a restart it has another.

After the end it stays *unsettled* while a P worker that was told to stop may still write into blocks of a D worker;
the owner keeps it until ``is_settled``, so that D learns when its quarantine is over. D's lease is the bound if no
word comes.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from vla_cloud.core.life_events import (
    Aborted,
    Action,
    Cancel,
    Emit,
    End,
    EndHere,
    Event,
    Fail,
    Failed,
    GiveUp,
    NeedPlace,
    NotPlaced,
    Placed,
    Prefilled,
    PushFailed,
    Refused,
    Reserved,
    SendAbort,
    SendGenerate,
    SendPrefill,
    SendReserve,
    SendWriterDone,
    Tick,
    TokensCame,
    WorkerDead,
    WorkerFinished,
    WorkerLost,
)
from vla_cloud.core.life_retry import NS_PER_S, LifeConfig, Retries
from vla_cloud.core.life_writers import Writers

__all__ = ["BUSY_CODES", "FINAL_CODES", "LifeConfig", "RequestLife", "Stage"]

FINAL_CODES: Final = frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Another worker would answer the same: the request ends."""
BUSY_CODES: Final = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE"})
"""A refusal with one of these is no fault of the worker: wait, within ``capacity_wait_s``."""


_WorkerEvent: TypeAlias = (
    Reserved | Refused | Prefilled | PushFailed | TokensCame | WorkerFinished | Aborted | Failed
)  # fmt: skip


class Stage(enum.Enum):
    """Where the present attempt is."""

    PLACING = "placing"  # no worker has it
    RESERVING = "reserving"  # D was asked for blocks
    PREFILLING = "prefilling"  # D holds blocks, P computes and pushes
    TRANSFERRING = "transferring"  # P is done; D has not shown a token
    DECODING = "decoding"
    GENERATING = "generating"
    ENDED = "ended"


@dataclass(slots=True)
class _Attempt:
    """Who works on it. ``writing``: P may compute and write; ``held``: D (or the worker that does both) has it."""

    prefill: str | None
    decode: str
    start_outputs: int
    writing: bool = False
    held: bool = True
    cached_tokens: int | None = None


class RequestLife:
    """One request. All methods from one thread; ``now_ns`` is the caller's monotonic clock."""

    def __init__(
        self, prompt_tokens: int, max_new_tokens: int, stop_token_ids: Collection[int], deadline_ns: int,
        config: LifeConfig,
    ) -> None:  # fmt: skip
        """Nothing is asked for until the first Tick. ``stop_token_ids``: tokens after which the answer is complete."""
        if prompt_tokens < 1 or max_new_tokens < 1:
            raise ValueError("a request has at least one prompt token and may give at least one token")
        self._prompt_tokens, self._max_new_tokens = prompt_tokens, max_new_tokens
        self._stop_token_ids, self._config = frozenset(stop_token_ids), config
        self.deadline_ns = deadline_ns
        self.stage = Stage.PLACING
        self.attempt = 0
        self.outputs: list[int] = []
        self._work: _Attempt | None = None
        self._cached_tokens: int | None = None
        self._wake_ns: int | None = 0
        self._retries = Retries(config)
        self._lost: set[str] = set()
        self._dead: set[str] = set()
        self._writers = Writers()
        self._actions: list[Action] = []

    @property
    def is_ended(self) -> bool:
        """End or Fail was given."""
        return self.stage is Stage.ENDED

    @property
    def is_settled(self) -> bool:
        """It has ended and no stopped writer is awaited."""
        return self.is_ended and not self._writers

    @property
    def next_wake_ns(self) -> int | None:
        """When a Tick is due; None once settled."""
        due_ns = self._writers.until_ns if self._writers else None
        if self.stage is not Stage.ENDED and (due_ns is None or self.deadline_ns < due_ns):
            due_ns = self.deadline_ns
        if self._wake_ns is not None and (due_ns is None or self._wake_ns < due_ns):
            due_ns = self._wake_ns
        return due_ns

    @property
    def decode(self) -> str | None:
        """The D (or the worker that does both) of the present attempt."""
        return None if self._work is None else self._work.decode

    @property
    def workers(self) -> frozenset[str]:
        """Workers whose loss or death concerns this request."""
        work = self._work
        present: tuple[str | None, ...] = ()
        if work is not None:
            present = (work.prefill, work.decode)
        elif self.stage is Stage.PLACING:
            present = (self._retries.prefer,)
        return frozenset(name for name in present if name is not None) | self._writers.workers

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """What to do now. Events of other attempts or workers, or that come too late, do no harm."""
        self._actions = list(self._writers.handle(event, now_ns)) if self._writers else []
        if isinstance(event, WorkerLost | WorkerDead):
            self._lost.add(event.worker)
        if isinstance(event, WorkerDead):
            self._dead.add(event.worker)
        if not self.is_ended:
            if now_ns >= self.deadline_ns:
                self._fail(Fail("DEADLINE_EXCEEDED", f"not complete at its deadline: {self.stage.value}"), now_ns)
            elif isinstance(event, TokensCame):  # nearly all events: not through all the cases
                self._of_worker(event, now_ns)
            else:
                self._on(event, now_ns)
        return self._actions

    def _on(self, event: Event, now_ns: int) -> None:
        match event:
            case Tick():
                self._tick(now_ns)
            case Placed():
                self._placed(event)
            case NotPlaced(reason):
                self._not_placed(reason, now_ns)
            case Cancel():
                self._fail(Fail("CANCELLED", "the client ended the request"), now_ns)
            case EndHere():
                self._end("stop", now_ns)
            case GiveUp(code, message):
                self._fail(Fail(code, message), now_ns)
            case WorkerLost(worker) | WorkerDead(worker):
                self._worker_lost(worker, now_ns)
            case _:
                self._of_worker(event, now_ns)

    def _of_worker(self, event: _WorkerEvent, now_ns: int) -> None:
        """A worker speaks of an attempt, perhaps the present one."""
        work = self._work
        if work is None or event.attempt != self.attempt:
            return
        if event.worker == work.decode and work.held:
            self._from_decode(event, work, now_ns)
        elif event.worker == work.prefill and work.writing:
            self._from_prefill(event, work, now_ns)

    def _from_decode(self, event: Event, work: _Attempt, now_ns: int) -> None:
        """D (or the worker that does both) speaks of the present attempt."""
        match event:
            case Reserved() if self.stage is Stage.RESERVING and work.prefill is not None:
                self.stage, work.writing = Stage.PREFILLING, True
                self._actions.append(SendPrefill(work.prefill, self.attempt, work.decode))
            case TokensCame():
                self._tokens(event, work, now_ns)
            case WorkerFinished():
                self._finished(event, work, now_ns)
            case Refused(worker, _, code, message, retry_after_s):
                work.held = False
                self._refused(worker, Fail(code, message, retry_after_s), now_ns)
            case Failed(worker, _, code, message, transfer):
                work.held = False
                if transfer:
                    self._transfer_failed(message, work, now_ns)
                else:
                    self._blame(worker, Fail(code, message), now_ns)
            case Aborted(worker):
                work.held = False
                self._blame(worker, Fail("UNAVAILABLE", f"{worker} gave the request up"), now_ns)

    def _from_prefill(self, event: Event, work: _Attempt, now_ns: int) -> None:
        """P speaks, for the last time in this attempt: whatever it says, it writes no more."""
        decoding = self.stage is Stage.DECODING  # D has verified all it needs of P
        match event:
            case Prefilled(_, _, cached_tokens, pushed_bytes):
                work.writing, work.cached_tokens = False, cached_tokens
                if not decoding:
                    self.stage = Stage.TRANSFERRING
                    self._wake_ns = now_ns + round(self._config.transfer_late_s(pushed_bytes) * NS_PER_S)
                elif self._cached_tokens is None and work.start_outputs == 0:
                    self._cached_tokens = cached_tokens
            case PushFailed(_, _, _, message):
                work.writing = False
                if not decoding:
                    self._transfer_failed(f"the KV was not handed over: {message}", work, now_ns)
            case Refused(worker, _, code, message, retry_after_s):
                work.writing = False
                if not decoding:
                    self._refused(worker, Fail(code, message, retry_after_s), now_ns)
            case Failed(worker, _, code, message, _):
                work.writing = False
                if not decoding:
                    self._blame(worker, Fail(code, message), now_ns)
            case Aborted(worker):
                work.writing = False
                if not decoding:
                    self._blame(worker, Fail("UNAVAILABLE", f"{worker} gave the request up"), now_ns)

    def _tick(self, now_ns: int) -> None:
        if self._wake_ns is None or now_ns < self._wake_ns:
            return
        self._wake_ns = None
        if self.stage is Stage.PLACING:
            self._need_place()
        elif self.stage is Stage.TRANSFERRING and self._work is not None:
            self._transfer_failed(f"{self._work.decode} did not show the KV that was sent to it", self._work, now_ns)

    def _placed(self, event: Placed) -> None:
        if self.stage is not Stage.PLACING:
            return
        self._wake_ns = None
        self._work = _Attempt(event.prefill, event.decode, len(self.outputs))
        if event.prefill is None:
            self.stage = Stage.GENERATING
            self._actions.append(SendGenerate(event.decode, self.attempt))
        else:
            self.stage = Stage.RESERVING
            self._actions.append(SendReserve(event.decode, self.attempt, event.prefill))

    def _not_placed(self, reason: str, now_ns: int) -> None:
        if self.stage is not Stage.PLACING:
            return
        next_step = self._retries.no_place(reason, now_ns)
        if isinstance(next_step, Fail):
            self._fail(next_step, now_ns)
        else:
            self._wake_ns = next_step

    def _tokens(self, event: TokensCame, work: _Attempt, now_ns: int) -> None:
        expected, room = self._prompt_tokens + len(self.outputs), self._max_new_tokens - len(self.outputs)
        if self.stage is Stage.RESERVING or event.position != expected or not 1 <= len(event.tokens) <= room:
            told = f"{len(event.tokens)} tokens at {event.position}, not 1 to {room} at {expected}"
            self._blame(event.worker, Fail("INTERNAL", f"{event.worker} sent {told} ({self.stage.value})"), now_ns)
            return
        if self.stage is not Stage.GENERATING:
            self.stage, self._wake_ns = Stage.DECODING, None
        if not self.outputs:
            self._cached_tokens = work.cached_tokens
        self.outputs.extend(event.tokens)
        self._retries.progress()
        self._actions.append(Emit(tuple(event.tokens)))

    def _finished(self, event: WorkerFinished, work: _Attempt, now_ns: int) -> None:
        came = len(self.outputs) - work.start_outputs
        if event.generated != came or not came:
            told = f"{event.worker} ended after {event.generated} tokens, {came} came"
            self._blame(event.worker, Fail("INTERNAL", told), now_ns)
            return
        work.held = False
        if self._cached_tokens is None and work.start_outputs == 0:
            self._cached_tokens = event.cached_tokens
        self._end(event.reason, now_ns)

    def _refused(self, worker: str, fail: Fail, now_ns: int) -> None:
        if fail.code not in BUSY_CODES:
            self._blame(worker, fail, now_ns)
        elif self._retries.refused(worker, fail, now_ns):
            self._begin_again(now_ns)
        else:
            self._fail(fail, now_ns)

    def _transfer_failed(self, message: str, work: _Attempt, now_ns: int) -> None:
        exclude, prefer = self._retries.after_failed_transfer(work.prefill, work.decode)
        # P has not said a last word: D is the first to notice, perhaps that P died.
        wait_s = self._config.writer_word_s if work.writing and prefer is not None else 0.0
        self._count_failure(Fail("UNAVAILABLE", message), exclude, prefer, now_ns, wait_s)

    def _worker_lost(self, worker: str, now_ns: int) -> None:
        work, fail = self._work, Fail("UNAVAILABLE", f"worker {worker} died")
        if work is None:
            if self._retries.prefer == worker:  # it was P that failed, not D
                self._retries.begin_again(fail, frozenset({worker}), None)
                self._need_place()
            return
        if worker == work.decode and work.held:
            work.held = False
            self._count_failure(fail, {worker}, work.prefill, now_ns)
        elif worker == work.prefill and (work.writing or self.stage is Stage.RESERVING):
            if self.stage is not Stage.DECODING:
                self._count_failure(fail, {worker}, None, now_ns)

    def _blame(self, worker: str, fail: Fail, now_ns: int) -> None:
        if fail.code in FINAL_CODES:
            self._fail(fail, now_ns)
        else:
            self._count_failure(fail, {worker}, None, now_ns)

    def _count_failure(
        self, fail: Fail, exclude: Iterable[str], prefer: str | None, now_ns: int, wait_s: float = 0.0
    ) -> None:  # fmt: skip
        retries = self._retries
        retries.failures += 1
        if retries.failures >= self._config.max_failures and not self._is_complete:
            self._fail(Fail(fail.code, f"{fail.message}; given up after {retries.failures} failures"), now_ns)
        else:
            retries.begin_again(fail, frozenset(exclude), None if prefer in self._lost else prefer)
            self._begin_again(now_ns, wait_s)

    def _begin_again(self, now_ns: int, wait_s: float = 0.0) -> None:
        self._release(now_ns)
        if self._is_complete:  # all that was missing was the word that it is
            self._end("stop" if self.outputs[-1] in self._stop_token_ids else "length", now_ns)
            return
        self.attempt += 1
        self.stage = Stage.PLACING
        if wait_s > 0.0:
            self._wake_ns = now_ns + round(wait_s * NS_PER_S)
        else:
            self._need_place()

    def _need_place(self) -> None:
        self._wake_ns = None
        self._actions.append(NeedPlace(self._retries.exclude, self._retries.prefer))

    @property
    def _is_complete(self) -> bool:
        outputs = self.outputs
        return len(outputs) >= self._max_new_tokens or (bool(outputs) and outputs[-1] in self._stop_token_ids)

    def _release(self, now_ns: int) -> None:
        """Have all workers of the attempt forget it: the writer first, so that it writes no more than it must."""
        work, self._work = self._work, None
        if work is None:
            return
        if work.writing and work.prefill is not None and work.prefill not in self._lost:
            self._actions.append(SendAbort(work.prefill, self.attempt))
        if not work.held or work.decode in self._lost:
            return
        self._actions.append(SendAbort(work.decode, self.attempt))
        if work.prefill is None or self.stage is Stage.DECODING:
            return
        if work.writing and work.prefill not in self._dead:
            until_ns = now_ns + round(self._config.settle_s * NS_PER_S)
            self._writers.add(self.attempt, work.prefill, work.decode, until_ns)
        else:
            self._actions.append(SendWriterDone(work.decode, self.attempt))

    def _end(self, reason: str, now_ns: int) -> None:
        self._close(now_ns)
        cached = 0 if self._cached_tokens is None else self._cached_tokens
        self._actions.append(End(reason, min(cached, self._prompt_tokens)))

    def _fail(self, fail: Fail, now_ns: int) -> None:
        self._close(now_ns)
        self._actions.append(fail)

    def _close(self, now_ns: int) -> None:
        self._release(now_ns)
        self.stage, self._wake_ns = Stage.ENDED, None
