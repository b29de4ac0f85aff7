"""Every implementation of paged attention against plain attention in float64, on the same blocks."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from vla_models.paged_attention import (
    BLOCK_SIZE,
    IMPLEMENTATIONS,
    AttentionShape,
    Span,
    blocks_for,
    choose_implementation,
    make_attention,
    plan_attention,
)
from vla_models.rope import inverse_frequencies

TOLERANCE = 2e-5
SHAPES = {
    "grouped 3 to 1": (9, 3, 64),
    "multi-head": (4, 4, 16),
    "one key head": (6, 1, 32),
    "odd sizes": (2, 2, 6),
    "wide heads": (4, 2, 128),
}
NUM_BLOCKS = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny matrices on several threads wait for each other more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request) -> str:
    if request.param == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed: pip install 'vla-runtime[chat]'")
    return request.param


class Rig:
    """An implementation, its pool, and the keys and values that each sequence should have, in float64."""

    def __init__(self, implementation: str, shape: tuple[int, int, int], scale: float = 1.0) -> None:
        heads, kv_heads, size = shape
        self.shape = AttentionShape(heads, kv_heads, size, inverse_frequencies(size, 10000.0), scale)
        self.attention = make_attention(implementation, self.shape)
        # Memory that nobody has written may hold anything.
        self.pool = torch.full((NUM_BLOCKS, 2, kv_heads, BLOCK_SIZE, size), float("nan"))
        self.random = torch.Generator().manual_seed(0)
        self.free = torch.randperm(NUM_BLOCKS, generator=self.random).tolist()
        self.tables: dict[str, list[int]] = {}
        self.history: dict[str, torch.Tensor] = {}

    def table(self, name: str, tokens: int) -> list[int]:
        table = self.tables.setdefault(name, [])
        while len(table) < blocks_for(tokens):
            table.append(self.free.pop())
        return table

    def fork(self, source: str, name: str, tokens: int) -> None:
        """A new sequence whose first whole blocks are those of another."""
        assert tokens % BLOCK_SIZE == 0
        self.tables[name] = self.tables[source][: blocks_for(tokens)]
        self.history[name] = self.history[source][:tokens]

    def run(self, prefill: list[tuple[str, int]], decode: list[str] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of random rows: what the implementation gives and what it should."""
        width = self.shape.num_heads + 2 * self.shape.num_kv_heads
        work = [*prefill, *((name, 1) for name in decode)]
        qkv = torch.randn(sum(count for _, count in work), width * self.shape.head_dim, generator=self.random)
        spans, expected, row = [], [], 0
        for name, count in work:
            rows = qkv[row : row + count].double().view(count, width, -1)
            row += count
            start = len(self.history.get(name, ()))
            before = self.history.get(name, rows[:0])
            self.history[name] = torch.cat([before, rows])
            spans.append(Span(start, count, self.table(name, start + count)))
            expected.append(self.expected(name, start))
        self.attention.begin(plan_attention(spans[: len(prefill)], spans[len(prefill) :]))
        return self.attention.attend(qkv, self.pool), torch.cat(expected).float()

    def expected(self, name: str, start: int) -> torch.Tensor:
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        rows = self.history[name]
        q, k = self.rotated(rows[:, :heads])[start:], self.rotated(rows[:, heads : heads + kv_heads])
        groups = heads // kv_heads
        k, v = k.repeat_interleave(groups, 1), rows[:, heads + kv_heads :].repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.shape.head_dim**-0.5
        late = torch.arange(len(rows)) > torch.arange(start, len(rows))[:, None]
        weights = scores.masked_fill(late, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        # Complex multiplication, another way to say the same.
        half = x.shape[-1] // 2
        angle = torch.arange(len(x))[:, None].double() * self.shape.inverse_frequencies.double()
        turn = torch.polar(torch.full_like(angle, self.shape.rotary_scale), angle)[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)


def check(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    found, expected = pair
    assert found.shape == expected.shape
    assert torch.isfinite(found).all(), "rows that were never written leaked in"
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_prompt_then_tokens_one_by_one(implementation, shape):
    rig = Rig(implementation, shape)
    check(rig.run([("a", 21)]))
    for _ in range(30):  # over a block boundary
        check(rig.run([], ["a"]))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 127, 128, 129, 200, 300])
def test_prompts_of_lengths_around_the_blocks_and_strips(implementation, tokens):
    check(Rig(implementation, (6, 2, 16)).run([("a", tokens)]))


@pytest.mark.parametrize("cuts", [(1,) * 9, (5, 150, 3), (16, 16), (128, 128), (140, 1, 130)], ids=str)
def test_chunks_see_all_before_them(implementation, cuts):
    rig = Rig(implementation, (6, 2, 16))
    for count in cuts:
        check(rig.run([("a", count)]))


def test_prompts_and_decoding_sequences_of_all_lengths_share_a_step(implementation):
    rig = Rig(implementation, (9, 3, 64))
    check(rig.run([("a", 3), ("b", 40), ("c", 16), ("d", 1)]))
    check(rig.run([("e", 33), ("b", 20), ("f", 1)], ["a", "c", "d"]))
    check(rig.run([], ["d", "f", "b", "a", "e", "c"]))


def test_a_prefix_of_another_sequence_is_read_and_never_written(implementation):
    rig = Rig(implementation, (6, 2, 16))
    check(rig.run([("a", 70)]))
    shared = rig.tables["a"][:3]
    before = rig.pool[shared].clone()
    rig.fork("a", "b", 48)
    check(rig.run([("b", 30)], ["a"]))
    check(rig.run([], ["b", "a"]))
    assert torch.equal(rig.pool[shared], before)


def test_only_the_rows_of_new_tokens_are_written(implementation):
    rig = Rig(implementation, (4, 4, 16))
    rig.run([("a", 19)])
    written = ~rig.pool.isnan().all(-1).all(2).all(1)  # [blocks, 16]
    first, second = rig.tables["a"]
    expected = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    expected[first], expected[second, :3] = True, True
    assert torch.equal(written, expected)


def test_rows_after_the_planned_ones_give_zeros_and_are_not_stored(implementation):
    rig = Rig(implementation, (6, 2, 16))
    rig.run([("a", 20)])
    plan = plan_attention([Span(0, 3, [rig.free.pop()])], [Span(20, 1, rig.table("a", 21))])
    rig.attention.begin(plan)
    qkv = torch.randn(7, 160, generator=rig.random)
    qkv[4:] = float("nan")
    found, pool = rig.attention.attend(qkv, rig.pool), rig.pool.clone()
    assert found.shape == (7, 96) and not found[4:].any()
    assert torch.equal(found[:4], rig.attention.attend(qkv[:4].contiguous(), rig.pool))
    assert torch.equal(pool.nan_to_num(-1.0), rig.pool.nan_to_num(-1.0))


def test_the_rotary_scale_applies_to_queries_and_keys(implementation):
    rig = Rig(implementation, (6, 2, 16), scale=1.3)
    check(rig.run([("a", 40)]))
    check(rig.run([], ["a"]))


def test_very_large_scores_neither_overflow_nor_blur(implementation):
    rig = Rig(implementation, (2, 1, 16))
    rig.run([("a", 20)])
    rig.pool[rig.tables["a"], 0] *= 1000.0
    heads = rig.history["a"]
    heads[:, 2] *= 1000.0  # the reference's keys
    check(rig.run([], ["a"]))


def test_a_nan_of_one_sequence_shows_and_stays_there(implementation):
    rig = Rig(implementation, (6, 2, 16))
    rig.run([("a", 20), ("b", 20)])
    rig.pool[rig.tables["a"][0], 0, :, 3] = float("nan")
    found, expected = rig.run([], ["a", "b"])
    assert found[0].isnan().all()
    assert torch.allclose(found[1], expected[1], atol=1e-4)


def test_scratch_memory_of_a_long_step_does_not_leak_into_a_short_one(implementation):
    rig = Rig(implementation, (6, 2, 16))
    check(rig.run([("a", 500)]))
    check(rig.run([("b", 5)], ["a"]))
    check(rig.run([], ["b"]))


def test_the_choice_follows_device_and_dtype():
    assert choose_implementation(torch.device("cpu"), torch.bfloat16) == "torch"
    assert choose_implementation(torch.device("meta"), torch.float32) == "torch"
    with_numba = importlib.util.find_spec("numba") is not None
    assert choose_implementation(torch.device("cpu"), torch.float32) == ("numba" if with_numba else "torch")


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match="'cuda'; known: torch, numba"):
        make_attention("cuda", AttentionShape(1, 1, 2, inverse_frequencies(2, 1e4)))
