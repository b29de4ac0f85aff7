"""Prefill and decode workers in simulated time behind the real Placement: caches, KV events with a delay, queues."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from router_parts.trace import BLOCK_TOKENS, Request, block_hash
from vla_cloud.core.kv_events import KvChange, KvEvent
from vla_cloud.core.placement import Choice, Demand, Placement
from vla_cloud.core.router.settings import PlacementConfig
from vla_common.clock import NS_PER_S


@dataclass(frozen=True)
class Rules:
    """The machines. ``cache_blocks`` (512 tokens) and rates per worker; a P computes one prompt after the other."""

    prefills: int = 16
    decodes: int = 16
    cache_blocks: int = 12_000
    prefill_tokens_s: float = 10_000.0
    prefill_base_s: float = 0.02
    decode_token_s: float = 0.02
    event_delay_s: float = 0.05
    report_s: float = 1.0


class Cache:
    """The prefix tree of one worker: bounded, least recently used leaves go first, changes are numbered events."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[bytes, None] = OrderedDict()
        self.events: list[KvEvent] = []
        self._number = 0

    def match(self, path: Sequence[bytes]) -> int:
        """Blocks of its beginning that are held."""
        return next((count for count, value in enumerate(path) if value not in self.held), len(path))

    def store(self, path: Sequence[bytes]) -> None:
        """Keep it; what exceeds the capacity goes first."""
        path = path[: self.capacity]
        for value in reversed(path):  # the beginning is used last, so that leaves go before what they stand on
            if value in self.held:
                self.held.move_to_end(value)
        new = [value for value in path if value not in self.held]
        while len(self.held) + len(new) > self.capacity:
            self._note(KvChange.REMOVED, self.held.popitem(last=False)[0])
        for value in new:
            self._note(KvChange.STORED, value)
        for value in reversed(new):
            self.held[value] = None
        for value in reversed(path):
            self.held.move_to_end(value)

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call."""
        events, self.events = self.events, []
        return events

    def _note(self, change: KvChange, value: bytes) -> None:
        self.events.append(KvEvent(self._number, change, value))
        self._number += 1


@dataclass
class _Prefill:
    cache: Cache
    waiting: deque[_Job] = field(default_factory=deque)
    busy: bool = False
    computed_tokens: int = 0
    left_tokens: int = 0


@dataclass
class _Decode:
    cache: Cache
    tokens: int = 0
    token_s: float = 0.0  # integral of the tokens held
    since_s: float = 0.0
    peak_tokens: int = 0


@dataclass(eq=False)
class _Job:
    name: str
    request: Request
    path: list[bytes]
    choice: Choice


class _Clock:
    """Simulated time, for the Placement."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_ns(self) -> int:
        return round(self.now_s * NS_PER_S)

    def wall_ns(self) -> int:
        return self.monotonic_ns()

    def sleep_until_ns(self, deadline_ns: int) -> None:
        self.now_s = max(self.now_s, deadline_ns / NS_PER_S)


class Cluster:
    """Replays a trace; :meth:`run` gives what came of it."""

    def __init__(self, rules: Rules, config: PlacementConfig, seed: int = 0) -> None:
        self.rules = rules
        self.clock = _Clock()
        config = replace(config, max_prefix_tokens=1 << 30)
        self.placement = Placement(config, self.clock, random.Random(seed), BLOCK_TOKENS)
        self.prefills = {f"p{i}": _Prefill(Cache(rules.cache_blocks)) for i in range(rules.prefills)}
        self.decodes = {f"d{i}": _Decode(Cache(rules.cache_blocks)) for i in range(rules.decodes)}
        for name in self.prefills:
            self.placement.add(name, "prefill", rules.cache_blocks)
        for name in self.decodes:
            self.placement.add(name, "decode", rules.cache_blocks)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._hashes: dict[int, bytes] = {}
        self._left = 0
        self.waits_s: list[float] = []
        self.ttft_s: list[float] = []
        self.reused_blocks = self.reused_tokens = self.sent_blocks = 0

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """All of them, to the end of the last answer."""
        self._left = len(requests)
        for number, request in enumerate(requests):
            self._at(request.at_s, lambda number=number, request=request: self._arrive(number, request))
        if requests and self.rules.report_s:
            self._at(requests[0].at_s, self._report)
        while self._queue:
            self.clock.now_s, _, act = heapq.heappop(self._queue)
            act()
        return self._found(requests)

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), act))

    def _hash(self, block: int) -> bytes:
        if block not in self._hashes:
            self._hashes[block] = block_hash(block)
        return self._hashes[block]

    def _arrive(self, number: int, request: Request) -> None:
        path = [self._hash(block) for block in request.blocks]
        name = str(number)
        choice = self.placement.place(name, 0, Demand(path, request.input_tokens, request.output_tokens))
        assert isinstance(choice, Choice) and choice.prefill is not None
        worker = self.prefills[choice.prefill]
        worker.waiting.append(_Job(name, request, path, choice))
        worker.left_tokens += request.input_tokens
        self._start(worker)

    def _start(self, worker: _Prefill) -> None:
        if worker.busy or not worker.waiting:
            return
        job = worker.waiting.popleft()
        worker.busy = True
        cached = worker.cache.match(job.path)
        cached_tokens = min(cached * BLOCK_TOKENS, job.request.input_tokens)
        self.reused_blocks += cached
        self.reused_tokens += cached_tokens
        uncached = job.request.input_tokens - cached_tokens
        worker.computed_tokens += uncached
        self.waits_s.append(self.clock.now_s - job.request.at_s)
        took_s = self.rules.prefill_base_s + uncached / self.rules.prefill_tokens_s
        self._at(self.clock.now_s + took_s, lambda: self._prefilled(worker, job))

    def _prefilled(self, worker: _Prefill, job: _Job) -> None:
        worker.busy = False
        worker.left_tokens -= job.request.input_tokens
        self.ttft_s.append(self.clock.now_s - job.request.at_s)
        assert job.choice.prefill is not None
        self._store(job.choice.prefill, worker.cache, job.path)
        self.placement.prefill_done(job.name, 0)
        decode = self.decodes[job.choice.decode]
        self.sent_blocks += len(job.path) - decode.cache.match(job.path)
        self._store(job.choice.decode, decode.cache, job.path)
        tokens = job.request.input_tokens + job.request.output_tokens
        self._hold(decode, tokens)
        ends_s = self.clock.now_s + job.request.output_tokens * self.rules.decode_token_s
        self._at(ends_s, lambda: self._decoded(decode, job, tokens))
        self._start(worker)

    def _decoded(self, decode: _Decode, job: _Job, tokens: int) -> None:
        self._hold(decode, -tokens)
        self.placement.release(job.name, 0)
        self._left -= 1

    def _hold(self, decode: _Decode, tokens: int) -> None:
        decode.token_s += decode.tokens * (self.clock.now_s - decode.since_s)
        decode.tokens, decode.since_s = decode.tokens + tokens, self.clock.now_s
        decode.peak_tokens = max(decode.peak_tokens, decode.tokens)

    def _store(self, name: str, cache: Cache, path: Sequence[bytes]) -> None:
        cache.store(path)
        events = cache.take_events()
        if events:
            arrives_s = self.clock.now_s + self.rules.event_delay_s
            self._at(arrives_s, lambda: self._deliver(name, events))

    def _deliver(self, name: str, events: list[KvEvent]) -> None:
        assert not self.placement.take_events(name, events[0].sequence, events), "no event is lost here"

    def _report(self) -> None:
        """Every worker's Load."""
        for name, worker in self.prefills.items():
            self.placement.take_load(name, worker.left_tokens)
        for name, decode in self.decodes.items():
            self.placement.take_load(name, decode.tokens)
        if self._left:
            self._at(self.clock.now_s + self.rules.report_s, self._report)

    def _found(self, requests: Sequence[Request]) -> dict[str, Any]:
        computed = [worker.computed_tokens for worker in self.prefills.values()]
        held = [decode.token_s for decode in self.decodes.values()]
        blocks = sum(len(request.blocks) for request in requests)
        tokens = sum(request.input_tokens for request in requests)
        return {
            "requests": len(requests),
            "reuse_blocks": self.reused_blocks / blocks,
            "reuse_tokens": self.reused_tokens / tokens,
            "sent_blocks": self.sent_blocks / blocks,
            "prefill_max_to_mean": max(computed) / float(np.mean(computed)),
            "decode_max_to_mean": max(held) / float(np.mean(held)),
            "decode_peak_max_to_mean": _spread([decode.peak_tokens for decode in self.decodes.values()]),
            **{f"queue_p{q}_s": float(np.percentile(self.waits_s, q)) for q in (50, 99)},
            **{f"ttft_p{q}_s": float(np.percentile(self.ttft_s, q)) for q in (50, 95, 99)},
            "ttft_mean_s": float(np.mean(self.ttft_s)),
            "router": self.placement.snapshot(),
        }


def _spread(values: Sequence[float]) -> float:
    return max(values) / float(np.mean(values))


def replay(requests: Sequence[Request], rules: Rules, configs: dict[str, PlacementConfig]) -> dict[str, Any]:
    """One run per configuration, on equal machines."""
    return {
        "machines": asdict(rules),
        "runs": {name: Cluster(rules, config).run(requests) for name, config in configs.items()},
    }
