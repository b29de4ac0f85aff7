"""Who is to blame, in which words; and the watch over the motor process, which no other clock can stop."""

import logging
from pathlib import Path

import numpy as np
import pytest

from vla_common.clock import ManualClock
from vla_edge.config import EdgeConfig
from vla_edge.core.chunk import REJECTS, Reject
from vla_edge.core.context_mailbox import ContextReject
from vla_edge.core.health import (
    NOT_STARTED,
    SKILLS,
    ChunkRefusals,
    ContextStreak,
    PolicyHealth,
    Tick,
    TickWatch,
    culprit,
    operator_text,
)
from vla_edge.core.planner import NoChunk, Skill
from vla_edge.core.records import EdgeMemory
from vla_edge.core.shield import REARM_TEXT, REASON_TEXT, Rearm, Reason, State
from vla_edge.edge_main import Supervisor

NS = 1_000_000_000
MS = 1_000_000


# ------------------------------------------------------------------ watch


def test_the_watch_tells_changes_once_and_durations():
    watch = TickWatch(0.25, 0)
    assert not watch.look(None, 60 * NS) and watch.state is Tick.NOT_STARTED and watch.silent_s == 60.0
    assert watch.look(1, 60 * NS) and watch.state is Tick.TICKING
    assert not watch.look(2, 60 * NS + 10 * MS)
    assert not watch.look(2, 60 * NS + 260 * MS)  # exactly 0.25 s is not longer
    assert watch.look(2, 60 * NS + 261 * MS) and watch.state is Tick.HANGS
    assert not watch.look(2, 61 * NS) and watch.silent_s == pytest.approx(0.99)
    assert watch.look(3, 61 * NS + 10 * MS) and watch.state is Tick.TICKING
    assert watch.silent_s == pytest.approx(1.0)  # how long that hang was


def test_a_watcher_that_begins_during_a_hang_finds_it():
    watch = TickWatch(0.25, 5 * NS)
    assert watch.look(77, 5 * NS)
    assert watch.look(77, 5 * NS + 300 * MS) and watch.state is Tick.HANGS


class Watched:
    """A supervisor without processes, and the motor's record."""

    def __init__(self):
        self.clock = ManualClock()
        self.memory = EdgeMemory.private(8)
        self.record = self.memory.blank("motor")
        self.supervisor = Supervisor(EdgeConfig(), self.memory, self.clock)

    def run(self, seconds, ticks, **changes):
        for _ in range(round(seconds / 0.05)):
            self.clock.advance_ns(50 * MS)
            if ticks:
                self.record["tick"] += 1
                for name, change in changes.items():
                    self.record[name] += change
                self.memory.write("motor", self.record)
            self.supervisor.watch_motor()


def criticals(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]


def test_the_supervisor_says_once_that_the_motor_hangs_and_once_that_it_is_back(caplog):
    watched = Watched()
    watched.run(2.0, True)
    assert criticals(caplog) == []
    watched.run(3.0, False)
    hang, = criticals(caplog)
    assert hang.startswith("THE MOTOR PROCESS DOES NOT TICK: no command for more than 0.25 s")
    watched.run(1.0, True)
    assert criticals(caplog) == [hang, "the motor process ticks again after 3.05 s"]


def test_a_motor_that_never_starts_is_told_once(caplog):
    watched = Watched()
    watched.run(10.0, False)
    assert criticals(caplog) == []
    watched.run(10.0, False)
    assert criticals(caplog) == ["THE MOTOR PROCESS HAS NOT STARTED within 10 s: nothing is sent. Look into process 0"]
    watched.run(1.0, True)
    assert len(criticals(caplog)) == 1


@pytest.mark.parametrize("step_ns", [0, -NS, NS // 20, 60 * NS], ids=["paused", "back", "in step", "ahead"])
def test_no_other_clock_can_stop_or_start_the_watch(caplog, step_ns):
    """Message time that stands still, as simulated time does in a pause, runs backwards or jumps."""
    watched = Watched()
    watched.run(2.0, True, stamp_ns=step_ns)
    assert criticals(caplog) == []
    watched.run(1.0, False)
    assert len(criticals(caplog)) == 1


def test_a_wall_clock_step_is_not_seen(caplog):
    watched = Watched()
    watched.clock.wall_ns = lambda: pytest.fail("the watch reads the monotonic clock only")
    watched.run(1.0, True)
    watched.run(1.0, False)
    assert len(criticals(caplog)) == 1


# ------------------------------------------------------------------ who is to blame


def policy(**changes):
    return PolicyHealth(**{"age_s": 0.01, "ready": True, "skill": "policy", "context_age_s": 0.1, **changes})


NOT_READY = {"ready": False, "context_age_s": 0.8}


@pytest.mark.parametrize("joints_age_s, health, chunks, text", [
    (0.01, policy(), "", ""),
    (None, policy(), "", "no joint state from the robot yet"),
    (0.2, policy(), "", ""),
    (1.24, policy(age_s=9.0), "", "no fresh joint state from the robot for 1.2 s"),
    (0.01, None, "", "the policy process has not started"),
    (0.01, policy(age_s=0.25), "", ""),
    (0.01, policy(age_s=1.2, **NOT_READY), "chunk_gap 1", "policy process does not answer (no heartbeat for 1.2 s)"),
    (0.01, policy(skill="none", ready=False), "", "no instruction given"),
    (0.01, policy(skill="home", context_age_s=None), "", ""),
    (0.01, policy(ready=False, context_age_s=None), "", "no context from the cloud yet"),
    (0.01, policy(**NOT_READY), "", "no context from the cloud for 0.8 s"),
    (0.01, policy(**NOT_READY, refused="context_stale", refused_count=12, refused_age_s=0.1), "chunk_gap 1",
     "contexts are refused: context_stale 12"),
    (0.01, policy(**NOT_READY, refused="context_stale", refused_count=12, refused_age_s=1.1), "",
     "no context from the cloud for 0.8 s"),
    (0.01, policy(refused="context_out_of_order", refused_count=1), "", ""),  # others are taken
    (0.01, policy(), "chunk_joint_names 3", "chunks are refused: chunk_joint_names 3"),
    (0.01, policy(why_not="denoiser_not_finite"), "", "the policy makes no chunk: denoiser_not_finite"),
])
def test_the_culprit_is_named(joints_age_s, health, chunks, text):
    assert culprit(joints_age_s, health, chunks) == text
    # A camera explains why no context comes, and nothing else.
    found = culprit(joints_age_s, health, chunks, "camera_missing_front")
    assert found == (f"{text} (camera_missing_front)" if text.startswith("no context") else text)


def test_every_name_fits_the_record():
    assert tuple(skill.value for skill in Skill) == SKILLS
    for name in [*ContextReject, *NoChunk]:
        assert len(name.value.encode()) <= 32


def test_the_heartbeat_carries_contexts_and_refusals():
    memory = EdgeMemory.private(8)
    beat, streak = memory.blank("policy"), ContextStreak()
    beat["stamp_ns"], beat["ready"], beat["skill"], beat["why_not"] = 10 * NS, 1, 2, b"no_fresh_context"
    streak.fill(beat)
    seen = PolicyHealth.of(beat, 10 * NS + NS // 10)
    assert (seen.age_s, seen.ready, seen.skill, seen.why_not, seen.context_age_s, seen.refused_count) == (
        0.1, True, "policy", "no_fresh_context", None, 0)
    streak.taken(9 * NS)
    streak.refused("context_stale", 10 * NS)
    streak.refused("context_session", 10 * NS)
    streak.fill(beat)
    seen = PolicyHealth.of(beat, 11 * NS)
    assert (seen.context_age_s, seen.refused, seen.refused_count, seen.refused_age_s) == (2.0, "context_session", 2, 1.0)
    streak.taken(10 * NS)
    streak.fill(beat)
    assert (beat["refused_count"], beat["refused"].item()) == (0, b"")
    streak.forget()
    streak.fill(beat)
    assert beat["context_ns"] == 0
    assert policy(age_s=0.25).can_plan and not policy(age_s=0.26).can_plan and not policy(ready=False).can_plan


def test_refused_chunks_count_since_the_last_accepted_one():
    refusals, counts = ChunkRefusals(), [0] * len(REJECTS)
    assert refusals.look(5, counts, 0) == ""
    counts[REJECTS.index(Reject.GAP)] += 1
    counts[REJECTS.index(Reject.JOINT_NAMES)] += 3
    assert refusals.look(5, counts, NS) == "chunk_joint_names 3"
    assert refusals.look(5, counts, 2 * NS) == "chunk_joint_names 3"
    assert refusals.look(5, counts, 2 * NS + 1) == ""
    counts[REJECTS.index(Reject.GAP)] += 1
    assert refusals.look(6, counts, 3 * NS) == ""  # one was taken: what was refused before explains nothing
    counts[REJECTS.index(Reject.GAP)] += 1
    assert refusals.look(6, counts, 3 * NS) == "chunk_gap 1"


HOLD = State.HOLDING
CLOUD = "no context from the cloud for 0.8 s"


@pytest.mark.parametrize("state, reason, verdict, can_plan, cause, text", [
    (State.NOMINAL, Reason.FOLLOWING, Rearm.NOT_HOLDING, True, "", "following the policy"),
    (State.BRAKING, Reason.QUEUE_EMPTY, Rearm.NOT_HOLDING, False, "", "chunks ran out: policy or cloud too late"),
    (State.BRAKING, Reason.QUEUE_EMPTY, Rearm.NOT_HOLDING, False, CLOUD, f"chunks ran out: {CLOUD}"),
    (HOLD, Reason.QUEUE_EMPTY, Rearm.ACCEPTED, False, CLOUD, f"chunks ran out: {CLOUD}"),
    (HOLD, Reason.QUEUE_EMPTY, Rearm.ACCEPTED, True, CLOUD, f"chunks ran out: {CLOUD}; ready for a re-arm"),
    (HOLD, Reason.QUEUE_EMPTY, Rearm.MEASUREMENT_STALE, True, CLOUD,
     f"chunks ran out: {CLOUD}; re-arm {REARM_TEXT[Rearm.MEASUREMENT_STALE]}"),
    (HOLD, Reason.NO_FIRST_CHUNK, Rearm.ACCEPTED, False, "no instruction given",
     "no chunk came after the re-arm: no instruction given"),
    (HOLD, Reason.NOT_ARMED, Rearm.ACCEPTED, False, "no instruction given",
     "not armed: send a re-arm; not ready: no instruction given"),
    (HOLD, Reason.NOT_ARMED, Rearm.ACCEPTED, False, "", "not armed: send a re-arm; not ready: no plan yet"),
    (HOLD, Reason.NOT_ARMED, Rearm.ACCEPTED, True, "", "not armed: send a re-arm"),
    (HOLD, Reason.ESTOP_INPUT, Rearm.ESTOP_PRESSED, True, "",
     f"{REASON_TEXT[Reason.ESTOP_INPUT]}; re-arm refused: the emergency stop input is pressed; release it"),
    (HOLD, Reason.MOTOR_STALLED, Rearm.ACCEPTED, True, "", REASON_TEXT[Reason.MOTOR_STALLED]),
    (HOLD, Reason.SHUTDOWN, Rearm.SHUTTING_DOWN, False, "", "the edge is shutting down"),
    (HOLD, Reason.NO_POSE, Rearm.MEASUREMENT_OUTSIDE_LIMITS, False, "", "no usable joint state yet: nothing is sent (a "
     "joint was measured outside its limits; move it back by hand)"),
])
def test_the_operator_is_told_in_one_line(state, reason, verdict, can_plan, cause, text):
    assert operator_text(state, reason, verdict, can_plan, cause) == text


def test_a_stop_that_was_asked_for_is_no_emergency():
    why = "the goal was cancelled"
    assert operator_text(State.BRAKING, Reason.ESTOP, Rearm.NOT_HOLDING, True, "", why) == (
        "stopped, the goal was cancelled: re-arm to go on")
    assert operator_text(HOLD, Reason.ESTOP, Rearm.ACCEPTED, False, "no plan", why) == (
        "stopped, the goal was cancelled: re-arm to go on; not ready: no plan")
    assert operator_text(HOLD, Reason.QUEUE_EMPTY, Rearm.ACCEPTED, True, "", why) == REASON_TEXT[Reason.QUEUE_EMPTY]


def test_texts_are_short():
    for reason in Reason:
        for verdict in Rearm:
            text = operator_text(HOLD, reason, verdict, False, "contexts are refused: context_instruction_hash 1234")
            assert len(text) <= 260


# ------------------------------------------------------------------ the io process tells it


class FakeBus:
    def __init__(self):
        self.sent = {}

    def publisher(self, topic, robot):
        bus = self

        class Out:
            def put(self, payload):
                bus.sent.setdefault(topic, []).append(payload)

        return Out()


class Io:
    """StatusOut with the shared memory of its siblings."""

    def __init__(self):
        from vla_common.metrics import Counters
        from vla_edge.child import Child
        from vla_edge.config import load_limits
        from vla_edge.io_status import StatusOut

        limits = load_limits(Path(__file__).parents[2] / EdgeConfig().robot_file, 0.01)
        self.clock, self.memory, self.bus = ManualClock(10 * NS), EdgeMemory.private(len(limits)), FakeBus()
        self.motor, self.policy = self.memory.blank("motor"), self.memory.blank("policy")
        self.out = StatusOut(Child(EdgeConfig(), self.memory, limits, self.clock, None), self.bus, Counters(), 0)

    def status(self, joints_age_s=0.01, advance_ns=50 * MS, motor=None, policy=None):
        from vla_common.wire import decode

        self.clock.advance_ns(advance_ns)
        now_ns = self.clock.monotonic_ns()
        for name, record, changes in (("motor", self.motor, motor), ("policy", self.policy, policy)):
            if changes is not None:
                record["stamp_ns"] = now_ns
                for key, value in changes.items():
                    record[key] = value
                self.memory.write(name, record)
        self.out.publish_status(now_ns, joints_age_s)
        return decode("ShieldStatus", self.bus.sent["shield_status"][-1])


READY = {"ready": 1, "skill": 2, "context_ns": 10 * NS}
FOLLOWS = {"state": State.NOMINAL, "reason": Reason.FOLLOWING, "rearm": Rearm.NOT_HOLDING}
RAN_OUT = {"state": HOLD, "reason": Reason.QUEUE_EMPTY, "rearm": Rearm.ACCEPTED}


def test_a_status_comes_although_no_motor_record_ever_did(caplog):
    io = Io()
    status = io.status()
    assert status.reason == f"{NOT_STARTED} (0.1 s)" and (status.state, status.tick) == (HOLD, -1)
    assert not status.rearm_ready and status.position.size == 0
    assert not caplog.records
    io.status(advance_ns=10 * NS)
    io.status()
    assert [record.getMessage() for record in caplog.records] == [NOT_STARTED]


def test_a_motor_process_that_hangs_is_told_loudly(caplog):
    io = Io()
    with caplog.at_level(logging.INFO):
        io.status(motor={**RAN_OUT, "position": 1.0}, policy=READY)
        assert io.status(advance_ns=200 * MS).position.tolist() == [1.0] * 8
        status = io.status(advance_ns=1000 * MS, policy=READY)
        assert status.reason == "THE MOTOR PROCESS DOES NOT TICK: the robot is on its own time-out (1.2 s)"
        assert not status.rearm_ready
        assert "TICK" not in io.status(motor=RAN_OUT, policy=READY).reason
        io.status(motor={"reason": Reason.SHUTDOWN})
        assert "TICK" not in io.status(advance_ns=NS).reason  # it has ended as it should
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


def test_what_made_chunks_run_out_stays_told_until_the_next_start():
    io = Io()
    assert io.status(motor=FOLLOWS, policy=READY).reason == "following the policy"
    braking = {**RAN_OUT, "state": State.BRAKING, "rearm": Rearm.NOT_HOLDING}
    assert io.status(motor=braking, policy=READY).reason == "chunks ran out: policy or cloud too late"
    assert io.status(motor=braking, advance_ns=300 * MS).reason == (
        "chunks ran out: policy process does not answer (no heartbeat for 0.3 s)")
    status = io.status(motor=RAN_OUT, policy={"ready": 0}, advance_ns=100 * MS)
    assert status.reason == "chunks ran out: no context from the cloud for 0.5 s" and not status.rearm_ready
    status = io.status(motor=RAN_OUT, policy=READY)
    assert status.reason == "chunks ran out: no context from the cloud for 0.5 s; ready for a re-arm"
    assert status.rearm_ready
    io.status(motor=FOLLOWS, policy=READY)
    assert io.status(motor=RAN_OUT, policy=READY).reason == "chunks ran out: policy or cloud too late"


def test_refused_chunks_are_named():
    io = Io()
    rejects = np.zeros(len(REJECTS), np.uint32)
    io.status(motor={**FOLLOWS, "accepted": 7}, policy=READY)
    rejects[REJECTS.index(Reject.JOINT_NAMES)] = 3
    status = io.status(motor={**RAN_OUT, "rejects": rejects}, policy=READY)
    assert status.reason == "chunks ran out: chunks are refused: chunk_joint_names 3; ready for a re-arm"
    assert status.chunks_rejected == 3


def test_before_the_first_pose_there_is_no_position():
    io = Io()
    status = io.status(joints_age_s=None, motor={"state": HOLD, "reason": Reason.NO_POSE, "rearm": Rearm.NO_MEASUREMENT})
    assert status.reason == "no usable joint state yet: nothing is sent (no joint state was received; check the robot driver)"
    assert status.position.size == 0 and list(status.joint_names) == [] and not status.rearm_ready
