"""Radix tree over token ids that keeps the keys and values of prefixes (part of stage 4, prefill).

Each edge carries a run of tokens and the handle of their keys and values; the handle is opaque here. Example after
caching "pick the red cube" and "pick the blue ball":

    root ── pick the ──┬── red cube
                       └── blue ball

Contract of a user:

1. ``match = cache.match(tokens)`` locks the longest known prefix; its handles, in order, hold ``match.length`` tokens.
2. compute the rest on top of them, then ``cache.insert(match, tokens, handle_of_the_rest)`` (optional)
3. ``cache.release(match)``, always, once the handles are no longer read.

Nodes of a locked path are never evicted. A hit compares tokens, never hashes. Not thread-safe.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Handle = TypeVar("Handle")


@dataclass
class PrefixCacheCounts:
    """Totals since start, in tokens except for ``lookups`` and ``refused``."""

    lookups: int = 0
    tokens_requested: int = 0
    tokens_reused: int = 0
    tokens_inserted: int = 0
    tokens_evicted: int = 0
    refused: int = 0  # insertions given up because everything else was in use


@dataclass(eq=False)
class _Node(Generic[Handle]):
    tokens: tuple[int, ...]  # of the edge that leads here
    handle: Handle | None  # None only at the root
    parent: _Node[Handle] | None
    children: dict[int, _Node[Handle]] = field(default_factory=dict)  # by first token of the edge
    locks: int = 0
    last_used: int = 0


@dataclass(eq=False)
class Match(Generic[Handle]):
    """A locked path. ``handles`` together hold the first ``length`` tokens of the sequence that was looked up."""

    length: int
    handles: list[Handle]
    _node: _Node[Handle] | None


class PrefixCache(Generic[Handle]):
    """The tree, bounded to ``capacity_tokens``; the least recently used leaves go first."""

    def __init__(self, capacity_tokens: int, split: Callable[[Handle, int], tuple[Handle, Handle]]) -> None:
        """``split(handle, n)`` gives the handles of the first n tokens and of the rest."""
        self.capacity_tokens = capacity_tokens
        self._split = split
        self._root: _Node[Handle] = _Node((), None, None)
        self._held = 0
        self._uses = 0
        self.counts = PrefixCacheCounts()

    @property
    def tokens_held(self) -> int:
        """Tokens in the tree."""
        return self._held

    def match(self, tokens: Sequence[int]) -> Match[Handle]:
        """Locks and returns the longest prefix of ``tokens`` in the tree, to the token."""
        self.counts.lookups += 1
        self.counts.tokens_requested += len(tokens)
        node, length = self._walk(tokens)
        self.counts.tokens_reused += length
        return self._lock(node, length)

    def insert(self, match: Match[Handle], tokens: Sequence[int], handle: Handle) -> bool:
        """Adds ``tokens``, of which ``handle`` holds those after ``match.length``.

        ``match`` stays valid and then covers and locks the inserted tokens as well. False if there is no room because
        the rest of the tree is in use; then nothing has changed.
        """
        node, known = self._walk(tokens)
        if known < match.length:
            raise ValueError("insert: the tokens do not continue the match")
        new = len(tokens) - known
        self._change_locks(node, +1)  # making room must not evict the branch that is about to grow
        if not self._make_room(new):
            self._change_locks(node, -1)
            self.counts.refused += 1
            return False
        self._change_locks(node, -1)
        if new:
            if known > match.length:  # another request has inserted part of it since: keep only what is new
                _, handle = self._split(handle, known - match.length)
            node = self._grow(node, tuple(tokens[known:]), handle)
        moved = self._lock(node, len(tokens))
        self._change_locks(match._node, -1)
        match.length, match.handles, match._node = moved.length, moved.handles, moved._node
        return True

    def release(self, match: Match[Handle]) -> None:
        """Unlocks a match; it must not be used any more. Releasing twice is a programming error."""
        if match._node is None:
            raise ValueError("release: this match was released before")
        self._change_locks(match._node, -1)
        match._node = None

    # --- the tree ---

    def _walk(self, tokens: Sequence[int]) -> tuple[_Node[Handle], int]:
        """Node at the end of the longest common prefix (an edge is split where the tokens diverge) and its depth."""
        self._uses += 1
        node, depth = self._root, 0
        while depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                break
            common = _common_length(child.tokens, tokens, depth)
            if common < len(child.tokens):
                child = self._split_edge(child, common)
            child.last_used = self._uses
            node, depth = child, depth + common
        return node, depth

    def _split_edge(self, node: _Node[Handle], at: int) -> _Node[Handle]:
        """Puts a node after the first ``at`` tokens of the edge into ``node`` and returns it."""
        assert node.parent is not None and node.handle is not None
        head, tail = self._split(node.handle, at)
        # Whoever locks the lower node locks the upper one through it, so the new one starts with the same count.
        upper = _Node(node.tokens[:at], head, node.parent, locks=node.locks, last_used=node.last_used)
        upper.children[node.tokens[at]] = node
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.handle, node.parent = node.tokens[at:], tail, upper
        return upper

    def _grow(self, node: _Node[Handle], tokens: tuple[int, ...], handle: Handle) -> _Node[Handle]:
        leaf = _Node(tokens, handle, node, last_used=self._uses)
        node.children[tokens[0]] = leaf
        self._held += len(tokens)
        self.counts.tokens_inserted += len(tokens)
        return leaf

    def _lock(self, node: _Node[Handle], length: int) -> Match[Handle]:
        self._change_locks(node, +1)
        handles = [step.handle for step in self._path(node) if step.handle is not None]
        return Match(length, handles[::-1], node)

    def _change_locks(self, node: _Node[Handle] | None, change: int) -> None:
        for step in self._path(node):
            step.locks += change

    def _path(self, node: _Node[Handle] | None) -> Iterator[_Node[Handle]]:
        """From ``node`` up to the root."""
        while node is not None:
            yield node
            node = node.parent

    def _make_room(self, new_tokens: int) -> bool:
        """Evicts unlocked leaves, least recently used first, until ``new_tokens`` fit. All or nothing."""
        excess = self._held + new_tokens - self.capacity_tokens
        if excess <= 0:
            return True
        if excess > self._evictable():
            return False
        leaves = [(n.last_used, id(n), n) for n in self._nodes() if not n.children and not n.locks]
        heapq.heapify(leaves)
        while excess > 0:
            leaf = heapq.heappop(leaves)[2]
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.tokens[0]]
            self._held -= len(leaf.tokens)
            excess -= len(leaf.tokens)
            self.counts.tokens_evicted += len(leaf.tokens)
            if parent is not self._root and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        return True

    def _evictable(self) -> int:
        # A locked node locks its ancestors, so every unlocked subtree can go as a whole.
        return sum(len(node.tokens) for node in self._nodes() if not node.locks)

    def _nodes(self) -> Iterator[_Node[Handle]]:
        """All nodes but the root."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common_length(edge: tuple[int, ...], tokens: Sequence[int], start: int) -> int:
    limit = min(len(edge), len(tokens) - start)
    for i in range(limit):
        if edge[i] != tokens[start + i]:
            return i
    return limit
