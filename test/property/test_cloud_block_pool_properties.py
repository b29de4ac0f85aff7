"""The block pool against a dictionary of who holds what, over any sequence of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from vla_cloud.core.block_pool import BlockPool
from vla_cloud.core.generate import OutOfBlocks

TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """Holdings are lists of blocks with one reference each; the model counts references per block."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.references: Counter[int] = Counter()
        self.resting: dict[str, list[int]] = {}

    @rule(target=holdings, n=st.integers(0, TOTAL + 1))
    def take(self, n: int) -> list[int]:
        free = TOTAL - len(+self.references) - sum(map(len, self.resting.values()))
        if n > free:
            with pytest.raises(OutOfBlocks):
                self.pool.take(n)
            return []
        taken = self.pool.take(n)
        assert len(set(taken)) == n
        assert not set(taken) & set(+self.references), "a held block was given again"
        assert not set(taken) & {b for blocks in self.resting.values() for b in blocks}, "a quarantined block was given"
        self.references.update(taken)
        return taken

    @rule(target=holdings, blocks=holdings, data=st.data())
    def share(self, blocks: list[int], data: st.DataObject) -> list[int]:
        part = data.draw(st.lists(st.sampled_from(blocks), unique=True)) if blocks else []
        if not all(self.references[b] for b in part):
            return []
        self.pool.share(part)
        self.references.update(part)
        return part

    @rule(blocks=consumes(holdings))
    def give_back(self, blocks: list[int]) -> None:
        self.pool.give_back(blocks)
        self.references.subtract(blocks)

    @rule(target=holdings, blocks=consumes(holdings), writer=st.sampled_from("pq"))
    def quarantine(self, blocks: list[int], writer: str) -> list[int]:
        if any(self.references[b] != 1 for b in blocks):
            with pytest.raises(ValueError, match="holders"):
                self.pool.quarantine(blocks, writer)
            return blocks
        self.pool.quarantine(blocks, writer)
        self.references.subtract(blocks)
        self.resting.setdefault(writer, []).extend(blocks)
        return []

    @rule(writer=st.sampled_from("pqr"))
    def acquit(self, writer: str) -> None:
        assert self.pool.acquit(writer) == len(self.resting.pop(writer, []))

    @rule(block=st.integers(-2, TOTAL + 1), verb=st.sampled_from(["share", "give_back"]))
    def misuse(self, block: int, verb: str) -> None:
        if self.references[block] == 0:
            with pytest.raises(ValueError):
                getattr(self.pool, verb)([block])

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        resting = {b for blocks in self.resting.values() for b in blocks}
        assert self.pool.free + self.pool.used + self.pool.quarantined == TOTAL
        assert self.pool.used == len(+self.references) and self.pool.quarantined == len(resting)
        for block in range(TOTAL):
            assert self.pool.refcount(block) == self.references[block]
            assert self.pool.is_quarantined(block) == (block in resting)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
