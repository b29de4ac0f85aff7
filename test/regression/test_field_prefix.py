"""Prefixes of chunks that are generated to agree with what is committed: faults of other runtimes by their right
behaviour."""

import numpy as np
import pytest
from field_rig import LIMITS, NS, START_NS, T_NS, Denoiser, T

from vla_common.wire import instruction_hash
from vla_edge.config import EnsembleConfig
from vla_edge.core.context_mailbox import Context, ContextMailbox, MailboxConfig
from vla_edge.core.planner import MotorView, Planner, PlannerConfig
from vla_edge.core.shield import State

TASK, H = "touch the red cube", 16


class WithPrefix(Denoiser):
    """Takes a prefix and honours it where its weight is 1; the rest is its own, so that a wrong prefix shows as a step.

    Attributes:
        seen: (tick's commanded pose, prefix) per chunk.
    """

    supports_prefix = True

    def __init__(self):
        self.seen = []

    def denoise(self, handle, proprio, age_s, gap_s, noise, prefix=None):
        self.seen.append((proprio[:8].copy(), prefix))
        own = super().denoise(handle, proprio, age_s, gap_s, noise)
        if prefix is None:
            return own
        weights = prefix.weights.reshape(-1, 1)
        return np.where(weights > 0.0, weights * prefix.actions + (1.0 - weights) * own, own).astype(np.float32)


def planner_of(denoiser, **changes):
    mailbox = ContextMailbox(b"m" * 32, MailboxConfig((3, 8)))
    made = Planner("p", LIMITS, denoiser, mailbox, PlannerConfig(T, H, prefix_ticks=3, **changes))
    made.set_instruction(TASK, 1000 * NS)
    context = Context("s", 1, 1000 * NS, b"m" * 32, instruction_hash(TASK).tobytes(), np.ones((3, 8), np.float32))
    assert made.offer(context, 1000 * NS) is None
    return made


def view(tick, position, plan):
    return MotorView(tick, 1000 * NS, position, np.zeros(8), np.zeros(8), State.NOMINAL, plan)


@pytest.mark.parametrize("moved_rad", [0.0, 0.004, -0.3])
def test_13_deltas_of_a_prefix_are_made_anew_for_the_pose_of_the_new_chunk(moved_rad):
    """real-time-chunking-kinetix#4: deltas of the former chunk were handed to the next one as they were, although they
    refer to another pose; the arm stepped by its motion in between, at every seam."""
    denoiser = WithPrefix()
    planner = planner_of(denoiser)
    committed = LIMITS.ready + 0.001 * np.arange(1, 13).reshape(-1, 1)  # absolute rows of ticks 101 ..
    position = LIMITS.ready + moved_rad
    made = planner.plan(view(100, position, committed), 0.0, 1000 * NS)
    prefix = denoiser.seen[-1][1]
    np.testing.assert_allclose(position + prefix.actions[:12], committed, atol=1e-6)
    assert (prefix.weights[:3] == 1.0).all() and (prefix.weights[12:] == 0.0).all()
    np.testing.assert_array_equal(made.positions[:3], committed[:3])  # what will be executed anyway, to the last bit
    assert made.base_tick == 100


def test_13_along_a_motion_every_seam_is_continuous(make_edge):
    """As above, through the whole edge while the arm moves: each chunk continues the plan in force, and rows belong to
    their ticks (lerobot#3402: a prefix that was shifted by five steps)."""
    denoiser = WithPrefix()
    edge = make_edge(denoiser=denoiser, ensemble=EnsembleConfig(rule="prefix", prefix_ticks=3)).start()
    edge.run(150)
    chunks = [np.array(c.positions).reshape(c.horizon, 8) for c in edge.chunks]
    bases = [c.base_tick for c in edge.chunks]
    assert len(chunks) > 20 and np.abs(edge.commands[-1] - edge.commands[0]).max() > 0.03, "it has moved"
    compared = 0
    for k in range(1, len(chunks)):
        shift = bases[k] - bases[k - 1]
        if 0 < shift <= H - 3:
            np.testing.assert_array_equal(chunks[k][:3], chunks[k - 1][shift:shift + 3])
            compared += 1
    assert compared > 15
    for _, prefix in denoiser.seen[3:]:
        if prefix is not None:
            assert np.abs(prefix.actions).max() < 0.1, "deltas, not positions"
            assert prefix.weights[0] == 1.0
    stream = np.array(edge.commands)
    assert (np.abs(np.diff(stream, 2, axis=0)) / T**2 <= LIMITS.acceleration * (1 + 1e-6)).all()


def test_13_rows_of_a_short_prefix_that_are_not_planned_have_no_say():
    """lerobot#4454: a prefix filled up with zeros pulled the chunk towards the mean of the training data."""
    short, none = WithPrefix(), WithPrefix()
    plan = LIMITS.ready + 0.001 * np.arange(1, 5).reshape(-1, 1)
    made = planner_of(short).plan(view(100, LIMITS.ready, plan), 0.0, 1000 * NS)
    free = planner_of(none).plan(view(100, LIMITS.ready, plan[:0]), 0.0, 1000 * NS)
    prefix = short.seen[-1][1]
    assert none.seen[-1][1] is None
    assert (prefix.weights[4:] == 0.0).all() and (np.diff(prefix.weights) <= 0.0).all()
    np.testing.assert_array_equal(made.positions[4:], free.positions[4:])


def test_13_without_a_prefix_deltas_refer_to_the_command_of_their_base_tick(make_edge):
    """As kinetix#4, for the default rules: a chunk's rows are its deltas on the command of its own base tick, and the queue
    holds absolute rows, so nothing is ever re-based."""
    class Recording(Denoiser):
        answers = []

        def denoise(self, *arguments):
            self.answers.append(super().denoise(*arguments))
            return self.answers[-1]

    denoiser = Recording()
    edge = make_edge(denoiser=denoiser).start().run(100)
    assert len(edge.chunks) == len(denoiser.answers) > 20
    command_at = dict(zip(edge.stamps_ns, edge.commands, strict=True))
    for made, deltas in zip(edge.chunks, denoiser.answers, strict=True):
        base = command_at[START_NS + made.base_tick * T_NS]
        np.testing.assert_array_equal(np.array(made.positions).reshape(-1, 8), base + deltas.astype(np.float64))
