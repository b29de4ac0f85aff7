"""A worker's spans of the requests that are traced, seen from what goes in, what comes out and what each step computes.

Stands in front of the engine where tracing is on; where it is off the engine stands alone. A stage is told when it
has ended, so that a worker that is killed leaves what it had done. See docs/tracing.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vla_cloud.core.request_trace import attempt_span
from vla_cloud.core.step_plan import StepPlan
from vla_cloud.engine.work_ledger import key_of
from vla_cloud.engine.worker_engine import WorkerEngine
from vla_cloud.pools import messages
from vla_cloud.pools.messages import ToGateway, ToWorker
from vla_common.clock import Clock
from vla_common.tracing import Tracer, Value, span_id


@dataclass(slots=True)
class _Work:
    """One attempt here. ``since_ns``: when the present stage began."""

    trace: bytes
    attempt: int
    stage: str  # reserve, await kv; queue, prefill, kv transfer; decode
    since_ns: int
    decodes: bool
    prompt_tokens: int
    chunks: int = 0
    tokens: int = 0


class TracedEngine:
    """The :class:`vla_cloud.pools.worker_process.Engine` of a traced worker; one thread calls all of it."""

    def __init__(self, engine: WorkerEngine, tracer: Tracer, clock: Clock) -> None:
        """``clock``: that of the spans. The gateway has decided what is traced."""
        self._engine, self._tracer, self._clock = engine, tracer, clock
        self._works: dict[str, _Work] = {}
        engine.on_step = self._stepped

    def ready(self, worker: str) -> messages.Ready:
        """See the engine, as for all that follows."""
        return self._engine.ready(worker)

    def handle(self, message: ToWorker) -> None:
        """A request that is traced is remembered from its arrival on."""
        if isinstance(message, messages.Reserve | messages.Prefill | messages.Generate) and message.work.trace:
            stage = "reserve" if isinstance(message, messages.Reserve) else "queue"
            self._works[key_of(message.request_id, message.attempt)] = _Work(
                message.work.trace, message.attempt, stage, self._clock.monotonic_ns(),
                not isinstance(message, messages.Prefill), len(message.work.prompt) // 4,
            )  # fmt: skip
        self._engine.handle(message)

    def step(self) -> bool:
        """One step."""
        return self._engine.step()

    def events(self) -> list[ToGateway]:
        """Messages for the gateway, each of which may end a stage."""
        events = self._engine.events()
        if self._works and events:
            now_ns = self._clock.monotonic_ns()
            for event in events:
                self._told(event, now_ns)
        return events

    def wait_fds(self) -> Sequence[int]:
        """Descriptors."""
        return self._engine.wait_fds()

    def wait_s(self) -> float | None:
        """How long nothing happens."""
        return self._engine.wait_s()

    @property
    def failure(self) -> str | None:
        """Why the engine has ended."""
        return self._engine.failure

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _stepped(self, plan: StepPlan, began_ns: int, ended_ns: int) -> None:
        """A forward pass is over."""
        if not self._works:
            return
        for chunk in plan.prefill:
            work = self._works.get(chunk.seq.request_id)
            if work is None:
                continue
            if work.stage == "queue":
                self._enter(work, "prefill", began_ns)
            parent = span_id(work.trace, "prefill", work.attempt)
            span = span_id(work.trace, "chunk", work.attempt, work.chunks)
            self._tracer.span(
                work.trace, span, parent, "chunk", began_ns, ended_ns, start=chunk.start, tokens=chunk.count,
                prompts=len(plan.prefill), rows=len(plan.decode),
            )  # fmt: skip
            work.chunks += 1
            if chunk.last and work.stage == "prefill":
                stage = "decode" if work.decodes else "kv transfer"
                self._enter(work, stage, ended_ns, tokens=work.prompt_tokens, cached_tokens=chunk.seq.cached_tokens)

    def _told(self, event: ToGateway, now_ns: int) -> None:
        match event:
            case messages.Tokens(rows):
                for row in rows:
                    work = self._works.get(key_of(row.request_id, row.attempt))
                    if work is not None:
                        if work.stage == "await kv":  # the first token came with the KV
                            self._enter(work, "decode", now_ns)
                        work.tokens += len(row.tokens)
            case messages.Reserved(request_id, attempt, _, _, blocks, cached_tokens):
                work = self._works.get(key_of(request_id, attempt))
                if work is not None:
                    self._enter(work, "await kv", now_ns, blocks=len(blocks), cached_tokens=cached_tokens)
            case messages.Prefilled(request_id, attempt, _, pushed_bytes):
                self._end(key_of(request_id, attempt), now_ns, "", bytes=pushed_bytes)
            case messages.Finished(request_id, attempt, reason, _, _, preemptions):
                self._end(key_of(request_id, attempt), now_ns, "", reason=reason, preemptions=preemptions)
            case messages.Aborted(request_id, attempt):
                # No failure: also a P worker whose push D has seen and answered before its own thread did is stopped.
                self._end(key_of(request_id, attempt), now_ns, "", stopped=True)
            case messages.Refused(request_id, attempt, code, message):
                self._end(key_of(request_id, attempt), now_ns, f"refused: {code}: {message}")
            case messages.PushFailed(request_id, attempt, code, message):
                self._end(key_of(request_id, attempt), now_ns, f"{code}: {message}")
            case messages.Error(code, message, request_id, attempt):
                self._end(key_of(request_id, attempt), now_ns, f"{code}: {message}")

    def _enter(self, work: _Work, stage: str, now_ns: int, error: str = "", **attributes: Value) -> None:
        """The present stage has ended; the next begins."""
        span = span_id(work.trace, work.stage, work.attempt)
        parent = attempt_span(work.trace, work.attempt)
        self._tracer.span(work.trace, span, parent, work.stage, work.since_ns, now_ns, error, **attributes)
        work.stage, work.since_ns = stage, now_ns

    def _end(self, key: str, now_ns: int, error: str, **attributes: Value) -> None:
        work = self._works.pop(key, None)
        if work is not None:
            if work.decodes:
                attributes["tokens"] = work.tokens
            self._enter(work, "", now_ns, error, **attributes)
