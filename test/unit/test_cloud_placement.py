"""Choice of P and D: affinity, load on every path, dead workers dropped at once."""

from __future__ import annotations

import random

import pytest

from vla_cloud.core.placement import MAX_BLOCKS_SEEN, Choice, Placement, PlacementConfig, block_hashes
from vla_cloud.pools.codec import pack_tokens


def prompt(seed: int, length: int) -> bytes:
    rng = random.Random(seed)
    return pack_tokens([rng.randrange(1000) for _ in range(length)])


def pools(prefills: int = 2, decodes: int = 2, **config: object) -> Placement:
    placement = Placement(PlacementConfig(**config))
    for i in range(prefills):
        placement.add(f"p{i}", "prefill", 100)
    for i in range(decodes):
        placement.add(f"d{i}", "decode", 100)
    return placement


def choose(placement: Placement, name: str, tokens: bytes, salt: bytes = b"", **kwargs: object) -> Choice:
    choice = placement.choose(name, 0, tokens, salt, 10, **kwargs)
    assert isinstance(choice, Choice), choice
    return choice


def test_equal_workers_share_the_load() -> None:
    placement = pools()
    seen = [choose(placement, f"r{i}", prompt(i, 100)) for i in range(4)]
    assert {c.prefill for c in seen[:2]} == {"p0", "p1"} and {c.decode for c in seen[:2]} == {"d0", "d1"}
    assert {c.prefill for c in seen[2:]} == {"p0", "p1"}


def test_the_same_beginning_goes_where_it_was_seen() -> None:
    placement = pools()
    first = choose(placement, "a", prompt(1, 200))
    assert first.prefill_tokens == 200
    placement.release("a", 0)
    choose(placement, "other", prompt(2, 200))
    again = choose(placement, "b", prompt(1, 200) + prompt(3, 30))
    assert (again.prefill, again.decode) == (first.prefill, first.decode)
    assert again.prefill_tokens == 230 - 192  # 12 whole blocks were seen


def test_tenants_do_not_share_affinity() -> None:
    placement = pools(prefills=1, decodes=1)
    choose(placement, "a", prompt(1, 200), b"one")
    assert choose(placement, "b", prompt(1, 200), b"two").prefill_tokens == 200


def test_a_short_common_beginning_does_not_decide() -> None:
    placement = pools(min_affinity_tokens=64)
    first = choose(placement, "a", prompt(1, 48) + prompt(2, 100))
    assert choose(placement, "b", prompt(1, 48) + prompt(3, 100)).prefill != first.prefill


def test_imbalance_beats_affinity() -> None:
    placement = pools(imbalance_tokens=300, imbalance_ratio=1.5)
    first = choose(placement, "a", prompt(1, 280))
    second = choose(placement, "b", prompt(1, 280) + prompt(2, 280))
    assert second.prefill == first.prefill
    assert choose(placement, "c", prompt(1, 280) + prompt(3, 50)).prefill != first.prefill


def test_a_miss_goes_to_the_least_load_not_to_the_emptiest_cache() -> None:  # sglang#14305
    placement = pools(prefills=2, decodes=1)
    first = choose(placement, "a", prompt(1, 400)).prefill
    placement.release("a", 0)
    other = {"p0": "p1", "p1": "p0"}[first]
    busy = choose(placement, "b", prompt(2, 300), exclude=[first])
    assert busy.prefill == other
    assert choose(placement, "c", prompt(3, 100)).prefill == first  # seen more, loaded less


def test_serving_needs_workers_for_every_stage() -> None:
    placement = pools(prefills=1, decodes=0)
    assert not placement.can_serve
    placement.add("d0", "decode", 10)
    assert placement.can_serve
    placement.drain("d0")
    assert not placement.can_serve
    placement.add("w0", "both", 10)
    assert placement.can_serve


def test_excluded_and_preferred_workers() -> None:
    placement = pools()
    assert choose(placement, "a", prompt(1, 50), exclude={"p0", "d0"}) == Choice("p1", "d1", 50, 60)
    assert choose(placement, "b", prompt(2, 50), prefer_prefill="p1").prefill == "p1"
    assert choose(placement, "c", prompt(3, 50), prefer_prefill="gone").prefill in ("p0", "p1")
    assert choose(placement, "d", prompt(4, 50), prefer_prefill="p1", exclude={"p1"}).prefill == "p0"


def test_why_there_is_no_place() -> None:
    assert Placement(PlacementConfig()).choose("a", 0, prompt(1, 10), b"", 1) == "no decode worker is ready"
    placement = pools(prefills=1, decodes=1)
    assert placement.choose("a", 0, prompt(1, 10), b"", 1, {"d0"}) == "no other decode worker"
    assert placement.choose("a", 0, prompt(1, 10), b"", 1, {"p0"}) == "no other prefill worker"
    placement.remove("p0")
    assert placement.choose("a", 0, prompt(1, 10), b"", 1) == "no prefill worker is ready"


def test_load_is_counted_on_every_path_and_comes_back_on_every_path() -> None:  # router#179
    placement = pools(prefills=1, decodes=1, skip_transfer_tokens=16)
    choose(placement, "a", prompt(1, 100))
    assert (placement.load_tokens("p0"), placement.load_tokens("d0")) == (100, 110)
    placement.prefill_done("a", 0)
    placement.prefill_done("a", 0)
    assert (placement.load_tokens("p0"), placement.load_tokens("d0")) == (0, 110)
    alone = choose(placement, "b", prompt(1, 100))  # D has seen all but 4 tokens: without P
    assert alone.prefill is None and (placement.load_tokens("p0"), placement.load_tokens("d0")) == (0, 220)
    for name in ("a", "a", "b", "unknown"):
        placement.release(name, 0)
    assert (placement.load_tokens("p0"), placement.load_tokens("d0")) == (0, 0)


def test_a_dead_worker_and_its_cache_are_forgotten_at_once() -> None:
    placement = pools(prefills=2, decodes=1)
    first = choose(placement, "a", prompt(1, 200)).prefill
    placement.remove(first)
    assert choose(placement, "b", prompt(1, 200)).prefill_tokens == 200
    placement.add(first, "prefill", 100)
    assert placement.load_tokens(first) == 0
    placement.release("a", 0)  # of the dead process: must not make the load of the new one negative
    assert placement.load_tokens(first) == 0 and placement.load_tokens("d0") == 210


def test_a_draining_worker_gets_nothing_and_a_role_may_change() -> None:
    placement = pools()
    placement.drain("p0")
    assert {choose(placement, f"r{i}", prompt(i, 50)).prefill for i in range(4)} == {"p1"}
    placement.add("d1", "prefill", 100)
    assert choose(placement, "x", prompt(9, 50), exclude={"p1"}).prefill == "d1"


def test_workers_of_both_roles_take_requests_alone() -> None:
    placement = Placement(PlacementConfig())
    placement.add("w0", "both", 10)
    placement.add("w1", "both", 10)
    chosen = [choose(placement, f"r{i}", prompt(i, 50)) for i in range(2)]
    assert {c.decode for c in chosen} == {"w0", "w1"} and {c.prefill for c in chosen} == {None}


def test_an_answer_counts_as_seen_for_the_next_turn() -> None:
    placement = pools(prefills=1, decodes=2, skip_transfer_tokens=16)
    first = choose(placement, "a", prompt(1, 64))
    placement.finished("a", 0, prompt(1, 64) + prompt(2, 32), b"")
    turn = choose(placement, "b", prompt(1, 64) + prompt(2, 32) + prompt(3, 10))
    assert turn.prefill is None and turn.decode == first.decode


def test_what_is_remembered_is_bounded() -> None:
    placement = pools(prefills=1, decodes=1)
    for i in range(60):
        choose(placement, f"r{i}", prompt(i, 1600))
        placement.release(f"r{i}", 0)
    assert len(placement._workers["p0"].seen) == max(MAX_BLOCKS_SEEN, 100)
    assert len(block_hashes(prompt(1, 100_000), b"")) == MAX_BLOCKS_SEEN


@pytest.mark.parametrize("length", [0, 15, 16, 33])
def test_only_whole_blocks_are_hashed(length: int) -> None:
    assert len(block_hashes(prompt(1, length), b"")) == length // 16
