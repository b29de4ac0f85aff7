"""Random submits, aborts, refusals, kills, corruption, stalls and late notices: blocks and memory come back to baseline."""

import gc
import random
import sys
import tracemalloc
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from engine_bench import Bench, Worker, at_baseline, expected, make_prompt, make_work

from vla_cloud.core.step_plan import Role
from vla_cloud.engine import first_token
from vla_cloud.kv_transfer.connector import Arrived, Broken, Cause, WriterGone
from vla_cloud.pools import messages

COUNT = 12
# A few prompts with common beginnings, so that caches are hit, shared and evicted all the time.
PROMPTS = [make_prompt(stem, 48)[: 16 * cut] + make_prompt(100 + i, 5 + 7 * i) for i in range(8) for stem, cut in
           ((i % 3, i % 4), (i % 2, 3))]  # fmt: skip
ANSWERS = [expected(prompt, COUNT) for prompt in PROMPTS]


class Churn:
    """One bench with two P, two D and one that does both, and a seed for everything that happens to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = Bench()
        self.bench.deadline_s = 3.0
        self.number = 0
        self.submitted = 0
        self.ended = 0
        self.complete = 0
        self.old_tokens: list[str] = []
        self.started = 0
        self.live: dict[str, tuple[int, list[str]]] = {}
        self.finals: dict[str, int] = {}
        for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH):
            self.start(role)

    def start(self, role: Role) -> None:
        self.started += 1
        host_blocks = self.random.choice([0, 12])
        blocks = self.random.choice([14, 24, 40])
        self.bench.add(f"{role.value}{self.started}", role, num_blocks=blocks, host_blocks=host_blocks, max_waiting=6)

    def of(self, *roles: Role) -> Worker:
        return self.random.choice([w for w in self.bench.workers.values() if w.engine.role in roles])

    def submit(self) -> None:
        self.number += 1
        self.submitted += 1
        request_id = f"r{self.number}"
        which = self.random.randrange(len(PROMPTS))
        prompt = PROMPTS[which] if self.random.random() > 0.02 else make_prompt(1, 300)
        work = make_work(prompt, COUNT, time_left_s=self.random.choice([2.0, 30.0, 100.0]))
        if self.random.random() < 0.7:
            p, d = self.of(Role.PREFILL), self.of(Role.DECODE)
            self.live[request_id] = which, [d.name, p.name]
            self.bench.disaggregate(p.name, d.name, request_id, work, lease_s=self.random.choice([1.0, 10.0]))
        else:
            worker = self.of(Role.BOTH, Role.DECODE)
            self.live[request_id] = which, [worker.name]
            self.bench.generate(worker.name, request_id, work)

    def act(self) -> None:
        chance = self.random.random()
        if chance < 0.50:
            self.submit()
        elif chance < 0.70 and self.live:
            request_id = self.random.choice(list(self.live))
            for name in self.live[request_id][1]:
                if name in self.bench.workers and self.random.random() < 0.7:
                    self.bench.send(name, messages.Abort(request_id, 0))
                    if self.random.random() < 0.5:
                        self.bench.send(name, messages.WriterDone(request_id, 0))
        elif chance < 0.72:
            worker = self.of(Role.PREFILL, Role.DECODE, Role.BOTH)
            self.bench.kill(worker.name)
            self.start(worker.engine.role)
        elif chance < 0.80:
            self.inject_late()
        elif chance < 0.86:
            sender = self.of(Role.PREFILL).end
            sender.frozen = not sender.frozen
        elif chance < 0.88:
            self.of(Role.PREFILL).end.corrupt = True
        elif chance < 0.94:
            self.bench.advance(self.random.choice([0.01, 0.3, 1.5, 4.0]))
        else:
            worker = self.of(Role.DECODE)
            leases = [messages.LeaseRow(request_id, 0) for request_id in self.live]
            self.bench.send(worker.name, messages.LeaseExtend(leases, 5.0))
        for _ in range(self.random.randrange(4)):
            self.bench.step(self.random.choice([0, 1, 3, 50]))

    def inject_late(self) -> None:
        if not self.old_tokens:
            return
        worker = self.of(Role.DECODE)
        token = self.random.choice(self.old_tokens)
        notice = first_token.encode(first_token.FirstToken(worker.ready.epoch, 5, 3, 0))
        worker.end.inject(self.random.choice([
            Arrived(token, self.random.randrange(9), notice, 1, 1), Broken(token, Cause.PEER_DEAD, "late", False),
            Broken(token, Cause.ABORTED, "late", True), WriterGone(token),
        ]))  # fmt: skip

    def reap(self) -> None:
        """Check what has ended, and forget it."""
        self.bench.collect()
        for request_id, (which, names) in list(self.live.items()):
            workers = [self.bench.workers[name] for name in names if name in self.bench.workers]
            speaker = self.bench.workers.get(names[0])
            if speaker is not None:
                told = speaker.of(request_id)
                assert told.tokens == ANSWERS[which][: len(told.tokens)], "a token from the wrong KV"
            pending = [w for w in workers if (request_id, 0) in w.accepted and w.of(request_id).final is None]
            if pending:
                continue
            del self.live[request_id]
            self.ended += 1
            self.bench.prefills.pop((request_id, 0), None)
            for worker in workers:
                told = worker.told.pop((request_id, 0), None)
                worker.accepted.discard((request_id, 0))
                if told is None:
                    continue
                name = type(told.final).__name__
                self.finals[name] = self.finals.get(name, 0) + 1
                if isinstance(told.final, messages.Finished):
                    assert told.tokens == ANSWERS[which], "an answer that is not complete"
                    self.complete += 1
                if told.reserved is not None:
                    self.old_tokens = [*self.old_tokens[-50:], told.reserved.token]
        for worker in self.bench.workers.values():
            worker.other.clear()
            worker.aborted.clear()
            for key in [key for key, told in worker.told.items() if key[0] not in self.live]:
                del worker.told[key]

    def calm_down(self) -> None:
        """No more faults; leases and deadlines pass."""
        for worker in self.bench.workers.values():
            if worker.engine.role is Role.PREFILL:
                worker.end.frozen = worker.end.corrupt = False
        for _ in range(4):
            self.bench.settle()
            self.bench.advance(40.0)
        self.bench.settle()
        self.reap()
        assert not self.live, f"never ended: {self.live}"
        for worker in self.bench.workers.values():
            at_baseline(worker)
            assert worker.engine.failure is None
            assert worker.engine.wait_s() is None


@pytest.mark.parametrize(("seed", "actions"), [(1, 1500), pytest.param(2, 10_000, marks=pytest.mark.slow),
                                              pytest.param(3, 10_000, marks=pytest.mark.slow)])  # fmt: skip
def test_blocks_and_memory_come_back_whatever_happens(seed, actions):
    churn = Churn(seed)
    sizes = []
    tracemalloc.start()
    try:
        for i in range(1, actions + 1):
            churn.act()
            if i % 20 == 0:
                churn.reap()
            if i % (actions // 5) == 0:
                churn.calm_down()
                for worker in churn.bench.workers.values():
                    worker.engine.tree.clear()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    print(f"{churn.submitted} submitted, {churn.complete} complete, {churn.finals}, memory {sizes}")
    assert churn.ended == churn.submitted
    assert churn.complete > churn.submitted // 10
    for name in ("Refused", "Prefilled", "PushFailed", "Finished", "Aborted", "Error"):
        assert churn.finals.get(name, 0) > 5, name
    # Rebuilt engines have pools of other sizes, which is most of what varies.
    assert sizes[-1] < sizes[0] + 400_000
