"""What is pushed when: every piece once, none before it is complete; and deadlines that follow the bandwidth."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_cloud.core.transfer_plan import Bandwidth, Push, PushPlan, TransferConfig, choose_layerwise


def test_long_prompts_go_layer_by_layer_and_short_ones_do_not():
    config = TransferConfig()
    assert choose_layerwise(config, 4096) and not choose_layerwise(config, 256)
    assert choose_layerwise(config, config.layerwise_tokens)
    assert not choose_layerwise(config, config.layerwise_tokens - 1)


def test_a_short_prompt_goes_in_one_push_after_its_chunk():
    plan = PushPlan(layers=3, block_size=16, total_tokens=40)
    assert plan.at_start() == []
    assert plan.after_layer(0, 40) == [] and plan.after_layer(2, 40) == []
    assert plan.after_chunk(40) == [Push(range(3), range(3))] and plan.done
    assert plan.after_chunk(40) == []


def test_a_block_waits_until_its_last_token_is_computed():
    plan = PushPlan(layers=2, block_size=16, total_tokens=50)
    assert plan.after_chunk(30) == [Push(range(2), range(0, 1))]
    assert plan.after_chunk(47) == [Push(range(2), range(1, 2))] and not plan.done
    assert plan.after_chunk(50) == [Push(range(2), range(2, 4))] and plan.done


def test_layers_go_as_they_are_computed():
    plan = PushPlan(layers=2, block_size=16, total_tokens=40, layerwise=True)
    assert plan.after_layer(0, 32) == [Push(range(0, 1), range(0, 2))]
    assert plan.after_layer(1, 32) == [Push(range(1, 2), range(0, 2))]
    assert plan.after_chunk(32) == []
    assert plan.after_layer(0, 40) == [Push(range(0, 1), range(2, 3))]
    assert plan.after_chunk(40) == [Push(range(1, 2), range(2, 3))] and plan.done  # no callback for the last layer


def test_what_p_has_cached_goes_at_once_and_what_d_holds_not_at_all():
    plan = PushPlan(layers=2, block_size=16, total_tokens=100, cached_tokens=64, held_tokens=32)
    assert plan.at_start() == [Push(range(2), range(2, 4))]
    assert plan.after_chunk(100) == [Push(range(2), range(4, 7))] and plan.done
    assert PushPlan(layers=2, block_size=16, total_tokens=64, cached_tokens=32, held_tokens=64).done


@pytest.mark.parametrize("bad", [{"cached_tokens": 8}, {"held_tokens": 112}, {"total_tokens": 0}, {"layers": 0}])
def test_impossible_plans_are_refused(bad):
    with pytest.raises(ValueError):
        PushPlan(**({"layers": 2, "block_size": 16, "total_tokens": 100} | bad))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_piece_goes_once_and_never_before_it_is_complete(data):
    layers = data.draw(st.integers(1, 4))
    block = data.draw(st.sampled_from([1, 4, 16]))
    total = data.draw(st.integers(1, 150))
    cached = data.draw(st.integers(0, total // block)) * block
    held = data.draw(st.integers(0, total // block)) * block
    layerwise = data.draw(st.booleans())
    plan = PushPlan(layers=layers, block_size=block, total_tokens=total, cached_tokens=cached, held_tokens=held,
                    layerwise=layerwise)
    sent: set[tuple[int, int]] = set()
    computed = [cached] * layers

    def take(pushes):
        for push in pushes:
            for layer in push.layers:
                for index in push.blocks:
                    assert (layer, index) not in sent
                    assert min((index + 1) * block, total) <= computed[layer]
                    assert index * block >= held
                    sent.add((layer, index))

    take(plan.at_start())
    at = cached
    while at < total:
        at += data.draw(st.integers(1, total - at))
        for layer in range(layers):
            computed[layer] = at
            take(plan.after_layer(layer, at))
        take(plan.after_chunk(at))
    take(plan.after_chunk(total))
    blocks = -(-total // block)
    assert plan.done and sent == {(layer, index) for layer in range(layers) for index in range(held // block, blocks)}


def test_the_deadline_grows_with_the_bytes_and_follows_what_was_measured():
    config = TransferConfig(base_s=0.5, margin=4.0, max_s=25.0, bandwidth_bytes_per_s=100e6)
    link = Bandwidth(config)
    assert link.allowed_ns(0) == 500_000_000
    assert link.allowed_ns(100_000_000) == 4_500_000_000
    assert link.allowed_ns(10**12) == 25_000_000_000
    link.measured(10**9, 10**9)
    assert link.bytes_per_s == 1e9 and link.allowed_ns(100_000_000) == 900_000_000
    for _ in range(60):
        link.measured(10**8, 10**9)
    assert link.bytes_per_s == pytest.approx(1e8, rel=0.01)


def test_small_transfers_measure_latency_and_are_not_taken():
    link = Bandwidth(TransferConfig())
    link.measured(1000, 10**9)
    link.measured(10**9, 0)
    assert link.bytes_per_s == 100e6


def test_one_slow_transfer_counts_by_its_seconds():
    link = Bandwidth(TransferConfig(smoothing=0.5))
    link.measured(10**9, 10**9)
    link.measured(10**8, 10**9)
    assert link.bytes_per_s == pytest.approx(1 / (0.5 / 1e9 + 0.5 / 1e8))


def test_a_link_that_became_slow_is_learnt_from_its_timeouts():
    config = TransferConfig()
    link = Bandwidth(config)
    link.measured(10**9, 10**8)  # 10 GB/s
    size, needed_ns = 100 << 20, 8 * 10**9
    tries = 0
    while (allowed := link.allowed_ns(size)) < needed_ns:
        link.timed_out(size, allowed)
        tries += 1
        assert tries < 60
    fast = Bandwidth(config)
    fast.measured(10**9, 10**9)
    fast.timed_out(2 * 10**9, 10**9)  # cut off for another reason: not slower than known
    assert fast.bytes_per_s == 1e9


@pytest.mark.parametrize("bad", [{"base_s": 0.0}, {"margin": 0.5}, {"smoothing": 0.0}, {"layerwise_tokens": 0},
                                 {"max_s": 0.1}, {"bandwidth_bytes_per_s": 0.0}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match="impossible"):
        TransferConfig(**bad)
