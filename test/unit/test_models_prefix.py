"""The head with a prefix: how committed rows guide the flow, and how the free ones go on from them."""

from __future__ import annotations

import pytest
import torch

from vla_models.flow_head import FlowHead, FlowHeadConfig, polynomial_projection, smoothing_table

H = 16
CHAIN = {
    "joints": [{"pos_m": [0.0, 0.0, 0.3], "quat_wxyz": [1.0, 0.0, 0.0, 0.0], "axis": [0.0, 0.0, 1.0]}] * 2,
    "tcp": {"pos_m": [0.0, -0.5, 0.0], "quat_wxyz": [1.0, 0.0, 0.0, 0.0]},
}


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    head = FlowHead(FlowHeadConfig(CHAIN, action_dim=3, horizon=H, action_patch=4, proprio_dim=4, context_tokens=3, context_dim=8,
                                   hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, smooth_degree=3))
    for parameter in head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    head.action_std.copy_(torch.linspace(0.01, 0.1, H)[:, None].expand(H, 3))
    return head.eval()


def denoise(head, prefix=None, weight=None, batch=1):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        kv = head.context_kv(*torch.randn(2, batch, 3, 8, generator=generator))
        proprio, noise = torch.randn(batch, 4, generator=generator), torch.randn(batch, H, 3, generator=generator)
        age, gap = torch.full((batch, 1), 0.1), torch.full((batch, 1), 0.5)
        return head.denoise(kv, proprio, age, gap, noise, prefix=prefix, prefix_weight=weight)


def weights(frozen, batch=1):
    return (torch.arange(H) < frozen).float()[None, :, None].expand(batch, -1, -1)


# ------------------------------------------------------------------ smoothing


def test_the_table_keeps_frozen_rows_and_goes_on_from_them():
    table = smoothing_table(H, 3).double()
    assert table.shape == (H + 1, H, H)
    assert (table[0] == polynomial_projection(H, 3).double()).all() and (table[H] == torch.eye(H)).all()
    for frozen in range(1, H + 1):
        assert (table[frozen][:frozen] == torch.eye(H)[:frozen]).all()
    t = torch.arange(1, H + 1, dtype=torch.float64) / H
    quadratic = 0.3 * t - 0.2 * t**2  # no third difference, zero at the commanded pose
    for frozen in range(1, H + 1):
        torch.testing.assert_close(table[frozen] @ quadratic, quadratic, atol=1e-6, rtol=0)


def test_the_free_rows_are_the_least_squares_solution():
    """No small change of the free rows makes the sum that they minimise smaller."""
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(H, dtype=torch.float64, generator=generator)

    def cost(rows):
        thirds = torch.diff(torch.cat([torch.zeros(1, dtype=torch.float64), rows]), n=3)
        return float((rows - wanted)[5:].square().sum() + 1e3 * thirds.square().sum())

    solution = smoothing_table(H, 3)[5].double() @ wanted
    best = cost(solution)
    for row in range(5, H):
        for step in (-0.01, 0.01):
            changed = solution.clone()
            changed[row] += step
            assert cost(changed) > best


def test_noise_is_averaged_and_nothing_steps_at_the_seam():
    generator = torch.Generator().manual_seed(0)
    noise = 1e-3 * torch.randn(H, 200, dtype=torch.float64, generator=generator)
    noise[:6] = 0.0
    for frozen in (1, 2, 5):
        smooth = smoothing_table(H, 3)[frozen].double() @ noise
        rough = [torch.diff(x, n=2, dim=0).square().mean().sqrt() for x in (noise, smooth)]
        assert rough[1] < 0.1 * rough[0]
        assert torch.diff(smooth, dim=0)[frozen - 1].abs().max() < torch.diff(noise, dim=0)[5].abs().max() * 0.2


def test_without_smoothing_nothing_is_smoothed():
    assert (smoothing_table(4, 0) == torch.eye(4)).all()
    assert smoothing_table(2, 1).shape == (3, 2, 2)  # too short for a third difference


def test_the_number_of_leading_frozen_rows_picks_the_operator(head):
    for frozen in range(H + 1):
        chosen = head._smoothing_of(weights(frozen))
        assert torch.equal(chosen[0], head.smoothing[frozen])
    gap = weights(6).clone()
    gap[0, 3] = 0.0
    assert torch.equal(head._smoothing_of(gap)[0], head.smoothing[3])


# ------------------------------------------------------------------ guidance


def test_no_weight_changes_nothing(head):
    free = denoise(head)
    assert torch.equal(denoise(head, torch.full((1, H, 3), float("nan")), weights(0)), free)


def test_each_row_of_a_batch_has_its_own_prefix(head):
    prefix = 0.02 * torch.randn(2, H, 3, generator=torch.Generator().manual_seed(2))
    weight = torch.cat([weights(3), weights(9)])
    both = denoise(head, prefix, weight, batch=2)
    assert torch.equal(both[0, :3], prefix[0, :3]) and torch.equal(both[1, :9], prefix[1, :9])
    assert not torch.equal(both[0, 3:9], prefix[0, 3:9])


def test_frozen_rows_take_the_straight_path_of_training(head, monkeypatch):
    """x_t = (1 - t) noise + t target, so the network sees frozen rows as it saw them in training."""
    seen = []
    original = head.velocity
    monkeypatch.setattr(head, "velocity", lambda x, time, *rest: seen.append((float(time), x)) or original(x, time, *rest))
    prefix = 0.02 * torch.randn(1, H, 3, generator=torch.Generator().manual_seed(3))
    denoise(head, prefix, weights(5))
    noise, target = seen[0][1], prefix / head.action_std
    assert [t for t, _ in seen] == [0.0, 0.25, 0.5, 0.75]
    for t, x in seen:
        torch.testing.assert_close(x[:, :5], ((1 - t) * noise + t * target)[:, :5], atol=1e-5, rtol=1e-5)


def test_a_soft_weight_ends_between_prediction_and_prefix(head, monkeypatch):
    """After the last step a row is (1 - w) x1 + w Y, with x1 the clean chunk predicted there."""
    monkeypatch.setattr(head, "velocity", lambda x, *rest: torch.zeros_like(x))  # x1 = x: nothing else moves it
    monkeypatch.setattr(head, "_smooth", lambda deltas, operator: deltas)
    prefix, w = torch.full((1, H, 3), 0.05), 0.5
    out = denoise(head, prefix, torch.full((1, H, 1), w))
    start = denoise(head)  # the noise, un-normalised
    share = 1.0
    for rest in (1.0, 0.75, 0.5, 0.25):
        share *= 1 - w / (4 * rest)
    assert share == pytest.approx(0.5 * (1 - 0.125) * (1 - 1 / 6) * (1 - 0.25))
    torch.testing.assert_close(out, prefix + share * (start - prefix))
