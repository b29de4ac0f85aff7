"""Blocks of sequences: from the prefix tree where it has them, from the pool otherwise, and back to both.

Every block in a sequence's table has one reference of that sequence, matched or not; the match beside it keeps the
tree from evicting. So an unlocked tree block has the tree as its only holder, and ``available`` is exact.
"""

from __future__ import annotations

from vla_cloud.core.block_pool import BLOCK_TOKENS, BlockPool, blocks_for
from vla_cloud.core.prefix_key import PrefixKey
from vla_cloud.core.radix_tree import RadixTree
from vla_cloud.core.sequence import TokenSequence


class BlockLedger:
    """Gives blocks to sequences and takes them back; evicts from the tree when the pool alone is not enough."""

    def __init__(self, pool: BlockPool, tree: RadixTree, prefix_cache: bool = True) -> None:
        """``prefix_cache`` False neither looks prefixes up nor stores them."""
        self.pool = pool
        self.tree = tree
        self._prefix_cache = prefix_cache

    @property
    def available(self) -> int:
        """Blocks that can be had now, free or by eviction."""
        return self.pool.free + self.tree.evictable

    def surely_fits(self, num_tokens: int, spare: int) -> bool:
        """Whether so many tokens fit, with ``spare`` blocks left, even if the tree has nothing of them."""
        return blocks_for(num_tokens) + spare <= self.available

    def uncached(self, seq: TokenSequence) -> int:
        """Tokens of the sequence that would have to be computed now."""
        return len(seq.tokens) - (self.tree.peek(self._lookup_key(seq)) if self._prefix_cache else 0)

    def occupy(self, seq: TokenSequence, num_tokens: int, spare: int) -> bool:
        """Give ``seq`` (without blocks) a table for ``num_tokens``, its known prefix from the tree; sets ``computed``.

        False, and nothing changed, if fewer than ``spare`` blocks would be left.
        """
        match = self.tree.match(self._lookup_key(seq))
        need = blocks_for(num_tokens) - len(match.blocks)
        if need + spare > self.available:
            self.tree.release(match)
            return False
        if need > self.pool.free:
            self.tree.evict(need - self.pool.free)
        own = self.pool.take(need)
        self.pool.share(match.blocks)
        seq.table = [*match.blocks, *own]
        seq.match = match
        seq.computed = match.length
        return True

    def grow(self, seq: TokenSequence) -> bool:
        """Make room for the KV of all tokens of ``seq``; False if no block can be had."""
        need = blocks_for(len(seq.tokens)) - len(seq.table)
        if need <= 0:
            return True
        if need > self.available:
            return False
        if need > self.pool.free:
            self.tree.evict(need - self.pool.free)
        seq.table.extend(self.pool.take(need))
        return True

    def publish(self, seq: TokenSequence) -> None:
        """Store the computed whole blocks in the tree, so that others find them."""
        whole = seq.computed // BLOCK_TOKENS * BLOCK_TOKENS
        if self._prefix_cache and seq.match is not None and whole > seq.match.length:
            seq.match = self.tree.insert(seq.match, seq.key(whole), seq.table)

    def release(self, seq: TokenSequence, keep: bool) -> None:
        """Take all blocks back; with ``keep`` the computed ones stay findable until evicted."""
        if keep:
            self.publish(seq)
        self._unlock(seq)
        self.pool.give_back(seq.table)
        seq.table = []

    def quarantine(self, seq: TokenSequence) -> None:
        """Take back the blocks of a reservation; those lent to ``seq.writer`` rest until BlockPool.acquit."""
        cached = seq.cached_tokens // BLOCK_TOKENS
        self._unlock(seq)
        self.pool.give_back(seq.table[:cached])
        self.pool.quarantine(seq.table[cached:], seq.writer)
        seq.table = []

    def _unlock(self, seq: TokenSequence) -> None:
        if seq.match is not None:
            self.tree.release(seq.match)
            seq.match = None

    def _lookup_key(self, seq: TokenSequence) -> PrefixKey:
        # Without the last token: it must be computed to have logits to sample from.
        return seq.key(len(seq.tokens) - 1 if self._prefix_cache else 0)
