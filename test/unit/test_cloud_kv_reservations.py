"""D's table of reservations under every order of events: blocks are never handed on while a writer may touch them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_cloud.kv_transfer.connector import Arrived, Broken, Cause, Reservation, WriterGone
from vla_cloud.kv_transfer.layout import KvLayout, check_pool
from vla_cloud.kv_transfer.memory import KvMemory
from vla_cloud.kv_transfer.reservations import Reservations
from vla_cloud.kv_transfer.transfer import Misdirected, Transfer, runs
from vla_common.clock import ManualClock

LAYERS = 2


def table(remote=True, orphan_s=60.0):
    clock = ManualClock()
    return Reservations(LAYERS, 64, remote, clock, orphan_s), clock


def finish(reservations, token, link, epoch=1, pieces=LAYERS):
    entry = reservations.check(token, link, epoch, pieces)
    if entry is not None:
        reservations.arrived(entry, Arrived(token, epoch, b"", 1, 1))


def test_an_orphan_is_released_after_its_time():
    reservations, clock = table(orphan_s=10.0)
    reservations.expect(Reservation("t", (1,), 1))
    reservations.grant("t", 0)
    reservations.link_lost(0, "reset", writer_gone=False)
    (broken,) = reservations.events.take()
    assert broken == Broken("t", Cause.PEER_DEAD, "reset", False) and not reservations.cancel("t")[0]
    clock.advance_ns(9_999_999_999)
    reservations.sweep()
    assert reservations.events.take() == []
    clock.advance_ns(1)
    reservations.sweep()
    assert reservations.events.take() == [WriterGone("t")] and reservations.writer_gone("t")


def test_a_late_notice_for_a_cancelled_reservation_only_says_that_the_writer_is_out():
    reservations, _ = table()
    reservations.expect(Reservation("t", (1,), 1))
    reservations.grant("t", 0)
    assert reservations.cancel("t") == (False, 0)
    finish(reservations, "t", 5)  # someone else says so
    assert reservations.events.take() == [] and not reservations.writer_gone("t")
    finish(reservations, "t", 0)
    assert reservations.events.take() == [WriterGone("t")]
    assert reservations.counters.late == 2 and reservations.counters.arrived == 0


def test_cancel_while_the_bytes_are_checked_drops_the_result():
    reservations, _ = table()
    reservations.expect(Reservation("t", (1,), 1))
    reservations.grant("t", 0)
    entry = reservations.check("t", 0, 1, LAYERS)
    assert entry is not None and reservations.cancel("t") == (True, -1)
    reservations.arrived(entry, Arrived("t", 1, b"", 1, 1))
    reservations.broken(entry, Cause.CHECKSUM, "")
    assert reservations.events.take() == [] and not reservations.busy


@settings(max_examples=400, deadline=None)
@given(remote=st.booleans(), actions=st.lists(
    st.tuples(st.sampled_from(["expect", "grant", "finish", "cancel", "ended", "lost", "orphan", "time"]),
              st.integers(0, 2), st.integers(0, 1)), max_size=50))
def test_every_reservation_ends_once_and_no_block_is_free_while_a_writer_may_touch_it(remote, actions):
    reservations, clock = table(remote, orphan_s=1.0)
    open_tokens: set[str] = set()  # expected, no end seen
    quarantined: set[str] = set()
    writers: dict[str, int] = {}  # who may write, as the peer sees it
    for what, index, link in actions:
        token = f"t{index}"
        if what == "expect" and token not in open_tokens | quarantined:
            reservations.expect(Reservation(token, (index,), 1))
            open_tokens.add(token)
        elif what == "expect":
            with pytest.raises(ValueError):
                reservations.expect(Reservation("other", (index,), 1))
        elif what == "grant":
            if not isinstance(reservations.grant(token, link), str):
                assert token in open_tokens and token not in writers
                writers[token] = link
        elif what == "finish":
            finish(reservations, token, link)
            if writers.get(token) == link:
                del writers[token]
        elif what == "ended":
            reservations.ended(token, link)
            if writers.get(token) == link:
                del writers[token]
        elif what in ("lost", "orphan"):
            reservations.link_lost(link, "", writer_gone=what == "lost" or not remote)
            if what == "lost" or not remote:
                writers = {key: who for key, who in writers.items() if who != link}
        elif what == "time":
            clock.advance_ns(2 * 10**9)
            reservations.sweep()
        elif what == "cancel" and token in open_tokens:
            gone, _ = reservations.cancel(token)
            assert gone or remote
            open_tokens.remove(token)
            if gone:
                writers.pop(token, None) if not remote else None
                assert not remote or token not in writers
            else:
                quarantined.add(token)
        for event in reservations.events.take():
            if isinstance(event, WriterGone):
                quarantined.remove(event.token)
                writers.pop(event.token, None) if what == "time" else None  # taken to be dead
            else:
                open_tokens.remove(event.token)
                if isinstance(event, Broken) and not event.writer_gone:
                    quarantined.add(event.token)
            if not isinstance(event, Broken) or event.writer_gone:
                assert not remote or event.token not in writers
    for index in range(3):
        assert reservations.writer_gone(f"t{index}") or f"t{index}" in writers or what == "orphan" or quarantined
    reservations.close()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_batches_cover_every_push_once(data):
    layers = data.draw(st.integers(1, 5))
    blocks = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True))
    transfer = Transfer("t", 0, layers, 100, data.draw(st.integers(1, 1200)))
    split = data.draw(st.integers(0, len(blocks)))
    transfer.push(range(layers), [block + 7 for block in blocks[:split]], blocks[:split])
    assert transfer.peek() is None  # not granted yet
    transfer.grant(1, blocks)
    for layer in range(layers):
        transfer.push(range(layer, layer + 1), [block + 7 for block in blocks[split:]], blocks[split:])
    seen = set()
    while (batch := transfer.peek()) is not None:
        assert [blocks[position] for position in batch.positions] == list(batch.remote)
        assert [block + 7 for block in batch.remote] == list(batch.local)
        seen |= {(layer, block) for layer in batch.layers for block in batch.remote}
        transfer.done(batch, 1)
    assert seen == {(layer, block) for layer in range(layers) for block in blocks}
    assert transfer.pieces == len(seen) and transfer.queued_bytes == 0
    transfer.push(range(1), [0], [blocks[0]])
    with pytest.raises(Misdirected, match="twice"):
        transfer.peek()


@pytest.mark.parametrize("remote", [[5], [1, 1]])
def test_a_push_of_other_blocks_or_of_one_twice_is_refused(remote):
    transfer = Transfer("t", 0, 1, 100, 1000)
    transfer.grant(1, [1, 2])
    transfer.push(range(1), [0] * len(remote), remote)
    with pytest.raises(Misdirected):
        transfer.peek()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_runs_are_the_same_pairs(pairs):
    local, remote = [a for a, _ in pairs], [b for _, b in pairs]
    found = [(at + k, to + k) for at, to, count in runs(local, remote) for k in range(count)]
    assert found == pairs


def test_a_pool_is_checked_against_its_layout():
    layout = KvLayout("m", "h", 2, 2, 8)
    memory = KvMemory(layout, 3)
    assert check_pool(layout, memory.array) is memory.array and not memory.array.any()
    with pytest.raises(ValueError, match="KV pool"):
        check_pool(KvLayout("m", "h", 3, 2, 8), memory.array)
    with pytest.raises(ValueError, match="contiguous"):
        check_pool(layout, memory.array[:, ::2])
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="at least 1"):
        KvMemory(layout, 0)


@pytest.mark.parametrize("bad", [{}, [], None, {"layers": 1}, KvLayout("m", "h", 1, 1, 1).to_json() | {"more": 1},
                                 KvLayout("m", "h", 1, 1, 1).to_json() | {"layers": True},
                                 KvLayout("m", "h", 1, 1, 1).to_json() | {"dtype": "float12"},
                                 KvLayout("m", "h", 1, 1, 1).to_json() | {"model_hash": 3}], ids=str)
def test_what_is_no_layout_is_refused(bad):
    with pytest.raises(ValueError):
        KvLayout.from_json(bad)
