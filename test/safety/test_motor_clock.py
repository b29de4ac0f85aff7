"""Deadlines: the edges of the grid."""

import pytest

from vla_edge.core.motor_clock import MotorClock


def test_the_shortest_period_is_a_nanosecond():
    clock = MotorClock(1, 5)
    assert (clock.period_ns, clock.start_ns, clock.missed) == (1, 5, 0)
    assert clock.deadline_ns(3) == 8 and clock.tick_at(8) == 3


@pytest.mark.parametrize("period_ns", [0, -1])
def test_a_period_that_is_not_positive_is_refused(period_ns):
    with pytest.raises(ValueError) as error:
        MotorClock(period_ns, 0)
    assert str(error.value) == f"period must be positive, got {period_ns} ns"


def test_work_that_ends_before_its_own_deadline_waits_for_the_next_tick():
    """A clock that stepped back, or a tick served early: never the same tick twice, never one before."""
    clock = MotorClock(10, 100)
    assert clock.after(7, 0) == 8 and clock.missed == 0


def test_misses_add_up_over_wakes_and_work():
    clock = MotorClock(10, 0)
    assert clock.on_wake(1, 35) == 3  # ticks 1 and 2 were missed
    assert clock.after(3, 62) == 7  # 4, 5 and 6 passed during the work
    assert clock.on_wake(7, 70) == 7
    assert clock.missed == 5


def test_a_deadline_belongs_to_its_own_tick():
    clock = MotorClock(10, 3)
    for tick in range(-2, 5):
        due = clock.deadline_ns(tick)
        assert clock.tick_at(due) == tick and clock.tick_at(due - 1) == tick - 1 and clock.tick_at(due + 9) == tick
