"""Statistics, ordering and outages of the faulty link, and the typed fault files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vla_common.config import ConfigError, load_config
from vla_sim.faults import DirectionFaults, EpisodeOutage, FaultPlan, LinkFaults, ProcessFault, TimedOutage
from vla_sim.link import DirectionSchedule, Link, OutagePlan, flip_bits

MS = 1_000_000
S = 1_000 * MS
FAULT_FILES = sorted((Path(__file__).parents[2] / "config" / "faults").glob("*.yaml"))


def delays_ms(faults: DirectionFaults, count: int = 4000, seed: int = 1) -> list[list[float]]:
    schedule = DirectionSchedule(faults, seed)
    return [[(d.at_ns - i * 100 * MS) / MS for d in schedule.admit(i * 100 * MS, 1000, False)] for i in range(count)]


def test_delay_jitter_and_loss_have_the_asked_statistics() -> None:
    fates = delays_ms(DirectionFaults(delay_s=0.1, jitter_s=0.05, loss=0.05))
    kept = np.array([fate[0] for fate in fates if fate])
    assert len(kept) / len(fates) == pytest.approx(0.95, abs=0.02)
    assert kept.min() >= 50 and kept.max() <= 150
    assert kept.mean() == pytest.approx(100, abs=2) and kept.std() == pytest.approx(100 / 12**0.5, abs=2)


def test_duplicates_reordering_and_corruption_are_counted() -> None:
    faults = DirectionFaults(delay_s=0.01, duplicate=0.2, reorder=0.3, reorder_hold_s=0.25, corrupt=0.1)
    schedule = DirectionSchedule(faults, 5)
    deliveries = [schedule.admit(i * 100 * MS, 1000, False) for i in range(4000)]
    counters = schedule.counters
    assert counters.duplicated == sum(len(d) == 2 for d in deliveries) == pytest.approx(800, abs=120)
    assert counters.reordered == sum(d[0].at_ns - i * 100 * MS > 200 * MS for i, d in enumerate(deliveries))
    assert counters.reordered == pytest.approx(1200, abs=150)
    broken = [d[0].flipped_bits for d in deliveries if d[0].flipped_bits]
    assert counters.corrupted == len(broken) == pytest.approx(400, abs=80)
    assert all(0 <= bit < 8000 for bits in broken for bit in bits)


def test_keep_order_never_lets_a_message_overtake() -> None:
    faults = DirectionFaults(delay_s=0.2, jitter_s=0.2, keep_order=True)
    schedule = DirectionSchedule(faults, 2)
    times = [schedule.admit(i * 20 * MS, 10, False)[0].at_ns for i in range(500)]
    assert times == sorted(times)
    free = DirectionSchedule(DirectionFaults(delay_s=0.2, jitter_s=0.2), 2)
    times = [free.admit(i * 20 * MS, 10, False)[0].at_ns for i in range(500)]
    assert times != sorted(times)


def test_same_seed_same_fate_and_a_loss_does_not_shift_later_draws() -> None:
    lossy = DirectionFaults(delay_s=0.1, jitter_s=0.05, loss=0.5)
    assert delays_ms(lossy, 100) == delays_ms(lossy, 100)
    assert delays_ms(lossy, 100) != delays_ms(lossy, 100, seed=2)
    sure = delays_ms(DirectionFaults(delay_s=0.1, jitter_s=0.05), 100)
    assert all(not fate or fate == other for fate, other in zip(delays_ms(lossy, 100), sure, strict=True))


def test_every_episode_has_its_outage_and_timed_ones_count_from_the_first() -> None:
    faults = LinkFaults(episode_outage=EpisodeOutage(2.0, 0.2, 0.8), outages=(TimedOutage(20.0, 6.0),))
    plan = OutagePlan(faults, 9)
    first = plan.begin_episode(0, 10 * S)
    assert first[0] == (30 * S, 36 * S)
    start, end = first[1]
    assert 10.2 * S <= start <= 10.8 * S and end - start == 2 * S
    assert plan.begin_episode(0, 11 * S) == []
    (second,) = plan.begin_episode(1, 50 * S)
    assert 50.2 * S <= second[0] <= 50.8 * S
    assert plan.is_cut(start) and plan.is_cut(end - 1) and not plan.is_cut(end) and plan.is_cut(33 * S)
    assert OutagePlan(faults, 9).begin_episode(0, 10 * S) == first


def test_link_delivers_in_time_order_and_keeps_tags() -> None:
    link = Link(LinkFaults(up=DirectionFaults(delay_s=0.1), down=DirectionFaults(delay_s=0.02)), seed=0)
    link.enter(0, "up", b"first", "a")
    link.enter(10 * MS, "down", b"second", "b")
    assert link.next_due_ns() == 30 * MS
    assert link.leave(29 * MS) == []
    assert link.leave(100 * MS) == [("down", b"second", "b"), ("up", b"first", "a")]
    assert link.next_due_ns() is None
    assert link.counters["up"].delivered == link.counters["down"].delivered == 1


def test_an_outage_swallows_what_is_under_way_and_what_enters() -> None:
    link = Link(LinkFaults(up=DirectionFaults(delay_s=0.1), outages=(TimedOutage(0.05, 1.0),)), seed=0)
    link.enter(0, "up", b"under way")
    link.outages.begin_episode(0, 0)
    link.enter(500 * MS, "up", b"inside")
    link.enter(1100 * MS, "up", b"after")
    assert [payload for _, payload, _ in link.leave(2 * S)] == [b"after"]
    assert link.counters["up"].cut == 2


def test_capacity_is_bounded() -> None:
    link = Link(LinkFaults(up=DirectionFaults(delay_s=1.0)), seed=0, capacity=10)
    for i in range(30):
        link.enter(i, "up", b"x")
    assert link.counters["up"].overflowed == 20 and len(link.leave(2 * S)) == 10


def test_flip_bits() -> None:
    assert flip_bits(b"\x00\x00", (0, 15)) == b"\x01\x80"
    assert flip_bits(flip_bits(b"hello", (3, 17)), (3, 17)) == b"hello"
    assert flip_bits(b"", (1,)) == b"" and flip_bits(b"x", ()) == b"x"


@pytest.mark.parametrize("path", FAULT_FILES, ids=lambda path: path.stem)
def test_shipped_fault_files_load(path: Path) -> None:
    plan = load_config(FaultPlan, path)
    assert plan.title and (plan.link is not None or plan.processes)


def test_shipped_fault_files_are_all_there() -> None:
    names = {path.stem for path in FAULT_FILES}
    assert names >= {"clean", "wifi", "lossy", "outage", "cloud_killed", "reorder_dup", "garbage"}


@pytest.mark.parametrize(("text", "message"), [
    ("title: x\nlink: {up: {los: 0.1}}", "loss"),
    ("title: x\nlink: {up: {loss: 1.5}}", "probability"),
    ("title: x\nlink: {up: {delay_s: 0.1, jitter_s: 0.2}}", "jitter_s"),
    ("title: x\nprocesses: [{process: clod, episode: 0, after_s: 1}]", "cloud"),
    ("title: x\nprocesses: [{process: io, episode: 0, after_s: 1, restart_after_s: 1}]", "restart_after_s"),
    ("title: x\nprocesses: [{process: io, episode: 0, after_s: 1, action: stop}]", "resume_after_s"),
    ("link: {}", "title"),
])
def test_bad_fault_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(FaultPlan, path)


def test_resume_only_for_stop() -> None:
    with pytest.raises(ValueError, match="resume_after_s"):
        ProcessFault("cloud", 0, 1.0, "kill", resume_after_s=1.0)
    with pytest.raises(ValueError, match="duration_s"):
        EpisodeOutage(0.0)
    with pytest.raises(ValueError, match="corrupt_bits"):
        DirectionFaults(corrupt_bits=0)
