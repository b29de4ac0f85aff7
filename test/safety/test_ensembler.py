"""Each merge rule row by row, against the formula it stands for and hand-worked numbers."""

import numpy as np
import pytest

from vla_edge.core.ensembler import (
    CAPACITY,
    ConstantAlpha,
    MinimumJerkRamp,
    Replace,
    SpeedRamp,
    TemporalEnsemble,
    make_rule,
)


def curve(x):
    """Minimum jerk from 0 to 1, by its definition: 30 x² (1 - x)² integrated."""
    return 10 * x**3 - 15 * x**4 + 6 * x**5 if 0 < x < 1 else float(x >= 1)


def merged(rule, old, new, tick=0):
    """``old`` rows merged with ``new`` ones; the inputs must stay, ``out`` must be overwritten in full."""
    new = np.array(new, float).reshape(len(new), -1)
    old = np.array(old, float).reshape(len(old), new.shape[1])
    kept = old.copy(), new.copy()
    out = np.full_like(new, np.nan)
    rule.merge(tick, old, new, out)
    np.testing.assert_array_equal(old, kept[0])
    np.testing.assert_array_equal(new, kept[1])
    return out


RULES = {"replace": Replace, "constant": lambda: ConstantAlpha(0.25), "ramp": lambda: MinimumJerkRamp(4),
         "speed ramp": lambda: SpeedRamp(4), "act": lambda: TemporalEnsemble(0.1, 4, 2)}


@pytest.mark.parametrize("name", RULES)
def test_without_an_overlap_the_new_chunk_is_the_plan(name):
    new = np.arange(10.0).reshape(5, 2)
    np.testing.assert_array_equal(merged(RULES[name](), [], new), new)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("overlap", [1, 2, 4, 6])
def test_beyond_the_overlap_the_new_chunk_is_the_plan(name, overlap):
    rng = np.random.default_rng(overlap)
    first, new = rng.normal(size=(overlap, 2)), rng.normal(size=(8, 2))
    rule = RULES[name]()
    old = merged(rule, [], first)
    np.testing.assert_array_equal(merged(rule, old, new)[overlap:], new[overlap:])


def test_replacing():
    assert merged(Replace(), [1, 2, 3], [7, 8, 9, 10]).ravel().tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("alpha, first", [(0.0, 8.0), (0.25, 7.0), (0.5, 6.0), (1.0, 4.0)])
def test_a_constant_weight_is_that_of_the_old_trajectory(alpha, first):
    out = merged(ConstantAlpha(alpha), [4, 4, 4], [8, 4, 0, 5])
    assert out.ravel().tolist() == [first, 4.0, 8.0 - first, 5.0]


@pytest.mark.parametrize("alpha", [-1e-9, 1.0 + 1e-9, 1.5, float("nan")])
def test_a_weight_is_between_0_and_1(alpha):
    with pytest.raises(ValueError) as error:
        ConstantAlpha(alpha)
    assert str(error.value) == f"ensemble alpha must be in 0 .. 1, got {alpha}"


# ------------------------------------------------------------------ ramps


@pytest.mark.parametrize("ticks", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 20])
def test_a_ramp_of_positions_row_by_row(ticks, rows):
    """Over ``ticks``, or over the overlap if that is shorter."""
    old, new = np.zeros((rows, 2)), np.tile([1.0, -2.0], (rows + 3, 1))
    out = merged(MinimumJerkRamp(ticks), old, new)
    for k in range(rows):
        share = curve(k / min(ticks, rows))
        np.testing.assert_allclose(out[k], [share, -2.0 * share], atol=1e-15)
    assert (out[0] == 0.0).all() and (out[min(ticks, rows):rows] == [1.0, -2.0]).all()


@pytest.mark.parametrize("ticks", [2, 3, 4, 6])
@pytest.mark.parametrize("rows", [4, 5, 7, 12, 30])
def test_a_ramp_of_speeds_row_by_row(ticks, rows):
    """The distance to the new trajectory grows by what is left of the old speed, then fades until the overlap ends."""
    rng = np.random.default_rng(rows)
    old, new = rng.normal(size=(rows, 2)), rng.normal(size=(rows + 2, 2))
    out = merged(SpeedRamp(ticks), old, new)
    ramp = min(ticks, rows // 2)
    distance = old[0] - new[0]
    for k in range(rows):
        if k:
            of_speed = (old[k] - new[k]) - (old[k - 1] - new[k - 1])
            distance = distance + (1 - curve(k / ramp)) * of_speed
        left = 1 - curve((k - ramp) / (rows - ramp))
        np.testing.assert_allclose(out[k], new[k] + left * distance, atol=1e-13)


@pytest.mark.parametrize("ticks, rows", [(6, 1), (6, 2), (6, 3), (1, 9)])
def test_a_ramp_of_speeds_needs_two_ticks_and_four_rows(ticks, rows):
    old, new = np.zeros((rows, 1)), np.ones((rows, 1))
    np.testing.assert_array_equal(merged(SpeedRamp(ticks), old, new), merged(MinimumJerkRamp(ticks), old, new))
    old, new = np.zeros((4, 1)), np.ones((4, 1))
    assert not (merged(SpeedRamp(2), old, new) == merged(MinimumJerkRamp(2), old, new)).all()


@pytest.mark.parametrize("rule", [MinimumJerkRamp, SpeedRamp])
def test_a_ramp_takes_at_least_a_tick_and_at_most_the_longest_overlap(rule):
    for ticks, capacity in ((0, 8), (-1, 8), (9, 8)):
        with pytest.raises(ValueError) as error:
            rule(ticks, capacity)
        assert str(error.value) == f"ramp must take 1 .. {capacity} ticks, got {ticks}"
    with pytest.raises(ValueError, match="1 .. 256 ticks, got 257"):
        rule(257)
    old, new = np.zeros((CAPACITY, 1)), np.ones((CAPACITY, 1))
    for made in (rule(8, 8), rule(1, 8), rule(256)):
        rows = 8 if made._weights[-1] is None or len(made._weights) <= 9 else CAPACITY
        out = merged(made, old[:rows], new[:rows])
        assert out[0] == 0.0 and np.isfinite(out).all()


# ------------------------------------------------------------------ temporal ensemble


def test_three_chunks_with_the_weights_of_the_paper():
    """exp(-ln 2 i): 1, 1/2, 1/4 from the oldest on; where fewer chunks speak, the oldest of those has rank 0."""
    rule = TemporalEnsemble(float(np.log(2)), 8, 1)
    plan = merged(rule, [], [7, 7, 7], 10)
    assert plan.ravel().tolist() == [7, 7, 7]
    plan = merged(rule, plan[1:], [1, 1, 1], 11)  # ticks 11 and 12 shared, 13 alone
    np.testing.assert_allclose(plan.ravel(), [(7 + 0.5) / 1.5, (7 + 0.5) / 1.5, 1])
    plan = merged(rule, plan[1:], [4, 4, 4], 12)
    np.testing.assert_allclose(plan.ravel(), [(7 + 0.5 + 1) / 1.75, (1 + 2) / 1.5, 4])


def test_only_the_last_chunks_are_kept():
    for chunks, mean in ((1, 8.0), (2, 6.0), (3, 14 / 3), (4, 15 / 4), (5, 15 / 4)):
        rule = TemporalEnsemble(0.0, chunks, 1)
        plan = merged(rule, [], [1.0])
        for value in (2.0, 4.0, 8.0):
            plan = merged(rule, plan, [value])
        assert plan[0, 0] == pytest.approx(mean), chunks


def test_a_ring_of_chunks_goes_round():
    rule = TemporalEnsemble(0.0, 3, 1)
    plan = merged(rule, [], [0.0] * 4, 0)
    for tick in range(1, 20):
        plan = merged(rule, plan[1:], [float(tick)] * 4, tick)
        newest = [tick, tick - 1, tick - 2][:min(tick + 1, 3)]
        assert plan[0, 0] == pytest.approx(np.mean(newest)) and plan[3, 0] == tick


def test_rows_that_a_shorter_chunk_cut_off_do_not_come_back():
    rule = TemporalEnsemble(0.0, 4, 1)
    plan = merged(rule, [], [0.0] * 6, 0)  # ticks 0 .. 5
    plan = merged(rule, plan[1:3], [1.0] * 2, 1)  # reaches only to 2
    plan = merged(rule, plan[1:], [2.0] * 4, 2)  # 2 .. 5 again: 3 .. 5 are new ground
    np.testing.assert_allclose(plan.ravel(), [1.0, 2.0, 2.0, 2.0])


def test_a_plan_that_ran_out_is_forgotten_and_so_is_one_that_was_reset():
    for forget in (lambda rule: None, lambda rule: rule.reset()):
        rule = TemporalEnsemble(0.0, 4, 1)
        merged(rule, [], [9.0] * 4, 0)
        forget(rule)
        plan = merged(rule, [], [1.0] * 4, 1)  # no overlap is given
        plan = merged(rule, plan, [3.0] * 4, 1)
        np.testing.assert_allclose(plan.ravel(), 2.0)
    rule = TemporalEnsemble(0.0, 4, 1)
    merged(rule, [], [9.0] * 4, 0)
    rule.reset()
    np.testing.assert_allclose(merged(rule, [[9.0]] * 4, [1.0] * 4, 0).ravel(), 1.0)  # nobody speaks but the newest


def test_a_full_ring_is_forgotten_too():
    """By a reset, and by a plan that ran out; otherwise chunks of a former plan would speak again."""
    rule = TemporalEnsemble(0.0, 2, 1)
    for _ in range(2):
        merged(rule, [[9.0]] * 4, [9.0] * 4, 0)
    rule.reset()
    np.testing.assert_allclose(merged(rule, [[9.0]] * 4, [1.0] * 4, 0).ravel(), 1.0)
    rule, plan = TemporalEnsemble(0.0, 3, 1), []
    for _ in range(3):
        plan = merged(rule, plan, [9.0] * 4, 0)
    plan = merged(rule, [], [1.0] * 4, 1)
    np.testing.assert_allclose(merged(rule, plan, [3.0] * 4, 1).ravel(), 2.0)


def test_a_chunk_speaks_only_from_its_first_tick_on():
    """The second begins ahead, at 4, the third at 2: ticks 2 and 3 are of the first and the third."""
    rule = TemporalEnsemble(0.0, 4, 1)
    plan = merged(rule, [], [0.0] * 10, 0)
    plan[4:] = merged(rule, plan[4:], [3.0] * 6, 4)
    np.testing.assert_allclose(merged(rule, plan[2:], [6.0] * 8, 2).ravel(), [3.0] * 2 + [3.0] * 6)
    np.testing.assert_allclose(merged(rule, plan[2:], [9.0] * 8, 2).ravel(), [5.0] * 2 + [4.5] * 6)


def test_chunks_that_start_ahead_count_from_their_first_tick():
    """The queue may merge a chunk that begins later than the next tick; its rows stay on their ticks."""
    rule = TemporalEnsemble(0.0, 4, 1)
    merged(rule, [], np.arange(10.0), 0)
    plan = merged(rule, np.arange(4.0, 10.0), [100.0] * 8, 4)
    np.testing.assert_allclose(plan.ravel(), [(100 + k) / 2 for k in range(4, 10)] + [100, 100])


def test_where_all_chunks_agree_the_plan_is_exactly_theirs():
    rule, row = TemporalEnsemble(0.37, 8, 1), [0.1, 0.2, 0.3]
    plan = merged(rule, [], row)
    for _ in range(20):
        plan = merged(rule, plan, row)
        assert plan.ravel().tolist() == row


def test_joints_of_an_ensemble_do_not_mix():
    rule = TemporalEnsemble(0.0, 2, 3)
    plan = merged(rule, [], [[0, 10, 20]] * 2)
    np.testing.assert_allclose(merged(rule, plan, [[2, 14, 26]] * 2), [[1, 12, 23]] * 2)


@pytest.mark.parametrize("decay, chunks, message", [
    (-10.001, 1, "act_decay must be in -10 .. 10, got -10.001"), (10.001, 1, "act_decay must be in -10 .. 10, got 10.001"),
    (float("nan"), 1, "act_decay must be in -10 .. 10, got nan"), (0.0, 0, "act_chunks must be 1 .. 64, got 0"),
    (0.0, 65, "act_chunks must be 1 .. 64, got 65"),
])
def test_parameters_of_an_ensemble(decay, chunks, message):
    with pytest.raises(ValueError) as error:
        TemporalEnsemble(decay, chunks, 1)
    assert str(error.value) == message
    for allowed in ((-10.0, 1), (10.0, 64)):
        assert merged(TemporalEnsemble(*allowed, 1), [], [1.0])[0, 0] == 1.0


def test_the_longest_chunk_fits():
    for rule in (TemporalEnsemble(0.1, 2, 1), TemporalEnsemble(0.1, 2, 1, 5)):
        rows = CAPACITY if rule._kept.shape[1] == CAPACITY else 5
        plan = merged(rule, [], np.zeros(rows))
        np.testing.assert_allclose(merged(rule, plan, np.ones(rows)).ravel(), np.exp(-0.1) / (1 + np.exp(-0.1)))


# ------------------------------------------------------------------ by name


def test_what_the_names_make():
    old, new = np.zeros((12, 2)), np.ones((12, 2))

    def same(made, rule):
        first = merged(made, [], old), merged(rule, [], old)
        np.testing.assert_array_equal(*first)
        np.testing.assert_array_equal(merged(made, first[0], new), merged(rule, first[1], new))

    same(make_rule("ramp", 2), MinimumJerkRamp(5))
    same(make_rule("ramp", 2, ramp_ticks=3), MinimumJerkRamp(3))
    same(make_rule("speed_ramp", 2), SpeedRamp(5))
    same(make_rule("speed_ramp", 2, ramp_ticks=3), SpeedRamp(3))
    same(make_rule("constant", 2), ConstantAlpha(0.5))
    same(make_rule("constant", 2, alpha=0.2), ConstantAlpha(0.2))
    same(make_rule("act", 2), TemporalEnsemble(0.01, 8, 2))
    same(make_rule("act", 2, act_decay=0.5, act_chunks=1), TemporalEnsemble(0.5, 1, 2))
    same(make_rule("replace", 2), Replace())
    same(make_rule("prefix", 2), Replace())


def test_the_act_default_keeps_eight_chunks():
    rule, plan = make_rule("act", 1, act_decay=0.0), np.zeros((0, 1))
    for value in range(10):
        plan = merged(rule, plan, [float(value)])
    assert plan[0, 0] == pytest.approx(np.mean(range(2, 10)))


@pytest.mark.parametrize("name", ["ramp", "speed_ramp"])
def test_the_capacity_bounds_a_ramp_made_by_name(name):
    with pytest.raises(ValueError, match="1 .. 3 ticks, got 4"):
        make_rule(name, 1, ramp_ticks=4, capacity=3)
    assert make_rule("act", 3, capacity=7)._kept.shape == (8, 7, 3)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        make_rule("mean", 1)
    assert str(error.value) == (
        "unknown ensemble rule 'mean': use speed_ramp, ramp, constant, act, replace or prefix")
