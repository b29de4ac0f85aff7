"""What can never be served is refused by name; shares of the chunk budget; cost of swapping."""

import math
from dataclasses import replace

import pytest

from vla_cloud.core.chunk_budget import share_budget
from vla_cloud.core.generate import (
    GenerateRequest,
    ImageSpan,
    InvalidRequest,
    Priority,
    SamplingParams,
    check_request,
    seed_of,
)
from vla_cloud.core.preemption import SwapCost, choose_victim
from vla_cloud.core.sequence import TokenSequence

GOOD = GenerateRequest("r", tuple(range(10)))
SHA = b"s" * 32


def test_a_good_request_passes():
    check_request(GOOD, 11, vocab_size=10)
    check_request(replace(GOOD, sampling=SamplingParams(max_new_tokens=0)), 10)
    images = (ImageSpan(0, 3, SHA), ImageSpan(3, 7, SHA))
    extremes = SamplingParams(temperature=100.0, top_p=1.0, top_k=0, seed=2**64 - 1, logprobs=20)
    check_request(replace(GOOD, images=images, sampling=extremes), 11)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"request_id": ""}, "id is empty"),
        ({"tokens": ()}, "0 tokens"),
        ({"tokens": tuple(range(20))}, "20 tokens"),
        ({"tokens": (1, -1)}, "token -1"),
        ({"tokens": (1, 50)}, "token 50"),
        ({"images": (ImageSpan(0, 0, SHA),)}, "empty"),
        ({"images": (ImageSpan(-1, 2, SHA),)}, "token -1"),
        ({"images": (ImageSpan(8, 3, SHA),)}, "leaves the prompt"),
        ({"images": (ImageSpan(2, 3, SHA), ImageSpan(4, 1, SHA))}, "overlaps"),
        ({"images": (ImageSpan(0, 1, b"short"),)}, "32 bytes"),
    ],
)
def test_a_wrong_request_is_refused_by_name(wrong, text):
    with pytest.raises(InvalidRequest, match=text) as refusal:
        check_request(replace(GOOD, **wrong), 20, vocab_size=50)
    assert refusal.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"seed": -1},
        {"seed": 2**64},
        {"logprobs": 21},
        {"logprobs": -1},
        {"max_new_tokens": -1},
        {"stop_token_ids": frozenset(range(65))},
    ],
)
def test_wrong_sampling_parameters_are_refused_by_name(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong)).replace("stop_token_ids", "stop tokens")):
        check_request(replace(GOOD, sampling=SamplingParams(**wrong)), 20)


def test_a_seed_is_the_given_one_or_that_of_the_id_on_every_worker():
    assert seed_of(replace(GOOD, sampling=SamplingParams(seed=0))) == 0
    assert seed_of(GOOD) == seed_of(replace(GOOD, tokens=(1,))) != seed_of(replace(GOOD, request_id="s"))
    assert seed_of(GOOD) == 10904041680466953029


@pytest.mark.parametrize(
    "remaining, budget, shares",
    [
        ([], 512, []),
        ([100], 512, [100]),
        ([1000], 512, [512]),
        ([1000, 1000], 512, [256, 256]),
        ([1000, 40], 512, [464, 40]),  # 8 tokens are left rather than a chunk that ends inside a block
        ([10, 1000, 1000], 512, [10, 256, 240]),
        ([1000, 1000, 1000], 512, [176, 176, 160]),
        ([30, 30], 16, [16, 0]),
        ([5, 5], 3, [0, 0]),
    ],
)
def test_shares_are_equal_whole_blocks_and_short_prompts_leave_theirs(remaining, budget, shares):
    assert share_budget(remaining, budget) == shares


def test_the_victim_is_the_lowest_priority_then_the_latest_arrival():
    def seq(order, priority, deadline_ns=None):
        return TokenSequence(replace(GOOD, request_id=str(order), priority=priority, deadline_ns=deadline_ns), order)

    low, high, late = seq(0, Priority.LOW), seq(1, Priority.HIGH), seq(2, Priority.NORMAL)
    robot = seq(3, Priority.ROBOT, 5)
    assert choose_victim([high, low, late, robot]) is low
    assert choose_victim([high, late, seq(1, Priority.NORMAL)]) is late
    assert choose_victim([high, robot], below=Priority.HIGH) is None
    assert choose_victim([robot, high], below=Priority.ROBOT) is high
    sooner = seq(4, Priority.ROBOT, 2)
    assert choose_victim([robot, sooner, seq(0, Priority.ROBOT)]).order == 0 and sooner.rank < robot.rank
    assert choose_victim([]) is None


def test_swapping_pays_both_ways_against_the_prefill_rate():
    cost = SwapCost(host_blocks=10, bytes_per_block=1_000_000, host_bandwidth_bytes_s=1e9, prefill_tokens_s=1000.0)
    assert cost.swap_s(33) == pytest.approx(2 * 3 * 1e6 / 1e9)
    assert cost.recompute_s(33) == pytest.approx(0.033)
    assert cost.prefers_swap(33, host_used=7)
    assert not cost.prefers_swap(33, host_used=8), "no room on the host"
    assert not cost.prefers_swap(0, host_used=0), "nothing to keep"
    assert not replace(cost, prefill_tokens_s=1e5).prefers_swap(33, host_used=0)
