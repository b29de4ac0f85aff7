"""The prefix tree against a set of stored prefixes, with a fake memory that shows whose KV a block holds."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from scheduler_rig import tree_blocks

from vla_cloud.core.block_pool import BlockPool
from vla_cloud.core.generate import ImageSpan
from vla_cloud.core.kv_events import KvChange
from vla_cloud.core.prefix_key import PrefixKey, block_hashes, salt_hash
from vla_cloud.core.radix_tree import PrefixMatch, RadixTree

TOTAL = 24
IMAGES = [(), (ImageSpan(10, 12, b"a" * 32),), (ImageSpan(10, 12, b"b" * 32),), (ImageSpan(11, 12, b"a" * 32),)]


def keys() -> st.SearchStrategy[PrefixKey]:
    """Few distinct blocks, so that prefixes are shared often."""
    tokens = st.lists(st.integers(0, 1), max_size=5).map(lambda blocks: [t for t in blocks for _ in range(16)])
    rest = st.integers(0, 15).map(lambda n: [0] * n)
    return st.builds(
        lambda salt, t, r, i: PrefixKey(salt, t + r, i),
        st.sampled_from([b"", b"x"]),
        tokens,
        rest,
        st.sampled_from(IMAGES),
    )


def identity(key: PrefixKey, index: int) -> object:
    """What the KV of block ``index`` depends on, said independently of the tree."""
    end = 16 * (index + 1)
    images = tuple((i.start, i.length, i.sha256) for i in key.images if i.start < end)
    return key.salt, tuple(key.tokens[:end]), images


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.tree = RadixTree(self.pool, capacity_blocks=16, event_backlog=30)
        self.memory: dict[int, object] = {}  # block -> identity of the KV in it
        self.held: list[tuple[PrefixKey, PrefixMatch]] = []
        self.router: dict[bytes, bytes] = {}
        self.next_event = 0

    @rule(key=keys())
    def match(self, key: PrefixKey) -> None:
        seen = self.tree.peek(key)
        match = self.tree.match(key)
        assert match.length == seen <= len(key.tokens) and match.length % 16 == 0
        for index, block in enumerate(match.blocks):
            assert self.memory[block] == identity(key, index), "KV of another prefix, image or tenant"
            assert not self.pool.is_quarantined(block) and self.pool.refcount(block) >= 1
        self.held.append((key, match))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute_and_insert(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        key, match = self.held[index]
        need = key.num_blocks - len(match.blocks)
        if need > self.pool.free:
            self.tree.evict(need - self.pool.free)
        if need > self.pool.free:
            return
        own = self.pool.take(need)
        for i, block in enumerate(own, start=len(match.blocks)):
            self.memory[block] = identity(key, i)
        stored = self.tree.insert(match, key, [*match.blocks, *own])
        self.pool.give_back(own)
        assert stored.blocks[: len(match.blocks)] == match.blocks and len(stored.blocks) <= key.num_blocks
        self.held[index] = (key, stored)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, match = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.release(match)

    @rule(n=st.integers(0, 8))
    def evict(self, n: int) -> None:
        before, possible = self.pool.free, self.tree.evictable
        freed = self.tree.evict(n)
        assert freed == min(n, possible) == self.pool.free - before

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        assert self.tree.evictable == 0

    @rule()
    def router_listens(self) -> None:
        for event in self.tree.drain_events():
            assert event.sequence == self.next_event
            self.next_event += 1
            if event.change is KvChange.CLEARED:
                self.router.clear()
            elif event.change is KvChange.STORED:
                known = {salt_hash(b""), salt_hash(b"x")} | set(self.router)
                assert event.parent_hash in known
                self.router[event.block_hash] = event.parent_hash
            else:
                del self.router[event.block_hash]
        assert len(self.router) == self.tree.size, "the router knows exactly what is held"
        for key, match in self.held:
            assert set(block_hashes(key)[: len(match.blocks)]) <= set(self.router)

    @invariant()
    def locked_blocks_stay_and_the_pool_agrees(self) -> None:
        blocks = tree_blocks(self.tree)
        assert len(blocks) == self.tree.size == self.pool.used <= 16
        assert self.tree.evictable == sum(not locked for locked in blocks.values())
        for key, match in self.held:
            for index, block in enumerate(match.blocks):
                assert blocks[block], "a locked block was evicted"
                assert self.memory[block] == identity(key, index)

    def teardown(self) -> None:
        for _, match in self.held:
            self.tree.release(match)
        self.tree.clear()
        assert self.pool.free == TOTAL and self.tree.size == 0 and not self.tree._roots


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=80, stateful_step_count=50, deadline=None, derandomize=True)
