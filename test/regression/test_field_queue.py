"""Chunks that come late, out of order, short or misshapen: faults of other runtimes, each by its right behaviour."""

import dataclasses

import numpy as np
import pytest
from field_rig import LIMITS, PANDA, START_NS, Denoiser, T, chunk

from vla_edge.config import EdgeConfig, make_queue
from vla_edge.core.chunk import ActionChunk, ChunkGate, Reject
from vla_edge.core.chunk_queue import ChunkQueue
from vla_edge.core.ensembler import make_rule
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.planner import NoChunk
from vla_edge.core.records import ChunkReader, EdgeMemory, fill_chunk
from vla_edge.core.shield import Reason, State

RULES = ["speed_ramp", "ramp", "constant", "act", "replace", "prefix"]


def make(rule="replace"):
    return ChunkQueue(8, make_rule(rule, 8), T), ChunkGate(LIMITS, T)


def offer(queue, gate, candidate, next_tick):
    return gate.admit(candidate, next_tick, START_NS) or queue.insert(candidate, next_tick)


def rows(queue, first, last):
    position, velocity = np.zeros(8), np.zeros(8)
    found = []
    for tick in range(first, last + 1):
        assert queue.sample(tick, position, velocity), f"nothing planned for tick {tick}"
        found.append(float(position[0]))
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("session", ["a", "b"])
def test_01_a_late_chunk_leaves_good_actions_alone(rule, session):
    """LeRobot async queue: with actions 20..27 queued and 19 the latest sent, a late chunk 0..15 emptied the queue."""
    queue, gate = make(rule)
    assert offer(queue, gate, chunk(19, 8, sequence=2), 20) is None
    assert offer(queue, gate, chunk(-1, 16, sequence=3, session=session), 20) in (Reject.OLDER, Reject.ALL_PAST)
    assert queue.insert(chunk(-1, 16, sequence=3), 20) is Reject.ALL_PAST  # nor without the gate in front of it
    assert rows(queue, 20, 27) == pytest.approx(np.arange(20, 28) * 1e-3) and not queue.covers(28)


@pytest.mark.parametrize("rule", RULES)
def test_02_an_older_chunk_takes_nothing_newer_away(rule):
    """LeRobot async queue: with 20..35 queued, an older chunk 10..25 left only 20..25."""
    queue, gate = make(rule)
    assert offer(queue, gate, chunk(19, 16, sequence=2), 20) is None
    assert offer(queue, gate, chunk(9, 16, sequence=1, value=0.1), 20) is Reject.OLDER
    assert rows(queue, 20, 35) == pytest.approx(np.arange(20, 36) * 1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_03_a_chunk_that_begins_later_makes_no_jump(rule):
    """LeRobot async queue: with 20..27 queued, a chunk 24..39 was executed from 24 at tick 20: a jump of four steps."""
    queue, gate = make(rule)
    assert offer(queue, gate, chunk(19, 8), 20) is None
    ahead = chunk(23, 16, sequence=2)
    assert gate.admit(ahead, 20, START_NS) is Reject.FUTURE_TICK  # by default nothing is planned from the future
    assert queue.insert(ahead, 20) is None  # where that is allowed, every action still belongs to its tick
    assert rows(queue, 20, 39) == pytest.approx(np.arange(20, 40) * 1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row, column", [(0, 0), (7, 3), (15, 7)])
def test_04_numbers_that_are_not_finite_are_refused(bad, row, column):
    """No gate at LeRobot, openpi client, GR00T: a NaN of the network went to the motors."""
    queue, gate = make()
    assert offer(queue, gate, chunk(19), 20) is None
    poisoned = chunk(20, sequence=2)
    poisoned.positions[row, column] = bad
    assert offer(queue, gate, poisoned, 21) is Reject.NOT_FINITE
    assert rows(queue, 20, 35) == pytest.approx(np.arange(20, 36) * 1e-3)


def test_04_a_denoiser_that_answers_nan_stops_the_robot_by_the_shield(make_edge):
    """As above, through policy and motor loop: the motion ends within the limits and every command is a number."""
    class Poisoned(Denoiser):
        poison = False

        def denoise(self, *arguments, **named):
            answer = super().denoise(*arguments, **named)
            answer[3, 2] = np.nan if self.poison else answer[3, 2]
            return answer

    denoiser = Poisoned()
    edge = make_edge(denoiser=denoiser).start()
    denoiser.poison = True
    edge.run(80)
    assert edge.state is State.HOLDING and np.isfinite(edge.commands).all()
    assert edge.refused_contexts()[NoChunk.NOT_FINITE.value] > 0


def test_05_a_slow_first_chunk_begins_with_its_first_action(make_edge):
    """lerobot#4223, #4454: the latency measured during warm-up (20 steps) skipped actions 0..19 of the first chunk,
    although none had been executed; the arm jumped."""
    edge = make_edge()
    edge.run(5)
    edge.say("touch the red cube")
    edge.run(20)
    edge.policy.turn = lambda: None  # the policy process is busy with its first chunk for 20 ticks
    edge.order("REARM")
    edge.run(3)
    base_tick = edge.tick - 1
    edge.run(20)
    assert edge.motor.shield.reason is Reason.WAITING_FIRST_CHUNK
    way = 0.01 * np.arange(1, 31).reshape(-1, 1) * (np.arange(8) == 0) / 30
    record = edge.memory.blank("chunk")
    fill_chunk(record, dataclasses.replace(chunk(base_tick, 30), observation_stamp_ns=edge.clock.monotonic_ns(),
                                           positions=LIMITS.ready + way))
    edge.memory.write("chunk", record)
    before = len(edge.commands)
    edge.run(31)
    followed = np.array(edge.commands[before:])[:, 0] - LIMITS.ready[0]
    assert 0.0 < followed[0] <= way[0, 0] * 1.01, "the first command is the first action, not action 20"
    assert np.abs(np.diff(followed)).max() <= way[0, 0] * 1.5, "no step is skipped"
    assert followed.max() == pytest.approx(0.01, abs=1e-3), "all thirty actions are executed"


def test_06_a_delay_longer_than_the_chunk_keeps_the_queue():
    """LeRobot RTC queue: with chunks of 50, a delay of 60 steps emptied the queue."""
    queue, gate = make()
    assert offer(queue, gate, chunk(99, 50), 100) is None
    late = chunk(48, 50, sequence=2)
    assert offer(queue, gate, late, 109) in (Reject.OLDER, Reject.ALL_PAST)
    assert queue.insert(late, 109) is Reject.ALL_PAST
    assert rows(queue, 109, 149) == pytest.approx(np.arange(109, 150) * 1e-3)


# ------------------------------------------------------------------ width


SIX = JointLimits(tuple(f"joint{i}" for i in range(6)), np.full(6, -2.0), np.full(6, 2.0), np.full(6, 1.0),
                  np.full(6, 5.0), np.full(6, 500.0), np.zeros(6), np.full(6, 0.05))


@pytest.mark.parametrize("width", [1, 4, 5, 7])
def test_10_an_action_of_another_width_is_refused(width, tmp_path):
    """strands-labs/robots#1704: a 4-wide action for 6 actuators was filled up with zeros, and two joints drove to 0."""
    narrow = ActionChunk("a", 1, 99, START_NS, T, SIX.names, np.full((16, width), 0.5))
    assert ChunkGate(SIX, T).admit(narrow, 100, START_NS) is Reject.WIDTH
    assert ChunkGate(SIX, T).admit(dataclasses.replace(narrow, names=SIX.names[:width]), 100, START_NS) is Reject.WIDTH
    memory = EdgeMemory.create("width", 6, tmp_path)
    with pytest.raises(ValueError, match=f"chunk of 16 x {width} .* does not fit"):
        fill_chunk(memory.blank("chunk"), narrow)
    memory.file.unlink()
    memory.close()


@pytest.mark.parametrize("shape", [(16, 4), (16, 1), (1, 8), (8,), (15, 8)])
def test_10_a_denoiser_that_answers_another_shape_makes_no_chunk(make_edge, shape):
    """As above, one stage earlier: numpy would spread a single column (or row) over all joints without a word."""
    class Misshapen(Denoiser):
        def denoise(self, *arguments, **named):
            return np.full(shape, 0.01, np.float32)

    edge = make_edge(denoiser=Misshapen())
    edge.run(5)
    edge.say("touch the red cube")
    edge.run(20)
    edge.order("REARM")
    edge.run(150)
    assert not edge.chunks and edge.state is State.HOLDING
    assert edge.refused_contexts()["denoiser_shape"] > 0
    np.testing.assert_array_equal(edge.commands[-1], LIMITS.ready)


# ------------------------------------------------------------------ short chunks


def test_14_nothing_is_planned_beyond_the_end_of_a_short_chunk(tmp_path):
    """lerobot#4223: rows beyond the end were zeros of the normalised space, which decode to the data set's mean."""
    memory = EdgeMemory.create("short", 8, tmp_path)
    record, reader = memory.blank("chunk"), ChunkReader(PANDA)
    fill_chunk(record, chunk(0, 16, value=1.5))
    fill_chunk(record, chunk(16, 5))  # the same memory, with rows of the longer chunk still in it
    short = reader.chunk(record)
    assert short.positions.shape == (5, 8) and short.last_tick == 21
    queue = make_queue(EdgeConfig(), 8)
    assert queue.insert(short, 17) is None
    assert rows(queue, 17, 21) == pytest.approx(np.arange(17, 22) * 1e-3)
    position, velocity = np.full(8, 7.0), np.full(8, 7.0)
    assert not queue.sample(22, position, velocity) and (position == 7.0).all() and (velocity == 7.0).all()
    memory.file.unlink()
    memory.close()


def test_14_after_the_last_action_the_arm_stops_where_it_is(make_edge):
    """As above, on the stream as sent: the mean of the training data (or zero) is far from the pose, the stop is not."""
    edge = make_edge().start()
    edge.run(40)
    edge.planner.set_instruction("", edge.clock.monotonic_ns())  # no more chunks: the queue runs out
    last = edge.commands[-1]
    edge.run(100)
    stream = np.array(edge.commands[-100:])
    assert edge.state is State.HOLDING
    planned = np.array(edge.chunks[-1].positions).reshape(-1, 8)
    reach = np.abs(planned - last).max(axis=0) + 0.01  # the rest of the last chunk, and the stop after it
    assert (np.abs(stream - last) <= reach).all()
    speeds = np.diff(stream, axis=0)[16:]
    assert (np.abs(speeds[1:]) <= np.abs(speeds[:-1]) + 1e-4).all(), "slower and slower"
