"""The dispatch under seeded random arrivals, answers, silences, deaths and returns of lanes."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from vla_cloud.core.context_dispatch import MAX_SENDS, ContextDispatch, DispatchConfig, Flight
from vla_cloud.core.context_pacer import ContextPacer, Offer
from vla_cloud.core.request import RobotRequest

MS = 1_000_000
PERIOD_NS = 100 * MS
CONFIG = DispatchConfig(60 * MS, PERIOD_NS, 200 * MS, max_batch=3)
ROBOTS = "uvwxyz"


class Driver:
    """Plays robots, lanes and their answers, and checks every decision."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pacer: ContextPacer[None] = ContextPacer(PERIOD_NS, max_robots=8, forget_after_ns=10**12)
        self.dispatch: ContextDispatch[None] = ContextDispatch(self.pacer, CONFIG)
        self.now_ns = 0
        self.sequence = dict.fromkeys(ROBOTS, 0)
        self.newest: dict[str, RobotRequest[None]] = {}
        self.up: dict[str, Flight[None] | None] = {}
        self.answer_ns: dict[str, int | None] = {}  # when a lane answers; None: frozen
        self.started = 0
        self.sends: dict[int, int] = defaultdict(int)  # by id of the request, kept alive in newest_ever
        self.kept: list[RobotRequest[None]] = []
        self.sent = dict.fromkeys(ROBOTS, 0)
        self.given_up = dict.fromkeys(ROBOTS, 0)
        self.open: list[Flight[None]] = []
        self.published: dict[str, list[RobotRequest[None]]] = defaultdict(list)

    def offer(self) -> None:
        robot = self.rng.choice(ROBOTS)
        self.sequence[robot] += 1
        request = RobotRequest(
            robot, "s", self.sequence[robot], self.now_ns, self.now_ns, self.now_ns + PERIOD_NS, None
        )  # fmt: skip
        self.kept.append(request)
        assert self.pacer.offer(request) in (Offer.QUEUED, Offer.REPLACED_OLDER)
        self.newest[robot] = request

    def lanes(self) -> None:
        if self.rng.random() < 0.5 and len(self.up) < 3:
            self.started += 1
            self.up[f"l{self.started}"] = None
            self.dispatch.lane_ready(f"l{self.started}")
        elif self.up:
            lane = self.rng.choice(list(self.up))
            del self.up[lane]
            self.dispatch.lane_lost(lane)

    def take(self) -> None:
        for flight in self.dispatch.take(self.now_ns):
            assert flight.lane in self.up and self.up[flight.lane] is None, "a lane computes one batch at a time"
            assert 1 <= len(flight.requests) <= CONFIG.max_batch
            self.up[flight.lane] = flight
            frozen = self.rng.random() < 0.1
            self.answer_ns[flight.lane] = None if frozen else self.now_ns + self.rng.choice((5, 20, 30, 70, 250)) * MS
            for request in flight.requests:
                assert request is self.newest[request.robot], "older than the newest"
                assert self.now_ns <= request.deadline_ns
                self.sends[id(request)] += 1
                assert self.sends[id(request)] <= MAX_SENDS
                self.sent[request.robot] += 1
            self.open.append(flight)
        live = [request.robot for flight in self.up.values() if flight and flight.is_live for request in flight.requests]
        assert len(live) == len(set(live)), "a robot is in one live flight at most"

    def see_given_up(self) -> None:
        for flight in [flight for flight in self.open if not flight.is_live]:
            self.open.remove(flight)
            for request in flight.requests:
                self.given_up[request.robot] += 1

    def answers(self) -> None:
        for lane, flight in list(self.up.items()):
            due_ns = self.answer_ns.get(lane)
            if flight is None or due_ns is None and self.rng.random() > 0.001 or due_ns and due_ns > self.now_ns:
                continue
            self.see_given_up()
            self.open = [other for other in self.open if other is not flight]
            assert self.dispatch.landed(lane, flight.number, self.now_ns) is flight
            self.up[lane] = None
            for i, request in enumerate(flight.requests):
                if self.rng.random() < 0.05:
                    self.dispatch.refused(flight, i)
                elif self.dispatch.accept(flight, i, self.now_ns):
                    assert self.now_ns <= request.received_ns + CONFIG.answer_within_ns, "stale"
                    self.published[request.robot].append(request)


@pytest.mark.parametrize("seed", range(60))
def test_newest_in_order_once_in_time(seed: int) -> None:
    driver = Driver(seed)
    for _ in range(4000):
        driver.now_ns += driver.rng.choice((1, 1, 3, 10)) * MS
        choice = driver.rng.random()
        if choice < 0.5:
            driver.offer()
        elif choice < 0.51:
            driver.lanes()
        driver.answers()
        driver.take()
        driver.see_given_up()
    assert sum(map(len, driver.published.values())) > 20
    for robot in ROBOTS:  # one batch a period, half a period of tolerance; what was given up may be repeated
        assert driver.sent[robot] - driver.given_up[robot] <= driver.now_ns / PERIOD_NS + 1.5
    for robot, requests in driver.published.items():
        sequences = [request.sequence for request in requests]
        assert sequences == sorted(set(sequences)), f"{robot}: published twice or out of order"
    counts = driver.pacer.counts
    settled = counts.served + counts.replaced + counts.late + counts.stale + counts.refused + counts.forgotten
    assert counts.offered == settled + driver.pacer.num_waiting


@pytest.mark.parametrize("seed", range(20))
def test_with_one_steady_lane_every_robot_goes_on_whatever_the_others_do(seed: int) -> None:
    """Robots at 10 Hz, one lane that answers in 15 ms, two that freeze and die: hardly a period is missed."""
    rng = random.Random(seed)
    pacer: ContextPacer[None] = ContextPacer(PERIOD_NS, max_robots=8, forget_after_ns=10**12)
    dispatch: ContextDispatch[None] = ContextDispatch(pacer, CONFIG)
    dispatch.lane_ready("steady")
    answers: list[tuple[int, Flight[None]]] = []
    last_ms: dict[str, int] = {}
    worst_ms = 0
    bad = 0
    for now_ms in range(20_000):
        now_ns = now_ms * MS
        if now_ms % 1000 == 0:
            if bad:
                dispatch.lane_lost(f"bad{bad}")
                answers = [(at, flight) for at, flight in answers if flight.lane == "steady"]
            bad += 1
            dispatch.lane_ready(f"bad{bad}")
        for i, robot in enumerate("xy"):
            if now_ms % 100 == 7 * i:
                pacer.offer(RobotRequest(robot, "s", now_ms, now_ns, now_ns, now_ns + PERIOD_NS, None))
        for flight in dispatch.take(now_ns):
            if flight.lane == "steady" or rng.random() < 0.7:
                answers.append((now_ms + 15, flight))
        for at_ms, flight in [entry for entry in answers if entry[0] <= now_ms]:
            answers.remove((at_ms, flight))
            if dispatch.landed(flight.lane, flight.number, now_ns):
                for i, request in enumerate(flight.requests):
                    if dispatch.accept(flight, i, now_ns):
                        worst_ms = max(worst_ms, now_ms - last_ms.get(request.robot, now_ms))
                        last_ms[request.robot] = now_ms
    assert dispatch.counts.hedged_flights + dispatch.counts.lost_flights > 5
    assert worst_ms <= 200, "a lane that fails costs a robot one period at most"
    assert min(last_ms.values()) > 19_800
