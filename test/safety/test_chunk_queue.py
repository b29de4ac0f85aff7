"""The queue with a rule that only looks: which rows are handed to it, what is kept, and what refusals leave alone."""

import numpy as np
import pytest

from vla_edge.core.chunk import ActionChunk, Reject
from vla_edge.core.chunk_queue import ChunkQueue
from vla_edge.core.ensembler import CAPACITY

T = 0.5


class Watching:
    """Writes 1000 + tick where both trajectories speak; notes what it was given."""

    def __init__(self):
        self.calls, self.resets = [], 0

    def merge(self, tick, old, new, out):
        assert len(new) == len(out) and old.shape[1] == new.shape[1] == out.shape[1]
        self.calls.append((tick, old[:, 0].tolist(), new[:, 0].tolist()))
        out[:] = new
        out[:len(old)] = (1000 + tick + np.arange(len(old))[:, None]) * [1.0, -1.0]

    def reset(self):
        self.resets += 1


def queue(capacity=CAPACITY):
    rule = Watching()
    return ChunkQueue(2, rule, T, capacity), rule


def chunk(first, last, scale=1.0):
    """Row of tick k holds ``scale k``."""
    rows = np.arange(first, last + 1, dtype=float).reshape(-1, 1) * scale * np.array([1.0, -1.0])
    return ActionChunk("s", 1, first - 1, 0, T, ("a", "b"), rows)


def plan(made, first=None, last=None):
    """Tick → position of the first joint."""
    position, velocity = np.full(2, np.nan), np.full(2, np.nan)
    found = {}
    for tick in range(made.first_tick - 2 if first is None else first, (made.last_tick if last is None else last) + 3):
        if made.sample(tick, position, velocity):
            assert position[1] == -position[0] and velocity[1] == -velocity[0]
            found[tick] = float(position[0])
    return found


def speeds(made):
    position, velocity = np.zeros(2), np.zeros(2)
    found = {}
    for tick in range(made.first_tick, made.last_tick + 1):
        assert made.sample(tick, position, velocity)
        found[tick] = float(velocity[0])
    return found


def test_a_new_queue_is_empty():
    made, rule = queue()
    assert made.empty and (made.first_tick, made.last_tick) == (0, -1)
    assert not made.covers(0) and not made.covers(-1) and rule.calls == []


@pytest.mark.parametrize("next_tick, ticks", [(5, range(5, 9)), (6, range(6, 9)), (8, range(8, 9))])
def test_a_first_chunk_counts_from_the_next_tick_on(next_tick, ticks):
    made, rule = queue()
    assert made.insert(chunk(5, 8), next_tick) is None
    assert plan(made) == {tick: float(tick) for tick in ticks}
    assert rule.calls == [(next_tick, [], [float(tick) for tick in ticks])]
    assert made.first_tick == next_tick and made.last_tick == 8 and not made.empty
    assert made.covers(next_tick) and made.covers(8) and not made.covers(next_tick - 1) and not made.covers(9)


def test_a_chunk_that_is_all_past_or_leaves_a_gap_changes_nothing():
    made, rule = queue()
    for refused, reason in ((chunk(1, 4), Reject.ALL_PAST), (chunk(6, 9), Reject.GAP), (chunk(1, 0), Reject.ALL_PAST)):
        assert made.insert(refused, 5) is reason
        assert made.empty and rule.calls == []
    made.insert(chunk(5, 8), 5)
    for refused, reason in ((chunk(1, 5), Reject.ALL_PAST), (chunk(10, 12), Reject.GAP)):
        assert made.insert(refused, 6) is reason
        assert plan(made) == {5: 5.0, 6: 6.0, 7: 7.0, 8: 8.0} and len(rule.calls) == 1
    assert made.insert(chunk(9, 12), 6) is None  # joins exactly
    assert plan(made, 6) == {tick: float(tick) for tick in range(6, 13)}


def test_a_plan_that_ran_out_bridges_no_gap():
    """Ticks 5 .. 8 are planned, the next is 12: 9 would join the plan, but 12 is where the robot is."""
    made, rule = queue()
    made.insert(chunk(5, 8), 5)
    assert made.insert(chunk(13, 15), 12) is Reject.GAP
    assert made.insert(chunk(9, 15), 12) is None
    assert plan(made) == {12: 12.0, 13: 13.0, 14: 14.0, 15: 15.0}
    assert rule.calls[-1] == (12, [], [12.0, 13.0, 14.0, 15.0])


def test_the_rule_sees_the_overlap_only():
    made, rule = queue()
    made.insert(chunk(5, 10), 5)
    assert made.insert(chunk(7, 12, scale=2.0), 8) is None
    assert rule.calls[-1] == (8, [8.0, 9.0, 10.0], [16.0, 18.0, 20.0, 22.0, 24.0])
    # One row before the next tick is kept: 7, from the old plan.
    assert plan(made) == {7: 7.0, 8: 1008.0, 9: 1009.0, 10: 1010.0, 11: 22.0, 12: 24.0}
    assert made.insert(chunk(10, 11, scale=3.0), 9) is None  # starts ahead, ends before the plan does
    assert rule.calls[-1] == (10, [1010.0, 22.0], [30.0, 33.0])
    assert plan(made) == {8: 1008.0, 9: 1009.0, 10: 1010.0, 11: 1011.0}


def test_no_row_before_the_plan_is_kept():
    made, _ = queue()
    made.insert(chunk(5, 8), 5)
    made.insert(chunk(5, 9, scale=2.0), 5)
    assert plan(made) == {5: 1005.0, 6: 1006.0, 7: 1007.0, 8: 1008.0, 9: 18.0}


def test_speed_is_forwards_and_at_the_end_backwards():
    made, _ = queue()
    made.insert(chunk(5, 8), 5)
    assert speeds(made) == {5: 2.0, 6: 2.0, 7: 2.0, 8: 2.0}  # 1 per 0.5 s
    made.insert(chunk(8, 8), 8)
    assert plan(made) == {7: 7.0, 8: 1008.0} and speeds(made) == {7: 2002.0, 8: 2002.0}
    single, _ = queue()
    single.insert(chunk(5, 5), 5)
    assert speeds(single) == {5: 0.0}


def test_nothing_is_written_outside_the_plan():
    made, _ = queue()
    made.insert(chunk(5, 8), 5)
    for tick in (4, 9):
        position, velocity = np.full(2, 7.0), np.full(2, 7.0)
        assert made.sample(tick, position, velocity) is False
        assert position.tolist() == velocity.tolist() == [7.0, 7.0]
    assert made.sample(5, position, velocity) is True


@pytest.mark.parametrize("still_since, shifted", [(None, False), (3, False), (2, True), (1, True)])
def test_a_first_chunk_from_an_unchanged_command_starts_with_its_first_step(still_since, shifted):
    """It was made from tick 2 and comes at 6."""
    made, rule = queue()
    assert made.insert(chunk(3, 7), 6, still_since) is None
    ticks = range(6, 11) if shifted else (6, 7)
    values = [3.0, 4.0, 5.0, 6.0, 7.0] if shifted else [6.0, 7.0]
    assert plan(made) == dict(zip(ticks, values, strict=True))
    assert rule.calls == [(6, [], values)]


def test_an_unchanged_command_saves_even_a_chunk_that_would_be_past_but_moves_none_to_an_earlier_tick():
    made, _ = queue()
    assert made.insert(chunk(3, 4), 6, 1) is None
    assert plan(made) == {6: 3.0, 7: 4.0}
    made, _ = queue()
    assert made.insert(chunk(7, 8), 6, 1) is Reject.GAP


def test_a_later_chunk_is_never_shifted():
    made, rule = queue()
    made.insert(chunk(3, 9), 3)
    assert made.insert(chunk(5, 8, scale=2.0), 7, 1) is None
    assert rule.calls[-1] == (7, [7.0, 8.0], [14.0, 16.0])


def test_a_chunk_that_reaches_beyond_the_memory_is_refused():
    """Six rows hold five ticks and the one before."""
    made, _ = queue(6)
    assert made.insert(chunk(5, 10), 5) is Reject.GAP
    assert made.insert(chunk(5, 9), 5) is None
    assert made.insert(chunk(6, 10), 6) is None
    assert plan(made) == {5: 5.0, 6: 1006.0, 7: 1007.0, 8: 1008.0, 9: 1009.0, 10: 10.0}
    assert made.insert(chunk(7, 12), 7) is Reject.GAP


def test_the_two_buffers_alternate():
    """Written many times over, no row of an earlier plan shows."""
    made, _ = queue(8)
    for tick in range(5, 60):
        assert made.insert(chunk(tick, tick + 3, scale=float(tick)), tick) is None
        found = plan(made, tick)
        assert found[tick + 3] == tick * (tick + 3.0) and found.get(tick) == (1000.0 + tick if tick > 5 else 25.0)


def test_ticks_may_be_negative():
    """An empty queue is marked by last_tick = -1, which must not be taken for a plan that reaches there."""
    for first, last in ((-5, 2), (-9, -5), (0, 3), (-1, 1)):
        made, rule = queue()
        assert made.insert(chunk(first, last), first) is None
        assert rule.calls == [(first, [], [float(tick) for tick in range(first, last + 1)])]
        assert plan(made) == {tick: float(tick) for tick in range(first, last + 1)}


def test_clearing_forgets_the_plan_and_resets_the_rule():
    made, rule = queue()
    made.insert(chunk(5, 8), 5)
    made.clear()
    assert made.empty and (made.first_tick, made.last_tick) == (0, -1) and rule.resets == 1
    assert not made.covers(5) and plan(made, 0, 10) == {}
    made.insert(chunk(6, 8), 6)
    assert rule.calls[-1] == (6, [], [6.0, 7.0, 8.0])


@pytest.mark.parametrize("tick, room, values", [
    (5, 10, [5.0, 6.0, 7.0, 8.0]), (6, 10, [6.0, 7.0, 8.0]), (8, 10, [8.0]), (5, 2, [5.0, 6.0]), (5, 4, [5.0, 6.0, 7.0, 8.0]),
    (4, 10, []), (9, 10, [])])
def test_what_is_ahead(tick, room, values):
    made, _ = queue()
    made.insert(chunk(5, 8), 5)
    out = np.full((room, 2), np.nan)
    assert made.ahead(tick, out) == len(values)
    assert out[:len(values), 0].tolist() == values and np.isnan(out[len(values):]).all()
    made.insert(chunk(6, 8, scale=2.0), 6)  # the other buffer
    assert made.ahead(6, out) == min(3, room) and out[0, 0] == 1006.0


def test_an_empty_queue_has_nothing_ahead():
    made, _ = queue()
    assert made.ahead(0, np.zeros((3, 2))) == 0
