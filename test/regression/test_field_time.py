"""Clocks, stamps and late replies: faults of other runtimes, each by its right behaviour."""

import numpy as np
import pytest
from field_rig import LIMITS, NS, OTHER_TASK, T_NS, TASK, Cloud, chunk

from vla_common import wire
from vla_edge.core.chunk import REJECTS, Reject
from vla_edge.core.context_mailbox import ContextReject
from vla_edge.core.records import fill_chunk
from vla_edge.core.shield import Reason, State

SKEWS_S = [-5.0, 5.0, -990.0, 1.7e9]


def stream_of(edge):
    """Everything that the robot and an operator see, stamps included; not the random name of the session."""
    return ([(c.sequence, c.base_tick, c.observation_stamp_ns, c.positions.tobytes()) for c in edge.chunks],
            np.array(edge.commands).tobytes(), edge.refused_contexts(), edge.refused_messages())


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_07_clocks_of_two_machines_are_never_compared(make_edge, skew_s):
    """lerobot#2458: a one-way latency of -44 ms from unsynchronised clocks; chunks were cut or refused by it. Here five
    seconds ahead or behind, and a machine that has just booted, give the same motion to the last bit."""
    echoes = []

    def run(start_ns):
        edge = make_edge(cloud=Cloud(start_ns))
        answer = edge.upload

        def upload(observation):
            contexts = answer(observation)
            echoes.extend((wire.decode("Observation", observation), wire.decode("ContextTokens", c)) for c in contexts)
            return contexts

        edge.upload = upload
        return stream_of(edge.start().run(150))

    here = 1000 * NS  # the robot's clock at the start of the rig
    same, skewed = run(here), run(here + round(skew_s * NS))
    assert len(same[0]) > 20 and same == skewed
    assert len(echoes) > 20
    for observation, context in echoes:
        assert context.header.stamp == observation.header.stamp
        assert (context.session, context.sequence) == (observation.session, observation.sequence)


# ------------------------------------------------------------------ late replies


def held_back(edge):
    """From now on the cloud's answers are kept in the list returned."""
    kept, answer = [], edge.cloud.answer
    edge.upload = lambda observation: kept.extend(answer(observation)) or []
    return kept


def test_12_a_reply_to_the_former_instruction_is_not_followed(make_edge):
    """Request and reply without a token (openpi client, GR00T server after a timeout): the late reply to one request was
    taken for the answer to the next."""
    edge = make_edge().start(TASK)
    kept = held_back(edge)
    edge.run(10)
    edge.say(OTHER_TASK)
    made = len(edge.chunks)
    for late in kept:
        edge.context(late)
    edge.run(3)
    assert kept and edge.refused_contexts() == {ContextReject.INSTRUCTION_HASH.value: len(kept)}
    edge.upload = edge.cloud.answer
    edge.run(30)
    newer = {wire.stamp_ns(o.header) for o in edge.observations if o.instruction == OTHER_TASK}
    # Until the first context of the new instruction the robot stands, with the stamp of its own tick.
    stamps = {c.observation_stamp_ns for c in edge.chunks[made:]}
    assert stamps & newer
    assert not stamps & {wire.stamp_ns(o.header) for o in edge.observations if o.instruction == TASK}


def test_12_a_reply_to_a_former_session_is_not_followed(make_edge):
    """As above, when the robot's process was restarted while the cloud computed."""
    edge = make_edge().start()
    kept = held_back(edge)
    edge.run(10)
    edge.io = edge.new_io()
    edge.say(TASK)
    edge.run(2)
    for late in kept:
        edge.context(late)
    edge.run(2)
    assert kept and edge.refused_contexts()[ContextReject.SESSION.value] == len(kept)


def test_12_replies_out_of_order_never_go_back(make_edge):
    """As above, within a session: of two replies that change places on the way, the older one is refused."""
    edge = make_edge().start()
    kept = held_back(edge)
    edge.run(20)
    assert len(kept) == 2
    for late in reversed(kept):
        edge.context(late)
    edge.run(10)
    assert edge.refused_contexts()[ContextReject.OUT_OF_ORDER.value] == 1
    newest = wire.stamp_ns(wire.decode("ContextTokens", kept[1]).header)
    assert edge.chunks[-1].observation_stamp_ns == newest
    edge.context(kept[1])  # nor is one taken twice
    edge.run(2)
    assert edge.refused_contexts()[ContextReject.OUT_OF_ORDER.value] == 2


def test_12_the_cloud_answers_the_newest_observation_only(make_edge):
    """As above, on the cloud's side: an observation that arrives after a newer one is not answered."""
    edge = make_edge()
    held = []
    edge.upload = lambda observation: held.append(observation) or []
    edge.run(5)
    edge.say(TASK)
    edge.run(40)
    first, second = held[:2]
    assert len(edge.cloud.answer(second)) == 1
    edge.cloud.clock.advance_ns(NS)
    assert edge.cloud.answer(first) == []


# ------------------------------------------------------------------ stamps from the future, time that stands still


def brakes_and_holds(edge, ticks=150):
    """Run on; the arm must come to rest for good, with a command in every tick."""
    before = len(edge.commands)
    edge.run(ticks)
    assert len(edge.commands) - before == ticks and (np.diff(edge.stamps_ns[before - 1:]) == T_NS).all()
    assert edge.state is State.HOLDING
    assert (np.diff(np.array(edge.commands[-20:]), axis=0) == 0.0).all()


def test_19_chunks_stamped_in_the_future_do_not_keep_a_joint_moving(make_edge):
    """moveit2#772: the age of a command was told by its sender's stamp, so one from the future never grew old and the
    arm moved on and on."""
    edge = make_edge().start()
    edge.policy.turn = lambda: None
    record, ring = edge.memory.blank("chunk"), edge.memory
    for k in range(30):
        rows = edge.commands[-1] + 0.002 * np.arange(1, 17).reshape(-1, 1) * (np.arange(8) < 7)
        made = chunk(edge.tick - 1, sequence=10_000 + k, positions=rows,
                     observation_stamp_ns=edge.clock.monotonic_ns() + 10 * NS)
        fill_chunk(record, made)
        ring.write("chunk", record)
        edge.step()
    assert edge.state in (State.BRAKING, State.HOLDING)
    rejects = edge.memory.read("motor")[1]["rejects"]
    assert rejects[REJECTS.index(Reject.FUTURE_STAMP)] > 10
    brakes_and_holds(edge)
    assert edge.motor.shield.reason is Reason.QUEUE_EMPTY


def test_19_contexts_stamped_in_the_future_are_no_plans(make_edge):
    """As above, one stage earlier; and such a context does not shut out the good ones that follow."""
    edge = make_edge().start()
    answer = edge.cloud.answer

    def shifted(observation):
        message = wire.decode("Observation", observation)
        message.header.stamp = wire.make_header(wire.stamp_ns(message.header) + 10 * NS).stamp
        return answer(wire.encode(message))

    edge.upload = shifted
    brakes_and_holds(edge)
    assert edge.refused_contexts()[ContextReject.FUTURE_STAMP.value] >= 10
    edge.upload = edge.cloud.answer
    edge.run(40)
    edge.order("REARM")
    edge.run(20)
    assert edge.state is State.NOMINAL


def test_19_a_joint_state_stamped_in_the_future_rearms_nothing(make_edge):
    """As above, for measurements: one from the future is no fresher than one from the past."""
    edge = make_edge().start()
    edge.order("ESTOP")
    edge.run(60)
    assert edge.state is State.HOLDING
    edge.robot_stamp = lambda now_ns: now_ns + 10 * NS
    edge.run(20)
    edge.order("REARM")
    edge.run(20)
    assert edge.state is State.HOLDING
    assert edge.refused_messages()["joint_states_future_stamp"] > 0


@pytest.mark.parametrize("sim_time", ["paused", "slower", "from zero"])
def test_20_the_watchdog_does_not_live_on_the_simulators_time(make_edge, sim_time):
    """tinynav#238: a watchdog on ROS time (use_sim_time) stood still with the paused simulator while the robot moved."""
    edge = make_edge().start()
    since_ns = edge.clock.monotonic_ns()
    stamps = {"paused": lambda now_ns: since_ns, "slower": lambda now_ns: since_ns + (now_ns - since_ns) // 4,
              "from zero": lambda now_ns: now_ns - since_ns}
    edge.robot_stamp = stamps[sim_time]
    brakes_and_holds(edge, 200)
    refused = edge.refused_messages()
    assert refused["joint_states_stale"] > 0 and refused["image_stale"] > 0
    edge.order("REARM")
    edge.run(20)
    assert edge.state is State.HOLDING, "a pose from a paused simulator re-arms nothing"
    assert np.abs(edge.commands[-1] - LIMITS.ready).max() < 1.0
