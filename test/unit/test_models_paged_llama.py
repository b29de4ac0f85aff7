"""The paged forward pass on a tiny random LLaMA: equal to transformers however a prompt is cut, cached or mixed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from vla_models.chat_model import ChatModel, load_chat_model
from vla_models.llama import Llama
from vla_models.llama import LlamaConfig as OurConfig
from vla_models.packed_linear import PackedLinear, can_pack, padded_rows
from vla_models.paged_attention import BLOCK_SIZE, IMPLEMENTATIONS, Span
from vla_models.paged_llama import PagedLlama, Step

TOLERANCE = 1e-4
VOCABULARY = 97
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny matrices on several threads wait for each other more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(folder, **options) -> tuple[LlamaForCausalLM, ChatModel]:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536,
    }  # fmt: skip
    # A wide initialisation: with the default the logits are so small that a wrong layer could hide in the tolerance.
    theirs = LlamaForCausalLM(LlamaConfig(**shape | options, initializer_range=0.3)).eval()
    theirs.save_pretrained(folder)
    return theirs, load_chat_model(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[LlamaForCausalLM, ChatModel]:
    return tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=IMPLEMENTATIONS)
def attention(request) -> str:
    if request.param == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed: pip install 'vla-runtime[chat]'")
    return request.param


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).tolist()


@torch.no_grad()
def reference(theirs: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return theirs(torch.tensor([tokens])).logits[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() < TOLERANCE * expected.abs().max())


class Paged:
    def __init__(self, model: ChatModel, attention: str, num_blocks: int = 64) -> None:
        self.llama = PagedLlama(model.llama, attention)
        self.pool = torch.full(self.llama.pool_shape(num_blocks), float("nan"))

    def prefill(self, tokens: list[int], start: int, table: list[int]) -> torch.Tensor:
        """Logits of all the new rows."""
        step = Step(tokens, [Span(start, len(tokens), table)], [], range(len(tokens)))
        return self.llama.forward(step, self.pool)


@pytest.mark.parametrize("cuts", [[150], [64, 64, 22], [1, 5, 30, 114]], ids=str)
def test_logits_of_a_prompt_in_chunks_are_those_of_transformers(models, attention, cuts):
    theirs, model = models
    tokens = prompt(150)
    paged, table, start, found = Paged(model, attention), list(range(50, 20, -1)), 0, []
    for count in cuts:
        found.append(paged.prefill(tokens[start : start + count], start, table))
        start += count
    assert close(torch.cat(found), reference(theirs, tokens))


def test_decode_rows_and_chunks_of_other_requests_share_a_pass(models, attention):
    theirs, model = models
    a, b, c = prompt(40, 1), prompt(17, 2), prompt(90, 3)
    paged = Paged(model, attention)
    paged.prefill(a[:-1], 0, [1, 2, 3])
    paged.prefill(b[:-1], 0, [4, 5])
    paged.prefill(c[:30], 0, [9, 8, 7])
    step = Step(
        [*c[30:70], a[-1], b[-1]], [Span(30, 40, [9, 8, 7, 6, 10])], [Span(39, 1, [1, 2, 3]), Span(16, 1, [4, 5])],
        [39, 40, 41],
    )  # fmt: skip
    found = paged.llama.forward(step, paged.pool)
    expected = [reference(theirs, c[:70])[-1], reference(theirs, a)[-1], reference(theirs, b)[-1]]
    assert close(found, torch.stack(expected))


def test_a_table_may_begin_with_blocks_of_another_request(models, attention):
    theirs, model = models
    shared, rest = prompt(48), prompt(25, 5)
    paged = Paged(model, attention)
    paged.prefill(shared + prompt(10, 9), 0, [3, 1, 2, 0])
    found = paged.prefill(rest, 48, [3, 1, 2, 7, 8])
    assert close(found, reference(theirs, shared + rest)[48:])


def test_only_the_asked_rows_have_logits(models, attention):
    theirs, model = models
    tokens = prompt(20)
    paged = Paged(model, attention)
    none = paged.llama.forward(Step(tokens, [Span(0, 20, [0, 1])], [], []), paged.pool)
    assert none.shape == (0, VOCABULARY)
    two = paged.llama.forward(Step(tokens, [Span(0, 20, [2, 3])], [], [19, 4]), paged.pool)
    assert close(two, reference(theirs, tokens)[[19, 4]])


def test_each_layer_is_told_once_its_keys_and_values_are_in_the_pool(models, attention):
    _, model = models
    paged = Paged(model, attention)
    seen = []

    def on_layer(index: int) -> None:
        written = [not bool(layer[5].isnan().any()) for layer in paged.pool]
        seen.append((index, written))

    paged.llama.forward(Step(prompt(16), [Span(0, 16, [5])], [], []), paged.pool, on_layer)
    assert seen == [(0, [True, False]), (1, [True, True])]


def test_both_implementations_leave_the_same_keys_and_values(models):
    if importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed: pip install 'vla-runtime[chat]'")
    pools = []
    for attention in IMPLEMENTATIONS:
        paged = Paged(models[1], attention)
        paged.prefill(prompt(32), 0, [7, 3])
        pools.append(paged.pool[:, [7, 3]])
    assert close(*pools)


def test_bfloat16_follows_float32_from_afar(tmp_path, models):
    theirs, model = models
    theirs.save_pretrained(tmp_path)
    half = load_chat_model(tmp_path, dtype=torch.bfloat16)
    llama = PagedLlama(half.llama)
    pool = torch.zeros(llama.pool_shape(4), dtype=torch.bfloat16)
    tokens = prompt(30)
    found = llama.forward(Step(tokens, [Span(0, 30, [2, 1])], [], range(30)), pool).float()
    expected = reference(theirs, tokens)
    assert llama.attention_name == "torch"
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > 0.98


def test_a_model_without_a_head_is_refused():
    config = OurConfig(8, 8, 1, 2, 2, 8, lm_head=False)
    with pytest.raises(ValueError, match="lm_head"):
        PagedLlama(Llama(config))


def test_row_counts_are_rounded_up_to_few_sizes():
    assert [padded_rows(rows) for rows in (0, 1, 4, 5, 8, 9, 32, 33, 64, 65, 512)] == [0, 4, 4, 6, 8, 12, 32, 40, 64, 80, 512]
    for rows in range(1, 2000):
        padded = padded_rows(rows)
        assert rows <= padded <= max(4, 4 * rows / 3) and padded_rows(padded) == padded
    assert len({padded_rows(rows) for rows in range(1, 65)}) == 13


def test_warming_up_runs_every_size_that_steps_will_have_and_leaves_answers_alone(models, attention, monkeypatch):
    theirs, model = models
    paged, sizes = Paged(model, attention), set()
    products = {"__call__": PackedLinear.__call__, "times": PackedLinear.times}

    def noted(name):
        def call(linear, *inputs):
            sizes.add((name, len(inputs[0])))
            return products[name](linear, *inputs)

        return call

    for name in products:
        monkeypatch.setattr(PackedLinear, name, noted(name))
    paged.llama.warm_up(100, 9)
    warmed = set(sizes)
    tokens = prompt(100)
    for count in (1, 2, 5, 9, 100):
        found = paged.llama.forward(Step(tokens[:count], [Span(0, count, list(range(7)))], [], range(min(count, 9))), paged.pool)
        assert close(found, reference(theirs, tokens[:count])[:9])
    if can_pack(model.llama.embed_tokens.weight):
        assert sizes == warmed, "a size was used that had not been tried"


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_packed_and_plain_products_agree(rows):
    torch.manual_seed(0)
    weight, x, other = torch.randn(24, 40), torch.randn(rows, 40), torch.randn(rows, 24)
    linear = PackedLinear(weight)
    assert linear.packed == can_pack(weight)
    plain = PackedLinear(weight.double())
    assert not plain.packed
    wide_x, wide_other = x.double(), other.double()
    for found, expected in (
        (linear(x), plain(wide_x)),
        (linear.silu(x), plain.silu(wide_x)),
        (linear.added_to(other, x), plain.added_to(wide_other, wide_x)),
        (linear.times(other, x), plain.times(wide_other, wide_x)),
    ):
        assert close(found.double(), expected)


@pytest.mark.parametrize(
    "rope", [YARN, YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}], ids=["yarn", "options"]
)
def test_yarn_is_that_of_transformers_beyond_the_trained_length(tmp_path, attention, rope):
    theirs, model = tiny(tmp_path, rope_parameters=rope)
    tokens = prompt(2500)
    paged, table, found = Paged(model, attention, 160), list(range(160)), []
    for start in range(0, 2500, 512):
        found.append(paged.prefill(tokens[start : start + 512], start, table))
    assert close(torch.cat(found), reference(theirs, tokens))


def test_a_stretched_context_is_yarn(tmp_path):
    theirs, _ = tiny(tmp_path / "long", rope_parameters=YARN | {"factor": 8.0}, max_position_embeddings=16384)
    tiny(tmp_path / "short", max_position_embeddings=2048)
    model = load_chat_model(tmp_path / "short", context_tokens=16384)
    assert model.llama.config.max_position_embeddings == 16384
    assert model.weights_hash != load_chat_model(tmp_path / "short").weights_hash, "other rotations are other KV"
    tokens = prompt(100)
    assert close(Paged(model, "torch").prefill(tokens, 0, list(range(7))), reference(theirs, tokens))
    with pytest.raises(ValueError, match="stretched already"):
        model.llama.stretch_context(32768)


@pytest.mark.slow
def test_a_prompt_of_64k_tokens_goes_through_in_chunks(tmp_path):
    """Against transformers at the end of 8K, then on to 64K; the last logits against a pass in larger chunks."""
    if importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed: pip install 'vla-runtime[chat]'")
    theirs, model = tiny(tmp_path, rope_parameters=YARN)
    total = 65536
    tokens, ends = prompt(total), []
    for chunk in (512, 2048):
        paged, table = Paged(model, "numba", total // BLOCK_SIZE), list(reversed(range(total // BLOCK_SIZE)))
        for start in range(0, total, chunk):
            step = Step(tokens[start : start + chunk], [Span(start, chunk, table)], [], [chunk - 1])
            found = paged.llama.forward(step, paged.pool)
            if start + chunk == 8192:
                assert close(found, reference(theirs, tokens[:8192])[-1:])
        ends.append(found)
    assert torch.isfinite(ends[0]).all() and close(*ends)
