"""Normalisation of foreign checkpoints and of our own training: faults of other runtimes, each by its right behaviour."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from field_rig import ROOT

from vla_models.flow_head import ContextKv, FlowHead, FlowHeadConfig
from vla_models.normalisation import NormalisationError, Normaliser, floored_scale
from vla_models.training.head import HeadSamples, fit_normalisation

MEAN, STD = np.array([0.5, -2.0, 10.0]), np.array([0.1, 0.5, 3.0])
Q01, Q99 = np.array([-1.0, 0.2, 5.0]), np.array([1.0, 0.6, 25.0])


def test_the_formulas_are_those_of_the_checkpoints():
    """Numbers by hand: (x - mean) / std, and 2 (x - q01) / (q99 - q01) - 1."""
    x = np.array([0.6, -1.0, 4.0])
    np.testing.assert_allclose(Normaliser.mean_std(MEAN, STD).forward(x), [1.0, 2.0, -2.0])
    quantile = Normaliser.quantile(Q01, Q99)
    np.testing.assert_allclose(quantile.forward(Q01), -1.0)
    np.testing.assert_allclose(quantile.forward(Q99), 1.0)
    np.testing.assert_allclose(quantile.forward([0.0, 0.5, 30.0]), [0.0, 0.5, 1.5])
    batch = np.random.default_rng(0).normal(size=(5, 7, 3))
    for normaliser in (quantile, Normaliser.mean_std(MEAN, STD)):
        np.testing.assert_allclose(normaliser.inverse(normaliser.forward(batch)), batch, atol=1e-12)


@pytest.mark.parametrize("normaliser", [Normaliser.mean_std(MEAN, STD), Normaliser.quantile(Q01, Q99)])
@pytest.mark.parametrize("beyond", [-4.0, -1.0001, 1.0001, 1.7, 50.0])
def test_15_beyond_one_is_not_clipped(normaliser, beyond):
    """FlashRT#209: answers were clipped to -1 .. 1 before un-normalising, so that the fastest 2 % of motions were cut."""
    answer = np.full(3, beyond)
    raw = normaliser.inverse(answer)
    np.testing.assert_allclose(raw, normaliser.centre + beyond * normaliser.scale, rtol=1e-12)
    np.testing.assert_allclose(normaliser.forward(raw), answer, rtol=1e-9)


def small_head(**changes):
    torch.manual_seed(0)
    chain = json.loads((ROOT / "vla_sim/assets/panda_chain.json").read_text())
    config = FlowHeadConfig(chain, horizon=16, context_tokens=3, context_dim=8, hidden_size=16, num_layers=1,
                            num_heads=2, intermediate_size=32, **changes)
    return FlowHead(config).eval()


def kv_of(head, batch=1):
    keys = torch.zeros(head.config.num_layers, batch, head.config.num_heads, 3, 8)
    return ContextKv(keys, keys, torch.zeros(batch, 6))


@pytest.mark.parametrize("size", [1.5, 7.0])
def test_15_the_action_head_clips_nothing_either(size):
    """As above, in our own head: with a velocity field of zero, actions are the noise times their scale."""
    head = small_head()
    torch.nn.init.zeros_(head.action_out.weight)
    torch.nn.init.zeros_(head.action_out.bias)
    head.action_std.fill_(0.02)
    ramp = torch.linspace(size / 16, size, 16)[None, :, None].expand(1, 16, 8)  # smoothing leaves a line as it is
    with torch.no_grad():
        deltas = head.denoise(kv_of(head), torch.zeros(1, 9), torch.zeros(1, 1), torch.full((1, 1), 0.5), ramp)
    np.testing.assert_allclose(deltas[0].numpy(), 0.02 * ramp[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("width", [0.0, 1e-12, 1e-7])
@pytest.mark.parametrize("mode", ["quantile", "mean_std"])
def test_16_dimensions_without_width_do_not_explode(mode, width):
    """VLA-Arena#29, #30: q99 = q01 divided by 1e-8, so that a joint 1 mrad off its constant went in as 2e5 and the
    network's answer was noise. A constant goes in as 0 and comes back as the constant, whatever is answered."""
    if mode == "quantile":
        normaliser = Normaliser.quantile([-1.0, 0.3], [1.0, 0.3 + width])
    else:
        normaliser = Normaliser.mean_std([0.0, 0.3], [1.0, width])
    assert normaliser.is_constant.tolist() == [False, True]
    for off in (0.0, 1e-3, -0.5):
        assert normaliser.forward([0.5, 0.3 + off]).tolist() == [0.5, 0.0]
    for answer in (0.0, -1.0, 3.0, 1e6):
        assert normaliser.inverse([0.5, answer]) == pytest.approx([0.5, 0.3], abs=1e-7)


def test_16_a_foreign_checkpoint_is_given_the_constant_it_was_trained_with():
    """As above: LeRobot and openpi trained with -1 for the constant itself, which their networks still expect."""
    stats = {"q01": [0.3, 0.0], "q99": [0.3, 1.0], "mean": [0.3, 0.5], "std": [0.0, 0.2]}
    quantile = Normaliser.from_stats(stats, "quantile")
    np.testing.assert_allclose(quantile.forward([[0.3, 0.5], [0.4, 0.5]]), [[-1.0, 0.0], [-1.0, 0.0]])
    np.testing.assert_allclose(quantile.inverse([-1.0, 0.0]), [0.3, 0.5])
    np.testing.assert_allclose(Normaliser.from_stats(stats, "mean_std").forward([0.3, 0.7]), [0.0, 1.0])


def test_16_a_joint_that_never_moved_in_training_does_not_explode():
    """As above, in our own training: the scale has a floor, and chunks of that joint stay (almost) where they are."""
    rng = np.random.default_rng(0)
    count, still = 64, 2
    proprio = rng.normal(0.0, 0.3, (count, 9)).astype(np.float32)
    chunk = rng.normal(0.0, 0.02, (count, 16, 8)).astype(np.float32)
    proprio[:, still], chunk[:, :, still] = 0.25, 0.0
    index, numbers = np.zeros(count, np.int64), np.zeros(count, np.float32)
    samples = HeadSamples(index, index, index, index, proprio, numbers, numbers, np.zeros((count, 3), np.float32), chunk)
    head = small_head()
    fit_normalisation(head, samples)
    assert head.action_std.min() >= 1e-4 and head.proprio_std.min() >= 1e-2
    assert torch.isfinite(head.action_std).all() and torch.isfinite(head.proprio_std).all()
    off = torch.from_numpy(proprio[:1].copy())
    off[0, still] += 0.005  # 5 mrad: an ordinary deviation at run time
    assert abs(float(((off - head.proprio_mean) / head.proprio_std)[0, still])) <= 0.5 + 1e-4
    moving = [column for column in range(8) if column != still]
    expected = np.sqrt((chunk.astype(np.float64) ** 2).mean(0))
    np.testing.assert_allclose(head.action_std.numpy()[:, moving], expected[:, moving], rtol=1e-6)
    with pytest.raises(NormalisationError, match="action_std"):
        broken = chunk.copy()
        broken[3, 4, 5] = np.nan
        fit_normalisation(head, dataclasses.replace(samples, chunk=broken))


@pytest.mark.parametrize("make, message", [
    (lambda: Normaliser.mean_std([0.0, 0.0], [1.0, -1.0]), r"std must not be negative, dimension \[1\]"),
    (lambda: Normaliser.mean_std([0.0, np.nan], [1.0, 1.0]), r"mean must be finite, dimension \[1\]"),
    (lambda: Normaliser.mean_std([0.0], [np.inf]), "std must be finite"),
    (lambda: Normaliser.quantile([1.0], [0.0]), "q99 - q01 must not be negative"),
    (lambda: Normaliser.quantile([0.0], [1.0, 2.0]), "one data set"),
    (lambda: Normaliser.mean_std([0.0], [1.0, 2.0]), "one data set"),
    (lambda: Normaliser.from_stats({"mean": [0.0], "std": [1.0]}, "quantile"), "quantile needs q01, q99"),
    (lambda: Normaliser.from_stats({}, "min_max"), "unknown normalisation 'min_max'"),
    (lambda: floored_scale("s", np.array([1.0, -1.0]), 0.1), "s: a scale must be finite"),
])
def test_statistics_that_cannot_be_used_are_named(make, message):
    """lerobot#3804: averaged quantiles passed as quantiles; nothing looked at the statistics of a checkpoint."""
    with pytest.raises(NormalisationError, match=message):
        make()
