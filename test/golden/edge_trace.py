"""Golden traces of the motor loop: how they are stored, and the runs of the real edge that they are cut from."""

import os
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

from edge_rig import CLOCK, INSTRUCTION, LIMITS, ROBOT_FILE, Rig, own_children

from vla_cli.replay_main import read
from vla_common import messages, wire
from vla_common.clock import sleep_s
from vla_edge.core.chunk import ActionChunk
from vla_edge.core.records import EdgeMemory, fill_chunk
from vla_edge.core.trace import COLUMNS, Trace, cut, tick_dtype

NOMINAL, COASTING, BRAKING, HOLDING = range(4)

# ------------------------------------------------------------------ storage


def pack(rows):
    """float64[m, n] as bytes that compress well, without loss: differences of the bit patterns of consecutive rows, the
    eight bytes of all numbers sorted by significance."""
    bits = np.ascontiguousarray(rows, dtype="<f8").view("<i8")
    first = np.zeros((1, bits.shape[1]), dtype="<i8")
    return np.diff(bits, axis=0, prepend=first).astype("<i8").view(np.uint8).reshape(-1, 8).T.copy()


def unpack(packed, columns):
    bits = np.ascontiguousarray(packed.T).view("<i8").reshape(-1, columns)
    return np.cumsum(bits, axis=0, dtype="<i8").astype("<i8").view("<f8")


def save(path, trace, settings, robot_text):
    """One file, numbers and bytes only: no pickle."""
    chunks, stamps = trace.chunks, sorted(trace.measured)
    sessions = sorted({chunk.session for chunk in chunks})
    assert all(chunk.names == LIMITS.names and chunk.period_s == 0.01 for chunk in chunks)
    arrays = {f"tick_{name}": np.diff(trace.ticks[name].astype("<i8"), prepend=0) for name in COLUMNS}
    np.savez_compressed(
        path, **arrays, origin_ns=trace.origin_ns, period_ns=trace.period_ns, joints=trace.joints,
        command=pack(trace.ticks["command"]), measured_stamp=np.array(stamps, "<i8"),
        measured=pack(np.array([trace.measured[stamp] for stamp in stamps]).reshape(-1, trace.joints)),
        chunk_numbers=np.array([[c.sequence, c.base_tick, c.observation_stamp_ns, len(c.positions),
                                 sessions.index(c.session)] for c in chunks], "<i8").reshape(-1, 5),
        chunk_positions=pack(np.concatenate([c.positions for c in chunks])),
        texts=np.frombuffer("\0".join([settings, robot_text, *sessions]).encode(), np.uint8))


def load(path):
    """(trace, settings JSON, robot file's text)."""
    with np.load(path, allow_pickle=False) as data:
        joints = int(data["joints"])
        settings, robot_text, *sessions = data["texts"].tobytes().decode().split("\0")
        ticks = np.zeros(len(data["tick_tick"]), tick_dtype(joints))
        for name in COLUMNS:
            ticks[name] = np.cumsum(data[f"tick_{name}"])
        ticks["command"] = unpack(data["command"], joints)
        chunks, at = [], 0
        rows = unpack(data["chunk_positions"], joints)
        for sequence, base, stamp, horizon, session in data["chunk_numbers"].tolist():
            chunks.append(ActionChunk(sessions[session], sequence, base, stamp, 0.01, LIMITS.names,
                                      rows[at:at + horizon].copy()))
            at += horizon
        measured = dict(zip(data["measured_stamp"].tolist(), unpack(data["measured"], joints), strict=True))
        return (Trace(ticks, int(data["origin_ns"]), int(data["period_ns"]), tuple(chunks), measured), settings,
                robot_text)


# ------------------------------------------------------------------ runs


class GoldenRig(Rig):
    """A robot whose measured pose can be another than the last command, as when it was moved by hand."""

    offset = 0.0

    def _receive(self):
        super()._receive()
        self.position = self.position + self.offset

    def now_moving(self, speed):
        self.wait(lambda: "recording to" in self.log.read_text() and self.statuses, 20.0, "the recorder")
        sleep_s(CLOCK, 0.3)
        self.direction[:7] = speed
        self.say(INSTRUCTION)
        self.arm()
        self.persist(lambda: self.commands and np.abs(self.commands[-1][2]).max() > 0.02, 10.0, "moving")

    def hold(self):
        self.wait(lambda: self.state() == HOLDING and np.abs(self.commands[-1][2]).max() == 0.0, 5.0, "holding")

    def child(self, name):
        return own_children(self.edge.pid)[name]


def nominal(rig):
    """There and back: chunks that follow each other, changes of direction that ask for more than the limits allow."""
    rig.now_moving(0.05)
    for speed in (0.08, -0.08, 0.03):
        rig.direction[:7] = speed
        sleep_s(CLOCK, 0.5)


def outage(rig):
    """The cloud falls silent: coasting, braking, holding. Back again: nothing until the re-arm."""
    rig.now_moving(0.06)
    sleep_s(CLOCK, 0.2)
    rig.cloud_answers = False
    rig.hold()
    rig.cloud_answers = True
    rig.direction[:7] = -0.05
    rig.arm()
    sleep_s(CLOCK, 0.4)


def emergency_stop(rig):
    """Stopped in full motion; then moved by hand, and re-armed from there: a new segment."""
    rig.now_moving(0.08)
    sleep_s(CLOCK, 0.3)
    rig.command("ESTOP")
    rig.hold()
    rig.offset = np.array([-0.1, 0.1, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0])
    sleep_s(CLOCK, 0.1)
    rig.command("REARM")
    rig.offset = 0.0
    rig.persist(lambda: rig.state() == NOMINAL, 10.0, "armed from the measured pose")
    sleep_s(CLOCK, 0.3)


def stranger_chunks(rig):
    """While the policy stands still: a late chunk, an older one, one from the future, one that is not finite."""
    rig.now_moving(0.06)
    sleep_s(CLOCK, 0.6)
    policy, (path,) = rig.child("policy"), rig.memory_files()
    memory, out = EdgeMemory.open(path, len(LIMITS)), rig.bus.publisher("action_chunk", rig.robot)
    os.kill(policy, signal.SIGSTOP)
    try:
        sleep_s(CLOCK, 0.08)
        newest = int(memory.read("chunk")[1]["base_tick"])
        for number, (lead, fill) in enumerate([(1, None), (-20, None), (None, None), (2, np.nan), (2, None)]):
            motor = memory.read("motor")[1]
            base = int(motor["tick"]) + 50 if lead is None else newest + lead
            rows = motor["position"] + 0.05 * np.arange(1, 25).reshape(-1, 1) / 24 if fill is None else np.full(
                (24, 8), fill)
            chunk = ActionChunk("stranger", 1_000 + number, base, CLOCK.monotonic_ns(), 0.01, LIMITS.names, rows)
            record = memory.blank("chunk")
            fill_chunk(record, chunk)
            memory.write("chunk", record)
            out.put(wire.encode(messages.new(
                "ActionChunk", header=wire.make_header(CLOCK.monotonic_ns()), session=chunk.session,
                sequence=chunk.sequence, base_tick=base, period_s=0.01, joint_names=list(LIMITS.names),
                observation_stamp_ns=chunk.observation_stamp_ns, horizon=24, positions=rows)))
            sleep_s(CLOCK, 0.02)
    finally:
        os.kill(policy, signal.SIGCONT)
        memory.close()
    rig.direction[:7] = -0.05
    sleep_s(CLOCK, 0.7)


def stall(rig):
    """The motor process stands still: first shorter than the robot waits for commands, then longer."""
    rig.now_moving(0.08)
    motor = rig.child("motor")
    for seconds in (0.045, 0.2):
        rig.persist(lambda: rig.state() == NOMINAL and np.abs(rig.commands[-1][2]).max() > 0.05, 10.0, "in motion")
        os.kill(motor, signal.SIGSTOP)
        sleep_s(CLOCK, seconds)
        os.kill(motor, signal.SIGCONT)
        sleep_s(CLOCK, 0.3)
    rig.persist(lambda: rig.state() == NOMINAL, 10.0, "armed again")
    sleep_s(CLOCK, 0.5)


RUNS = {run.__name__: run for run in (nominal, outage, emergency_stop, stranger_chunks, stall)}
MOST_TICKS = 350


def record(name, path, folder):
    """Run the real edge through a scene and store what its motor loop saw and did."""
    rig = GoldenRig(folder, "--record", str(folder / "run.mcap"))
    try:
        RUNS[name](rig)
        rig.command("ESTOP")
        rig.hold()
        rig.edge.terminate()
        assert rig.edge.wait(6.0) == 0
    finally:
        rig.close()
    recorded = read([folder / "run.mcap"])
    trace = recorded.trace
    moving = np.flatnonzero(np.diff(trace.ticks["state"].astype(int)))  # from just before it is armed
    first = int(trace.ticks["tick"][max(0, moving[0] - 3)])
    trace = cut(trace, first, first + MOST_TICKS)
    # Machine's own paths mean nothing here, and the motor loop reads none.
    plain = type(recorded.config)(**{**recorded.config.__dict__, "robot_file": Path("robot.yaml"), "model": Path("model"),
                                     "record": None, "robot_id": "golden", "bus": "tcp/127.0.0.1:7447",
                                     "cloud": "tcp/127.0.0.1:7448"})
    save(path, trace, plain.to_json(), ROBOT_FILE.read_text(encoding="utf-8"))
