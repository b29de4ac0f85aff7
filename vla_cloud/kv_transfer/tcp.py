"""KV transfer over TCP: the receiver itself reads each piece from the socket into a block, after it has checked that
the sender may write there. Cancelling is final at once, as nobody else writes to the pool.
"""

from __future__ import annotations

import select
import socket
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vla_cloud.kv_transfer.connector import Cause, PeerUnreachable, TransferError, Verify
from vla_cloud.kv_transfer.digest import pool_view
from vla_cloud.kv_transfer.frames import Frame, Link, LinkBroken
from vla_cloud.kv_transfer.handshake import Address, Deadline, greet, new_secret
from vla_cloud.kv_transfer.layout import KvLayout, LayoutMismatch
from vla_cloud.kv_transfer.peer import Peer
from vla_cloud.kv_transfer.receiver import Receiver, ReceiverOptions
from vla_cloud.kv_transfer.reservations import Entry
from vla_cloud.kv_transfer.sender import Sender
from vla_cloud.kv_transfer.transfer import Batch, Transfer
from vla_common.clock import Clock

_IOV: Final = 256
_POLL_MS: Final = 200


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(16)
    return listener


def place(listener: socket.socket, advertise: str | None = None) -> str:
    """``host:port`` under which others find it."""
    host, port = listener.getsockname()[:2]
    host = advertise or host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial(where: Address, deadline: Deadline) -> socket.socket:
    """Connect. Raises PeerUnreachable."""
    try:
        sock = socket.create_connection(where.host_port, timeout=deadline.left_s())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that vanishes sends no FIN: find out within 10 + 3 * 5 s.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        return sock
    except (OSError, ValueError) as error:
        raise PeerUnreachable(f"no KV receiver at {where.place}: {error}") from error


class TcpReceiver(Receiver):
    """KvReceiver that reads pieces from TCP links into its blocks."""

    kind = "tcp"
    remote_writer = False
    # TCP's own checksum has 16 bits.
    default_verify = Verify.FULL

    def __init__(self, layout: KvLayout, pool: NDArray[np.uint8], clock: Clock,
                 options: ReceiverOptions | None = None, host: str = "127.0.0.1", port: int = 0,
                 advertise: str | None = None) -> None:
        """Listens on loopback unless told otherwise; ``advertise`` is the host that senders use. Raises OSError."""
        listener = listen(host, port)
        address = Address(self.kind, place(listener, advertise), new_secret())
        self.address = str(address)
        super().__init__(layout, pool, listener, address.secret, clock, options or ReceiverOptions())
        self._bytes = pool_view(self._pool)
        self._start()

    def _write(self, number: int, link: Link, frame: Frame) -> None:
        """Read the tail of a WRITE: into its blocks while the reservation stands, else away."""
        head = frame.head
        entry = self._table.writing(head.get("token"), number)
        targets: list[memoryview] = []
        layers = range(0)
        positions: list[int] = []
        if entry is not None:
            try:
                layers, positions = self._allowed(entry, head, frame.tail_bytes)
            except ValueError as error:
                self.counters.forbidden += 1
                self._table.broken(entry, Cause.FORBIDDEN, str(error))
                raise LinkBroken(f"a sender named what it may not write: {error}") from None
            size, stride, ids = self._layout.piece_bytes, self._pool.shape[1], entry.reservation.blocks
            starts = [(layer * stride + ids[position]) * size for layer in layers for position in positions]
            targets = [self._bytes[start:start + size] for start in starts]
        self._fill(link, entry, targets, frame.tail_bytes)
        if entry is not None:
            entry.written[layers.start:layers.stop, positions] = True

    def _allowed(self, entry: Entry, head: dict[str, object], tail_bytes: int) -> tuple[range, list[int]]:
        match head.get("layers"):
            case [int(start), int(stop)] if 0 <= start < stop <= self._layout.layers:
                layers = range(start, stop)
            case other:
                raise ValueError(f"layers {str(other)[:40]} of {self._layout.layers}")
        blocks = head.get("blocks")
        if not isinstance(blocks, list) or len(layers) * len(blocks) * self._layout.piece_bytes != tail_bytes:
            raise ValueError(f"{tail_bytes} bytes do not fit the blocks named")
        places = {block: position for position, block in enumerate(entry.reservation.blocks)}
        try:
            positions = [places[block] for block in blocks]
        except (KeyError, TypeError):
            raise ValueError("a block outside the reservation") from None
        if len(set(positions)) != len(positions) or entry.written[layers.start:layers.stop, positions].any():
            raise ValueError(f"a piece of {layers} for the second time")
        return layers, positions

    def _fill(self, link: Link, entry: Entry | None, targets: list[memoryview], count: int) -> None:
        poller = select.poll()
        poller.register(link, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        at = 0
        while count:
            try:
                if entry is None:
                    got = len(link.socket.recv(min(count, 1 << 20)))
                else:
                    with entry.lock:
                        # Seen under the lock: once cancel has returned, no byte goes into the blocks.
                        if not self._table.current(entry):
                            entry = None
                            continue
                        got = link.socket.recvmsg_into(targets[at:at + _IOV])[0]
            except BlockingIOError:
                poller.poll(_POLL_MS)
                if self._closed.is_set():
                    raise LinkBroken("the receiver was closed") from None
                continue
            if got == 0:
                raise LinkBroken("the sender closed the link or died in the middle of a write")
            count -= got
            while entry is not None and got:
                if got < len(targets[at]):
                    targets[at] = targets[at][got:]
                    break
                got -= len(targets[at])
                at += 1


class TcpSender(Sender):
    """KvSender over TCP; pieces go from the pool to the socket without a copy of ours."""

    kind = "tcp"

    def meet(self, address: str) -> tuple[Link, Frame, None]:
        """See Sender."""
        try:
            where = Address.parse(address, self.kind)
        except ValueError as error:
            raise PeerUnreachable(str(error)) from error
        deadline = Deadline(self.clock, self.options.connect_s)
        sock = dial(where, deadline)
        try:
            welcome = greet(sock, where.secret, self.layout, deadline)
        except (LayoutMismatch, TransferError):
            sock.close()
            raise
        return Link(sock), welcome, None

    def room(self, peer: Peer) -> bool:
        """See Sender: one batch in line is enough to keep the socket full."""
        return peer.link is not None and not peer.link.pending

    def put(self, peer: Peer, transfer: Transfer, batch: Batch) -> int | None:
        """See Sender."""
        with transfer.lock:
            if not transfer.live:
                return None
            digest = self.hash_pieces(batch) if peer.hashing else 0
        assert peer.link is not None
        peer.link.write_pieces({"token": transfer.token, "layers": [batch.layers.start, batch.layers.stop],
                                "blocks": list(batch.remote)}, self.pieces(batch), transfer)
        return digest
