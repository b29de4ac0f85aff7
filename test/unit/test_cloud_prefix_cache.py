"""The prefix cache, case by case. A handle here is the tuple of the tokens it stands for."""

from __future__ import annotations

import pytest

from vla_cloud.core.prefix_cache import PrefixCache

Handle = tuple[int, ...]


def make_cache(capacity: int = 100) -> PrefixCache[Handle]:
    return PrefixCache(capacity, lambda handle, at: (handle[:at], handle[at:]))


def add(cache: PrefixCache[Handle], *tokens: int) -> bool:
    match = cache.match(tokens)
    try:
        return match.length == len(tokens) or cache.insert(match, tokens, tokens[match.length :])
    finally:
        cache.release(match)


def known(cache: PrefixCache[Handle], *tokens: int) -> int:
    match = cache.match(tokens)
    cache.release(match)
    assert sum(match.handles, ()) == tokens[: match.length]
    return match.length


def test_longest_common_prefix_to_the_token() -> None:
    cache = make_cache()
    add(cache, 1, 2, 3, 4)
    assert known(cache, 1, 2, 3, 4) == 4
    assert known(cache, 1, 2, 9) == 2
    assert known(cache, 1, 2, 3, 4, 5) == 4
    assert known(cache, 9) == 0
    assert cache.tokens_held == 4


def test_shared_prefix_is_kept_once() -> None:
    cache = make_cache()
    add(cache, 1, 2, 3, 4)
    add(cache, 1, 2, 5, 6)
    assert cache.tokens_held == 6
    assert known(cache, 1, 2, 3, 4) == known(cache, 1, 2, 5, 6) == 4


def test_least_recently_used_leaf_goes_first() -> None:
    cache = make_cache(6)
    add(cache, 1, 2, 3)
    add(cache, 4, 5, 6)
    known(cache, 1, 2, 3)
    add(cache, 7, 8, 9)
    assert (known(cache, 1, 2, 3), known(cache, 4, 5, 6), known(cache, 7, 8, 9)) == (3, 0, 3)
    assert cache.counts.tokens_evicted == 3


def test_locked_path_is_never_evicted_and_insertion_is_refused_instead() -> None:
    cache = make_cache(4)
    add(cache, 1, 2, 3, 4)
    held = cache.match((1, 2, 3, 4))
    assert not add(cache, 5, 6)
    assert (cache.counts.refused, cache.tokens_held) == (1, 4)
    cache.release(held)
    assert add(cache, 5, 6)
    assert known(cache, 5, 6) == 2


def test_sequence_longer_than_the_cache_is_refused_without_evicting_anything() -> None:
    cache = make_cache(4)
    add(cache, 1, 2)
    assert not add(cache, 3, 4, 5, 6, 7)
    assert known(cache, 1, 2) == 2


def test_lock_moves_to_the_inserted_tokens() -> None:
    cache = make_cache(4)
    match = cache.match((1, 2, 3, 4))
    assert cache.insert(match, (1, 2, 3, 4), (1, 2, 3, 4))
    assert match.length == 4
    assert not add(cache, 9)
    cache.release(match)
    assert add(cache, 9)


def test_split_under_a_lock_keeps_the_whole_path_locked() -> None:
    cache = make_cache(5)
    add(cache, 1, 2, 3, 4)
    held = cache.match((1, 2, 3, 4))
    assert known(cache, 1, 2, 9) == 2  # splits the locked edge
    assert not add(cache, 5, 6)
    cache.release(held)
    assert add(cache, 5, 6, 7)


def test_same_tokens_inserted_twice_by_two_requests() -> None:
    cache = make_cache()
    first, second = cache.match((1, 2, 3)), cache.match((1, 2, 3))
    assert cache.insert(first, (1, 2), (1, 2))
    assert cache.insert(second, (1, 2, 3), (1, 2, 3))
    assert sum(second.handles, ()) == (1, 2, 3)
    cache.release(first)
    cache.release(second)
    assert cache.tokens_held == 3


def test_double_release_is_an_error() -> None:
    cache = make_cache()
    match = cache.match((1,))
    cache.release(match)
    with pytest.raises(ValueError, match="released before"):
        cache.release(match)


def test_counts_tokens_reused() -> None:
    cache = make_cache()
    add(cache, 1, 2, 3)
    add(cache, 1, 2, 4)
    counts = cache.counts
    assert (counts.lookups, counts.tokens_requested, counts.tokens_reused, counts.tokens_inserted) == (2, 6, 2, 4)
