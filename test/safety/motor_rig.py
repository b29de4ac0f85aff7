"""A motor loop with two joints on a clock that only the test moves."""

import numpy as np

from vla_common.clock import ManualClock
from vla_edge.core.chunk import REJECTS, ActionChunk, ChunkGate
from vla_edge.core.chunk_queue import ChunkQueue
from vla_edge.core.ensembler import Replace
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.motor_loop import MotorLoop
from vla_edge.core.records import EdgeMemory, fill_chunk
from vla_edge.core.shield import Reason, Shield, ShieldConfig, State

T, T_NS = 0.01, 10_000_000
LIMITS = JointLimits(("arm", "gripper"), *(np.array(row) for row in (
    [-2.0, 0.0], [2.0, 1.0], [1.0, 1.0], [10.0, 10.0], [500.0, 500.0], [0.0, 0.0], [0.05, 1.0])))
HOME = np.array([0.25, 0.5])
START_NS = 10**12
SHIELD = ShieldConfig(fresh_ticks=12, first_chunk_ticks=20, stall_ticks=5)


class Rig:
    """A loop on a clock that stands still unless the test moves it; each tick wakes ``late_ns`` after its deadline."""

    def __init__(self, memory=None, gate=None, **options):
        self.memory = memory or EdgeMemory.private(2)
        self.clock = ManualClock(START_NS)
        self.sent = []
        self.tick, self.late_ns, self.missed = 0, 1_000, 0
        self.records = {name: self.memory.blank(name) for name in ("joints", "control", "chunk")}
        self.shield = Shield(LIMITS, T, SHIELD)
        self.queue = ChunkQueue(2, Replace(), T)
        self.gate = ChunkGate(LIMITS, T, gate)
        self.loop = MotorLoop(self.memory, LIMITS, self.gate, self.queue, self.shield, self.clock,
                              lambda stamp, q, v: self.sent.append((stamp, q.tolist(), v.tolist())), **options)

    @property
    def now_ns(self):
        return self.clock.monotonic_ns()

    def write(self, name, **fields):
        for field, value in fields.items():
            self.records[name][field] = value
        self.memory.write(name, self.records[name])

    def count(self, name, **fields):
        self.write("control", **{name: self.records["control"][name] + 1}, **fields)

    def measure(self, position=HOME, age_ns=0):
        self.write("joints", position=position, stamp_ns=self.now_ns - age_ns)

    def offer(self, base_tick, sequence=1, steps=20, way=0.001, session="s", **changes):
        rows = HOME + way * np.arange(1.0, steps + 1)[:, None] * [1.0, 0.0]
        fields = {"session": session, "sequence": sequence, "base_tick": base_tick, "observation_stamp_ns": self.now_ns,
                  "period_s": T, "names": LIMITS.names, "positions": rows}
        fill_chunk(self.records["chunk"], ActionChunk(**{**fields, **changes}))
        self.memory.write("chunk", self.records["chunk"])

    def due(self, tick):
        return START_NS + tick * T_NS

    def serve(self):
        self.clock.advance_ns(max(0, self.due(self.tick) + self.late_ns - self.now_ns))
        done = self.loop.serve(self.tick, self.due(self.tick), self.now_ns, self.missed)
        self.tick += 1
        return done

    def armed(self):
        self.measure()
        assert self.serve()
        self.count("rearm")
        self.measure()
        assert self.serve() and self.shield.reason is Reason.WAITING_FIRST_CHUNK
        return self

    def following(self, ticks=5):
        self.armed()
        self.offer(self.tick - 1)
        for _ in range(ticks):
            self.serve()
        assert self.shield.state is State.NOMINAL
        return self

    def report(self):
        return self.memory.read("motor")[1]

    def log(self):
        records = self.memory.ticks.drain(0, 5000)[1]
        return np.frombuffer(b"".join(records), dtype=self.memory.dtypes["ticks"])


def verdicts(rig):
    return {reject: int(count) for reject, count in zip(REJECTS, rig.report()["rejects"], strict=True) if count}
