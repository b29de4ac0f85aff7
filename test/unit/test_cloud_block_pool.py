"""The block pool: counts, sharing, quarantine, misuse."""

import pytest

from vla_cloud.core.block_pool import BlockPool, blocks_for
from vla_cloud.core.generate import OutOfBlocks


def counts(pool):
    return pool.free, pool.used, pool.quarantined


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (65_536, 4096)])
def test_blocks_for_tokens(tokens, blocks):
    assert blocks_for(tokens) == blocks


def test_taking_is_all_or_nothing():
    pool = BlockPool(4)
    first = pool.take(3)
    assert len(set(first)) == 3 and counts(pool) == (1, 3, 0)
    with pytest.raises(OutOfBlocks, match="2 KV blocks asked, 1 of 4 free"):
        pool.take(2)
    assert counts(pool) == (1, 3, 0) and pool.take(0) == []
    assert set(pool.take(1)) == {0, 1, 2, 3} - set(first)


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(2)
    block = pool.take(1)
    pool.share(block)
    pool.give_back(block)
    assert counts(pool) == (1, 1, 0)
    pool.give_back(block)
    assert counts(pool) == (2, 0, 0)


def test_a_quarantined_block_is_neither_free_nor_usable_until_its_writer_is_acquitted():
    pool = BlockPool(4)
    a, b = pool.take(2), pool.take(1)
    pool.quarantine(a, "p1")
    pool.quarantine(b, "p2")
    assert counts(pool) == (1, 0, 3) and pool.is_quarantined(a[0]) and pool.writers() == ["p1", "p2"]
    for misuse in (pool.share, pool.give_back, lambda blocks: pool.quarantine(blocks, "p1")):
        with pytest.raises(ValueError, match="no holder"):
            misuse(a)
    with pytest.raises(OutOfBlocks):
        pool.take(2)
    assert pool.acquit("p1") == 2 and counts(pool) == (3, 0, 1)
    assert pool.acquit("p1") == 0 and pool.acquit("unknown") == 0
    assert pool.acquit("p2") == 1 and counts(pool) == (4, 0, 0)


def test_one_writer_may_have_blocks_of_several_reservations_in_quarantine():
    pool = BlockPool(4)
    pool.quarantine(pool.take(1), "p")
    pool.quarantine(pool.take(2), "p")
    assert pool.acquit("p") == 3 and pool.free == 4


def test_what_others_read_cannot_be_quarantined():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.share(blocks[1:])
    with pytest.raises(ValueError, match="2 holders"):
        pool.quarantine(blocks, "p")
    assert counts(pool) == (2, 2, 0), "nothing changed"


@pytest.mark.parametrize("verb", ["share", "give_back"])
def test_a_block_without_a_holder_is_refused_and_nothing_changes(verb):
    pool = BlockPool(3)
    (block,) = pool.take(1)
    for wrong in ([block, (block + 1) % 3], [99], [-1]):
        with pytest.raises(ValueError, match="no holder"):
            getattr(pool, verb)(wrong)
    assert pool.refcount(block) == 1


def test_giving_back_twice_in_one_call_or_in_two_is_refused():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    with pytest.raises(ValueError, match="twice"):
        pool.give_back([block, block])
    pool.give_back([block])
    with pytest.raises(ValueError, match="no holder"):
        pool.give_back([block])


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
    with pytest.raises(ValueError, match="-1"):
        BlockPool(1).take(-1)
