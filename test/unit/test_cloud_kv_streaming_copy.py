"""Copies past the caches: the same bytes at the right places, and nothing else."""

from __future__ import annotations

import builtins
import time

import numpy as np
import pytest

from vla_cloud.kv_transfer import streaming_copy as module
from vla_cloud.kv_transfer.connector import Arrived, Pushed, Reservation
from vla_cloud.kv_transfer.factory import make_receiver
from vla_cloud.kv_transfer.layout import KvLayout
from vla_cloud.kv_transfer.memory import KvMemory, base_address
from vla_cloud.kv_transfer.shared_memory import SharedMemorySender
from vla_cloud.kv_transfer.streaming_copy import streaming_copy
from vla_common.clock import SystemClock

LAYERS, FROM_BLOCKS, TO_BLOCKS = 3, 12, 20


@pytest.mark.parametrize("kv_heads, head_dim", [(1, 16), (3, 64), (1, 20)])
def test_pieces_arrive_at_their_places_and_nothing_else_is_touched(kv_heads, head_dim):
    layout = KvLayout("toy", "0", layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim)
    size = layout.piece_bytes
    copy = streaming_copy(size)
    assert copy is not None
    rng = np.random.default_rng(kv_heads)
    source, target = KvMemory(layout, FROM_BLOCKS), KvMemory(layout, TO_BLOCKS)
    source.array[:] = rng.integers(0, 256, source.array.shape, np.uint8)
    target.array[:] = rng.integers(0, 256, target.array.shape, np.uint8)
    want = target.array.copy()
    at, to = rng.permutation(FROM_BLOCKS)[:7].astype(np.int64), rng.permutation(TO_BLOCKS)[:7].astype(np.int64)
    want[1:3, to] = source.array[1:3, at]
    copy(base_address(target.array), base_address(source.array), TO_BLOCKS * size, FROM_BLOCKS * size, to, at, 1, 3,
         size)
    assert np.array_equal(target.array, want)


def test_pieces_that_are_no_whole_grains_are_left_to_others():
    assert streaming_copy(module.GRAIN - 64) is None


def test_without_numba_there_is_none(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "numba":
            raise ImportError("No module named 'numba'")
        return real(name, *args, **kwargs)

    module._compiled.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    try:
        assert streaming_copy(module.GRAIN) is None
    finally:
        monkeypatch.undo()
        module._compiled.cache_clear()


@pytest.mark.parametrize("blocks", [1, 9], ids=["below the size", "above"])
def test_a_transfer_through_shared_memory_streams_what_is_large(blocks, monkeypatch):
    layout = KvLayout("toy", "0", layers=LAYERS, kv_heads=2, head_dim=64)
    source, target = KvMemory(layout, FROM_BLOCKS), KvMemory(layout, TO_BLOCKS)
    source.array[:] = np.random.default_rng(1).integers(0, 256, source.array.shape, np.uint8)
    monkeypatch.setattr(SharedMemorySender, "stream_pool_bytes", 1)
    monkeypatch.setattr(SharedMemorySender, "stream_bytes", 4 * layout.block_bytes)
    clock = SystemClock()
    receiver = make_receiver("shm", target, clock)
    sender = SharedMemorySender(source.layout, source.array, clock)
    calls = []
    stream = sender._stream
    monkeypatch.setattr(sender, "_stream", lambda *args: (calls.append(args), stream(*args)))
    try:
        remote = list(range(TO_BLOCKS))[::2][:blocks]
        receiver.expect(Reservation("t", tuple(remote), 1))
        sender.open("t", receiver.address, clock.monotonic_ns() + 20 * 10**9)
        sender.push("t", range(LAYERS), list(range(blocks)), remote)
        sender.finish("t", b"done")
        assert [type(event) for event in _events(sender)] == [Pushed]
        assert [type(event) for event in _events(receiver)] == [Arrived]
        assert len(calls) == (blocks > 4)
        assert np.array_equal(target.array[:, remote], source.array[:, :blocks])
    finally:
        sender.close()
        receiver.close()


def _events(end):
    until = time.monotonic() + 20
    while not (events := end.poll()):
        assert time.monotonic() < until
        time.sleep(0.001)
    return events
