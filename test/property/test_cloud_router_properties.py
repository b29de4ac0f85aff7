"""The router's index against a naive model, and against a real prefix tree over a link that loses messages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vla_cloud.core.block_pool import BlockPool
from vla_cloud.core.kv_events import KvChange, KvEvent
from vla_cloud.core.prefix_key import PrefixKey, block_hashes
from vla_cloud.core.radix_tree import RadixTree
from vla_cloud.core.router.event_feed import EventFeed
from vla_cloud.core.router.prefix_index import PrefixIndex
from vla_cloud.core.router.prompt_hashes import PromptHashes
from vla_cloud.pools.codec import pack_tokens

WORKERS = ("a", "b", "c")
# Few first bytes, so that tables are shared; a path is any list of these.
BLOCKS = [bytes([i % 3]) + bytes([i]) * 31 for i in range(12)]
PATH = st.lists(st.sampled_from(BLOCKS), max_size=8, unique=True)
WORKER = st.sampled_from(WORKERS)
OPERATION = st.one_of(
    st.tuples(st.just("store"), WORKER, PATH),
    st.tuples(st.just("remove"), WORKER, PATH),
    st.tuples(st.just("clear"), WORKER, st.just([])),
    st.tuples(st.just("expect"), WORKER, PATH),
    st.tuples(st.just("expire"), WORKER, st.just([])),
    st.tuples(st.just("die"), WORKER, st.just([])),
)


class Naive:
    """One worker, by its definition."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.expected: dict[bytes, int] = {}

    def match(self, path: list[bytes]) -> int:
        for count, value in enumerate(path):
            if value not in self.held and value not in self.expected:
                return count
        return len(path)


@settings(max_examples=250, deadline=None)
@given(st.lists(OPERATION, max_size=40), PATH)
def test_the_index_is_the_naive_model(operations: list[tuple[str, str, list[bytes]]], path: list[bytes]) -> None:
    index, model, now = PrefixIndex(), {name: Naive() for name in WORKERS}, 0
    for name in WORKERS:
        index.add(name, 100)
    for kind, name, blocks in operations:
        now += 1
        worker = model[name]
        if kind == "store":
            index.apply(name, [KvEvent(0, KvChange.STORED, value) for value in blocks])
            for value in blocks:
                if value not in worker.held:
                    worker.expected.pop(value, None)
            worker.held |= set(blocks)
        elif kind == "remove":
            index.apply(name, [KvEvent(0, KvChange.REMOVED, value) for value in blocks])
            worker.held -= set(blocks)
        elif kind == "clear":
            index.apply(name, [KvEvent(0, KvChange.CLEARED)])
            worker.held.clear()
        elif kind == "expect":
            index.expect(name, blocks, now + 4)
            worker.expected |= dict.fromkeys(blocks, now + 4)
        elif kind == "expire":
            index.expire(now)
            for one in model.values():
                one.expected = {value: until for value, until in one.expected.items() if until > now}
        else:
            index.remove(name)
            model[name] = Naive()
            index.add(name, 100)
        assert index.match(path) == {name: one.match(path) for name, one in model.items() if one.match(path)}
        assert all(index.blocks(name) == len(one.held) for name, one in model.items())
        assert all(index.expected(name) == len(one.expected) for name, one in model.items())
    index.sweep()
    assert len(index) == len(set().union(*(one.held for one in model.values())))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # which conversation
            st.integers(1, 6),  # so many blocks of it are stored
            st.sampled_from(["arrives", "arrives", "arrives", "lost", "twice"]),
        ),
        max_size=30,
    ),
    st.integers(4, 12),
)
def test_after_losses_and_snapshots_the_index_is_the_tree(steps: list[tuple[int, int, str]], capacity: int) -> None:
    """A real tree that evicts; whenever a snapshot is asked for, the next message is one."""
    pool = BlockPool(capacity)
    tree, index = RadixTree(pool), PrefixIndex()
    feed = EventFeed(index, 0.001)
    feed.add("w", capacity)
    now_ns = 0

    def deliver(fate: str) -> None:
        nonlocal now_ns
        events = tree.drain_events()
        for _ in range({"arrives": 1, "lost": 0, "twice": 2}[fate] if events else 0):
            now_ns += 10**7
            if feed.take("w", events[0].sequence, events, now_ns):
                tree.snapshot_events()

    for conversation, length, fate in steps:
        key = PrefixKey(b"s", [conversation * 100 + i // 32 for i in range(16 * length)])
        match = tree.match(key)
        missing = key.num_blocks - len(match.blocks)
        if missing > pool.free:
            tree.evict(missing - pool.free)
        if missing <= pool.free:
            new = pool.take(missing)
            match = tree.insert(match, key, [*match.blocks, *new])
            pool.give_back(new)
        tree.release(match)
        deliver(fate)
    tree.snapshot_events()
    deliver("arrives")
    deliver("arrives")
    assert index.blocks("w") == tree.size
    for conversation in range(4):
        key = PrefixKey(b"s", [conversation * 100 + i // 32 for i in range(96)])
        hashes = PromptHashes(b"s").extend(pack_tokens(key.tokens))
        assert hashes == block_hashes(key)
        assert index.match(hashes).get("w", 0) * 16 == tree.peek(key)
