"""What every merge rule must do, and how hard each one steps."""

import numpy as np
import pytest

from vla_edge.core.ensembler import ConstantAlpha, MinimumJerkRamp, Replace, SpeedRamp, make_rule

RULES = {"replace": Replace(), "alpha 0.5": ConstantAlpha(0.5), "alpha 0.3": ConstantAlpha(0.3),
         "ramp 8": MinimumJerkRamp(8), "ramp 12": MinimumJerkRamp(12), "ramp 1": MinimumJerkRamp(1),
         "speed ramp 6": SpeedRamp(6), "speed ramp 8": SpeedRamp(8), "speed ramp 1": SpeedRamp(1)}


def merged(rule, old, new):
    out = np.full_like(old, np.nan)
    old_copy, new_copy = old.copy(), new.copy()
    rule.merge(old, new, out)
    assert (old == old_copy).all() and (new == new_copy).all(), "inputs must stay as they are"
    return out


@pytest.fixture(params=list(RULES), ids=list(RULES))
def rule(request):
    return RULES[request.param]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40, 256])
def test_agreement_changes_nothing(rule, rows):
    same = np.random.default_rng(rows).normal(size=(rows, 8))
    np.testing.assert_allclose(merged(rule, same, same.copy()), same, atol=1e-15)


# A rule that blends speeds leaves the band between both positions where the speeds disagree.
BLENDS_POSITIONS = [name for name, rule in RULES.items() if not isinstance(rule, SpeedRamp)]


@pytest.mark.parametrize("name", BLENDS_POSITIONS)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
def test_the_result_lies_between_both(name, rows):
    rng = np.random.default_rng(rows)
    old, new = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 3))
    out = merged(RULES[name], old, new)
    assert (out >= np.minimum(old, new) - 1e-12).all() and (out <= np.maximum(old, new) + 1e-12).all()


def test_no_rule_remembers(rule):
    rng = np.random.default_rng(1)
    old, new = rng.normal(size=(12, 4)), rng.normal(size=(12, 4))
    first = merged(rule, old, new)
    merged(rule, rng.normal(size=(5, 4)), rng.normal(size=(5, 4)))
    assert (merged(rule, old, new) == first).all()


def test_a_ramp_starts_on_the_old_trajectory_and_ends_on_the_new_one():
    old, new = np.zeros((20, 2)), np.ones((20, 2))
    out = merged(MinimumJerkRamp(12), old, new)
    assert (out[0] == 0.0).all() and (out[12:] == 1.0).all() and (np.diff(out[:, 0]) >= 0.0).all()


def test_a_ramp_is_over_when_the_overlap_ends():
    """So that the first tick that only the new chunk has is no step."""
    out = merged(MinimumJerkRamp(12), np.zeros((4, 1)), np.ones((4, 1)))
    np.testing.assert_allclose(out[:, 0], [10 * x**3 - 15 * x**4 + 6 * x**5 for x in (0.0, 0.25, 0.5, 0.75)])


def test_a_speed_ramp_never_passes_the_new_speed():
    """Both start at the same point with speeds 0 and 1; a ramp of positions overshoots by 45 %."""
    old, new = np.zeros((16, 1)), np.arange(16.0)[:, None]
    speed = np.diff(merged(SpeedRamp(6), old, new)[:, 0])
    assert speed[0] < 0.05 and (np.diff(speed[:6]) > 0.0).all() and speed[:6].max() <= 1.0 + 1e-12
    assert np.diff(merged(MinimumJerkRamp(6), old, new)[:, 0]).max() > 1.4


def test_a_speed_ramp_is_back_on_the_new_trajectory_when_the_overlap_ends():
    old, new = np.zeros((30, 2)), np.cumsum(np.ones((30, 2)), axis=0)
    out = merged(SpeedRamp(6), old, new)
    assert (out[0] == old[0]).all()
    np.testing.assert_allclose(out[-1], new[-1], atol=0.01)


def acceleration_of(rule):
    """Largest |a| when two 100 Hz chunks at rest disagree by 50 mrad: the case measured in the field."""
    old, new = np.zeros((30, 1)), np.full((30, 1), 0.05)
    stream = np.concatenate([np.zeros((3, 1)), merged(rule, old, new), np.full((3, 1), 0.05)])
    return np.abs(np.diff(stream[:, 0], 2)).max() / 0.01**2


def test_the_ramp_steps_an_order_of_magnitude_less():
    assert acceleration_of(Replace()) == pytest.approx(500, rel=0.01)
    assert acceleration_of(ConstantAlpha(0.5)) == pytest.approx(250, rel=0.01)
    assert acceleration_of(MinimumJerkRamp(12)) < 21
    assert acceleration_of(MinimumJerkRamp(8)) < 45


def test_rules_by_name():
    assert isinstance(make_rule("ramp", ramp_ticks=3), MinimumJerkRamp)
    assert isinstance(make_rule("constant", alpha=0.2), ConstantAlpha)
    assert isinstance(make_rule("replace"), Replace)
    assert isinstance(make_rule("speed_ramp", ramp_ticks=3), SpeedRamp)
    for name, options in (("latest", {}), ("ramp", {"ramp_ticks": 0}), ("constant", {"alpha": 1.5})):
        with pytest.raises(ValueError):
            make_rule(name, **options)
