"""The model runner on a tiny random LLaMA: greedy answers equal to transformers in every way of serving them."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from vla_cloud.core.generate import GenerateRequest, SamplingParams, seed_of
from vla_cloud.engine.runner import Batch, BatchError, Chunk, sampling_rule
from vla_cloud.engine.torch_runner import TorchRunner
from vla_cloud.kv_transfer.layout import KvLayout, LayoutMismatch
from vla_models.chat_model import ChatModel, load_chat_model
from vla_models.paged_attention import IMPLEMENTATIONS, blocks_for
from vla_models.sampling import SamplingRule

VOCABULARY = 97
GREEDY = SamplingRule()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny matrices on several threads wait for each other more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[LlamaForCausalLM, ChatModel]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    theirs, folder = LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, load_chat_model(folder)


@pytest.fixture(params=IMPLEMENTATIONS)
def runner(request, models) -> TorchRunner:
    if request.param == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed: pip install 'vla-runtime[chat]'")
    return TorchRunner(models[1], num_blocks=60, attention=request.param)


def prompt(tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).tolist()


@torch.no_grad()
def greedy(theirs: LlamaForCausalLM, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


def answer(runner: TorchRunner, tokens: list[int], count: int, table: list[int], *, chunk=1000, start=0, rule=GREEDY) -> list[int]:
    """Prefill from ``start`` on in chunks, then decode alone."""
    tokens = list(tokens)
    for begin in range(start, len(tokens), chunk):
        piece = tokens[begin : begin + chunk]
        last = begin + len(piece) == len(tokens)
        found = runner.run(Batch(prefill=[Chunk("a", piece, begin, table, rule if last else None, tokens[:begin])]))
    tokens.append(found[0].token_id)
    for _ in range(count - 1):
        row = Chunk("a", tokens[-1:], len(tokens) - 1, table, rule, tokens[:-1])
        tokens.append(runner.run(Batch(decode=[row]))[0].token_id)
    return tokens[-count:]


@pytest.mark.parametrize("chunk", [1000, 16, 7])
def test_greedy_answers_are_those_of_transformers(models, runner, chunk):
    for seed, length in enumerate((1, 16, 33, 70)):
        tokens = prompt(length, seed)
        assert answer(runner, tokens, 20, [9, 3, 5, 40, 2, 7], chunk=chunk) == greedy(models[0], tokens, 20)


def test_a_cached_prefix_gives_the_same_answer(models, runner):
    shared, rest = prompt(48, 1), prompt(9, 2)
    answer(runner, shared + prompt(20, 3), 5, [1, 2, 3, 4, 5])
    found = answer(runner, shared + rest, 12, [1, 2, 3, 6, 7], start=48)
    assert found == greedy(models[0], shared + rest, 12)


def test_requests_that_share_every_step_answer_as_alone(models, runner):
    """A batch as the scheduler makes it: prompts arrive one step apart, in chunks, beside those already decoding."""
    prompts = {str(seed): prompt(length, seed) for seed, length in enumerate((5, 60, 31, 90))}
    free = list(range(60))
    tables = {name: [free.pop() for _ in range(blocks_for(len(tokens) + 12))] for name, tokens in prompts.items()}
    tokens = {name: list(value) for name, value in prompts.items()}
    computed = dict.fromkeys(prompts, 0)
    for step in range(40):
        prefill, decode = [], []
        for order, name in enumerate(prompts):
            left = len(tokens[name]) - computed[name]
            if step < order or len(tokens[name]) == len(prompts[name]) + 12:
                continue
            count = min(left, 23)
            chunk = Chunk(
                name, tokens[name][computed[name] : computed[name] + count], computed[name], tables[name],
                GREEDY if count == left else None,
            )  # fmt: skip
            (decode if left == 1 and computed[name] else prefill).append(chunk)
            computed[name] += count
        for sampled in runner.run(Batch(prefill, decode)):
            tokens[sampled.request_id].append(sampled.token_id)
    for name, value in prompts.items():
        assert tokens[name][len(value) :] == greedy(models[0], value, 12), name


def test_blocks_copied_to_other_places_and_another_runner_go_on_the_same(models, runner):
    """What a transfer or a swap does: bytes of blocks moved, the answer goes on."""
    tokens = prompt(40, 4)
    expected = greedy(models[0], tokens, 15)
    first = answer(runner, tokens, 5, [1, 2, 3])
    other = TorchRunner(models[1], num_blocks=20)
    runner.layout.require(other.layout)
    other.copy_blocks_in([19, 0, 7], runner.copy_blocks_out([1, 2, 3]))
    grown = tokens + first
    row = Chunk("b", grown[-1:], len(grown) - 1, [19, 0, 7], GREEDY)
    found = [other.run(Batch(decode=[row]))[0].token_id]
    assert expected[5] == found[0]
    copy = runner.copy_blocks_out([1])
    runner.kv[:, 1] = 0
    assert copy.any(), "a copy, not a view"


def test_sampled_answers_do_not_depend_on_how_they_were_served(models, runner):
    tokens, rule = prompt(30, 5), SamplingRule(temperature=1.0, top_p=0.95, repetition_penalty=1.2, seed=11)
    plain = answer(runner, tokens, 20, [0, 1, 2, 3], rule=rule)
    assert answer(runner, tokens, 20, [9, 8, 7, 6], rule=rule, chunk=9) == plain
    resumed = answer(runner, tokens + plain[:8], 12, [5, 6, 7, 8], rule=rule)
    assert resumed == plain[8:]
    assert len(set(plain)) > 5


def test_the_penalty_counts_the_prompt_and_the_chunk_itself(runner):
    tokens = prompt(20, 6)
    best = answer(runner, tokens, 1, [0, 1])
    rule = SamplingRule(repetition_penalty=1e6, logprobs=3)
    again = runner.run(Batch(prefill=[Chunk("a", [*tokens[16:], *best], 16, [0, 1], rule, tokens[:16])]))[0]
    assert again.token_id not in {*tokens, *best}
    assert again.logprob is not None and len(again.top_logprobs) == 3


def test_layers_are_told_in_order_and_answers_follow_the_batch(runner):
    layers: list[int] = []
    chunks = [Chunk("x", [1, 2], 0, [0], GREEDY), Chunk("y", [3], 0, [1], None)]
    found = runner.run(Batch(chunks, [Chunk("z", [4], 0, [2], GREEDY)]), layers.append)
    assert layers == [0, 1] and [sampled.request_id for sampled in found] == ["x", "z"]
    assert runner.run(Batch()) == []


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (Chunk("bad", [1] * 17, 0, [0], GREEDY), "1 blocks of 16 for 17 tokens"),
        (Chunk("bad", [1], 256, list(range(17)), GREEDY), "257 tokens, the longest sequence is 256"),
        (Chunk("bad", [VOCABULARY], 0, [0], GREEDY), "outside 0 .. 96"),
        (Chunk("bad", [-1], 0, [0], GREEDY), "outside 0 .. 96"),
        (Chunk("bad", [1], 0, [60], GREEDY), "pool of 60"),
        (Chunk("bad", [1], 0, [-1], GREEDY), "pool of 60"),
        (Chunk("bad", [], 0, [0], GREEDY), "0 tokens"),
        (Chunk("bad", [1], -1, [0], GREEDY), "position -1"),
    ],
)
def test_a_batch_that_cannot_be_run_is_refused_by_request_before_anything_is_written(runner, chunk, words):
    with pytest.raises(BatchError, match=words) as error:
        runner.run(Batch(prefill=[Chunk("good", [1] * 16, 0, [5], GREEDY), chunk]))
    assert error.value.request_id == "bad" and not runner.kv.any()


def test_a_decode_row_is_one_token(runner):
    with pytest.raises(BatchError, match="not 2"):
        runner.run(Batch(decode=[Chunk("bad", [1, 2], 0, [0], GREEDY)]))


def test_the_pool_may_be_memory_from_outside(models):
    layout = TorchRunner(models[1], num_blocks=1).layout
    memory = np.zeros((2, 8, layout.piece_bytes), dtype=np.uint8)
    runner = TorchRunner(models[1], kv=memory)
    runner.run(Batch(prefill=[Chunk("a", [1] * 16, 0, [3], None)]))
    assert memory[:, 3].any() and not memory[:, [0, 1, 2, 4, 5, 6, 7]].any()
    keys = memory[0, 3].view(np.float32).reshape(2, 2, 16, 8)[0]
    assert np.isfinite(keys).all() and keys.any(axis=-1).all()
    with pytest.raises(ValueError, match="a KV pool is u8"):
        TorchRunner(models[1], kv=memory[:1])
    with pytest.raises(ValueError, match="without blocks"):
        TorchRunner(models[1])
    with pytest.raises(ValueError, match="takes 1 to 256"):
        TorchRunner(models[1], num_blocks=1, max_model_len=257)


def test_the_layout_says_whose_keys_and_values_these_are(models, tmp_path):
    theirs, model = models
    layout = TorchRunner(model, num_blocks=1).layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.block_size, layout.dtype) == (2, 2, 8, 16, "float32")
    assert KvLayout.from_json(layout.to_json()) == layout
    theirs.save_pretrained(tmp_path / "same")
    TorchRunner(load_chat_model(tmp_path / "same"), num_blocks=1).layout.require(layout)
    changed = LlamaForCausalLM(theirs.config)
    changed.save_pretrained(tmp_path / "other")
    with pytest.raises(LayoutMismatch, match="model_hash"):
        TorchRunner(load_chat_model(tmp_path / "other"), num_blocks=1).layout.require(layout)


def test_a_request_draws_with_its_own_seed_on_every_worker():
    request = GenerateRequest("r1", (1, 2), SamplingParams(temperature=0.5, top_k=4, top_p=0.5, logprobs=2))
    rule = sampling_rule(request)
    assert rule == SamplingRule(0.5, 4, 0.5, 1.0, seed_of(request), 2)
    assert sampling_rule(GenerateRequest("r2", (1, 2))).seed != rule.seed
    assert sampling_rule(GenerateRequest("r2", (1, 2), SamplingParams(seed=5))).seed == 5
