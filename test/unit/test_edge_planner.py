"""The planner: whose chunk, from where, or why none."""

from pathlib import Path

import numpy as np
import pytest

from vla_common.wire import instruction_hash
from vla_edge.config import load_limits
from vla_edge.core.context_mailbox import Context, ContextMailbox, MailboxConfig
from vla_edge.core.local_motion import PointToPoint, is_home_phrase, stand
from vla_edge.core.planner import MotorView, NoChunk, Planner, PlannerConfig, Skill
from vla_edge.core.shield import State

T, NS, H = 0.01, 1_000_000_000, 16
LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)
TASK = "Touch the red  cube"
NOW_NS = 1000 * NS
MODEL = b"m" * 32


class FakeDenoiser:
    engine = "fake"

    def __init__(self):
        self.encoded, self.calls, self.answer = [], [], np.full((H, 8), 0.01, np.float32)

    def encode_context(self, now, previous):
        self.encoded.append((now, previous))
        return len(self.encoded)

    def denoise(self, handle, proprio, age_s, gap_s, noise, prefix=None):
        self.calls.append((handle, proprio, age_s, gap_s, noise))
        return self.answer


def context(stamp_ns, instruction=TASK, fill=0.0):
    return Context("s", stamp_ns, stamp_ns, MODEL, instruction_hash(instruction).tobytes(),
                   np.full((4, 8), fill, np.float32))


def motor(tick=100, stamp_ns=NOW_NS, position=None, state=State.NOMINAL, velocity=None):
    return MotorView(tick, stamp_ns, LIMITS.ready if position is None else position,
                     np.zeros(8) if velocity is None else velocity, np.zeros(8), state)


@pytest.fixture
def denoiser():
    return FakeDenoiser()


@pytest.fixture
def planner(denoiser):
    return Planner("p", LIMITS, denoiser, ContextMailbox(MODEL, MailboxConfig((4, 8))), PlannerConfig(T, H))


def test_without_an_instruction_there_is_no_chunk(planner):
    assert planner.plan(motor(), 0.0, NOW_NS) is None and planner.why_not is NoChunk.NO_INSTRUCTION
    assert planner.skill is Skill.NONE and not planner.ready(NOW_NS)
    planner.set_instruction(TASK, NOW_NS)
    planner.set_instruction("  ", NOW_NS)
    assert planner.plan(motor(), 0.0, NOW_NS) is None and planner.skill is Skill.NONE


def test_a_chunk_of_the_policy_starts_from_the_newest_command(planner, denoiser):
    planner.set_instruction(TASK, NOW_NS)
    assert planner.offer(context(NOW_NS - NS // 10), NOW_NS) is None
    position = LIMITS.ready + 0.1
    chunk = planner.plan(motor(tick=77, position=position), 0.25, NOW_NS)
    assert (chunk.base_tick, chunk.sequence, chunk.session, chunk.names) == (77, 1, "p", LIMITS.names)
    assert chunk.observation_stamp_ns == NOW_NS - NS // 10 and chunk.period_s == T
    np.testing.assert_allclose(chunk.positions, np.tile(position + 0.01, (H, 1)), atol=1e-9)
    handle, proprio, age_s, gap_s, noise = denoiser.calls[0]
    np.testing.assert_allclose(proprio, [*position, 0.25], rtol=1e-6)
    assert (handle, age_s, gap_s) == (1, pytest.approx(0.1), 0.5)
    assert noise.shape == (H, 8) and (noise == 0).all() and proprio.dtype == noise.dtype == np.float32


def test_age_counts_to_the_instant_of_the_base_tick(planner, denoiser):
    planner.set_instruction(TASK, NOW_NS)
    planner.offer(context(NOW_NS - NS // 10), NOW_NS)
    planner.plan(motor(stamp_ns=NOW_NS - 8_000_000), 0.0, NOW_NS)
    assert denoiser.calls[0][2] == pytest.approx(0.092)


def test_a_context_is_encoded_once(planner, denoiser):
    planner.set_instruction(TASK, NOW_NS)
    planner.offer(context(NOW_NS - NS // 10, fill=1.0), NOW_NS)
    for _ in range(3):
        planner.plan(motor(), 0.0, NOW_NS)
    assert len(denoiser.encoded) == 1
    planner.offer(context(NOW_NS, fill=2.0), NOW_NS)
    planner.plan(motor(), 0.0, NOW_NS)
    assert len(denoiser.encoded) == 2 and denoiser.encoded[1][0][0, 0] == 2.0


@pytest.mark.parametrize("state", [State.HOLDING, State.BRAKING])
def test_a_stopped_robot_gets_no_chunk_but_readiness_is_told(planner, denoiser, state):
    planner.set_instruction(TASK, NOW_NS)
    assert not planner.ready(NOW_NS)
    planner.offer(context(NOW_NS), NOW_NS)
    assert planner.plan(motor(state=state), 0.0, NOW_NS) is None and planner.why_not is None
    assert planner.ready(NOW_NS) and not planner.ready(NOW_NS + NS) and not denoiser.calls
    planner.set_instruction("go home", NOW_NS)
    assert planner.ready(NOW_NS)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_not_finite_is_no_chunk(planner, denoiser, bad):
    planner.set_instruction(TASK, NOW_NS)
    planner.offer(context(NOW_NS), NOW_NS)
    denoiser.answer = denoiser.answer.copy()
    denoiser.answer[7, 3] = bad
    assert planner.plan(motor(), 0.0, NOW_NS) is None and planner.why_not is NoChunk.NOT_FINITE


def test_without_a_measurement_the_policy_is_not_asked(planner, denoiser):
    planner.set_instruction(TASK, NOW_NS)
    planner.offer(context(NOW_NS), NOW_NS)
    assert planner.plan(motor(), None, NOW_NS) is None and planner.why_not is NoChunk.NO_MEASUREMENT
    planner.set_instruction("home", NOW_NS)
    assert planner.plan(motor(), None, NOW_NS) is not None


def test_an_outage_makes_no_chunks_once_the_context_is_too_old(planner):
    planner.set_instruction(TASK, NOW_NS)
    planner.offer(context(NOW_NS), NOW_NS)
    for age_s, made in ((0.3, True), (0.59, True), (0.61, False), (1.0, False)):
        now_ns = NOW_NS + round(age_s * NS)
        assert (planner.plan(motor(stamp_ns=now_ns), 0.0, now_ns) is not None) == made
    assert planner.why_not is NoChunk.NO_CONTEXT


def test_a_new_instruction_is_waited_for_standing_but_not_for_ever(planner, denoiser):
    planner.set_instruction("go home", NOW_NS)
    planner.set_instruction(TASK, NOW_NS)
    velocity = np.full(8, 0.3)
    chunk = planner.plan(motor(velocity=velocity), 0.0, NOW_NS + NS)
    assert not denoiser.calls and (np.diff(chunk.positions, axis=0) >= 0).all()
    np.testing.assert_array_equal(chunk.positions[-1], chunk.positions[-2])
    assert planner.plan(motor(stamp_ns=NOW_NS + 2 * NS), 0.0, NOW_NS + 2 * NS) is None
    assert planner.why_not is NoChunk.NO_CONTEXT


def test_contexts_of_the_former_instruction_are_not_followed(planner, denoiser):
    planner.set_instruction(TASK, NOW_NS)
    planner.offer(context(NOW_NS), NOW_NS)
    planner.set_instruction("touch the blue cube", NOW_NS)
    assert planner.offer(context(NOW_NS + 1), NOW_NS + 1) is not None
    planner.plan(motor(), 0.0, NOW_NS)
    assert not denoiser.calls


def test_the_same_instruction_in_other_letters_is_the_same(planner):
    planner.set_instruction(TASK, NOW_NS)
    planner.offer(context(NOW_NS), NOW_NS)
    planner.set_instruction("touch THE red cube", NOW_NS + NS)
    assert planner.ready(NOW_NS)


def go_home(planner, start, ticks):
    """Follow the chunks exactly, a new one every five ticks."""
    rows, position = [], start
    for k in range(0, ticks, 5):
        chunk = planner.plan(motor(tick=k, position=position, stamp_ns=NOW_NS + k * 10_000_000), 0.0, NOW_NS)
        rows += list(chunk.positions[:5])
        position = rows[-1]
    return np.array(rows)


def test_home_is_reached_smoothly_and_held(planner, denoiser):
    planner.set_instruction("Go  Home", NOW_NS)
    start = LIMITS.ready + np.array([0.8, -0.5, 0.3, 0.2, -0.4, 0.1, 0.6, 0.7])
    rows = go_home(planner, start, 400)
    np.testing.assert_allclose(rows[-1], LIMITS.ready, atol=1e-12)
    q = np.concatenate([[start] * 3, rows])
    for order, limit in ((1, LIMITS.velocity), (2, LIMITS.acceleration), (3, LIMITS.jerk)):
        assert (np.abs(np.diff(q, order, axis=0)) / T**order <= 0.51 * limit).all()
    assert not denoiser.calls and (np.diff(rows[:, 7]) <= 1e-12).all()  # the gripper opens on the way


def test_home_is_planned_anew_from_where_a_stop_ended(planner):
    planner.set_instruction("go home", NOW_NS)
    start = LIMITS.ready + 0.5 * (np.arange(8) < 7)
    planner.plan(motor(tick=0, position=start), 0.0, NOW_NS)
    planner.plan(motor(tick=50, position=start, state=State.HOLDING), 0.0, NOW_NS)
    chunk = planner.plan(motor(tick=500, position=start), 0.0, NOW_NS)
    assert np.abs(chunk.positions[0] - start).max() < 1e-3
    # A robot that was held back by its limits.
    chunk = planner.plan(motor(tick=800, position=start), 0.0, NOW_NS)
    assert np.abs(chunk.positions[0] - start).max() < 1e-3


def test_noise_is_reproducible(denoiser):
    def noise_of(seed):
        planner = Planner("p", LIMITS, denoiser, ContextMailbox(MODEL, MailboxConfig((4, 8))),
                          PlannerConfig(T, H, noise_scale=0.5, noise_seed=seed))
        planner.set_instruction(TASK, NOW_NS)
        planner.offer(context(NOW_NS), NOW_NS)
        planner.plan(motor(), 0.0, NOW_NS)
        return denoiser.calls[-1][4]

    assert (noise_of(1) == noise_of(1)).all() and (noise_of(1) != noise_of(2)).any()
    assert 0.3 < noise_of(1).std() < 0.7


# ------------------------------------------------------------------ motions


def test_point_to_point_takes_as_long_as_the_slowest_joint_needs():
    goal = LIMITS.ready.copy()
    goal[1] += 0.5
    motion = PointToPoint(LIMITS.ready, goal, LIMITS, 0.5)
    times = np.arange(0, motion.duration_s + 0.1, 0.001)
    rows = motion.at(times)
    assert (rows[0] == LIMITS.ready).all()
    np.testing.assert_allclose(rows[-1], goal, atol=1e-12)
    speed = np.abs(np.diff(rows[:, 1])).max() / 0.001 / LIMITS.velocity[1]
    acceleration = np.abs(np.diff(rows[:, 1], 2)).max() / 1e-6 / LIMITS.acceleration[1]
    assert max(speed, acceleration) == pytest.approx(0.5, rel=0.02)


def test_a_tiny_motion_is_not_instant():
    assert PointToPoint(LIMITS.ready, LIMITS.ready, LIMITS).duration_s == 0.2


def test_standing_is_the_stop_of_the_shield():
    rows = stand(LIMITS.ready, np.full(8, 0.5), np.zeros(8), LIMITS, T, 60)
    np.testing.assert_array_equal(rows[-1], rows[-2])
    assert ((rows[-1] - LIMITS.ready) > 0).all()
    still = stand(LIMITS.ready, np.zeros(8), np.zeros(8), LIMITS, T, 4)
    np.testing.assert_array_equal(still, np.tile(LIMITS.ready, (4, 1)))


@pytest.mark.parametrize("text, home", [("go home", True), ("home", True), ("ready", True), ("go home now", False)])
def test_home_phrases(text, home):
    assert is_home_phrase(text) is home
