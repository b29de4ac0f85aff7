"""Which lane gets whose observation, and which answers count: on a clock that the test moves."""

from __future__ import annotations

from vla_cloud.core.context_dispatch import ContextDispatch, DispatchConfig, Flight
from vla_cloud.core.context_pacer import ContextPacer, Offer
from vla_cloud.core.request import RobotRequest

MS = 1_000_000
CONFIG = DispatchConfig(hedge_ns=60 * MS, hedge_max_ns=100 * MS, answer_within_ns=200 * MS, max_batch=2)


class Bench:
    def __init__(self, *lanes: str) -> None:
        self.pacer: ContextPacer[None] = ContextPacer(100 * MS, max_robots=8, forget_after_ns=10**10)
        self.dispatch: ContextDispatch[None] = ContextDispatch(self.pacer, CONFIG)
        for lane in lanes:
            self.dispatch.lane_ready(lane)
        self.sequence = 0

    def offer(self, robot: str, now_ms: int) -> RobotRequest[None]:
        self.sequence += 1
        now_ns = now_ms * MS
        request = RobotRequest(robot, "s", self.sequence, now_ns, now_ns, now_ns + 100 * MS, None)
        assert self.pacer.offer(request) in (Offer.QUEUED, Offer.REPLACED_OLDER)
        return request

    def take(self, now_ms: int) -> list[Flight[None]]:
        return self.dispatch.take(now_ms * MS)

    def land(self, flight: Flight[None], now_ms: int) -> list[bool]:
        landed = self.dispatch.landed(flight.lane, flight.number, now_ms * MS)
        assert landed is flight
        return [self.dispatch.accept(flight, i, now_ms * MS) for i in range(len(flight.turns))]


def test_what_is_due_goes_in_one_batch_to_one_lane() -> None:
    bench = Bench("a")
    requests = [bench.offer(robot, 0) for robot in "xyz"]
    (flight,) = bench.take(1)
    assert flight.requests == requests[:2], "max_batch"
    assert bench.take(2) == [], "one batch a lane"
    assert bench.land(flight, 20) == [True, True]
    (flight,) = bench.take(20)
    assert flight.requests == requests[2:]


def test_what_is_due_is_shared_among_idle_lanes() -> None:
    bench = Bench("a", "b")
    for robot in "xyz":
        bench.offer(robot, 0)
    assert [(flight.lane, len(flight.turns)) for flight in bench.take(1)] == [("a", 2), ("b", 1)]


def test_a_robot_waits_for_its_answer_and_then_the_newest_goes() -> None:
    bench = Bench("a", "b")
    bench.offer("x", 0)
    (flight,) = bench.take(0)
    bench.offer("x", 50)
    newest = bench.offer("x", 55)
    assert bench.take(55) == []
    assert bench.land(flight, 58) == [True]
    assert bench.take(58)[0].requests == [newest]


def test_an_overdue_observation_goes_to_another_lane_and_is_answered_once() -> None:
    bench = Bench("a", "b")
    request = bench.offer("x", 0)
    (first,) = bench.take(0)
    assert bench.dispatch.next_wake_ns() == 60 * MS
    assert bench.take(59) == []
    (second,) = bench.take(60)
    assert (second.lane, second.requests) == ("b", [request])
    assert bench.land(second, 70) == [True]
    assert bench.land(first, 71) == [False]
    assert bench.dispatch.counts.old_answers == 1
    bench.offer("x", 100)
    assert bench.take(100)[0].lane == "a", "it has answered: it gets work again"


def test_a_hedge_takes_the_newest_and_an_older_answer_in_time_still_counts() -> None:
    bench = Bench("a", "b")
    bench.offer("x", 0)
    (first,) = bench.take(0)
    newest = bench.offer("x", 58)
    (second,) = bench.take(61)
    assert second.requests == [newest]
    assert bench.land(first, 62) == [True]
    assert bench.land(second, 70) == [True]


def test_the_older_answer_does_not_follow_the_newer() -> None:
    bench = Bench("a", "b")
    bench.offer("x", 0)
    (first,) = bench.take(0)
    bench.offer("x", 58)
    (second,) = bench.take(61)
    assert bench.land(second, 70) == [True]
    assert bench.land(first, 71) == [False]


def test_an_overdue_lane_gets_nothing_until_it_answers() -> None:
    bench = Bench("a", "b")
    bench.offer("x", 0)
    (first,) = bench.take(0)
    (second,) = bench.take(60)
    bench.land(second, 70)
    for now_ms in (100, 200, 300):
        bench.offer("x", now_ms)
        (flight,) = bench.take(now_ms)
        assert flight.lane == "b"
        bench.land(flight, now_ms + 10)
    assert bench.land(first, 320) == [False]


def test_without_another_lane_nothing_is_hedged_and_no_stale_answer_counts() -> None:
    bench = Bench("a")
    bench.offer("x", 0)
    (first,) = bench.take(0)
    bench.offer("x", 100)
    assert bench.take(150) == []
    assert bench.land(first, 201) == [False]
    assert bench.dispatch.counts.late_answers == 1
    bench.offer("x", 200)
    assert bench.land(bench.take(201)[0], 215) == [True]


def test_a_busy_machine_is_not_hedged_at_once() -> None:
    bench = Bench("a", "b")
    for i in range(40):
        bench.offer("x", 100 * i)
        (flight,) = bench.take(100 * i)
        bench.land(flight, 100 * i + 45)
    bench.offer("x", 4000)
    bench.take(4000)
    assert bench.take(4080) == [], "45 ms are usual: 60 ms say nothing"
    assert len(bench.take(4091)) == 1


def test_a_lost_lane_costs_no_wait() -> None:
    bench = Bench("a", "b")
    request = bench.offer("x", 0)
    bench.take(0)
    bench.dispatch.lane_lost("a")
    (second,) = bench.take(5)
    assert (second.lane, second.requests) == ("b", [request])


def test_a_single_lost_lane_goes_on_when_it_is_back() -> None:
    bench = Bench("a.1")
    bench.offer("x", 0)
    (first,) = bench.take(0)
    bench.dispatch.lane_lost("a.1")
    assert bench.take(5) == []
    assert bench.dispatch.landed("a.1", first.number, 6 * MS) is None
    newest = bench.offer("x", 900)
    bench.dispatch.lane_ready("a.2")
    (flight,) = bench.take(901)
    assert (flight.lane, flight.requests) == ("a.2", [newest])


def test_an_observation_that_kills_its_lanes_is_sent_twice_only() -> None:
    bench = Bench("a", "b", "c")
    bench.offer("x", 0)
    for now_ms, lane in ((0, "a"), (1, "b")):
        (flight,) = bench.take(now_ms)
        assert flight.lane == lane
        bench.dispatch.lane_lost(lane)
    assert bench.take(2) == []
    assert bench.dispatch.counts.given_up == 1
    newest = bench.offer("x", 100)
    assert bench.take(100)[0].requests == [newest]


def test_a_late_answer_spares_the_second_computation() -> None:
    bench = Bench("a", "b")
    bench.offer("x", 0)
    (first,) = bench.take(0)
    bench.offer("y", 59)
    bench.take(59)  # b is busy when a is overdue
    assert bench.take(61) == []
    assert bench.land(first, 62) == [True]
    assert bench.take(63) == []


def test_a_refused_request_is_not_sent_again() -> None:
    bench = Bench("a", "b")
    bench.offer("x", 0)
    (first,) = bench.take(0)
    (second,) = bench.take(60)
    assert bench.dispatch.landed("a", first.number, 61 * MS) is first
    bench.dispatch.refused(first, 0)
    assert bench.land(second, 70) == [False]


def test_an_answer_nobody_asked_for_is_dropped() -> None:
    bench = Bench("a", "b")
    bench.offer("x", 0)
    (flight,) = bench.take(0)
    assert bench.dispatch.landed("b", flight.number, 0) is None
    assert bench.dispatch.landed("a", flight.number + 1, 0) is None
    assert bench.dispatch.landed("z", flight.number, 0) is None
    bench.land(flight, 5)
    assert bench.dispatch.landed("a", flight.number, 0) is None


def test_robots_that_are_gone_are_forgotten() -> None:
    bench = Bench("a")
    for i in range(50):
        bench.offer(f"robot{i}", 20_000 * i)
        bench.land(bench.take(20_000 * i)[0], 20_000 * i + 1)
    bench.dispatch.forget()
    assert len(bench.dispatch._turns) == len(bench.dispatch._answered) <= 8
