"""The radix tree against a brute-force set of sequences, over seeded random operations."""

from __future__ import annotations

import random

import pytest

from vla_cloud.core.prefix_cache import Match, PrefixCache

Handle = tuple[int, ...]


def sequence(rng: random.Random) -> Handle:
    """Few distinct tokens, so that prefixes are shared often; now and then empty or long."""
    return tuple(rng.randrange(3) for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 13))))


def common(a: Handle, b: Handle) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def split(handle: Handle, at: int) -> tuple[Handle, Handle]:
    assert 0 < at < len(handle), "a handle is never split into an empty part"
    return handle[:at], handle[at:]


@pytest.mark.parametrize("seed", range(40))
def test_without_eviction_it_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    cache: PrefixCache[Handle] = PrefixCache(10_000, split)
    inserted: list[Handle] = []
    for _ in range(120):
        tokens = sequence(rng)
        match = cache.match(tokens)
        assert match.length == max((common(tokens, other) for other in inserted), default=0)
        assert sum(match.handles, ()) == tokens[: match.length]
        if rng.random() < 0.6:
            assert cache.insert(match, tokens, tokens[match.length :])
            inserted.append(tokens)
        cache.release(match)
        prefixes = {other[:n] for other in inserted for n in range(1, len(other) + 1)}
        assert cache.tokens_held == len(prefixes)


@pytest.mark.parametrize("seed", range(40))
def test_bounded_and_locked_prefixes_survive(seed: int) -> None:
    rng = random.Random(1000 + seed)
    capacity = rng.choice((1, 4, 12, 30))
    cache: PrefixCache[Handle] = PrefixCache(capacity, split)
    held: list[tuple[Handle, Match[Handle]]] = []
    for _ in range(300):
        if held and (len(held) > 4 or rng.random() < 0.4):
            cache.release(held.pop(rng.randrange(len(held)))[1])
            continue
        tokens = sequence(rng)
        match = cache.match(tokens)
        assert sum(match.handles, ()) == tokens[: match.length]
        before = cache.tokens_held
        if not cache.insert(match, tokens, tokens[match.length :]):
            assert cache.tokens_held == before
        held.append((tokens[: match.length], match))
        assert cache.tokens_held <= capacity
        for prefix, _ in held:  # whatever a request holds is still found, to the token
            again = cache.match(prefix)
            assert again.length == len(prefix)
            cache.release(again)
    for _, match in held:
        cache.release(match)
    everything = cache.match(())
    assert cache.insert(everything, tuple(range(10, 10 + capacity)), tuple(range(10, 10 + capacity)))
    assert cache.tokens_held == capacity, "all locks are gone, so a sequence of the full capacity fits"
    counts = cache.counts
    assert counts.tokens_inserted - counts.tokens_evicted == cache.tokens_held


@pytest.mark.parametrize("seed", range(10))
def test_answers_only_tokens_that_were_asked_for(seed: int) -> None:
    """With eviction the tree may forget, but never answers with tokens that were not asked for."""
    rng = random.Random(seed)
    cache: PrefixCache[Handle] = PrefixCache(8, split)
    for _ in range(500):
        tokens = sequence(rng)
        match = cache.match(tokens)
        if match.length < len(tokens):
            cache.insert(match, tokens, tokens[match.length :])
        assert sum(match.handles, ()) == tokens[: match.length]
        cache.release(match)
