"""The prefix tree: what a hit means, locks, eviction order, bounds, events."""

import pytest

from vla_cloud.core import prefix_key
from vla_cloud.core.block_pool import BlockPool
from vla_cloud.core.generate import ImageSpan
from vla_cloud.core.kv_events import KvChange
from vla_cloud.core.prefix_key import PrefixKey, block_hashes
from vla_cloud.core.radix_tree import RadixTree


def key(*blocks, rest=(), salt=b"", images=()):
    """A key of whole blocks, each of 16 equal tokens, and a rest."""
    return PrefixKey(salt, [token for token in blocks for _ in range(16)] + list(rest), images)


class Cache:
    """A tree with a pool, and the everyday use of both."""

    def __init__(self, blocks=16, **more):
        self.pool = BlockPool(blocks)
        self.tree = RadixTree(self.pool, **more)

    def store(self, k, keep_locked=False):
        match = self.tree.match(k)
        own = self.pool.take(k.num_blocks - len(match.blocks))
        match = self.tree.insert(match, k, [*match.blocks, *own])
        self.pool.give_back(own)
        if keep_locked:
            return match
        self.tree.release(match)

    def found(self, k):
        match = self.tree.match(k)
        self.tree.release(match)
        assert match.length == self.tree.peek(k)
        return match.length


def test_whole_blocks_only_are_stored_and_found():
    cache = Cache()
    cache.store(key(1, 2, rest=[5] * 15))
    assert cache.tree.size == 2
    assert cache.found(key(1, 2, 3)) == 32
    assert cache.found(key(1, 2, rest=[5] * 15)) == 32
    assert cache.found(key(1, rest=[2] * 15)) == 16
    assert cache.found(key(2)) == 0 == cache.found(key(rest=[1] * 15))


def test_a_hash_collision_gives_no_foreign_kv(monkeypatch):
    # Python's own hash and the chained one are both made to collide for all blocks.
    class Same(int):
        def __hash__(self):
            return 1

    monkeypatch.setattr(prefix_key.hashlib, "sha256", lambda *_: FakeDigest())

    class FakeDigest:
        def update(self, data):
            pass

        def digest(self):
            return b"0" * 32

    cache = Cache()
    stored = PrefixKey(b"", [Same(3)] * 16 + [Same(4)] * 16)
    cache.store(stored)
    assert cache.found(PrefixKey(b"", [Same(3)] * 16 + [Same(5)] * 16)) == 16
    assert cache.found(PrefixKey(b"", [Same(4)] * 16 + [Same(3)] * 16)) == 0
    assert cache.found(stored) == 32


@pytest.mark.parametrize(
    "image, found",
    [
        (ImageSpan(20, 8, b"a" * 32), 48),
        (ImageSpan(20, 8, b"b" * 32), 16),  # another image
        (ImageSpan(21, 8, b"a" * 32), 16),  # elsewhere
        (ImageSpan(20, 7, b"a" * 32), 16),  # another size
        (ImageSpan(48, 8, b"a" * 32), 16),  # no image at all in these blocks
    ],
)
def test_an_image_counts_by_hash_offset_and_length(image, found):
    cache = Cache()
    cache.store(key(7, 7, 7, images=(ImageSpan(20, 8, b"a" * 32),)))
    assert cache.found(key(7, 7, 7, 7, images=(image,))) == found


def test_an_image_over_a_block_border_counts_in_both_blocks_and_all_after_it():
    cache = Cache()
    cache.store(key(7, 7, 7, 7, images=(ImageSpan(12, 8, b"a" * 32),)))
    assert cache.found(key(7, 7, 7, 7, images=(ImageSpan(12, 8, b"b" * 32),))) == 0
    # An image that begins after the last stored block changes nothing.
    both = (ImageSpan(12, 8, b"a" * 32), ImageSpan(64, 4, b"c" * 32))
    assert cache.found(key(7, 7, 7, 7, 7, images=both)) == 64


def test_salts_share_nothing_and_an_empty_salt_leaves_no_trace():
    cache = Cache()
    cache.store(key(1, 2, salt=b"one"))
    assert cache.found(key(1, 2, salt=b"two")) == 0 == cache.found(key(1, 2))
    assert set(cache.tree._roots) == {b"one"}
    cache.tree.clear()
    assert cache.tree._roots == {} and cache.pool.free == cache.pool.total


def test_locked_nodes_are_never_evicted():
    cache = Cache()
    cache.store(key(1, 2, 3))
    locked = cache.tree.match(key(1, 2))
    cache.store(key(1, 4))
    assert cache.tree.evictable == 2
    assert cache.tree.evict(100) == 2
    assert cache.found(key(1, 2, 3)) == 32 and cache.tree.size == 2
    cache.tree.release(locked)
    assert cache.tree.evict(100) == 2 and cache.pool.free == cache.pool.total


def test_the_least_recently_used_leaf_goes_first():
    cache = Cache()
    for leaf in (2, 3, 4):
        cache.store(key(1, leaf))
    cache.found(key(1, 2))
    assert cache.tree.evict(1) == 1 and cache.found(key(1, 3)) == 16
    assert cache.found(key(1, 4)) == 32  # used again: now 2 is the oldest
    assert cache.tree.evict(1) == 1 and cache.found(key(1, 2)) == 16
    assert cache.tree.evict(2) == 2 and cache.tree.size == 0, "a parent goes once it is a leaf"


def test_a_parent_is_as_recent_as_its_last_child():
    cache = Cache()
    cache.store(key(1, 2))
    cache.store(key(8))
    cache.found(key(1, 2))
    assert cache.tree.evict(1) == 1  # 8
    assert cache.found(key(1, 2)) == 32 and cache.found(key(8)) == 0


def test_what_was_stored_first_stays_and_the_second_copy_is_its_owners_own():
    cache = Cache()
    k = key(1, 2)
    first, second = cache.tree.match(k), cache.tree.match(k)
    a, b = cache.pool.take(2), cache.pool.take(2)
    first = cache.tree.insert(first, k, a)
    second = cache.tree.insert(second, k, b)
    assert first.blocks == second.blocks == a
    cache.pool.give_back(a)
    cache.pool.give_back(b)
    assert cache.pool.used == 2
    cache.tree.release(first)
    assert cache.tree.evict(9) == 0, "the second match still locks"
    cache.tree.release(second)
    assert cache.tree.evict(9) == 2


def test_the_capacity_bounds_the_tree_and_a_full_locked_tree_stores_less():
    cache = Cache(capacity_blocks=3)
    for i in range(20):
        cache.store(key(i, i + 1))
        assert cache.tree.size <= 3
    match = cache.store(key(50, 51, 52, 53), keep_locked=True)
    assert match.length == 48 and cache.tree.size == 3
    assert cache.store(key(60), keep_locked=True).length == 0
    cache.tree.release(match)
    none = Cache(capacity_blocks=0)
    none.store(key(1, 2))
    assert none.tree.size == 0 and none.pool.free == none.pool.total


def test_a_match_is_released_or_inserted_once():
    cache = Cache()
    match = cache.tree.match(key(1))
    with pytest.raises(ValueError, match="only 0 block numbers"):
        cache.tree.insert(match, key(1), [])
    cache.tree.release(match)
    with pytest.raises(ValueError, match="once"):
        cache.tree.release(match)
    with pytest.raises(ValueError, match="once"):
        cache.tree.insert(match, key(1), [0])
    with pytest.raises(ValueError, match="negative"):
        RadixTree(cache.pool, -1)


def test_events_tell_a_router_what_is_held():
    cache = Cache()
    k = key(1, 2, salt=b"t")
    cache.store(k)
    cache.store(key(1, 3, salt=b"t"))
    events = cache.tree.drain_events()
    assert [e.sequence for e in events] == [0, 1, 2] and {e.change for e in events} == {KvChange.STORED}
    hashes = block_hashes(k)
    assert [e.block_hash for e in events[:2]] == hashes
    assert events[1].parent_hash == events[2].parent_hash == hashes[0]
    cache.tree.evict(1)
    (gone,) = cache.tree.drain_events()
    assert (gone.sequence, gone.change, gone.block_hash) == (3, KvChange.REMOVED, hashes[1])
    assert cache.tree.drain_events() == []


@pytest.mark.parametrize("lost", [False, True])
def test_a_backlog_nobody_drains_becomes_a_list_of_what_is_held(lost):
    cache = Cache(blocks=80, event_backlog=1000 if lost else 10)
    for i in range(30):
        cache.store(key(i, i))
    if lost:
        cache.tree.snapshot_events()
    assert len(cache.tree._events._pending) <= 10
    events = cache.tree.drain_events()
    assert events[0].change is KvChange.CLEARED and len(events) == 1 + cache.tree.size
    seen = set()
    for event in events[1:]:
        assert event.parent_hash in seen | {prefix_key.salt_hash(b"")}, "parents come first"
        seen.add(event.block_hash)
    cache.store(key(99))
    later = cache.tree.drain_events()
    assert later[-1].change is KvChange.STORED
    assert later[0].sequence == events[-1].sequence + 1


def test_hashes_depend_on_salt_tokens_order_and_images():
    keys = [
        key(1, 2),
        key(2, 1),
        key(1, 2, salt=b"x"),
        key(1, 2, images=(ImageSpan(0, 1, b"a" * 32),)),
        key(1, 2, images=(ImageSpan(1, 1, b"a" * 32),)),
        key(1, 2, images=(ImageSpan(0, 1, b"b" * 32),)),
    ]
    assert len({block_hashes(k)[-1] for k in keys}) == len(keys)
    assert block_hashes(key(1, 2, rest=[3])) == block_hashes(key(1, 2))


def test_stale_entries_of_the_eviction_queue_are_bounded():
    cache = Cache()
    cache.store(key(1))
    for _ in range(5000):
        cache.found(key(1))
    assert len(cache.tree._leaves) < 200
