"""The pacer, event by event."""

from __future__ import annotations

from vla_cloud.core.context_pacer import ContextPacer, Offer
from vla_cloud.core.request import RobotRequest

MS = 1_000_000
PERIOD_NS = 100 * MS


def make_pacer(max_robots: int = 4) -> ContextPacer[None]:
    return ContextPacer(PERIOD_NS, max_robots=max_robots, forget_after_ns=10 * PERIOD_NS)


def request(robot: str, sequence: int, at_ms: int, session: str = "s", deadline_ms: int = 100,
            stamp_ms: int | None = None) -> RobotRequest[None]:
    stamp_ns = (5_000 + at_ms if stamp_ms is None else stamp_ms) * MS  # of the robot's clock, another than the cloud's
    return RobotRequest(robot, session, sequence, stamp_ns, at_ms * MS, (at_ms + deadline_ms) * MS, None)


def served(pacer: ContextPacer[None], at_ms: int, limit: int = 8) -> list[tuple[str, int]]:
    return [(taken.robot, taken.sequence) for taken in pacer.take(at_ms * MS, limit)]


def test_newer_observation_replaces_the_waiting_one() -> None:
    pacer = make_pacer()
    assert pacer.offer(request("a", 0, 0)) is Offer.QUEUED
    assert pacer.offer(request("a", 1, 5)) is Offer.REPLACED_OLDER
    assert served(pacer, 6) == [("a", 1)]
    assert served(pacer, 6) == []
    assert (pacer.counts.replaced, pacer.counts.served) == (1, 1)


def test_older_and_repeated_observations_are_stale() -> None:
    pacer = make_pacer()
    pacer.offer(request("a", 5, 0))
    assert pacer.offer(request("a", 4, 1)) is Offer.STALE
    assert pacer.offer(request("a", 5, 1)) is Offer.STALE
    assert served(pacer, 2) == [("a", 5)]
    assert pacer.offer(request("a", 5, 3)) is Offer.STALE  # a duplicate, after it was served


def test_restarted_edge_counts_from_zero_and_its_stragglers_are_stale() -> None:
    pacer = make_pacer()
    pacer.offer(request("a", 500, 0, session="old"))
    assert pacer.offer(request("a", 0, 30, session="new")) is Offer.REPLACED_OLDER
    assert pacer.offer(request("a", 501, 40, session="old", stamp_ms=5_010)) is Offer.STALE
    assert served(pacer, 40) == [("a", 0)]


def test_straggler_of_a_session_that_was_never_seen_does_not_lock_the_robot_out() -> None:
    """The cloud restarted too, so the straggler is the first it hears of the old session."""
    pacer = make_pacer()
    pacer.offer(request("a", 0, 0, session="new"))
    assert pacer.offer(request("a", 501, 10, session="old", stamp_ms=4_000)) is Offer.STALE
    assert pacer.offer(request("a", 502, 1100, session="old", stamp_ms=4_100)) is Offer.REPLACED_OLDER
    assert pacer.offer(request("a", 1, 1101, session="new")) is Offer.REPLACED_OLDER


def test_rebooted_robot_with_a_younger_clock_is_accepted_once_the_old_session_is_silent() -> None:
    pacer = make_pacer()
    pacer.offer(request("a", 500, 0, session="old", stamp_ms=9_000_000))
    assert pacer.offer(request("a", 0, 900, session="new", stamp_ms=30_000)) is Offer.STALE
    assert pacer.offer(request("a", 1, 1001, session="new", stamp_ms=30_100)) is Offer.REPLACED_OLDER
    assert served(pacer, 1001) == [("a", 1)]


def test_late_request_is_dropped_not_served() -> None:
    pacer = make_pacer()
    pacer.offer(request("a", 0, 0, deadline_ms=50))
    assert served(pacer, 51) == []
    assert (pacer.counts.late, pacer.num_waiting) == (1, 0)


def test_rate_is_capped_but_jitter_is_not_delayed() -> None:
    pacer = make_pacer()
    pacer.offer(request("a", 0, 0))
    assert served(pacer, 0) == [("a", 0)]
    pacer.offer(request("a", 1, 80))  # 20 ms early
    assert served(pacer, 80) == [("a", 1)]
    pacer.offer(request("a", 2, 100))
    assert served(pacer, 100) == []
    assert pacer.next_due_ns() == 150 * MS
    assert served(pacer, 150) == [("a", 2)]


def test_longest_unserved_robot_goes_first() -> None:
    pacer = make_pacer()
    for robot in "abc":
        pacer.offer(request(robot, 0, 0))
    assert served(pacer, 0, limit=2) == [("a", 0), ("b", 0)]
    pacer.offer(request("a", 1, 60))
    pacer.offer(request("b", 1, 60))
    assert served(pacer, 60, limit=2) == [("c", 0), ("a", 1)]
    assert served(pacer, 61, limit=2) == [("b", 1)]


def test_robots_are_bounded_and_silent_ones_are_forgotten() -> None:
    pacer = make_pacer(max_robots=2)
    pacer.offer(request("a", 0, 0))
    pacer.offer(request("b", 0, 900))
    assert pacer.offer(request("c", 0, 950)) is Offer.TOO_MANY_ROBOTS
    assert pacer.offer(request("c", 1, 1100)) is Offer.QUEUED
    assert pacer.num_robots == 2
    assert (pacer.counts.refused, pacer.counts.forgotten) == (1, 1)
