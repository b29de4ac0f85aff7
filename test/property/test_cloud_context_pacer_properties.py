"""The pacer under seeded random arrivals: reordered, repeated, late, from robots that restart."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from vla_cloud.core.context_pacer import ContextPacer, Offer
from vla_cloud.core.request import RobotRequest

MS = 1_000_000
PERIOD_NS = 100 * MS


class Driver:
    """Offers random requests and checks each answer against what was offered."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pacer: ContextPacer[None] = ContextPacer(PERIOD_NS, max_robots=5, forget_after_ns=20 * PERIOD_NS)
        self.now_ns = 0
        self.clock_offset_ns = {robot: self.rng.randrange(10**15) for robot in "abcdefg"}
        self.session = dict.fromkeys("abcdefg", 0)
        self.sent: dict[str, list[RobotRequest[None]]] = defaultdict(list)
        self.accepted: dict[str, RobotRequest[None]] = {}
        self.served: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (stamp, time of service)

    def offer(self) -> None:
        robot = self.rng.choice("abcdefg")
        sent = self.sent[robot]
        if sent and self.rng.random() < 0.15:  # again, or late: the link duplicates and reorders
            request = replace(self.rng.choice(sent[-20:]), received_ns=self.now_ns)
        else:
            request = self.fresh(robot)
            sent.append(request)
            if self.rng.random() < 0.1:
                return  # lost or still on its way
        if self.pacer.offer(request) in (Offer.QUEUED, Offer.REPLACED_OLDER):
            self.accepted[robot] = request

    def fresh(self, robot: str) -> RobotRequest[None]:
        if self.rng.random() < 0.02:
            self.session[robot] += 1  # the edge restarts and counts from zero
        session = str(self.session[robot])
        sequence = sum(request.session == session for request in self.sent[robot])
        deadline_ns = self.now_ns + self.rng.choice((0, 20, 100, 100, 300)) * MS
        stamp_ns = self.clock_offset_ns[robot] + self.now_ns
        return RobotRequest(robot, session, sequence, stamp_ns, self.now_ns, deadline_ns, None)

    def take(self) -> None:
        limit = self.rng.choice((0, 1, 2, 8))
        taken = self.pacer.take(self.now_ns, limit)
        assert len(taken) <= limit
        assert len({request.robot for request in taken}) == len(taken)
        for request in taken:
            assert request is self.accepted[request.robot], "older than the newest"
            assert self.now_ns <= request.deadline_ns
            self.served[request.robot].append((request.stamp_ns, self.now_ns))


@pytest.mark.parametrize("seed", range(60))
def test_serves_only_the_newest_in_time_and_within_the_rate(seed: int) -> None:
    driver = Driver(seed)
    for _ in range(2000):
        driver.now_ns += driver.rng.choice((1, 1, 3, 10)) * MS
        driver.offer() if driver.rng.random() < 0.6 else driver.take()
    counts = driver.pacer.counts
    accounted = counts.served + counts.replaced + counts.late + counts.stale + counts.refused + counts.forgotten
    assert counts.offered == accounted + driver.pacer.num_waiting
    assert counts.served > 50
    for served in driver.served.values():
        stamps = [stamp for stamp, _ in served]
        assert stamps == sorted(set(stamps)), "an older observation followed a newer one"
        times = [at for _, at in served]
        for window in range(1, len(times)):
            for start in range(0, len(times) - window, 7):
                # Half a period of tolerance, once, whatever the length of the window.
                assert times[start + window] - times[start] >= window * PERIOD_NS - PERIOD_NS // 2


@pytest.mark.parametrize("seed", range(10))
def test_nobody_starves_when_capacity_is_short(seed: int) -> None:
    """Five robots at 10 Hz, capacity for three a period: the service is shared evenly."""
    rng = random.Random(seed)
    pacer: ContextPacer[None] = ContextPacer(PERIOD_NS, max_robots=5, forget_after_ns=20 * PERIOD_NS)
    served: dict[str, int] = defaultdict(int)
    for tick in range(200):
        now_ns = tick * PERIOD_NS
        for robot in rng.sample("abcde", 5):
            pacer.offer(RobotRequest(robot, "s", tick, 0, now_ns, now_ns + PERIOD_NS, None))
        for request in pacer.take(now_ns + 1, 3):
            served[request.robot] += 1
    assert sum(served.values()) == 600
    assert max(served.values()) - min(served.values()) <= 1
