"""Load generator: requests whose tokens are stamped as the client gets them, and phases made of them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from vla_cloud.core.generate import GenerateRequest, RequestAborted, SamplingParams
from vla_cloud.pools.events import TokenEvent
from vla_cloud.pools.service import ServingService

NS_PER_MS = 1e6
_SETTLE_S = 60.0


@dataclass
class Trace:
    """One request as its client saw it; one stamp per token."""

    prompt_tokens: int
    begin_ns: int = field(default_factory=time.monotonic_ns)
    stamps: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    attempts: int = 1

    @property
    def ttft_ms(self) -> float:
        return (self.stamps[0] - self.begin_ns) / NS_PER_MS

    def gaps_ms(self, from_ns: int = 0) -> list[float]:
        """Between tokens that came after ``from_ns``."""
        late = [stamp for stamp in self.stamps if stamp >= from_ns]
        return [(b - a) / NS_PER_MS for a, b in zip(late, late[1:], strict=False)]


class Prompts:
    """Random prompts of any length, none like another, and names for requests."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._number = 0

    def new(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(3, self._vocabulary, length).tolist())

    def name(self) -> str:
        self._number += 1
        return f"b{self._number}"


async def run(service: ServingService, name: str, prompt: tuple[int, ...], count: int, trace: Trace) -> Trace:
    """One greedy request; an abort ends the trace early."""
    request = GenerateRequest(name, prompt, SamplingParams(max_new_tokens=count))
    with suppress(RequestAborted):
        async for event in service.generate(request):
            if isinstance(event, TokenEvent):
                now_ns = time.monotonic_ns()
                trace.stamps += [now_ns] * len(event.tokens)
            else:
                trace.cached_tokens, trace.attempts = event.cached_tokens, event.attempts
    return trace


async def one(service: ServingService, prompts: Prompts, prompt: tuple[int, ...], count: int) -> Trace:
    """One request from beginning to end, alone."""
    return await run(service, prompts.name(), prompt, count, Trace(len(prompt)))


async def settle(*services: ServingService) -> None:
    """Until nothing is left on the workers."""
    end = time.monotonic() + _SETTLE_S
    while any(service.health()["unsettled"] for service in services):
        if time.monotonic() > end:
            raise RuntimeError(f"requests did not settle within {_SETTLE_S:g} s")
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Phase:
    """Decoding streams, what they met, and when."""

    begin_ns: int
    end_ns: int
    gaps_ms: list[float]
    prompts: list[Trace]
    tokens: int


async def decode_phase(
    service: ServingService, prompts: Prompts, starts: list[tuple[int, ...]], count: int, limit_s: float,
    arriving: tuple[ServingService, int] | None = None,
) -> Phase:  # fmt: skip
    """Streams that began at ``starts`` decode ``count`` tokens each and meet a whole prompt, or ``limit_s`` is over.

    ``arriving``: where prompts of this length arrive meanwhile, the next as soon as one has its first token.
    """
    names = [prompts.name() for _ in starts]
    traces = [Trace(len(start)) for start in starts]
    tasks = [
        asyncio.create_task(run(service, name, start, count + 4096, trace))
        for name, start, trace in zip(names, starts, traces, strict=True)
    ]
    while not all(len(trace.stamps) >= 4 for trace in traces):
        _check(tasks)
        await asyncio.sleep(0.01)
    fed: list[Trace] = []
    feeding = asyncio.create_task(_feed(*arriving, prompts, fed)) if arriving is not None else None
    begin_ns = time.monotonic_ns()
    begun = [len(trace.stamps) for trace in traces]
    while time.monotonic_ns() - begin_ns < limit_s * 1e9:
        is_met = feeding is None or fed
        if is_met and all(len(trace.stamps) - first >= count for trace, first in zip(traces, begun, strict=True)):
            break
        _check([*tasks, *([feeding] if feeding is not None else [])])
        await asyncio.sleep(0.02)
    end_ns = time.monotonic_ns()
    for name in names:
        service.abort(name)
    await asyncio.gather(*tasks)
    if feeding is not None:
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding
    await settle(service, *([arriving[0]] if arriving is not None else []))
    gaps = [gap for trace in traces for gap in _until(trace, end_ns).gaps_ms(begin_ns)]
    done = sum(len(trace.stamps) - first for trace, first in zip(traces, begun, strict=True))
    return Phase(begin_ns, end_ns, gaps, fed, done)


async def _feed(service: ServingService, length: int, prompts: Prompts, fed: list[Trace]) -> None:
    while True:
        prompt = prompts.new(length)
        trace = Trace(length)
        await run(service, prompts.name(), prompt, 2, trace)
        fed.append(trace)


def _check(tasks: list[asyncio.Task[object]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError("a request of the measurement ended too early")


def _until(trace: Trace, end_ns: int) -> Trace:
    return Trace(trace.prompt_tokens, trace.begin_ns, [stamp for stamp in trace.stamps if stamp <= end_ns])


async def open_loop(
    service: ServingService, prompts: Prompts, arrivals: list[tuple[float, tuple[int, ...], int]]
) -> list[Trace]:
    """Requests at given seconds from now: (when, prompt, output tokens); waits for all."""
    begin_ns = time.monotonic_ns()

    async def later(at_s: float, prompt: tuple[int, ...], count: int) -> Trace:
        await asyncio.sleep(max(0.0, at_s - (time.monotonic_ns() - begin_ns) / 1e9))
        return await run(service, prompts.name(), prompt, count, Trace(len(prompt)))

    traces = await asyncio.gather(*(later(*arrival) for arrival in arrivals))
    await settle(service)
    return traces
