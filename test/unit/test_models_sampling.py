from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_models.sampling import MAX_LOGPROBS, SamplingRule, draw, uniform


def logits(size: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 3


def drawn(values: np.ndarray, count: int, **rule) -> np.ndarray:
    """How often each token is drawn at ``count`` positions."""
    tokens = [draw(values, SamplingRule(**rule), position).token_id for position in range(count)]
    return np.bincount(tokens, minlength=len(values)) / count


def test_temperature_0_takes_the_best_and_the_lower_id_of_equals():
    values = np.array([1.0, 3.0, 3.0, 2.0], dtype=np.float32)
    assert draw(values, SamplingRule(), 0).token_id == 1


def test_the_draw_depends_on_seed_and_position_only():
    values = logits()
    rule = SamplingRule(temperature=1.0, seed=7)
    forward = [draw(values, rule, position).token_id for position in range(40)]
    resumed = {position: draw(values, rule, position).token_id for position in reversed(range(40))}
    assert forward == [resumed[position] for position in range(40)]
    other = [draw(values, SamplingRule(temperature=1.0, seed=8), position).token_id for position in range(40)]
    assert forward != other and len(set(forward)) > 3


def test_random_numbers_are_uniform_and_differ_between_neighbouring_seeds_and_positions():
    grid = np.array([[uniform(seed, position) for position in range(60)] for seed in range(60)])
    assert 0 <= grid.min() and grid.max() < 1 and len(np.unique(grid)) == grid.size
    assert abs(grid.mean() - 0.5) < 0.02 and abs(grid.std() - 12**-0.5) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.05


def test_the_largest_seed_is_taken():
    assert 0 <= uniform(2**64 - 1, 2**40) < 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    values = logits(8)
    expected = torch.softmax(torch.from_numpy(values) / temperature, -1).numpy()
    assert np.abs(drawn(values, 4000, temperature=temperature) - expected).max() < 0.03


def test_top_k_leaves_exactly_the_k_best():
    values = logits(20)
    found = drawn(values, 2000, temperature=2.0, top_k=3)
    assert set(np.flatnonzero(found)) == set(np.argsort(-values)[:3])


@pytest.mark.parametrize("size", [20, 2000])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999])
def test_top_p_leaves_the_smallest_set_that_reaches_it(size, top_p):
    values = logits(size) / 3
    probabilities = torch.softmax(torch.from_numpy(values).double(), -1)
    order = torch.argsort(-probabilities)
    kept = int((probabilities[order].cumsum(0) < top_p).sum()) + 1
    allowed = set(order[:kept].tolist())
    found = set(np.flatnonzero(drawn(values, 1500, temperature=1.0, top_p=top_p)))
    assert found <= allowed
    if kept <= 20:
        assert len(found) >= kept - 2  # the rarest may not have come


def test_a_flat_distribution_wider_than_the_first_candidates_keeps_its_whole_nucleus():
    values = np.zeros(3000, dtype=np.float32)
    tokens = [draw(values, SamplingRule(temperature=1.0, top_p=0.9), position).token_id for position in range(800)]
    assert 2500 < max(tokens) < 2700 and min(tokens) < 50


def test_the_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    values, history = logits(), [3, 3, 9, 41]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([history]), torch.from_numpy(values)[None])[0]
    rule = SamplingRule(repetition_penalty=1.7)
    assert draw(values, rule, 4, history).token_id == int(theirs.argmax())
    best = int(values.argmax())
    many = SamplingRule(repetition_penalty=1000.0)
    assert draw(values, many, 4, [best]).token_id != best
    assert draw(values, rule, 0).token_id == best  # nothing to repeat


def test_logprobs_are_of_the_models_own_logits():
    values = logits()
    expected = torch.log_softmax(torch.from_numpy(values).double(), -1)
    rule = SamplingRule(temperature=0.3, repetition_penalty=2.0, logprobs=5)
    found = draw(values, rule, 3, [int(values.argmax())])
    assert found.logprob == pytest.approx(float(expected[found.token_id]))
    top = expected.topk(5)
    assert [token for token, _ in found.top] == top.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(top.values.tolist())
    only = draw(values, SamplingRule(logprobs=0), 3)
    assert only.logprob == pytest.approx(float(expected.max())) and only.top == ()
    assert draw(values, SamplingRule(), 3).logprob is None


def test_the_logits_are_left_as_they_were():
    values = logits()
    before = values.copy()
    draw(values, SamplingRule(temperature=1.0, top_p=0.5, repetition_penalty=2.0, logprobs=3), 0, [1, 2])
    assert np.array_equal(values, before)


@pytest.mark.parametrize("rule", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5}])
def test_nan_logits_are_an_error_and_not_a_token(rule):
    values = logits()
    values[4] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        draw(values, SamplingRule(**rule), 0)


@pytest.mark.parametrize(
    "rule",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0},
        {"top_p": 1.1}, {"top_p": float("nan")}, {"repetition_penalty": 0.0}, {"seed": -1}, {"seed": 2**64},
        {"logprobs": -1}, {"logprobs": MAX_LOGPROBS + 1},
    ],
    ids=str,
)  # fmt: skip
def test_values_without_a_meaning_are_refused(rule):
    with pytest.raises(ValueError, match=next(iter(rule))):
        SamplingRule(**rule)
