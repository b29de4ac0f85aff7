"""The prefix cache: a tree with one node per 16-token block, over the blocks of a BlockPool.

Contract: a node is *locked* while a match that covers it is unreleased; locked nodes are never evicted. The tree is one
holder of each of its blocks; whoever puts a matched block in a table of its own shares it (BlockPool.share) and gives
it back as well. Unlocked nodes form whole subtrees, so every one of them can be evicted, leaves first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from vla_cloud.core.block_pool import BLOCK_TOKENS, BlockPool
from vla_cloud.core.kv_events import KvChange, KvEvent, KvEventLog
from vla_cloud.core.prefix_key import BlockKey, PrefixKey, chain_hash, salt_hash


class _Node:
    __slots__ = ("parent", "key", "block", "children", "locks", "last_use", "hash")

    def __init__(self, parent: _Node | None, key: BlockKey | bytes, block: int, hash_: bytes) -> None:
        self.parent = parent
        self.key = key  # a root's key is its salt
        self.block = block
        self.children: dict[BlockKey, _Node] = {}
        self.locks = 0  # unreleased matches that end here or below
        self.last_use = 0
        self.hash = hash_


class PrefixMatch:
    """A locked prefix of the tree: ``blocks`` in order, ``length`` = 16 tokens each. Release it once."""

    __slots__ = ("blocks", "_node", "_released")

    def __init__(self, node: _Node, blocks: list[int]) -> None:
        """Made by RadixTree only."""
        self.blocks = blocks
        self._node = node
        self._released = False

    @property
    def length(self) -> int:
        """Tokens covered."""
        return len(self.blocks) * BLOCK_TOKENS


class RadixTree:
    """Whole computed blocks, found by comparing tokens, images and salt; least recently used leaves go first."""

    def __init__(self, pool: BlockPool, capacity_blocks: int | None = None, event_backlog: int = 65536) -> None:
        """An empty tree that holds at most ``capacity_blocks`` (None: the whole pool)."""
        self._pool = pool
        self._capacity = pool.total if capacity_blocks is None else capacity_blocks
        if self._capacity < 0:
            raise ValueError("capacity_blocks cannot be negative; 0 switches the cache off")
        self._roots: dict[bytes, _Node] = {}
        self._size = 0
        self._locked = 0  # nodes with locks > 0, roots left out
        self._uses = itertools.count(1)
        self._order = itertools.count()
        # (last use, tie-break, leaf): entries go stale when their node is used, locked or grows; checked when popped.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._events = KvEventLog(self._held, event_backlog)

    @property
    def size(self) -> int:
        """Blocks held."""
        return self._size

    @property
    def evictable(self) -> int:
        """Blocks that evict() can let go now."""
        return self._size - self._locked

    def peek(self, key: PrefixKey) -> int:
        """Tokens that match() would find, without locking or counting as a use."""
        node = self._roots.get(key.salt)
        found = 0
        for index in range(key.num_blocks if node is not None else 0):
            assert node is not None
            node = node.children.get(key.block_key(index))
            if node is None:
                break
            found += BLOCK_TOKENS
        return found

    def match(self, key: PrefixKey) -> PrefixMatch:
        """The longest stored prefix of whole blocks, locked. Leave out the last token if its logits are needed."""
        node = self._root(key.salt)
        blocks: list[int] = []
        now = next(self._uses)
        for index in range(key.num_blocks):
            child = node.children.get(key.block_key(index))
            if child is None:
                break
            child.last_use = now
            blocks.append(child.block)
            node = child
        self._lock_path(node)
        return PrefixMatch(node, blocks)

    def insert(self, match: PrefixMatch, key: PrefixKey, blocks: Sequence[int]) -> PrefixMatch:
        """Store the whole blocks of ``key`` beyond ``match``; ``blocks`` is the table of the whole key.

        ``match`` must be a locked prefix of ``key``; it is used up, the returned match locks what is stored now. What
        another sequence stored meanwhile is kept, with its own block. At the capacity fewer blocks are stored.
        """
        self._require_locked(match)
        if len(blocks) < key.num_blocks:
            raise ValueError(f"{key.num_blocks} whole blocks of tokens, but only {len(blocks)} block numbers")
        node = match._node
        held = list(match.blocks)
        now = next(self._uses)
        for index in range(len(held), key.num_blocks):
            block_key = key.block_key(index)
            child = node.children.get(block_key)
            if child is None:
                if self._size >= self._capacity and not self._evict_one():
                    break
                child = self._grow(node, block_key, blocks[index])
            # Every ancestor is locked by this match already, so each new node needs one lock of its own.
            self._locked += child.locks == 0
            child.locks += 1
            child.last_use = now
            held.append(child.block)
            node = child
        match._released = True
        return PrefixMatch(node, held)

    def release(self, match: PrefixMatch) -> None:
        """Unlock. A second release raises ValueError."""
        self._require_locked(match)
        match._released = True
        node: _Node | None = match._node
        leaf = match._node
        while node is not None:
            node.locks -= 1
            if node.parent is None:
                self._drop_empty_root(node)
            elif node.locks == 0:
                self._locked -= 1
            node = node.parent
        self._offer(leaf)

    def evict(self, n_blocks: int) -> int:
        """Let go of least recently used unlocked leaves until ``n_blocks`` came free in the pool or none is left."""
        before = self._pool.free
        while self._pool.free - before < n_blocks and self._evict_one():
            pass
        return self._pool.free - before

    def clear(self) -> None:
        """Let go of everything that is not locked."""
        while self._evict_one():
            pass

    def drain_events(self) -> list[KvEvent]:
        """Changes since the last call; bounded by the backlog, beyond it a CLEARED and everything held."""
        return self._events.drain()

    def snapshot_events(self) -> None:
        """Make the next drain list everything held, for a router that lost events."""
        self._events.snapshot()

    def _root(self, salt: bytes) -> _Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = _Node(None, salt, -1, salt_hash(salt))
        return root

    def _drop_empty_root(self, root: _Node) -> None:
        # Salts come and go; a root without children and matches would be a leak.
        if not root.children and root.locks == 0:
            assert isinstance(root.key, bytes)
            del self._roots[root.key]

    def _grow(self, parent: _Node, key: BlockKey, block: int) -> _Node:
        child = _Node(parent, key, block, chain_hash(parent.hash, key))
        self._pool.share([block])
        parent.children[key] = child
        self._size += 1
        self._events.note(KvChange.STORED, child.hash, parent.hash)
        return child

    def _lock_path(self, node: _Node | None) -> None:
        while node is not None:
            if node.locks == 0 and node.parent is not None:
                self._locked += 1
            node.locks += 1
            node = node.parent

    def _offer(self, node: _Node) -> None:
        """Put an unlocked leaf up for eviction."""
        if node.parent is None or node.locks or node.children:
            return
        heapq.heappush(self._leaves, (node.last_use, next(self._order), node))
        if len(self._leaves) > 64 + 4 * self._size:
            self._leaves = [entry for entry in self._leaves if _is_current(entry)]
            heapq.heapify(self._leaves)

    def _evict_one(self) -> bool:
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if not _is_current(entry):
                continue
            node = entry[2]
            parent = node.parent
            assert parent is not None and not isinstance(node.key, bytes)
            del parent.children[node.key]
            node.parent = None
            self._size -= 1
            self._pool.give_back([node.block])
            self._events.note(KvChange.REMOVED, node.hash, parent.hash)
            if parent.parent is None:
                self._drop_empty_root(parent)
            else:
                self._offer(parent)
            return True
        return False

    def _held(self) -> Iterator[tuple[bytes, bytes]]:
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            assert node.parent is not None
            yield node.hash, node.parent.hash
            pending.extend(node.children.values())

    def _require_locked(self, match: PrefixMatch) -> None:
        if match._released:
            raise ValueError("this prefix match was released already: each match is released or inserted once")


def _is_current(entry: tuple[int, int, _Node]) -> bool:
    last_use, _, node = entry
    return node.parent is not None and node.locks == 0 and not node.children and node.last_use == last_use
