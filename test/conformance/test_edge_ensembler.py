"""What every merge rule must do, alone and inside the queue, and how hard each one steps."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vla_edge.config import load_limits
from vla_edge.core.chunk import ActionChunk, ChunkGate, Reject
from vla_edge.core.chunk_queue import ChunkQueue
from vla_edge.core.ensembler import (
    ConstantAlpha,
    MinimumJerkRamp,
    Replace,
    SpeedRamp,
    TemporalEnsemble,
    make_rule,
)

T = 0.01
LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)
NOW_NS = 1_000_000_000_000
CASES = settings(max_examples=50, deadline=None, database=None, derandomize=True)

RULES = {
    "replace": lambda n: Replace(),
    "prefix": lambda n: make_rule("prefix", n),
    "alpha 0.5": lambda n: ConstantAlpha(0.5),
    "alpha 0.3": lambda n: ConstantAlpha(0.3),
    "alpha 0": lambda n: ConstantAlpha(0.0),
    "alpha 1": lambda n: ConstantAlpha(1.0),
    "ramp 8": lambda n: MinimumJerkRamp(8),
    "ramp 12": lambda n: MinimumJerkRamp(12),
    "ramp 1": lambda n: MinimumJerkRamp(1),
    "speed ramp 6": lambda n: SpeedRamp(6),
    "speed ramp 8": lambda n: SpeedRamp(8),
    "speed ramp 1": lambda n: SpeedRamp(1),
    "act": lambda n: TemporalEnsemble(0.01, 8, n),
    "act fast": lambda n: TemporalEnsemble(-0.7, 4, n),
    "act 1 chunk": lambda n: TemporalEnsemble(0.5, 1, n),
    "act 2 chunks": lambda n: TemporalEnsemble(0.5, 2, n),
}
# A rule that blends speeds leaves the band between both positions where the speeds disagree.
BLENDS_POSITIONS = [name for name in RULES if not name.startswith("speed")]
RAMPS = [name for name in RULES if "ramp" in name]
REMEMBERS = [name for name in RULES if name.startswith("act")]
NOTHING = np.zeros((0, 1))


@pytest.fixture(params=list(RULES), ids=list(RULES))
def make(request):
    return RULES[request.param]


def joined(rule, old, new, tick=100):
    """A plan made of one chunk, then a second chunk of the same ticks; checks what holds for any rule."""
    plan, out = np.full_like(old, np.nan), np.full_like(new, np.nan)
    rule.merge(tick, old[:0], old, plan)
    assert (plan == old).all(), "a first chunk is the plan"
    overlap = min(len(old), len(new))
    plan_copy, new_copy = plan.copy(), new.copy()
    rule.merge(tick, plan[:overlap], new, out)
    assert (plan == plan_copy).all() and (new == new_copy).all(), "inputs must stay as they are"
    assert (out[overlap:] == new[overlap:]).all(), "what only the new chunk has is the new chunk's"
    return out


# ------------------------------------------------------------------ any rule alone


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40, 255])
def test_agreement_changes_nothing(make, rows):
    same = np.random.default_rng(rows).normal(size=(rows, 8))
    np.testing.assert_allclose(joined(make(8), same, same.copy()), same, atol=1e-15)


@pytest.mark.parametrize("old_rows, new_rows", [(1, 1), (1, 5), (5, 1), (3, 40), (40, 3), (16, 16), (255, 255)])
def test_no_rule_changes_how_far_the_plan_reaches(make, old_rows, new_rows):
    rng = np.random.default_rng(old_rows)
    out = joined(make(3), rng.normal(size=(old_rows, 3)), rng.normal(size=(new_rows, 3)))
    assert out.shape == (new_rows, 3) and np.isfinite(out).all()


@pytest.mark.parametrize("name", BLENDS_POSITIONS)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
def test_the_result_lies_between_both(name, rows):
    rng = np.random.default_rng(rows)
    old, new = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 3))
    out = joined(RULES[name](3), old, new)
    assert (out >= np.minimum(old, new) - 1e-12).all() and (out <= np.maximum(old, new) + 1e-12).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12, 40])
def test_no_rule_goes_far_beyond_both(make, rows):
    """A speed ramp may leave the band, by no more than the disagreement itself summed over the ramp."""
    rng = np.random.default_rng(rows)
    old, new = np.cumsum(rng.normal(size=(2, rows, 3)), axis=1)
    out = joined(make(3), old, new)
    reach = np.abs(np.diff(old - new, axis=0)).sum(axis=0) + np.abs(old - new).max(axis=0)
    assert (out >= np.minimum(old, new) - reach - 1e-12).all() and (out <= np.maximum(old, new) + reach + 1e-12).all()


@pytest.mark.parametrize("name", RAMPS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 40])
def test_a_ramp_begins_on_the_old_trajectory(name, rows):
    rng = np.random.default_rng(rows)
    old, new = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 3))
    np.testing.assert_allclose(joined(RULES[name](3), old, new)[0], old[0], atol=1e-15)


def scenario(rule, seed, tick=0):
    """Twelve overlapping chunks of changing lengths; returns every merged row."""
    rng, plan, found = np.random.default_rng(seed), np.zeros((0, 4)), []
    for _ in range(12):
        new = rng.normal(size=(int(rng.integers(1, 30)), 4))
        out = np.full_like(new, np.nan)
        rule.merge(tick, plan[:len(new)], new, out)
        step = int(rng.integers(0, 8))
        tick, plan = tick + step, out[step:].copy()
        found.append(out)
    return np.concatenate(found)


def test_a_reset_forgets_everything(make):
    used = make(4)
    scenario(used, seed=1)
    used.reset()
    assert (scenario(used, seed=2) == scenario(make(4), seed=2)).all()


@pytest.mark.parametrize("name", [name for name in RULES if name not in REMEMBERS])
def test_most_rules_remember_nothing_anyway(name):
    used = RULES[name](4)
    scenario(used, seed=1)
    assert (scenario(used, seed=2) == scenario(RULES[name](4), seed=2)).all()


def test_only_differences_of_ticks_count(make):
    assert (scenario(make(4), seed=3, tick=7) == scenario(make(4), seed=3, tick=10**12)).all()


def test_units_and_joints_do_not_mix(make):
    """Merging commutes with another zero, another unit and another order of joints."""
    rng = np.random.default_rng(5)
    old, new = rng.normal(size=(20, 4)), rng.normal(size=(16, 4))
    plain = joined(make(4), old, new)
    np.testing.assert_allclose(joined(make(4), 3.0 * old + 7.0, 3.0 * new + 7.0), 3.0 * plain + 7.0, atol=1e-12)
    order = [2, 0, 3, 1]
    assert (joined(make(4), old[:, order], new[:, order]) == plain[:, order]).all()


@pytest.mark.parametrize("name", list(RULES))
@CASES
@given(data=st.data())
def test_finite_chunks_make_a_finite_plan(name, data):
    values = st.floats(-1e6, 1e6)
    rule, plan, tick = RULES[name](2), np.zeros((0, 2)), 0
    for _ in range(data.draw(st.integers(1, 4))):
        new = data.draw(arrays(np.float64, (data.draw(st.integers(1, 20)), 2), elements=values))
        out = np.full_like(new, np.nan)
        rule.merge(tick, plan[:len(new)], new, out)
        assert np.isfinite(out).all()
        step = data.draw(st.integers(0, 6))
        tick, plan = tick + step, out[step:].copy()


# ------------------------------------------------------------------ any rule in the queue


def chunk(base_tick, rows, sequence=1, session="a"):
    return ActionChunk(session, sequence, base_tick, NOW_NS, T, LIMITS.names, rows)


def smooth(rng, rows):
    return LIMITS.ready + np.cumsum(rng.normal(scale=1e-3, size=(rows, 8)), axis=0)


def queue_of(make):
    return ChunkQueue(8, make(8), T)


def plan_of(queue):
    """Everything a reader can see, to the bit."""
    position, velocity, found = np.zeros(8), np.zeros(8), []
    for tick in range(queue.first_tick, queue.last_tick + 1):
        assert queue.sample(tick, position, velocity)
        found.append(np.concatenate([position, velocity]))
    return queue.first_tick, queue.last_tick, np.array(found)


def drive(queue, seed, tick=0):
    """A hundred ticks of chunks as they come: late, short, long; returns the sampled stream."""
    rng, position, velocity, stream = np.random.default_rng(seed), np.zeros(8), np.zeros(8), []
    sequence = 0
    for now in range(tick, tick + 100):
        if rng.random() < 0.25:
            sequence += 1
            late = int(rng.integers(0, 4))
            queue.insert(chunk(now - 1 - late, smooth(rng, int(rng.integers(2, 24))), sequence), now)
        is_planned = queue.sample(now, position, velocity)
        stream.append(np.concatenate([position, velocity]) if is_planned else np.full(16, np.nan))
    return np.array(stream)


def test_a_cleared_queue_remembers_no_former_plan(make):
    used = queue_of(make)
    drive(used, seed=1)
    used.clear()
    np.testing.assert_array_equal(drive(used, seed=2, tick=500), drive(queue_of(make), seed=2, tick=500))


def test_a_plan_that_ran_out_leaves_no_trace(make):
    rng = np.random.default_rng(3)
    long, short, later = smooth(rng, 40), smooth(rng, 5), smooth(rng, 16)
    used, fresh = queue_of(make), queue_of(make)
    used.insert(chunk(0, long), 1)
    used.insert(chunk(1, short, 2), 2)  # cuts the long one off; then nothing comes for a while
    used.insert(chunk(19, later, 3), 20)
    fresh.insert(chunk(19, later, 3), 20)
    np.testing.assert_array_equal(plan_of(used)[2], plan_of(fresh)[2])


def test_what_a_shorter_chunk_cut_off_stays_cut_off(make):
    rng = np.random.default_rng(4)
    long, short, later = smooth(rng, 40), smooth(rng, 8), smooth(rng, 30)
    queue = queue_of(make)
    for base, rows, sequence in ((0, long, 1), (1, short, 2), (2, later, 3)):
        queue.insert(chunk(base, rows, sequence), base + 1)
    first, last, plan = plan_of(queue)
    assert last == 32
    only_new = range(10, last + 1)  # the short chunk reached tick 9
    np.testing.assert_array_equal(plan[[tick - first for tick in only_new], :8], later[[tick - 3 for tick in only_new]])


def test_the_stream_does_not_depend_on_when_it_happens(make):
    np.testing.assert_array_equal(drive(queue_of(make), seed=5, tick=3), drive(queue_of(make), seed=5, tick=10**12))


def test_a_chunk_that_comes_twice_changes_nothing(make):
    rng = np.random.default_rng(6)
    queue, gate = queue_of(make), ChunkGate(LIMITS, T)
    for base, sequence in ((9, 1), (12, 2)):
        good = chunk(base, smooth(rng, 16), sequence)
        assert gate.admit(good, base + 1, NOW_NS) is None and queue.insert(good, base + 1) is None
    before = plan_of(queue)
    assert gate.admit(good, 13, NOW_NS) is Reject.OLDER
    assert gate.admit(good, 14, NOW_NS) is Reject.OLDER
    after = plan_of(queue)
    assert before[:2] == after[:2] and (before[2] == after[2]).all()


def test_a_refused_chunk_changes_nothing(make):
    rng = np.random.default_rng(7)
    first, second = smooth(rng, 16), smooth(rng, 16)
    queue, other = queue_of(make), queue_of(make)
    for each in (queue, other):
        each.insert(chunk(9, first), 10)
    assert queue.insert(chunk(30, first, 2), 11) is Reject.GAP
    assert queue.insert(chunk(-20, first, 2), 11) is Reject.ALL_PAST
    assert queue.insert(chunk(10, np.tile(first, (20, 1)), 2), 11) is Reject.GAP  # beyond the memory
    for each in (queue, other):
        each.insert(chunk(11, second, 3), 12)
    assert (plan_of(queue)[2] == plan_of(other)[2]).all()


def test_merging_for_hours_takes_no_more_memory(make):
    queue, rng = queue_of(make), np.random.default_rng(8)
    chunks = [smooth(rng, 16) for _ in range(8)]
    position, velocity = np.zeros(8), np.zeros(8)

    def run(first, last):
        for tick in range(first, last):
            if tick % 5 == 0:
                queue.insert(chunk(tick - 2, chunks[tick // 5 % 8], tick), tick)
            queue.sample(tick, position, velocity)

    tracemalloc.start()
    try:
        run(0, 300)
        before = tracemalloc.get_traced_memory()[0]
        run(300, 3000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 4096, f"{grown} bytes in 2700 ticks"


# ------------------------------------------------------------------ ramps


def test_a_ramp_starts_on_the_old_trajectory_and_ends_on_the_new_one():
    out = joined(MinimumJerkRamp(12), np.zeros((20, 2)), np.ones((20, 2)))
    assert (out[0] == 0.0).all() and (out[12:] == 1.0).all() and (np.diff(out[:, 0]) >= 0.0).all()


def test_a_ramp_is_over_when_the_overlap_ends():
    """So that the first tick that only the new chunk has is no step."""
    out = joined(MinimumJerkRamp(12), np.zeros((4, 1)), np.ones((9, 1)))
    np.testing.assert_allclose(out[:4, 0], [10 * x**3 - 15 * x**4 + 6 * x**5 for x in (0.0, 0.25, 0.5, 0.75)])
    assert (out[4:] == 1.0).all()


def test_a_speed_ramp_never_passes_the_new_speed():
    """Both start at the same point with speeds 0 and 1; a ramp of positions overshoots by 45 %."""
    old, new = np.zeros((16, 1)), np.arange(16.0)[:, None]
    speed = np.diff(joined(SpeedRamp(6), old, new)[:, 0])
    assert speed[0] < 0.05 and (np.diff(speed[:6]) > 0.0).all() and speed[:6].max() <= 1.0 + 1e-12
    assert np.diff(joined(MinimumJerkRamp(6), old, new)[:, 0]).max() > 1.4


def test_a_speed_ramp_is_back_on_the_new_trajectory_when_the_overlap_ends():
    old, new = np.zeros((30, 2)), np.cumsum(np.ones((30, 2)), axis=0)
    out = joined(SpeedRamp(6), old, new)
    assert (out[0] == old[0]).all()
    np.testing.assert_allclose(out[-1], new[-1], atol=0.01)


def test_a_speed_ramp_in_a_short_overlap_is_a_ramp_of_positions():
    old, new = np.zeros((3, 1)), np.ones((10, 1))
    assert (joined(SpeedRamp(6), old, new) == joined(MinimumJerkRamp(6), old, new)).all()


def acceleration_of(rule, chunks_before=1):
    """Largest |a| when two 100 Hz chunks at rest disagree by 50 mrad: the case measured in the field."""
    old, new, out = np.zeros((30, 1)), np.full((30, 1), 0.05), np.zeros((30, 1))
    for k in range(chunks_before):
        rule.merge(0, old if k else NOTHING, old, out)
    rule.merge(0, old, new, out)
    stream = np.concatenate([np.zeros((3, 1)), out, np.full((3, 1), 0.05)])
    return np.abs(np.diff(stream[:20, 0], 2)).max() / 0.01**2


def test_the_ramp_steps_an_order_of_magnitude_less():
    assert acceleration_of(Replace()) == pytest.approx(500, rel=0.01)
    assert acceleration_of(ConstantAlpha(0.5)) == pytest.approx(250, rel=0.01)
    assert acceleration_of(TemporalEnsemble(0.0, 8, 1)) == pytest.approx(250, rel=0.01)
    assert acceleration_of(TemporalEnsemble(0.0, 8, 1), 3) == pytest.approx(125, rel=0.01)
    assert acceleration_of(MinimumJerkRamp(12)) < 21
    assert acceleration_of(MinimumJerkRamp(8)) < 45


# ------------------------------------------------------------------ temporal ensemble


def test_the_temporal_ensemble_weighs_as_in_the_paper():
    """Three predictions for each tick, oldest first: weights exp(-m i), normalised."""
    m, values = 0.3, (1.0, 2.0, 5.0)
    rule, plan, out = TemporalEnsemble(m, 8, 1), np.zeros((0, 1)), np.zeros((10, 1))
    for tick, value in enumerate(values):
        rule.merge(tick, plan, np.full((10, 1), value), out)
        plan = out[1:].copy()
    weights = np.exp(-m * np.arange(3))
    assert out[0, 0] == pytest.approx(np.dot(weights, values) / weights.sum())
    # The last rows have fewer predictions; ranks count those that are there, the second chunk is the oldest at 8.
    assert out[8, 0] == pytest.approx((2.0 + weights[1] * 5.0) / (1.0 + weights[1])) and out[9, 0] == 5.0


def test_decay_says_whom_to_believe():
    def last(decay):
        out = np.zeros((4, 1))
        rule = TemporalEnsemble(decay, 4, 1)
        for value in (0.0, 1.0):
            rule.merge(0, out if value else NOTHING, np.full((4, 1), value), out)
        return out[0, 0]

    assert last(0.0) == pytest.approx(0.5) and last(5.0) < 0.01 and last(-5.0) > 0.99


class DictEnsemble:
    """The paper's rule with a list of predictions per tick, and the same bound on chunks."""

    def __init__(self, decay, chunks):
        self.decay, self.limit, self.chunks = decay, chunks, []

    def merge(self, tick, overlap, new):
        if not overlap:
            self.chunks = []
        said = {tick + k: row for k, row in enumerate(new)}
        self.chunks = [{t: row for t, row in chunk.items() if t < tick + len(new)} for chunk in self.chunks]
        self.chunks = (self.chunks + [said])[-self.limit:]
        out = []
        for t in said:
            rows = [chunk[t] for chunk in self.chunks if t in chunk]
            weights = np.exp(-self.decay * np.arange(len(rows)))
            out.append(np.average(rows, axis=0, weights=weights))
        return np.array(out)


@CASES
@given(st.floats(-2, 2), st.integers(1, 6),
       st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_the_temporal_ensemble_equals_a_dictionary_of_predictions(decay, chunks, steps, seed):
    rng, tick, reach = np.random.default_rng(seed), 0, 0
    rule, model = TemporalEnsemble(decay, chunks, 3), DictEnsemble(decay, chunks)
    plan = np.zeros((0, 3))
    for step, rows in steps:
        tick += step
        new, overlap = rng.normal(size=(rows, 3)), max(0, min(reach, tick + rows) - tick)
        plan, out = plan[step:], np.zeros((rows, 3))
        rule.merge(tick, plan[:overlap], new, out)
        np.testing.assert_allclose(out, model.merge(tick, overlap, new), atol=1e-12)
        plan, reach = out.copy(), tick + rows


# ------------------------------------------------------------------ by name


def test_rules_by_name():
    assert isinstance(make_rule("ramp", 8, ramp_ticks=3), MinimumJerkRamp)
    assert isinstance(make_rule("constant", 8, alpha=0.2), ConstantAlpha)
    assert isinstance(make_rule("replace", 8), Replace) and isinstance(make_rule("prefix", 8), Replace)
    assert isinstance(make_rule("speed_ramp", 8, ramp_ticks=3), SpeedRamp)
    assert isinstance(make_rule("act", 8, act_decay=0.1, act_chunks=3), TemporalEnsemble)


@pytest.mark.parametrize("name, options, message", [
    ("latest", {}, "speed_ramp, ramp, constant, act, replace or prefix"), ("ramp", {"ramp_ticks": 0}, "1 .. 256"),
    ("speed_ramp", {"ramp_ticks": 257}, "1 .. 256"), ("constant", {"alpha": 1.5}, "alpha"),
    ("constant", {"alpha": float("nan")}, "alpha"), ("act", {"act_decay": 11.0}, "act_decay"),
    ("act", {"act_decay": float("nan")}, "act_decay"), ("act", {"act_chunks": 0}, "act_chunks"),
    ("act", {"act_chunks": 65}, "act_chunks"),
])
def test_wrong_parameters_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_rule(name, 8, **options)
