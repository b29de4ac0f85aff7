"""KV transfer between processes of one machine: the sender maps the receiver's pool and copies into it.

The pool is a memfd, handed over the Unix socket after the hand-shake; notices use the same socket. While a grant is
out, the sender's process can write to the pool whatever the receiver does, so only its word, or the end of its last
descriptor (the kernel closes them after the process's memory is gone), gives cancelled blocks back; time does not.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

import numpy as np
from numpy.typing import NDArray

from vla_cloud.kv_transfer.connector import PeerRefused, PeerUnreachable, TransferError, Verify
from vla_cloud.kv_transfer.digest import piece_hash
from vla_cloud.kv_transfer.frames import Frame, Link
from vla_cloud.kv_transfer.handshake import Address, Deadline, greet, new_secret
from vla_cloud.kv_transfer.layout import KvLayout, LayoutMismatch
from vla_cloud.kv_transfer.memory import KvMemory, base_address, copy, map_pool
from vla_cloud.kv_transfer.peer import Peer
from vla_cloud.kv_transfer.receiver import Receiver, ReceiverOptions
from vla_cloud.kv_transfer.sender import Sender, SenderOptions
from vla_cloud.kv_transfer.streaming_copy import streaming_copy
from vla_cloud.kv_transfer.transfer import Batch, Transfer, runs
from vla_common.clock import Clock

_CREDENTIALS = struct.Struct("3i")


class SharedMemoryReceiver(Receiver):
    """KvReceiver over a pool that other processes of the same user may map."""

    kind = "shm"
    remote_writer = True
    # Nothing lies between the copy and the memory that could change a byte. Reading all of it twice more, for the
    # checksum, takes as long as the copy itself (benchmarks/kv_transfer.py).
    default_verify = Verify.NOTICE

    def __init__(self, memory: KvMemory, clock: Clock, options: ReceiverOptions | None = None) -> None:
        """Listens at an abstract Unix socket with a random name. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"vla-kv-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(16)
        self._memory = memory
        address = Address(self.kind, name, new_secret())
        self.address = str(address)
        super().__init__(memory.layout, memory.array, listener, address.secret, clock, options or ReceiverOptions())
        self._start()

    def _check_peer(self, sock: socket.socket) -> None:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            raise PeerRefused(f"a process of user {uid} asked for the KV pool of user {os.getuid()}")

    def _welcomed(self, sock: socket.socket, deadline: Deadline) -> None:
        deadline.arm(sock)
        socket.send_fds(sock, [b"F"], [self._memory.fd])


class SharedMemorySender(Sender):
    """KvSender that copies straight into the receiver's blocks."""

    kind = "shm"
    batch_bytes = 4 << 20
    # 4 MiB take 0.6 ms to copy; to wake a thread takes 0.1 ms on an idle machine, and milliseconds on a busy one.
    inline_bytes = 4 << 20
    # From here on past the caches; less is better found in them by a D on the same chip, and a small pool fits there.
    stream_bytes = 1 << 20
    stream_pool_bytes = 64 << 20

    def __init__(self, layout: KvLayout, pool: NDArray[np.uint8], clock: Clock,
                 options: SenderOptions | None = None) -> None:
        """See Sender; for large pools, compiles the copy, which takes a moment."""
        super().__init__(layout, pool, clock, options)
        self._stream = streaming_copy(layout.piece_bytes) if pool.nbytes >= self.stream_pool_bytes else None

    def meet(self, address: str) -> tuple[Link, Frame, NDArray[np.uint8]]:
        """See Sender; the context is the receiver's pool."""
        deadline = Deadline(self.clock, self.options.connect_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            where = Address.parse(address, self.kind)
            deadline.arm(sock)
            sock.connect(f"\0{where.place}")
            welcome = greet(sock, where.secret, self.layout, deadline)
            deadline.arm(sock)
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if len(fds) != 1:
                raise PeerUnreachable("the receiver sent no memory")
            try:
                pool = map_pool(fds[0], self.layout, int(welcome.head["num_blocks"]))
            finally:
                os.close(fds[0])
            return Link(sock), welcome, pool
        except LayoutMismatch:
            sock.close()
            raise
        except (OSError, ValueError, KeyError) as error:
            sock.close()
            raise PeerUnreachable(f"no shared-memory receiver: {error}") from error
        except TransferError:
            sock.close()
            raise

    def put(self, peer: Peer, transfer: Transfer, batch: Batch) -> int | None:
        """See Sender. Each piece is hashed and then copied out of the cache; without a checksum whole runs are."""
        size = self.layout.piece_bytes
        own, other = self.pool, peer.context
        source, target = base_address(own), base_address(other)
        from_layer, to_layer = own.shape[1] * size, other.shape[1] * size
        with transfer.lock:
            if not transfer.live:
                return None
            if peer.hashing:
                return self._put_hashed(batch, source, target, from_layer, to_layer)
            if self._stream and len(batch.layers) * len(batch.local) * size >= self.stream_bytes:
                places, pieces = np.array(batch.remote, np.int64), np.array(batch.local, np.int64)
                layers = batch.layers
                self._stream(target, source, to_layer, from_layer, places, pieces, layers.start, layers.stop, size)
                return 0
            stretches = [(at * size, to * size, count * size) for at, to, count in runs(batch.local, batch.remote)]
            for layer in batch.layers:
                near, far = source + layer * from_layer, target + layer * to_layer
                for at, to, count in stretches:
                    copy(far + to, near + at, count)
        return 0

    def _put_hashed(self, batch: Batch, source: int, target: int, from_layer: int, to_layer: int) -> int:
        size, view = self.layout.piece_bytes, self.bytes
        pieces = [(position, local * size, remote * size) for position, local, remote
                  in zip(batch.positions, batch.local, batch.remote, strict=True)]
        digest = 0
        for layer in batch.layers:
            near, far, seeds = layer * from_layer, target + layer * to_layer, layer << 32
            for position, at, to in pieces:
                start = near + at
                digest += piece_hash(view[start:start + size], seeds | position)
                copy(far + to, source + start, size)
        return digest

    def part(self, peer: Peer) -> None:
        """See Sender: unmap."""
        peer.context = None
