"""The scheduler over a memory that shows foreign KV: any order of requests, steps, aborts, failures and signals.

The rig checks in every step that budgets hold, that no ready decode row is left out, that no block is written by two and
that every row of KV read is the right one; ``check`` that every block is accounted for.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from scheduler_rig import Rig, request

from vla_cloud.core.chunk_budget import share_budget
from vla_cloud.core.generate import FinishReason, GenerateRequest, ImageSpan, Priority, QueueFull
from vla_cloud.core.sequence import SequenceState
from vla_cloud.core.step_plan import Role, StepPlan

SWAP = {"bytes_per_block": 1000, "host_bandwidth_bytes_s": 1e9, "prefill_tokens_s": 100.0}


def random_request(rng: random.Random, name: str, rig: Rig) -> GenerateRequest:
    """Prompts of a few families, so that prefixes are shared; sometimes long, an image, a tenant, a deadline."""
    family = rng.randrange(3)
    length = rng.choice((1, 5, 16, 17, 33, 64, 100, 180))
    tokens = [(family + i // 16) % 5 for i in range(max(1, length - rng.randrange(4)))]
    images = (ImageSpan(0, 1, rng.choice((b"a", b"b")) * 32),) if rng.random() < 0.2 else ()
    deadline_ns = rig.clock.monotonic_ns() + rng.randrange(1, 60) if rng.random() < 0.2 else None
    return request(
        name,
        tokens,
        new=rng.choice((0, 1, 2, 7, 20, 40)) if rig.config.role is Role.BOTH else rng.choice((1, 2, 7, 20, 40)),
        priority=rng.choice([*Priority]),
        stop=frozenset(rng.sample(range(40), rng.choice((0, 0, 2)))),
        salt=rng.choice((b"", b"", b"t")),
        images=images,
        deadline_ns=deadline_ns,
    )


def random_rig(rng: random.Random, role: Role) -> Rig:
    partial = rng.choice((1, 2, 4))
    return Rig(
        blocks=rng.choice((13, 24, 40)),
        tree_blocks=rng.choice((None, 8, 0)),
        role=role,
        chunk_tokens=rng.choice((64, 128)),
        long_prefill_tokens=rng.choice((20, 100)),
        max_partial_prefills=partial,
        max_long_prefills=max(1, partial - 1),
        max_running=rng.choice((1, 3, 8)),
        max_admitted=rng.choice((8, 12)),
        max_waiting=6,
        max_bypass=rng.choice((0, 3, 64)),
        watermark_blocks=rng.choice((0, 2)),
        prefix_cache=rng.random() < 0.8,
        host_blocks=rng.choice((0, 6, 40)),
        **SWAP,
    )


class Chaos:
    """Everything that may happen to a worker, drawn from one random source."""

    def __init__(self, rng: random.Random, role: Role) -> None:
        self.rng = rng
        self.rig = random_rig(rng, role)
        self.count = 0
        self.refused = 0
        self.quarantined: dict[str, list[int]] = {}

    def add(self) -> None:
        self.count += 1
        try:
            local = self.rig.config.role is Role.DECODE and self.rng.random() < 0.3
            self.rig.add(random_request(self.rng, f"r{self.count}", self.rig), writer=f"w{self.count}", local=local)
        except QueueFull:
            self.refused += 1

    def abort(self) -> None:
        live = self.rig.live()
        if live:
            seq = self.rng.choice(live)
            if seq.state is SequenceState.RESERVED:
                self.quarantined[seq.writer] = list(seq.table[seq.cached_tokens // 16 :])
            assert self.rig.scheduler.abort(seq.request_id)

    def step(self, meanwhile: bool = False, fail: bool = False) -> None:
        def interfere(plan: StepPlan) -> None:
            for _ in range(self.rng.randrange(3)):
                self.abort()
            self.arrive()

        self.rig.step(interfere if meanwhile else None, fail)

    def arrive(self) -> None:
        reserved = self.rig.live(SequenceState.RESERVED)
        if reserved:
            assert self.rig.arrive(self.rng.choice(reserved))

    def push(self) -> None:
        ready = self.rig.live(SequenceState.TO_PUSH)
        if ready:
            seq = self.rng.choice(ready)
            self.rig.push(seq)

    def writer_ends(self) -> None:
        """A writer of a gone reservation writes once more, then is known to have ended."""
        writers = self.rig.pool.writers()
        if writers:
            writer = self.rng.choice(writers)
            self.rig.late_write(writer, self.quarantined.get(writer, []))
            assert self.rig.scheduler.acquit(writer) > 0
            self.rig.writers.discard(writer)

    def time_passes(self) -> None:
        self.rig.clock.advance_ns(self.rng.randrange(1, 30))

    def any(self) -> None:
        roll = self.rng.random()
        if roll < 0.35:
            self.add()
        elif roll < 0.68:
            self.step(meanwhile=self.rng.random() < 0.3, fail=self.rng.random() < 0.05)
        elif roll < 0.77:
            self.abort()
        elif roll < 0.93:
            self.rng.choice((self.arrive, self.push, self.writer_ends))()
        else:
            self.time_passes()

    def end(self) -> None:
        """Every request ends and every block comes back, once no writer is left that holds any."""
        while self.rig.pool.writers():
            self.writer_ends()
        self.rig.run()
        for name in self.rig.sequences:
            assert name in self.rig.finished, f"{name} has no end"
            self.rig.check_outputs(name)
        self.rig.check_baseline()
        self.rig.sequences.clear()
        self.rig.finished.clear()
        self.rig.pushed_rows.clear()
        assert not self.rig.scheduler.has_work and self.rig.scheduler._planner.host_used == 0


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32), role=st.sampled_from([*Role]))
    def start(self, seed: int, role: Role) -> None:
        self.chaos = Chaos(random.Random(seed), role)

    @rule()
    def add(self) -> None:
        self.chaos.add()

    @rule(meanwhile=st.booleans())
    def step(self, meanwhile: bool) -> None:
        self.chaos.step(meanwhile)

    @rule()
    def fail(self) -> None:
        self.chaos.step(fail=True)

    @rule()
    def abort(self) -> None:
        self.chaos.abort()

    @rule()
    def signal(self) -> None:
        self.chaos.arrive()
        self.chaos.push()

    @precondition(lambda self: self.chaos.rig.pool.quarantined)
    @rule()
    def writer_ends(self) -> None:
        self.chaos.writer_ends()

    @rule()
    def time_passes(self) -> None:
        self.chaos.time_passes()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.end()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)


@pytest.mark.parametrize("role", [*Role])
def test_10_000_random_operations_end_every_request_and_return_every_block(role: Role) -> None:
    rng = random.Random(f"{role.value} worker")
    done = refused = 0
    ends: set[FinishReason] = set()
    while done < 10_000:
        chaos = Chaos(rng, role)
        for _ in range(5):
            for _ in range(100):
                chaos.any()
                done += 1
                if done % 5 == 0:
                    chaos.rig.check()
            ends |= {end.reason for end in chaos.rig.finished.values()}
            chaos.end()
        refused += chaos.refused
    assert refused > 50, "the run is meant to overload the queue"
    assert ends >= {FinishReason.ABORTED, FinishReason.ERROR}
    assert ends & {FinishReason.STOP, FinishReason.LENGTH, FinishReason.PUSHED}


@given(st.lists(st.integers(1, 5000), max_size=8), st.integers(0, 4096))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_shares_stay_in_the_budget_and_are_fair(remaining: list[int], budget: int) -> None:
    shares = share_budget(remaining, budget)
    assert sum(shares) <= budget
    for wanted, share in zip(remaining, shares, strict=True):
        assert 0 <= share <= wanted and (share == wanted or share % 16 == 0)
        assert share >= min(wanted, budget // len(remaining) // 16 * 16), "less than an equal share"
    if sum(remaining) <= budget:
        assert shares == remaining
    elif remaining:
        assert budget - sum(shares) < 16, "budget left over beside prompts that need it"


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_short_prompt_beside_long_ones_is_done_in_a_bounded_number_of_steps(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(blocks=2000, max_partial_prefills=4, max_long_prefills=2, prefix_cache=False)
    for i in range(rng.randrange(1, 8)):
        rig.add(request(f"long{i}", rng.randrange(400, 2000), new=1))
    for _ in range(rng.randrange(12)):
        rig.step()
    length = rng.randrange(1, 100)
    rig.add(request("short", length, new=1))
    start = rig.steps
    while "short" not in rig.finished:
        rig.step()
    # A quarter of 64 tokens a step at least; and a slot may be taken by the rest (128 at most) of a long one's prompt.
    assert rig.steps - start <= -(-length // 16) + 128 // 16 + 1


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_preempted_resume_before_any_newcomer_of_their_priority(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(blocks=12, watermark_blocks=0, host_blocks=rng.choice((0, 30)), **SWAP)
    for i in range(12):
        rig.add(request(f"r{i}", rng.randrange(1, 60), new=rng.randrange(30, 80)))
    while rig.scheduler.live:
        waiting = rig.live(SequenceState.PREEMPTED)
        new = rig.live(SequenceState.WAITING)
        rig.step()
        started = [seq for seq in new if seq.state is not SequenceState.WAITING]
        assert not started or all(seq.state is not SequenceState.PREEMPTED for seq in waiting)
    assert rig.scheduler.load().preemptions > 0
    for name in rig.sequences:
        rig.check_outputs(name)
    rig.check_baseline()
