"""The parts of the router: the index, the events that fill it, the scorers."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from collections import Counter

import pytest

from vla_cloud.core.generate import ImageSpan
from vla_cloud.core.kv_events import KvChange, KvEvent, KvEventLog
from vla_cloud.core.prefix_key import PrefixKey, block_hashes
from vla_cloud.core.router.event_feed import EventFeed
from vla_cloud.core.router.prefix_index import SHARDS, PrefixIndex
from vla_cloud.core.router.prompt_hashes import PromptHashes
from vla_cloud.core.router.scoring import SCORERS, Candidate, is_unbalanced, make_scorer
from vla_cloud.core.router.sessions import Sessions, session_key
from vla_cloud.core.router.settings import PlacementConfig, Tier
from vla_cloud.pools.codec import pack_tokens
from vla_common.clock import NS_PER_S
from vla_common.config import ConfigError, from_mapping

STORED, REMOVED, CLEARED = KvChange.STORED, KvChange.REMOVED, KvChange.CLEARED


def path(seed: int, length: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(length)]


def rows(change: KvChange, values: list[bytes]) -> list[KvEvent]:
    return [KvEvent(0, change, value) for value in values]


# -- names of blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 15, 16, 33, 320])
@pytest.mark.parametrize("images", [(), (ImageSpan(3, 20, b"a" * 32),), (ImageSpan(0, 2, b"a" * 32), ImageSpan(5, 9, b"b" * 32))])
def test_prompt_hashes_are_those_of_the_workers(length: int, images: tuple[ImageSpan, ...]) -> None:
    tokens = [random.Random(length + i).randrange(2**31) for i in range(length)]
    expected = block_hashes(PrefixKey(b"salt", tokens, images))
    hashes = PromptHashes(b"salt", images)
    assert hashes.extend(pack_tokens(tokens[: length // 2])) == expected[: length // 2 // 16]
    assert hashes.extend(pack_tokens(tokens)) == expected and len(expected) == length // 16
    assert hashes.extend(pack_tokens(tokens[:16])) == expected[:1]


# -- the index -------------------------------------------------------------------------------------------------------


def test_one_system_prompt_is_one_entry_and_what_follows_is_spread_over_all_shards() -> None:
    index = PrefixIndex()
    first = struct.pack("<q", 7) * 4
    for name in ("a", "b", "c"):
        index.add(name, 10_000)
        index.apply(name, rows(STORED, [first, *path(ord(name), 3000)]))
    sizes = [len(table) for table in index._shards]
    assert sum(map(len, index._shards)) == len(index) == 9001
    assert len(sizes) == SHARDS and max(sizes) < 3 * 9001 / SHARDS and min(sizes) > 0
    assert index.match([first]) == {"a": 1, "b": 1, "c": 1}


def test_a_match_is_the_longest_beginning_of_each_worker() -> None:
    index = PrefixIndex()
    blocks = path(1, 6)
    for name, held in (("a", blocks[:2]), ("b", blocks), ("c", blocks[1:]), ("d", [*blocks[:2], *blocks[3:]])):
        index.add(name, 100)
        index.apply(name, rows(STORED, held))
    assert index.match(blocks) == {"a": 2, "b": 6, "d": 2}
    assert index.match([]) == {} == index.match(path(2, 3))


def test_an_entry_goes_with_the_last_worker_that_has_it() -> None:
    index = PrefixIndex()
    blocks = path(1, 4)
    for name in ("a", "b"):
        index.add(name, 100)
        index.apply(name, rows(STORED, blocks))
    index.apply("a", rows(REMOVED, blocks[2:]))
    assert len(index) == 4 and index.match(blocks) == {"a": 2, "b": 4}
    index.apply("b", rows(REMOVED, blocks[2:]))
    assert len(index) == 2 and (index.blocks("a"), index.blocks("b")) == (2, 2)
    index.remove("a")
    assert index.match(blocks) == {"b": 2} and index.blocks("a") == 0
    index.remove("b")
    assert index.match(blocks) == {}
    index.sweep()
    assert len(index) == 0


def test_a_dead_workers_entries_are_swept_by_later_calls_and_its_place_is_used_again() -> None:
    index = PrefixIndex()
    index.add("a", 5000)
    index.add("b", 5000)
    both, alone = path(1, 1000), path(2, 4000)
    index.apply("a", rows(STORED, [*both, *alone]))
    index.apply("b", rows(STORED, both))
    size = sum(map(sys.getsizeof, index._shards))
    index.remove("a")
    index.add("c", 5000)  # before the sweep: must not take over what the dead one had
    assert index.match(both[:3]) == {"b": 3} and index.match(alone[:1]) == {}
    for _ in range(SHARDS):
        index.expire(0)
    assert len(index) == 1000 and not index._retired
    assert sum(map(sys.getsizeof, index._shards)) < size / 2
    index.add("d", 5000)
    assert max(index._names) < 1 << 3 and index.match(both[:3]) == {"b": 3}


def test_the_index_is_bounded_by_what_workers_hold_now() -> None:
    index = PrefixIndex()
    index.add("a", 200)
    tracemalloc.start()
    try:
        for round_ in range(60):
            blocks = path(round_, 200)
            index.apply("a", rows(STORED, blocks))
            index.expect("a", path(1000 + round_, 200), round_ + 1)
            index.apply("a", rows(REMOVED, blocks[::-1]))
            if round_ == 9:
                early = tracemalloc.get_traced_memory()[0]
        assert tracemalloc.get_traced_memory()[0] < early + 100_000
    finally:
        tracemalloc.stop()
    assert len(index) == 0 and index.expected("a") == 200
    index.expire(10**9)
    assert index.expected("a") == 0


def test_a_worker_that_clears_all_the_time_takes_no_room() -> None:
    index = PrefixIndex()
    index.add("a", 10)
    for i in range(500):
        index.apply("a", [*rows(STORED, path(i, 3)), KvEvent(0, CLEARED)])
    assert len(index) < 200 and index._next_bit < 1 << 64 and index.blocks("a") == 0
    index.sweep()
    assert len(index) == 0


def test_what_cannot_be_true_is_left_out_and_counted() -> None:
    index = PrefixIndex()
    index.add("a", 4)
    blocks = path(1, 6)
    index.apply("a", rows(STORED, [b"", b"short", b"x" * 33]))
    index.apply("a", rows(REMOVED, [b"", blocks[0]]))
    assert len(index) == 0 and index.counters["blocks_refused"] == 4
    index.apply("a", rows(STORED, [*blocks, blocks[0]]))
    assert index.blocks("a") == 4 and index.counters["blocks_refused"] == 6
    index.expect("unknown", blocks, 5)
    assert index.match(blocks) == {"a": 4}


def test_expected_blocks_go_on_from_reported_ones_and_outlive_a_clear() -> None:
    index = PrefixIndex()
    blocks = path(1, 6)
    index.add("a", 10)
    index.apply("a", rows(STORED, blocks[:2]))
    index.expect("a", blocks[2:5], 100)
    assert index.match(blocks) == {"a": 5}
    index.apply("a", rows(STORED, blocks[2:3]))
    assert index.match(blocks) == {"a": 5} and index.expected("a") == 2
    index.apply("a", [KvEvent(0, CLEARED)])
    assert index.match(blocks) == {} and index.match(blocks[3:]) == {"a": 2}
    index.expire(100)
    assert index.match(blocks[3:]) == {} and index.counters["blocks_unconfirmed"] == 2


def test_what_is_expected_again_lives_on() -> None:
    index, blocks = PrefixIndex(), path(1, 4)
    index.add("a", 10)
    index.expect("a", blocks, 5)
    index.expect("a", blocks[:2], 9)
    index.expire(5)
    assert index.match(blocks) == {"a": 2} and index.expected("a") == 2
    index.expire(9)
    assert index.match(blocks) == {}


# -- events ----------------------------------------------------------------------------------------------------------


class Source:
    """A worker's event log over a set, and what is asked of it."""

    def __init__(self) -> None:
        self.held: dict[bytes, None] = {}
        self.log = KvEventLog(lambda: [(value, b"") for value in self.held])

    def store(self, values: list[bytes]) -> None:
        for value in values:
            self.held[value] = None
            self.log.note(STORED, value)


def feed() -> EventFeed:
    found = EventFeed(PrefixIndex(), 5.0)
    found.add("w", 1000)
    return found


def give(it: EventFeed, events: list[KvEvent], now_ns: int = 0) -> bool:
    return bool(events) and it.take("w", events[0].sequence, events, now_ns)


def test_a_gap_is_noticed_and_a_snapshot_makes_it_whole() -> None:
    it, source, blocks = feed(), Source(), path(1, 30)
    source.store(blocks[:10])
    assert not give(it, source.log.drain())
    source.store(blocks[10:20])
    source.log.drain()  # lost on the way
    source.store(blocks[20:])
    assert give(it, source.log.drain())
    assert it._index.match(blocks) == {"w": 10}  # what was known is kept as a guess
    source.log.snapshot()
    assert not give(it, source.log.drain())
    assert it._index.match(blocks) == {"w": 30} and it._index.blocks("w") == 30
    counts = it.counters
    assert (counts["event_gaps"], counts["snapshots_asked"], counts["snapshots_taken"]) == (1, 1, 1)
    source.store(path(2, 1))
    assert not give(it, source.log.drain()) and it._index.blocks("w") == 31


def test_a_lost_first_message_is_a_gap_too() -> None:
    it = feed()
    assert it.take("w", 3, rows(STORED, path(1, 2)), 0)


def test_a_snapshot_is_asked_for_again_after_a_time_only() -> None:
    it = feed()
    asked = [it.take("w", 10 * (i + 1), rows(STORED, path(i, 2)), i * NS_PER_S) for i in range(12)]
    assert [i for i, one in enumerate(asked) if one] == [0, 5, 10]
    assert it._index.blocks("w") == 0


def test_a_part_of_a_snapshot_that_is_lost_is_a_gap() -> None:
    it, source = feed(), Source()
    source.store(path(1, 40))
    source.log.snapshot()
    events = source.log.drain()
    assert not give(it, events[:20])
    assert give(it, events[30:])


def test_repeated_events_do_no_harm() -> None:
    it, source, blocks = feed(), Source(), path(1, 10)
    source.store(blocks)
    events = source.log.drain()
    for part in (events, events, events[3:6]):
        assert not give(it, part)
    removed = [KvEvent(10, REMOVED, blocks[9])]
    assert not give(it, [*events[5:], *removed]) and it._index.match(blocks) == {"w": 9}
    assert not give(it, events) and it._index.match(blocks) == {"w": 9}  # what is gone does not come back
    assert it.counters["events_repeated"] == 10 + 3 + 5 + 10


def test_events_of_unknown_and_dead_workers_are_ignored() -> None:
    it = feed()
    assert not it.take("other", 0, rows(STORED, path(1, 2)), 0) and not it.take("other", 50, [], 0)
    assert not it.take("w", 0, rows(STORED, path(1, 2)), 0)
    it.remove("w")
    it.remove("w")
    assert not it.take("w", 2, rows(STORED, path(2, 2)), 0)
    it._index.sweep()
    assert len(it._index) == 0 and it.counters["events_ignored"] == 4


# -- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_is_forgotten_after_its_time_and_keeps_its_p_over_a_turn_without_one() -> None:
    sessions, a = Sessions(60.0, 10), session_key(b"", "a")
    assert a != session_key(b"t", "a") and len(a) == 32 and session_key(b"t", "") == b""
    sessions.note(a, "p0", "d0", 0)
    sessions.note(a, None, "d1", 10 * NS_PER_S)
    assert sessions.find(a, 69 * NS_PER_S) == ("p0", "d1")
    assert sessions.find(a, 70 * NS_PER_S) == (None, "") == sessions.find(b"other", 0)
    sessions.note(session_key(b"", "b"), "p0", "d0", 80 * NS_PER_S)
    assert len(sessions) == 1


# -- scorers ---------------------------------------------------------------------------------------------------------


def scorer(**config: object):
    return make_scorer(PlacementConfig(**config), random.Random(7))


def test_cost_weighs_tokens_to_compute_against_load() -> None:
    it = scorer(prefill_weight=2.0, transfer_weight=0.25)
    far, near = Candidate(0, 0, 0), Candidate(1500, 1000, 0)
    assert it.pick([far, near], 1000, True) == 1  # 2000 against 1500
    assert it.pick([far, near], 1000, False) == 0  # to send 1000 tokens is cheap
    assert it.pick([Candidate(0, 0, 0), Candidate(2500, 1000, 0)], 1000, True) == 0


@pytest.mark.parametrize("name", SCORERS)
def test_equal_workers_take_turns(name: str) -> None:
    it = scorer(scorer=name)
    assert it.pick([Candidate(5, 0, 3), Candidate(5, 0, 1), Candidate(5, 0, 2)], 100, True) == 1


@pytest.mark.parametrize("name", ["cost", "least_load"])
def test_a_miss_goes_to_the_least_load(name: str) -> None:
    assert scorer(scorer=name).pick([Candidate(9, 0, 0), Candidate(4, 0, 9), Candidate(7, 0, 0)], 50, True) == 1


def test_temperature_spreads_choices_by_cost_and_a_seed_repeats_them() -> None:
    candidates = [Candidate(0, 0, 0), Candidate(100, 0, 0), Candidate(10_000, 0, 0)]

    def draw() -> list[int]:
        it = scorer(temperature_tokens=100.0)
        return [it.pick(candidates, 10, True) for _ in range(2000)]

    seen = Counter(draw())
    assert seen[1] / seen[0] == pytest.approx(0.368, abs=0.05) and seen[2] == 0
    assert draw() == draw()
    assert {scorer().pick(candidates, 10, True) for _ in range(50)} == {0}


def test_imbalance_needs_both_the_difference_and_the_factor() -> None:
    def unbalanced(*loads: int) -> bool:
        return is_unbalanced([Candidate(load, 0, 0) for load in loads], 100, 1.5)

    assert unbalanced(0, 101) and unbalanced(300, 500, 460) and not unbalanced(0, 100) and not unbalanced(1000, 1200)


def test_settings_are_checked_by_name() -> None:
    for wrong, told in (
        ({"imbalance_ratio": 0.5}, "imbalance_ratio"), ({"prefill_weight": -1.0}, "prefill_weight"),
        ({"max_sessions": 0}, "session_s 0"), ({"snapshot_retry_s": 0.0}, "snapshot_retry_s"),
        ({"tier_weights": {"device": 1.5}}, "tier device"), ({"tier_weights": {"tape": 1.0}}, "tape"),
        ({"scorer": "best"}, "cost"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            from_mapping(PlacementConfig, wrong)
    assert from_mapping(PlacementConfig, {"tier_weights": {"device": 0.5}}).tier_weights == {Tier.DEVICE: 0.5}
    with pytest.raises(ValueError, match="round_robin"):
        make_scorer(PlacementConfig(scorer="best"), random.Random(0))  # type: ignore[arg-type]
