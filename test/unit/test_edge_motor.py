"""Motor clock and motor loop: one command per tick, at absolute deadlines, whatever arrives."""

from pathlib import Path

import numpy as np
import pytest

from vla_common.clock import SteppedClock
from vla_edge.config import EdgeConfig, load_limits, make_queue
from vla_edge.core.chunk import REJECTS, ActionChunk, ChunkGate, Reject
from vla_edge.core.motor_clock import MotorClock
from vla_edge.core.motor_loop import MotorLoop
from vla_edge.core.records import EdgeMemory, fill_chunk
from vla_edge.core.shield import EstopInput, Rearm, Reason, Shield, ShieldConfig, State
from vla_edge.motor_main import run_clock

T, T_NS = 0.01, 10_000_000
LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)


# ------------------------------------------------------------------ clock


def test_deadlines_do_not_drift():
    clock = MotorClock(T_NS, 123)
    assert [clock.deadline_ns(k) for k in (0, 1, 1_000_000)] == [123, 123 + T_NS, 123 + 1_000_000 * T_NS]
    assert clock.tick_at(122) == -1 and clock.tick_at(123) == 0 and clock.tick_at(123 + T_NS - 1) == 0


@pytest.mark.parametrize("woke_late_ns, served, missed", [
    (0, 5, 0), (9_999_999, 5, 0), (10_000_000, 6, 1), (35_000_000, 8, 3),
])
def test_overslept_deadlines_are_skipped_and_counted(woke_late_ns, served, missed):
    clock = MotorClock(T_NS, 0)
    assert clock.on_wake(5, 5 * T_NS + woke_late_ns) == served and clock.missed == missed


@pytest.mark.parametrize("work_ns, following, missed", [
    (0, 6, 0), (9_999_999, 6, 0), (10_000_000, 7, 1), (52_000_000, 11, 5),
])
def test_work_that_runs_over_makes_no_burst(work_ns, following, missed):
    clock = MotorClock(T_NS, 0)
    assert clock.after(5, 5 * T_NS + work_ns) == following and clock.missed == missed


def test_waking_early_serves_the_tick_waited_for():
    assert MotorClock(T_NS, 0).on_wake(5, 5 * T_NS - 1) == 5


def test_a_period_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        MotorClock(0, 0)


# ------------------------------------------------------------------ loop


class Motor:
    """A motor loop with the shared memory of its siblings, on a clock that only this test moves."""

    def __init__(self, tmp_path, start_ns=1_000 * T_NS, estop_silence_s=None):
        self.clock = SteppedClock(start_ns)
        self.memory = EdgeMemory.create("test", len(LIMITS), tmp_path)
        self.sent, self.sequence, self.tick, self.start_ns = [], 0, 0, start_ns
        config = EdgeConfig()
        self.loop = MotorLoop(self.memory, LIMITS, ChunkGate(LIMITS, T), make_queue(config, len(LIMITS)),
                              Shield(LIMITS, T, ShieldConfig(first_chunk_ticks=20)), self.clock,
                              lambda stamp, q, v: self.sent.append((stamp, q.copy(), v.copy())), "test", 42,
                              estop_silence_s)
        self._joints, self._control = self.memory.blank("joints"), self.memory.blank("control")
        self._chunk = self.memory.blank("chunk")

    @property
    def now_ns(self):
        return self.clock.monotonic_ns()

    def measure(self, position=None, stamp_ns=None):
        self._joints["position"] = LIMITS.ready if position is None else position
        self._joints["stamp_ns"] = self.now_ns if stamp_ns is None else stamp_ns
        self.memory.write("joints", self._joints)

    def event(self, name):
        self._control[name] += 1
        self.memory.write("control", self._control)

    def button(self, pressed, heard_ns=None):
        """What the io process writes for each message of the emergency stop input."""
        self._control["presses"] += pressed and not self._control["pressed"]
        self._control["pressed"] = pressed
        self._control["heard_ns"] = self.now_ns if heard_ns is None else heard_ns
        self.memory.write("control", self._control)

    def skip(self, ticks):
        """The process does not run for so many periods."""
        self.tick += ticks
        self.clock.sleep_until_ns(self.start_ns + self.tick * T_NS)

    def chunk(self, base_tick=None, way=0.02, **changes):
        state = self.memory.read("motor")[1]
        base = int(state["tick"]) if base_tick is None else base_tick
        self.sequence += 1
        rows = state["position"] + way * np.arange(1, 17).reshape(-1, 1) / 16 * (np.arange(8) < 7)
        fields = {"session": "s", "sequence": self.sequence, "base_tick": base, "observation_stamp_ns": self.now_ns,
                  "period_s": T, "names": LIMITS.names, "positions": rows}
        fill_chunk(self._chunk, ActionChunk(**{**fields, **changes}))
        self.memory.write("chunk", self._chunk)

    def step(self, measured=True):
        if measured:
            self.measure(self.sent[-1][1] if self.sent else None)
        deadline_ns = self.start_ns + self.tick * T_NS
        self.clock.sleep_until_ns(deadline_ns)
        sent = self.loop.serve(self.tick, deadline_ns, deadline_ns + 50_000, 0)
        self.tick += 1
        return sent

    def run(self, ticks, chunks=True):
        for k in range(ticks):
            if chunks and k % 5 == 0 and self.sent:
                self.chunk()
            self.step()

    def armed(self):
        self.step()
        self.event("rearm")
        self.step()
        return self

    @property
    def state(self):
        return self.loop.shield.state


@pytest.fixture
def motor(tmp_path):
    made = Motor(tmp_path)
    yield made
    made.memory.file.unlink()
    made.memory.close()


def test_nothing_is_sent_before_the_robot_is_seen(motor):
    for _ in range(5):
        assert not motor.step(measured=False)
    motor.measure(stamp_ns=motor.now_ns - 600_000_000)  # too old
    assert not motor.step(measured=False)
    motor.measure(np.full(8, np.nan))
    assert not motor.step(measured=False)
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.NO_POSE)
    record = motor.memory.read("motor")[1]
    assert (int(record["tick"]), Rearm(int(record["rearm"]))) == (motor.tick - 1, Rearm.MEASUREMENT_NOT_FINITE)
    assert motor.memory.ticks.drain(0)[1] == []  # no command, no entry in the log
    assert motor.step() and motor.state is State.HOLDING and motor.loop.shield.reason is Reason.NOT_ARMED
    assert len(motor.sent) == 1 and (motor.sent[0][1] == LIMITS.ready).all() and (motor.sent[0][2] == 0).all()


def test_one_command_per_tick_in_every_state(motor):
    motor.armed().run(50)
    motor.run(60, chunks=False)
    assert len(motor.sent) == 112
    stamps = np.array([stamp for stamp, _, _ in motor.sent])
    assert (np.diff(stamps) == T_NS).all()
    _, records, lost = motor.memory.ticks.drain(0)
    ticks = np.frombuffer(b"".join(records), dtype=motor.memory.dtypes["ticks"])
    assert lost == 0 and (ticks["tick"] == np.arange(112)).all() and set(ticks["state"]) == set(State)
    assert (ticks["lateness_ns"] == 50_000).all()
    np.testing.assert_array_equal(ticks["position"], [q for _, q, _ in motor.sent])


def test_arm_move_run_out_hold_and_arm_again(motor):
    motor.armed()
    assert (motor.state, motor.loop.shield.reason) == (State.COASTING, Reason.WAITING_FIRST_CHUNK)
    motor.run(50)
    assert motor.state is State.NOMINAL and motor.sent[-1][1][0] > 0.03
    motor.run(60, chunks=False)
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.QUEUE_EMPTY)
    held = motor.sent[-1][1]
    motor.chunk()
    motor.step()
    assert motor.state is State.HOLDING and (motor.sent[-1][1] == held).all()
    motor.event("rearm")
    motor.run(10)
    assert motor.state is State.NOMINAL and motor.loop.shield.segment == 1


def test_a_chunk_from_before_the_rearm_is_not_followed(motor):
    motor.armed().run(20)
    motor.event("estop")
    motor.run(60, chunks=False)
    before = motor.tick - 1
    motor.event("rearm")
    motor.step()
    motor.chunk(base_tick=before)
    motor.step()
    assert rejects(motor)[Reject.BEFORE_REARM] == 1
    assert motor.loop.shield.reason is Reason.WAITING_FIRST_CHUNK


def test_both_commands_within_one_tick_mean_stop(motor):
    motor.armed().run(10)
    motor.event("rearm")
    motor.event("estop")
    motor.run(60)
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.ESTOP)


def test_commands_from_before_the_motor_started_do_not_act(tmp_path):
    memory = EdgeMemory.create("early", len(LIMITS), tmp_path)
    control = memory.blank("control")
    control["rearm"] = control["estop"] = 7
    memory.write("control", control)
    shield = Shield(LIMITS, T)
    loop = MotorLoop(memory, LIMITS, ChunkGate(LIMITS, T), make_queue(EdgeConfig(), 8), shield, SteppedClock(0),
                     lambda *_: None)
    shield.start(LIMITS.ready)
    loop.serve(0, 0, 0, 0)
    assert (shield.state, shield.reason) == (State.HOLDING, Reason.NOT_ARMED)
    memory.file.unlink()
    memory.close()


def rejects(motor):
    counts = motor.memory.read("motor")[1]["rejects"]
    return {reject: int(count) for reject, count in zip(REJECTS, counts, strict=True) if count}


@pytest.mark.parametrize("changes, reject", [
    ({"names": tuple(reversed(LIMITS.names))}, Reject.JOINT_NAMES),
    ({"positions": np.full((16, 8), np.nan)}, Reject.NOT_FINITE),
    ({"base_tick": 10**6}, Reject.FUTURE_TICK),
    ({"observation_stamp_ns": 10**15}, Reject.FUTURE_STAMP),
    ({"observation_stamp_ns": 0}, Reject.STALE),
    ({"period_s": 0.1}, Reject.PERIOD),
    ({"positions": np.full((16, 8), 9.0)}, Reject.OUTSIDE_LIMITS),
])
def test_bad_chunks_are_counted_and_the_robot_acts_on_their_absence(motor, changes, reject):
    motor.armed().run(20)
    for _ in range(80):
        motor.chunk(**changes)
        motor.step()
    assert motor.state is State.HOLDING and motor.loop.shield.reason is Reason.QUEUE_EMPTY
    assert rejects(motor)[reject] >= 10
    q = np.array([row for _, row, _ in motor.sent])
    assert (np.abs(np.diff(q, 3, axis=0)) / T**3 <= LIMITS.jerk * (1 + 1e-9) + 1e-8).all()


def test_wrong_step_numbers_cannot_read_beyond_the_record(motor):
    motor.armed().run(10)
    record = motor._chunk
    record["horizon"], record["sequence"] = 2**32 - 1, 10**6
    motor.memory.write("chunk", record)
    motor.step()
    assert motor.step()


def test_rearm_without_fresh_joint_states_is_refused(motor):
    motor.step()
    for _ in range(30):
        motor.step(measured=False)
    assert int(motor.memory.read("motor")[1]["rearm"]) == Rearm.MEASUREMENT_STALE
    motor.event("rearm")
    motor.step(measured=False)
    assert motor.state is State.HOLDING and motor.loop.last_rearm is Rearm.MEASUREMENT_STALE


def test_old_joint_states_do_not_stop_a_robot_that_follows(motor):
    """What to do about a silent robot driver is the policy's business: it makes no chunk without a measurement."""
    motor.armed()
    for k in range(40):
        if k % 5 == 0:
            motor.chunk()
        motor.step(measured=False)
    assert motor.state is State.NOMINAL


# ------------------------------------------------------------------ the process did not run


def logged(motor):
    return np.frombuffer(b"".join(motor.memory.ticks.drain(0)[1]), dtype=motor.memory.dtypes["ticks"])


@pytest.mark.parametrize("skipped, broken", [(0, False), (9, False), (10, True), (100, True)])
def test_a_stall_is_longer_than_the_stall_time(motor, skipped, broken):
    """10 ticks skipped: 11 periods between two commands, more than stall_ticks = 10."""
    motor.armed().run(30)
    motor.skip(skipped)
    motor.step()
    assert (motor.loop.shield.reason is Reason.MOTOR_STALLED) == broken
    assert motor.loop.shield.stalls == int(motor.memory.read("motor")[1]["stalls"]) == broken


def test_a_stalled_stream_holds_where_the_robot_was_measured_until_rearmed(motor):
    motor.armed().run(50)
    last, segment = motor.sent[-1][1], motor.loop.shield.segment
    assert np.abs(motor.sent[-1][2]).max() > 0.02
    motor.skip(100)
    motor.measure(last + np.array([0.02] * 7 + [0.0]))  # its own time-out took it there
    motor.chunk()  # a policy that went on planning changes nothing
    motor.step(measured=False)
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.MOTOR_STALLED)
    np.testing.assert_array_equal(motor.sent[-1][1], last + np.array([0.02] * 7 + [0.0]))
    assert (motor.sent[-1][2] == 0).all() and motor.loop.shield.segment == segment + 1
    motor.run(30)
    assert motor.state is State.HOLDING
    assert set(logged(motor)["segment"][-31:]) == {segment + 1}
    motor.event("rearm")
    motor.run(20)
    assert motor.state is State.NOMINAL and motor.loop.shield.segment == segment + 1


def test_a_stall_without_fresh_joint_states_holds_the_last_command(motor):
    motor.armed().run(50)
    last = motor.sent[-1][1]
    motor.skip(50)
    motor.step(measured=False)
    assert motor.loop.shield.reason is Reason.MOTOR_STALLED and (motor.sent[-1][1] == last).all()


def test_a_stall_while_holding_or_before_the_first_command_is_nothing(motor):
    assert not motor.step(measured=False)
    motor.skip(100)
    assert motor.step() and motor.loop.shield.reason is Reason.NOT_ARMED
    motor.skip(100)
    motor.step()
    assert motor.loop.shield.reason is Reason.NOT_ARMED and motor.loop.shield.segment == 1
    assert motor.armed().loop.shield.reason is Reason.WAITING_FIRST_CHUNK
    motor.skip(100)  # waiting at rest, but acting: the robot is on its own time-out
    motor.step()
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.MOTOR_STALLED)


def test_a_rearm_from_the_time_of_the_stall_is_not_carried_out(motor):
    motor.armed().run(30)
    motor.skip(50)
    motor.event("rearm")
    motor.run(5)
    assert motor.state is State.HOLDING
    motor.skip(50)
    motor.event("rearm")
    motor.run(5)
    assert motor.state is State.HOLDING
    motor.event("rearm")
    motor.run(10)
    assert motor.state is State.NOMINAL


def test_a_stop_from_the_time_of_the_stall_counts(motor):
    motor.armed().run(30)
    motor.skip(50)
    motor.event("estop")
    motor.step()
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.ESTOP)


def test_stopped_within_a_tick_the_old_command_is_not_sent(motor):
    motor.armed().run(50)
    last = motor.sent[-1][1]
    take = motor.loop._take_chunk

    def stopped_here(*arguments):
        found = take(*arguments)
        motor.clock.advance_ns(1_000_000_000)
        motor.measure(last + np.array([0.03] * 7 + [0.0]))
        return found

    motor.loop._take_chunk = stopped_here
    motor.step()
    motor.loop._take_chunk = take
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.MOTOR_STALLED)
    np.testing.assert_array_equal(motor.sent[-1][1][:7], last[:7] + 0.03)
    assert (motor.sent[-1][2] == 0).all()


# ------------------------------------------------------------------ emergency stop input


def test_a_pressed_input_stops_latches_and_forbids_rearming(motor):
    motor.armed().run(30)
    motor.button(True)
    motor.run(60)
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.ESTOP_INPUT)
    motor.event("rearm")
    motor.step()
    assert motor.loop.last_rearm is Rearm.ESTOP_PRESSED
    assert int(motor.memory.read("motor")[1]["rearm"]) == Rearm.ESTOP_PRESSED
    motor.button(False)
    motor.step()
    assert motor.state is State.HOLDING
    motor.event("rearm")
    motor.run(10)
    assert motor.state is State.NOMINAL
    rows = logged(motor)
    assert set(rows["estop_input"]) == {EstopInput.RELEASED, EstopInput.PRESSED} and rows["estop_presses"][-1] == 1


def test_a_press_between_two_ticks_is_not_lost(motor):
    motor.armed().run(30)
    motor.button(True)
    motor.button(False)
    motor.event("rearm")
    motor.step()
    assert (motor.state, motor.loop.shield.reason) == (State.BRAKING, Reason.ESTOP_INPUT)


def test_an_input_that_may_be_silent_may_be_silent(motor):
    motor.armed()
    motor.button(False)
    motor.run(200)
    assert motor.state is State.NOMINAL


def test_a_required_input_must_be_heard(tmp_path):
    motor = Motor(tmp_path, estop_silence_s=0.5)
    motor.step()
    motor.event("rearm")
    motor.step()
    assert motor.loop.last_rearm is Rearm.ESTOP_SILENT and motor.loop.shield.reason is Reason.NOT_ARMED
    motor.button(False)
    motor.event("rearm")
    motor.run(40)
    assert motor.state is State.NOMINAL
    motor.button(False)
    heard_ns = motor.now_ns
    while motor.state is State.NOMINAL:
        motor.run(5)
    silent_s = (motor.now_ns - heard_ns) * 1e-9
    assert motor.loop.shield.reason is Reason.ESTOP_SILENT and 0.5 <= silent_s <= 0.56
    motor.memory.file.unlink()
    motor.memory.close()


def test_a_new_motor_process_takes_over_the_level(tmp_path):
    memory = EdgeMemory.create("late", len(LIMITS), tmp_path)
    control = memory.blank("control")
    control["pressed"], control["presses"] = 1, 7
    memory.write("control", control)
    shield = Shield(LIMITS, T)
    loop = MotorLoop(memory, LIMITS, ChunkGate(LIMITS, T), make_queue(EdgeConfig(), 8), shield, SteppedClock(0),
                     lambda *_: None)
    shield.start(LIMITS.ready)
    loop.serve(0, 0, 0, 0)
    assert shield.rearm(LIMITS.ready, 0.0) is Rearm.ESTOP_PRESSED
    memory.file.unlink()
    memory.close()


class StopAfter:
    def __init__(self, clock, at_ns):
        self.clock, self.at_ns = clock, at_ns

    def is_set(self):
        return self.clock.monotonic_ns() >= self.at_ns


def test_the_end_is_a_damped_stop(motor):
    motor.armed().run(100)
    assert np.abs(motor.sent[-1][2]).max() > 0.05
    motor.start_ns = motor.now_ns
    stop = StopAfter(motor.clock, motor.now_ns + 3 * T_NS)
    run_clock(motor.loop, motor.clock, T_NS, stop)
    assert (motor.state, motor.loop.shield.reason) == (State.HOLDING, Reason.SHUTDOWN)
    assert (motor.sent[-1][2] == 0).all()
    q = np.array([row for _, row, _ in motor.sent])
    assert (np.abs(np.diff(q, 2, axis=0)) / T**2 <= LIMITS.acceleration * (1 + 1e-9)).all()


class SlowOutlet:
    """A clock that oversleeps now and then."""

    def __init__(self):
        self.inner, self.calls = SteppedClock(0), 0

    def monotonic_ns(self):
        return self.inner.monotonic_ns()

    def wall_ns(self):
        return self.inner.wall_ns()

    def sleep_until_ns(self, deadline_ns):
        self.calls += 1
        self.inner.sleep_until_ns(deadline_ns + (37_000_000 if self.calls % 10 == 0 else 100_000))


def test_a_late_wake_up_skips_and_never_bursts(tmp_path):
    clock = SlowOutlet()
    memory = EdgeMemory.create("late", len(LIMITS), tmp_path)
    joints = memory.blank("joints")
    joints["position"] = LIMITS.ready
    memory.write("joints", joints)
    sent = []
    loop = MotorLoop(memory, LIMITS, ChunkGate(LIMITS, T), make_queue(EdgeConfig(), 8), Shield(LIMITS, T), clock,
                     lambda stamp, q, v: sent.append((stamp, clock.monotonic_ns())))
    done = run_clock(loop, clock, T_NS, StopAfter(clock, 3_000_000_000))
    stamps = np.array(sent)
    assert done.missed > 50 and len(sent) + done.missed == pytest.approx(300, abs=5)
    assert (np.diff(stamps[:, 0]) >= T_NS).all()  # one command per tick at most
    assert ((stamps[:, 0] - T_NS) % T_NS == 0).all()  # on the grid, for ever
    assert (stamps[:, 1] - stamps[:, 0] < T_NS).all()  # always the tick that is due now
    memory.file.unlink()
    memory.close()
