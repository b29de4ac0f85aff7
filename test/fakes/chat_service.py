"""A ServingService without workers: says what a test tells it to, when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vla_cloud.core.generate import FinishReason, GenerateRequest, RequestError
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.core.life_events import Fail
from vla_cloud.pools.events import Finished, TokenEvent, request_error


class AnyGrammar:
    """A checker that takes every grammar, or raises ``error``."""

    def __init__(self, error: RequestError | None = None) -> None:
        self.error = error
        self.seen: list[Grammar] = []

    async def check(self, grammar: Grammar) -> None:
        self.seen.append(grammar)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error


Script = Sequence[Sequence[int] | Exception | TokenEvent]


def fail(code: str, message: str = "no", retry_after_s: float = 0.0) -> RequestError:
    """As ServingService raises them."""
    return request_error(Fail(code, message, retry_after_s))


@dataclass
class ScriptedService:
    """``script(request)``: token lists, TokenEvents or an exception, one after the other; then the end.

    ``gate``: each step waits for it. ``closed``: ids in the order in which their answers were closed, however.
    """

    script: Callable[[GenerateRequest], Script]
    reason: FinishReason = FinishReason.STOP
    cached_tokens: int = 0
    gate: asyncio.Event | None = None
    serving: bool = True
    requests: list[GenerateRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    closed: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    draining: bool = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Finished]:
        self.requests.append(request)
        if self.draining:
            raise fail("UNAVAILABLE", "the server ends: ask another")
        self.running.add(request.request_id)
        count = 0
        try:
            for step in self.script(request):
                await self._turn(request.request_id)
                if isinstance(step, Exception):
                    raise step
                event = step if isinstance(step, TokenEvent) else TokenEvent(request.request_id, tuple(step))
                count += len(event.tokens)
                yield event
            await self._turn(request.request_id)
            yield Finished(request.request_id, self.reason, len(request.tokens), count, self.cached_tokens, 1)
        finally:
            self.running.discard(request.request_id)
            self.closed.append(request.request_id)

    async def _turn(self, request_id: str) -> None:
        """Let others run, as a real service does."""
        if self.gate is None:
            await asyncio.sleep(0)
        while self.gate is not None and not self.gate.is_set() and request_id not in self.aborted:
            await asyncio.sleep(0.001)
        if request_id in self.aborted:
            raise fail("CANCELLED", "the request was aborted")

    def abort(self, request_id: str) -> bool:
        self.aborted.add(request_id)
        return request_id in self.running

    def health(self) -> dict[str, Any]:
        return {
            "serving": self.serving and not self.draining, "draining": self.draining, "active": len(self.running),
            "queued": 0, "unsettled": 0, "workers": [], "served": len(self.closed),
        }  # fmt: skip

    async def drain(self, timeout_s: float) -> bool:
        self.draining = True
        for _ in range(max(1, round(timeout_s / 0.001))):
            if not self.running:
                return True
            await asyncio.sleep(0.001)
        return False
