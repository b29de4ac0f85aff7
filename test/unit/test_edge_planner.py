"""The planner: whose chunk, from where, or why none."""

from pathlib import Path

import numpy as np
import pytest

from vla_common.wire import instruction_hash
from vla_edge.config import load_limits
from vla_edge.core.context_mailbox import Context, ContextMailbox, MailboxConfig
from vla_edge.core.denoiser import DenoiserError
from vla_edge.core.local_motion import PointToPoint, is_home_phrase, stand
from vla_edge.core.planner import MotorView, NoChunk, Planner, PlannerConfig, Skill
from vla_edge.core.prefix import PlanningDelay, make_prefix, soft_mask
from vla_edge.core.shield import State

T, NS, H = 0.01, 1_000_000_000, 16
LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)
TASK = "Touch the red  cube"
NOW_NS = 1000 * NS
MODEL = b"m" * 32


class FakeDenoiser:
    engine = "fake"

    def __init__(self, supports_prefix=False):
        self.supports_prefix, self.prefixes = supports_prefix, []
        self.encoded, self.calls, self.answer = [], [], np.full((H, 8), 0.01, np.float32)

    def encode_context(self, now, previous):
        self.encoded.append((now, previous))
        return len(self.encoded)

    def denoise(self, handle, proprio, age_s, gap_s, noise, prefix=None):
        self.calls.append((handle, proprio, age_s, gap_s, noise))
        self.prefixes.append(prefix)
        return self.answer


def context(stamp_ns, instruction=TASK, fill=0.0):
    return Context("s", stamp_ns, stamp_ns, MODEL, instruction_hash(instruction).tobytes(),
                   np.full((4, 8), fill, np.float32))


def motor(tick=100, stamp_ns=NOW_NS, position=None, state=State.NOMINAL, velocity=None, plan=None):
    return MotorView(tick, stamp_ns, LIMITS.ready if position is None else position,
                     np.zeros(8) if velocity is None else velocity, np.zeros(8), state, plan)


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


# ------------------------------------------------------------------ prefix

PLAN = LIMITS.ready + np.linspace(0.01, 0.12, 12)[:, None]  # what the queue holds: 12 rows


def prefix_planner(denoiser, prefix_ticks=3):
    planner = Planner("p", LIMITS, denoiser, ContextMailbox(MODEL, MailboxConfig((4, 8))),
                      PlannerConfig(T, H, prefix_ticks=prefix_ticks))
    planner.set_instruction(TASK, NOW_NS)
    planner.offer(context(NOW_NS), NOW_NS)
    return planner


def test_a_prefix_for_a_model_without_one_is_refused_at_start_with_the_remedy(denoiser):
    with pytest.raises(DenoiserError, match="ensemble.rule.*speed_ramp.*prefix inputs"):
        prefix_planner(denoiser)


def test_other_rules_send_no_prefix():
    denoiser = FakeDenoiser(supports_prefix=True)
    prefix_planner(denoiser, prefix_ticks=None).plan(motor(plan=PLAN), 0.0, NOW_NS)
    assert denoiser.prefixes == [None]


@pytest.mark.parametrize("plan", [None, PLAN[:0]])
def test_nothing_is_committed_where_nothing_is_planned(plan):
    denoiser = FakeDenoiser(supports_prefix=True)
    chunk = prefix_planner(denoiser).plan(motor(plan=plan), 0.0, NOW_NS)
    assert denoiser.prefixes == [None]
    np.testing.assert_allclose(chunk.positions, LIMITS.ready + np.full((H, 8), 0.01), atol=1e-9)


def test_committed_rows_are_frozen_and_stay_what_they_were_to_the_bit():
    denoiser = FakeDenoiser(supports_prefix=True)
    planner = prefix_planner(denoiser)
    planner.plan(motor(), 0.0, NOW_NS)  # makes this instruction's plan the one in force
    command = PLAN[0] - 0.003  # limits hold the robot behind its plan
    chunk = planner.plan(motor(tick=101, position=command, plan=PLAN), 0.0, NOW_NS)
    prefix = denoiser.prefixes[-1]
    assert prefix.actions.dtype == prefix.weights.dtype == np.float32
    assert prefix.actions.shape == (H, 8) and prefix.weights.shape == (H,)
    np.testing.assert_allclose(prefix.actions[:12], PLAN - command, atol=1e-8)
    assert (prefix.weights[:3] == 1.0).all() and (prefix.weights[12:] == 0.0).all()
    assert (np.diff(prefix.weights[2:13]) < 0.0).all() and (prefix.weights[3:12] > 0.0).all()
    assert (chunk.positions[:3] == PLAN[:3]).all()
    np.testing.assert_allclose(chunk.positions[3:], command + np.full((H - 3, 8), 0.01), atol=1e-9)


def test_a_prefix_is_anchored_anew_on_every_command():
    """real-time-chunking-kinetix#4: deltas of an older chunk refer to another pose."""
    denoiser = FakeDenoiser(supports_prefix=True)
    planner = prefix_planner(denoiser)
    for shift in (0.0, 0.05, -0.05):
        planner.plan(motor(position=LIMITS.ready + shift, plan=PLAN), 0.0, NOW_NS)
        prefix = denoiser.prefixes[-1]
        np.testing.assert_allclose(LIMITS.ready + shift + prefix.actions[:12].astype(float), PLAN, atol=1e-8)


def test_a_measured_delay_freezes_more_rows_until_it_is_forgotten():
    denoiser = FakeDenoiser(supports_prefix=True)
    planner = prefix_planner(denoiser, prefix_ticks=1)

    def frozen(took_s):
        view = motor(plan=PLAN)
        planner.plan(view, 0.0, NOW_NS)
        planner.finished(view, NOW_NS + round(took_s * NS))
        return int((denoiser.prefixes[-1].weights == 1.0).sum())

    assert [frozen(took_s) for took_s in (0.004, 0.047, 0.004)] == [1, 1, 5]
    assert [frozen(0.004) for _ in range(20)][-2:] == [5, 1]


def test_more_delay_than_plan_freezes_all_of_it():
    denoiser = FakeDenoiser(supports_prefix=True)
    planner = prefix_planner(denoiser)
    planner.finished(motor(), NOW_NS + NS)
    chunk = planner.plan(motor(plan=PLAN), 0.0, NOW_NS)
    assert denoiser.prefixes[-1].weights.tolist() == [1.0] * 12 + [0.0] * 4
    assert (chunk.positions[:12] == PLAN).all()
    long = np.tile(PLAN, (4, 1))
    chunk = planner.plan(motor(plan=long), 0.0, NOW_NS)
    assert denoiser.prefixes[-1].weights.tolist() == [1.0] * H and (chunk.positions == long[:H]).all()


@pytest.mark.parametrize("before", ["home", "another task", "a stand"])
def test_the_plan_of_another_goal_is_followed_as_far_as_it_is_committed_and_does_not_guide(before):
    denoiser = FakeDenoiser(supports_prefix=True)
    planner = prefix_planner(denoiser)
    other = "touch the blue cube"
    if before == "home":
        planner.set_instruction("go home", NOW_NS)
        planner.plan(motor(plan=PLAN), 0.0, NOW_NS)
    elif before == "another task":
        planner.plan(motor(plan=PLAN), 0.0, NOW_NS)
    planner.set_instruction(other, NOW_NS)
    if before == "a stand":
        planner.plan(motor(plan=PLAN), 0.0, NOW_NS)
        assert not denoiser.prefixes
    planner.offer(context(NOW_NS, instruction=other), NOW_NS)
    planner.plan(motor(plan=PLAN), 0.0, NOW_NS)
    assert denoiser.prefixes[-1].weights.tolist() == [1.0] * 3 + [0.0] * 13
    planner.plan(motor(plan=PLAN), 0.0, NOW_NS)
    assert denoiser.prefixes[-1].weights[3] > 0.3


def test_the_soft_mask_is_that_of_the_paper():
    weights = soft_mask(16, 4, 11).astype(float)
    c = np.array([(11 - k) / 8 for k in range(4, 11)])
    np.testing.assert_allclose(weights[4:11], c * (np.exp(c) - 1) / (np.e - 1), rtol=1e-6)
    assert (weights[:4] == 1.0).all() and (weights[11:] == 0.0).all()
    assert soft_mask(8, 3, 3).tolist() == [1.0] * 3 + [0.0] * 5
    assert soft_mask(8, 5, 3).tolist() == [1.0] * 3 + [0.0] * 5
    for frozen in range(10):
        for planned in range(9):
            weights = soft_mask(8, frozen, planned)
            assert ((weights >= 0) & (weights <= 1)).all() and (np.diff(weights) <= 0).all()


def test_a_prefix_keeps_small_steps_of_a_far_pose():
    """float32 of the pose itself would round to 2e-7 rad, of the difference to 1e-10."""
    position = np.full(8, 2.5)
    plan = position + 1e-4 * np.arange(1, 5)[:, None]
    prefix = make_prefix(plan, position, H, 2)
    np.testing.assert_allclose(position + prefix.actions[:4].astype(float), plan, atol=1e-10)
    assert make_prefix(plan[:0], position, H, 2) is None


def test_the_planning_delay_counts_whole_ticks():
    delay = PlanningDelay(T, 2)
    assert delay.ticks == 2
    for took_ns, ticks in ((9_999_999, 2), (10_000_000, 2), (20_000_000, 3), (-5, 3)):
        delay.record(NOW_NS, NOW_NS + took_ns)
        assert delay.ticks == ticks


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
