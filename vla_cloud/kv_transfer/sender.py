"""What the senders have in common: a thread per receiver, events, and how transfers begin and end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vla_cloud.kv_transfer.connector import Failed, PeerUnreachable, Pushed
from vla_cloud.kv_transfer.digest import piece_hash, pool_view, seed
from vla_cloud.kv_transfer.frames import MAX_PAYLOAD, Frame, Link
from vla_cloud.kv_transfer.layout import KvLayout, check_pool
from vla_cloud.kv_transfer.peer import Peer
from vla_cloud.kv_transfer.reservations import EventQueue
from vla_cloud.kv_transfer.transfer import Batch, Transfer
from vla_common.clock import Clock


@dataclass(frozen=True)
class SenderOptions:
    """``connect_s``: a receiver that has not welcomed us by then is unreachable."""

    connect_s: float = 5.0


class Sender:
    """A KvSender without the way of the bytes; see connector.py for the calls."""

    kind = ""
    batch_bytes = 1 << 20
    """About what is written between two looks at aborts, revocations and deadlines: some 0.2 ms of copying."""
    inline_bytes = 0
    """Pushes up to this size are written by the engine's own thread if D's grant is there."""

    def __init__(self, layout: KvLayout, pool: NDArray[np.uint8], clock: Clock,
                 options: SenderOptions | None = None) -> None:
        """``pool``: u8[layers, num_blocks, piece_bytes], only read."""
        self.layout = layout
        self.pool = check_pool(layout, pool)
        self.bytes = pool_view(self.pool)
        self.clock = clock
        self.options = options or SenderOptions()
        self.events = EventQueue()
        self._lock = threading.Lock()
        self.closed = False
        self._peers: dict[str, Peer] = {}
        self._leaving: list[Peer] = []
        self._owners: dict[str, Peer] = {}

    # -- what connectors add; called by the peer's thread ------------------------------------------------------------

    def meet(self, address: str) -> tuple[Link, Frame, Any]:
        """Connect and shake hands within ``options.connect_s``: the link, WELCOME, what :meth:`put` needs of the peer.

        Raises LayoutMismatch, PeerUnreachable, PeerRefused.
        """
        raise NotImplementedError

    def put(self, peer: Peer, transfer: Transfer, batch: Batch) -> int | None:
        """Write it; the sum of the pieces' hashes, or None if the transfer ended meanwhile. Raises LinkBroken."""
        raise NotImplementedError

    def room(self, peer: Peer) -> bool:
        """Whether :meth:`put` may be called now."""
        return True

    def halt(self, transfer: Transfer) -> None:
        """``transfer.live`` is False: return when nothing more is written for it."""
        with transfer.lock:
            pass

    def hash_pieces(self, batch: Batch) -> int:
        """Sum of the pieces' hashes, from the sender's pool."""
        seeds = [seed(layer, position) for layer in batch.layers for position in batch.positions]
        return sum(map(piece_hash, self.pieces(batch), seeds))

    def pieces(self, batch: Batch) -> list[memoryview]:
        """The bytes, layer by layer."""
        size, view, num_blocks = self.layout.piece_bytes, self.bytes, self.pool.shape[1]
        return [view[(layer * num_blocks + local) * size:(layer * num_blocks + local + 1) * size]
                for layer in batch.layers for local in batch.local]

    def part(self, peer: Peer) -> None:
        """The link of this peer has ended."""

    # -- the engine's calls ----------------------------------------------------------------------------------------

    def connect(self, address: str) -> None:
        """See KvSender."""
        peer = self._peer(address)
        # The hand-shake has its own deadline; a little more than that means a thread that gets no processor.
        if not peer.met.wait(self.options.connect_s + 1.0):
            raise PeerUnreachable(f"no answer within {self.options.connect_s:g} s")
        if peer.error is not None:
            raise peer.error

    def open(self, token: str, address: str, deadline_ns: int) -> None:
        """See KvSender. Raises ValueError: the token is open already."""
        transfer = Transfer(token, deadline_ns, self.layout.layers, self.layout.piece_bytes, self.batch_bytes)
        with self._lock:
            if self.closed:
                raise ValueError("the sender is closed")
            if token in self._owners:
                raise ValueError(f"transfer token {token!r} is open already")
        while True:
            peer = self._peer(address)
            with self._lock:
                self._owners[token] = peer
            if peer.add(transfer):
                return

    def push(self, token: str, layers: range, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        """See KvSender."""
        total, num_blocks = self.pool.shape[:2]
        if len(local_blocks) != len(remote_blocks):
            raise ValueError(f"{len(local_blocks)} local blocks for {len(remote_blocks)} remote ones")
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= total:
            raise ValueError(f"layers {layers} of {total}")
        if local_blocks and not 0 <= min(local_blocks) <= max(local_blocks) < num_blocks:
            raise ValueError(f"local blocks outside the pool of {num_blocks}")
        self._owner(token).push(token, layers, tuple(local_blocks), tuple(remote_blocks))

    def finish(self, token: str, payload: bytes) -> None:
        """See KvSender."""
        if len(payload) > MAX_PAYLOAD:
            raise ValueError(f"a payload of {len(payload)} bytes; at most {MAX_PAYLOAD}")
        self._owner(token).finish(token, bytes(payload))

    def abort(self, token: str) -> None:
        """See KvSender."""
        with self._lock:
            peer = self._owners.get(token)
        if peer is not None:
            peer.abort(token)
            self.forget(token)
        self.events.drop(token)

    def poll(self) -> list[Pushed | Failed]:
        """See KvSender."""
        return cast("list[Pushed | Failed]", self.events.take())

    def fileno(self) -> int:
        """See KvSender."""
        return self.events.fileno()

    def close(self) -> None:
        """See KvSender."""
        with self._lock:
            self.closed = True
            peers = [*self._peers.values(), *self._leaving]
        for peer in peers:
            peer.stop()
        for peer in peers:
            peer.join()
        self.events.close()

    # -- for peers -------------------------------------------------------------------------------------------------

    def forget(self, token: str) -> None:
        """The transfer ended."""
        with self._lock:
            self._owners.pop(token, None)

    def left(self, peer: Peer) -> None:
        """The peer's thread ends: the next ``open`` to its address connects anew."""
        with self._lock:
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]
                # It still has to fail its transfers and to close its link, for which close() waits.
                self._leaving = [*filter(Peer.is_alive, self._leaving), peer]

    def _peer(self, address: str) -> Peer:
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = Peer(self, address, f"kv-{self.kind}-send")
                peer.start()
            return peer

    def _owner(self, token: str) -> Peer:
        with self._lock:
            peer = self._owners.get(token)
        if peer is None:
            raise ValueError(f"transfer {token!r} is not open; it may have failed: see poll()")
        return peer
