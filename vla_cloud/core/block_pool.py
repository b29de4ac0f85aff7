"""Which blocks of the paged KV memory are free, shared, or still within reach of a remote writer.

Every block is in exactly one state: free, used (refcount >= 1) or quarantined. The pool knows numbers only;
the bytes belong to the model runner.
"""

from __future__ import annotations

from collections.abc import Sequence

from vla_cloud.core.generate import OutOfBlocks

BLOCK_TOKENS = 16


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockPool:
    """Reference counts of ``num_blocks`` blocks, numbered from 0. Every call is all or nothing."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks free."""
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks holds nothing: give it at least 1")
        self.total = num_blocks
        self._refcount = [0] * num_blocks
        # Last in, first out: a block given back is the one most likely in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_writer: dict[str, list[int]] = {}
        self._quarantined: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that take() may give now."""
        return len(self._free)

    @property
    def quarantined(self) -> int:
        """Blocks without an owner that a remote writer may still write."""
        return len(self._quarantined)

    @property
    def used(self) -> int:
        """Blocks with at least one holder."""
        return self.total - len(self._free) - len(self._quarantined)

    def refcount(self, block: int) -> int:
        """Holders of a block; 0 when free or quarantined."""
        return self._refcount[block]

    def is_quarantined(self, block: int) -> bool:
        """Whether the block awaits the end of its writer."""
        return block in self._quarantined

    def take(self, n: int) -> list[int]:
        """n free blocks, each with one holder. Raises OutOfBlocks (and takes none) if fewer are free."""
        if n < 0:
            raise ValueError(f"cannot take {n} blocks")
        if n > len(self._free):
            raise OutOfBlocks(f"{n} KV blocks asked, {len(self._free)} of {self.total} free: retry later")
        if n == 0:
            return []
        taken = self._free[-n:][::-1]
        del self._free[-n:]
        for block in taken:
            self._refcount[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each. A block without a holder raises ValueError."""
        self._require_held(blocks, "share")
        for block in blocks:
            self._refcount[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each; without holders a block is free. A block without a holder raises ValueError."""
        self._require_held(blocks, "give back", distinct=True)
        for block in blocks:
            self._refcount[block] -= 1
            if self._refcount[block] == 0:
                self._free.append(block)

    def quarantine(self, blocks: Sequence[int], writer: str) -> None:
        """The only holder lets go of blocks that ``writer`` may still write: neither free nor readable until acquit.

        A block with several holders raises ValueError: what others read was never lent to a writer.
        """
        self._require_held(blocks, "quarantine", distinct=True)
        for block in blocks:
            if self._refcount[block] != 1:
                raise ValueError(f"block {block} has {self._refcount[block]} holders and cannot be quarantined")
        for block in blocks:
            self._refcount[block] = 0
        self._quarantined.update(blocks)
        if blocks:
            self._by_writer.setdefault(writer, []).extend(blocks)

    def acquit(self, writer: str) -> int:
        """The writer is known to have ended: its quarantined blocks become free. Returns how many (0 if none)."""
        blocks = self._by_writer.pop(writer, [])
        self._quarantined.difference_update(blocks)
        self._free.extend(blocks)
        return len(blocks)

    def writers(self) -> list[str]:
        """Writers that hold blocks in quarantine, oldest first."""
        return list(self._by_writer)

    def _require_held(self, blocks: Sequence[int], verb: str, distinct: bool = False) -> None:
        if distinct and len(set(blocks)) != len(blocks):
            raise ValueError(f"cannot {verb} a block twice in one call: {list(blocks)}")
        for block in blocks:
            if not 0 <= block < self.total or self._refcount[block] == 0:
                raise ValueError(f"cannot {verb} block {block}: it has no holder")
