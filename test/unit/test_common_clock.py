import threading

import pytest

from vla_common.clock import Clock, ManualClock, SteppedClock, SystemClock, sleep_s


def test_all_are_clocks():
    assert all(isinstance(clock, Clock) for clock in (SystemClock(), ManualClock(), SteppedClock()))


def test_system_clock_never_wakes_early():
    clock = SystemClock()
    for _ in range(5):
        deadline_ns = clock.monotonic_ns() + 2_000_000
        clock.sleep_until_ns(deadline_ns)
        assert clock.monotonic_ns() >= deadline_ns
    before_ns = clock.monotonic_ns()
    clock.sleep_until_ns(before_ns - 10**12)
    assert clock.monotonic_ns() - before_ns < 60 * 10**9  # not 1,000 s
    assert clock.wall_ns() > 1_600_000_000 * 10**9


def test_manual_clock_wakes_waiters_at_their_deadline():
    clock = ManualClock(start_ns=100)
    woke = threading.Event()

    def wait() -> None:
        clock.sleep_until_ns(200)
        woke.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    clock.advance_ns(99)
    assert not woke.wait(0.05)
    clock.advance_ns(1)
    assert woke.wait(60)
    thread.join()
    assert clock.wall_ns() == 1_700_000_000 * 10**9 + 200
    with pytest.raises(ValueError, match="go back"):
        clock.advance_ns(-1)


def test_stepped_clock_runs_a_loop_at_once():
    clock = SteppedClock()
    sleep_s(clock, 3600)
    clock.sleep_until_ns(5)
    assert clock.monotonic_ns() == 3600 * 10**9
