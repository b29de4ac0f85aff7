"""Engines of P and D workers in one process and as much of a gateway as joins them; the test turns the crank."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kv_chain_runner import KvChainRunner, reference
from memory_connector import Wire

from vla_cloud.core.block_pool import blocks_for
from vla_cloud.core.generate import Priority, SamplingParams
from vla_cloud.core.step_plan import Role, SchedulerConfig
from vla_cloud.core.transfer_plan import TransferConfig
from vla_cloud.engine.runner import ModelRunner
from vla_cloud.engine.worker_engine import EngineConfig, WorkerEngine
from vla_cloud.pools import messages
from vla_cloud.pools.codec import decode_to_gateway, decode_to_worker, encode, pack_tokens
from vla_common.clock import NS_PER_S, Clock, ManualClock

FINAL = (
    messages.Refused, messages.Prefilled, messages.PushFailed, messages.Finished, messages.Aborted, messages.Error,
)  # fmt: skip
TRANSFER = TransferConfig(layerwise_tokens=48)


def limits(role: Role, **changes: Any) -> SchedulerConfig:
    """Small limits, so that small prompts are chunked."""
    values: dict[str, Any] = dict(
        role=role, max_model_len=256, chunk_tokens=48, max_partial_prefills=3, max_long_prefills=2,
        long_prefill_tokens=64, max_running=8, max_admitted=16, max_waiting=16, watermark_blocks=1,
    )  # fmt: skip
    values.update(changes)
    if values.get("host_blocks"):
        values.update(bytes_per_block=1024, host_bandwidth_bytes_s=1e12, prefill_tokens_s=1.0)
    return SchedulerConfig(**values)


@dataclass
class Told:
    """What one worker said of one attempt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    start: int = -1
    final: Any = None
    reserved: messages.Reserved | None = None


@dataclass
class Worker:
    """One engine, and what it said."""

    name: str
    engine: WorkerEngine
    runner: ModelRunner
    ready: messages.Ready
    end: Any = None  # its sender or receiver
    told: dict[tuple[str, int], Told] = field(default_factory=dict)
    other: list[Any] = field(default_factory=list)
    accepted: set[tuple[str, int]] = field(default_factory=set)
    aborted: list[tuple[str, int]] = field(default_factory=list)

    def of(self, request_id: str, attempt: int = 0) -> Told:
        return self.told.setdefault((request_id, attempt), Told())


class Bench:
    """Workers by name. Every message goes through its bytes. ``step`` turns every engine once and pumps the wire."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock if clock is not None else ManualClock(1)
        self.wire = Wire()
        self.workers: dict[str, Worker] = {}
        self.prefills: dict[tuple[str, int], tuple[str, messages.Work]] = {}
        self.deadline_s = 5.0
        self.hold_prefill = False

    def add(
        self, name: str, role: Role, num_blocks: int = 64, *, runner: Any = None, end: Any = None,
        config: EngineConfig | None = None, grammars: Any = None, **changes: Any,
    ) -> Worker:  # fmt: skip
        """Start a worker. ``end``: its connector, an in-memory one by default."""
        runner = runner if runner is not None else KvChainRunner(num_blocks, max_model_len=256)
        config = config if config is not None else EngineConfig(limits(role, **changes), TRANSFER)
        sender = receiver = None
        if role is Role.PREFILL:
            sender = end = end if end is not None else self.wire.sender(runner.kv)
        elif role is Role.DECODE:
            receiver = end = end if end is not None else self.wire.receiver(runner.kv)
        engine = WorkerEngine(runner, config, self.clock, sender, receiver, grammars)
        ready = decode_to_gateway(encode(engine.ready(name)))
        assert isinstance(ready, messages.Ready)
        worker = self.workers[name] = Worker(name, engine, runner, ready, end)
        return worker

    def kill(self, name: str) -> None:
        """The worker's process is dead."""
        worker = self.workers.pop(name)
        if worker.engine.role is Role.PREFILL:
            worker.end.kill()
        elif worker.engine.role is Role.DECODE:
            del self.wire.receivers[worker.end.address]

    def send(self, name: str, message: Any) -> None:
        if isinstance(message, messages.Reserve | messages.Prefill | messages.Generate):
            self.workers[name].accepted.add((message.request_id, message.attempt))
        if isinstance(message, messages.Abort):
            self.workers[name].aborted.append((message.request_id, message.attempt))
        self.workers[name].engine.handle(decode_to_worker(encode(message)))

    def generate(self, name: str, request_id: str, work: messages.Work, attempt: int = 0) -> None:
        self.send(name, messages.Generate(request_id, attempt, work))

    def disaggregate(
        self, p: str, d: str, request_id: str, work: messages.Work, attempt: int = 0, lease_s: float = 30.0
    ) -> None:
        """Reserve on D; the prefill on P follows when D has blocks."""
        self.prefills[request_id, attempt] = (p, work)
        self.send(d, messages.Reserve(request_id, attempt, work, p, lease_s))

    def collect(self) -> None:
        """Take what the engines have to say, and send P the prompts that D has blocks for."""
        for worker in list(self.workers.values()):
            for event in worker.engine.events():
                self._hear(worker, decode_to_gateway(encode(event)))

    def step(self, operations: int = 1 << 30) -> bool:
        busy = False
        for worker in list(self.workers.values()):
            busy |= worker.engine.step()
            self.collect()
        return bool(self.wire.pump(operations)) or busy

    def settle(self, rounds: int = 2000) -> None:
        """Until nothing happens any more."""
        for _ in range(rounds):
            if not self.step():
                break
        else:
            raise AssertionError("still busy")
        assert not self.step()

    def until(self, condition: Callable[[], bool], operations: int = 1 << 30, rounds: int = 2000) -> None:
        for _ in range(rounds):
            if condition():
                return
            self.step(operations)
        raise AssertionError("it never came")

    def advance(self, seconds: float) -> None:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance_ns(round(seconds * NS_PER_S))

    def _hear(self, worker: Worker, event: Any) -> None:
        if isinstance(event, messages.Tokens):
            seen = set()
            for row in event.rows:
                told = worker.of(row.request_id, row.attempt)
                assert told.final is None, "a token after the end"
                assert (row.request_id, row.attempt) not in seen
                seen.add((row.request_id, row.attempt))
                told.start = row.position if told.start < 0 else told.start
                assert row.position == told.start + len(told.tokens), "a gap or a repeat"
                told.tokens += row.tokens
                told.logprobs += row.logprobs
        elif isinstance(event, messages.Reserved):
            told = worker.of(event.request_id, event.attempt)
            assert told.reserved is None and told.final is None
            told.reserved = event
            if not self.hold_prefill:
                self.prefill(worker, event)
        elif isinstance(event, FINAL) and getattr(event, "request_id", ""):
            told = worker.of(event.request_id, event.attempt)
            key = (event.request_id, event.attempt)
            if isinstance(event, messages.Aborted) and (told.final is not None or key not in worker.accepted):
                assert key in worker.aborted
                return  # the answer to an abort that came too late
            assert told.final is None, f"{told.final} and {event}"
            told.final = event
        else:
            worker.other.append(event)

    def prefill(self, worker: Worker, event: messages.Reserved, **changes: Any) -> None:
        """Send P its part."""
        p, work = self.prefills[event.request_id, event.attempt]
        if p not in self.workers:
            return
        values: dict[str, Any] = dict(
            worker=worker.name, address=worker.ready.address, token=event.token, epoch=worker.ready.epoch,
            first_block=event.first_block, blocks=event.blocks, deadline_s=self.deadline_s,
        )  # fmt: skip
        values.update(changes)
        destination = messages.Destination(**values)
        self.send(p, messages.Prefill(event.request_id, event.attempt, work, destination))


def make_work(prompt: list[int], count: int = 8, **changes: Any) -> messages.Work:
    """Greedy unless told otherwise."""
    sampling = {name: changes.pop(name) for name in list(changes) if name in SamplingParams.__dataclass_fields__}
    sampling.setdefault("seed", 7)
    values: dict[str, Any] = dict(time_left_s=1000.0, priority=Priority.NORMAL)
    values.update(changes)
    return messages.Work(pack_tokens(prompt), SamplingParams(max_new_tokens=count, **sampling), **values)


def make_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(997), k=length)


def expected(prompt: list[int], count: int = 8, **changes: Any) -> list[int]:
    return reference(prompt, count, **changes)


def at_baseline(worker: Worker) -> None:
    """Nothing is held but the prefix cache."""
    engine = worker.engine
    assert engine.scheduler.live == 0 and len(engine.ledger) == 0 and len(engine.swap) == 0
    assert engine.pool.quarantined == 0
    assert engine.pool.free + engine.tree.evictable == engine.pool.total, "blocks are missing"
    assert engine.tree.evictable == engine.tree.size, "a lock is left"
    for side in (engine.prefill_side, engine.decode_side):
        assert side is None or len(side) == 0
    assert engine.decode_side is None or engine.decode_side.quarantines == 0


# -- one P, one D and one prompt, for tests of a pair ----------------------------------------------------------------

PROMPT = make_prompt(1, 100)
WORK = make_work(PROMPT)
WANTED = expected(PROMPT)


def pair(**changes) -> Bench:
    bench = Bench()
    bench.add("p", Role.PREFILL)
    bench.add("d", Role.DECODE, **changes)
    return bench


def all_at_baseline(bench: Bench) -> None:
    for worker in bench.workers.values():
        at_baseline(worker)


def d_of(bench: Bench) -> Worker:
    return bench.workers["d"]


def began_writing(bench: Bench) -> None:
    """Until P has written some but not all of the prompt's KV."""
    bench.disaggregate("p", "d", "r", WORK)
    sender = bench.workers["p"].end
    bench.until(lambda: sender.writes >= 3, operations=1)
    assert sender.writes < 2 * blocks_for(len(PROMPT))
