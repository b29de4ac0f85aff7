"""What the receivers have in common: links, hand-shakes, grants, notices and the check of what arrived."""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import threading
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vla_cloud.kv_transfer.connector import (
    Arrived,
    Broken,
    Cause,
    PeerRefused,
    ReceiverCounters,
    Reservation,
    Verify,
    WriterGone,
)
from vla_cloud.kv_transfer.digest import pool_digest
from vla_cloud.kv_transfer.frames import Frame, Kind, Link, LinkBroken, LinkEnded
from vla_cloud.kv_transfer.handshake import Deadline, admit
from vla_cloud.kv_transfer.layout import KvLayout, LayoutMismatch, check_pool
from vla_cloud.kv_transfer.reservations import Reservations
from vla_common.clock import Clock

LOG = logging.getLogger(__name__)

_POLL_MS = 200


@dataclass(frozen=True)
class ReceiverOptions:
    """Settings of a receiver.

    Attributes:
        verify: see Verify; None takes the connector's own default.
        handshake_s: a peer that says nothing for that long is dropped.
        max_links: senders at a time.
        orphan_s: how long blocks stay in quarantine after a link was lost whose end does not prove its sender's death.
    """

    verify: Verify | None = None
    handshake_s: float = 5.0
    max_links: int = 64
    orphan_s: float = 60.0


class Receiver:
    """A KvReceiver without the way of the bytes; see connector.py for the calls."""

    remote_writer = True
    """The peer writes into our memory by itself."""
    kind = ""
    default_verify = Verify.FULL

    def __init__(self, layout: KvLayout, pool: NDArray[np.uint8], listener: socket.socket, secret: str, clock: Clock,
                 options: ReceiverOptions) -> None:
        """Takes over the listening socket. Call :meth:`_start` when ready."""
        self._layout = layout
        self._pool = check_pool(layout, pool)
        self._secret = secret
        self._clock = clock
        self._options = options
        self._verify = options.verify or self.default_verify
        self._listener = listener
        self._table = Reservations(layout.layers, pool.shape[1], self.remote_writer, clock, options.orphan_s)
        self._links: dict[int, Link] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._leaving: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name=f"kv-{self.kind}-accept", daemon=True)

    def _start(self) -> None:
        self._accepting.start()

    # -- what connectors add ---------------------------------------------------------------------------------------

    def _welcome(self) -> tuple[dict[str, Any], bytes]:
        return {"num_blocks": int(self._pool.shape[1]), "verify": self._verify.value}, b""

    def _welcomed(self, sock: socket.socket, deadline: Deadline) -> None:
        """After the hand-shake, before the first frame."""

    def _check_peer(self, sock: socket.socket) -> None:
        """Raise PeerRefused for a process that may not even try."""

    def _loss_proves_death(self, sock: socket.socket) -> bool:
        """Whether the end of this link means that its sender can write no more."""
        return True

    def _write(self, number: int, link: Link, frame: Frame) -> None:
        raise LinkBroken(f"WRITE on a {self.kind} link")

    # -- the engine's calls ----------------------------------------------------------------------------------------

    @property
    def counters(self) -> ReceiverCounters:
        """Totals since start."""
        return self._table.counters

    def expect(self, reservation: Reservation) -> None:
        """See KvReceiver."""
        self._table.expect(reservation)

    def cancel(self, token: str) -> bool:
        """See KvReceiver."""
        gone, number = self._table.cancel(token)
        link = self._links.get(number)
        if link is not None:
            try:
                link.write(Kind.REVOKE, {"token": token})
            except LinkBroken:
                pass  # its thread is about to find out
        return gone

    def poll(self) -> list[Arrived | Broken | WriterGone]:
        """See KvReceiver."""
        self._table.sweep()
        return cast("list[Arrived | Broken | WriterGone]", self._table.events.take())

    def writer_gone(self, token: str) -> bool:
        """See KvReceiver."""
        return self._table.writer_gone(token)

    def fileno(self) -> int:
        """See KvReceiver."""
        return self._table.events.fileno()

    def close(self) -> None:
        """See KvReceiver."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.eventfd_write(self._stop, 1)  # never read: wakes every thread
        self._accepting.join()
        with self._lock:
            threads = [*self._threads.values(), *self._leaving]
        for thread in threads:
            thread.join()
        self._listener.close()
        self._table.close()
        os.close(self._stop)

    # -- threads ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        self._listener.setblocking(False)
        for number in itertools.count():
            poller.poll()
            if self._closed.is_set():
                return
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                LOG.warning("a sender could not be accepted: %s", error)
                continue
            with self._lock:
                if len(self._threads) >= self._options.max_links:
                    self.counters.refused_links += 1
                    sock.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(number, sock), daemon=True,
                                          name=f"kv-{self.kind}-{number}")
                self._threads[number] = thread
            thread.start()

    def _serve(self, number: int, sock: socket.socket) -> None:
        link: Link | None = None
        why = "the sender's link ended"
        proves_death = True
        try:
            self._meet(sock)
            proves_death = self._loss_proves_death(sock)
            link = Link(sock)
            self._links[number] = link
            self._frames(number, link)
        except (LayoutMismatch, PeerRefused) as error:
            self.counters.refused_links += 1
            LOG.warning("a sender was refused: %s", error)
        except (LinkBroken, OSError, ValueError) as error:
            why = str(error)
            # A link that is given up here, because of what came over it, says nothing of its writer.
            given_up = link is not None and not isinstance(error, LinkEnded) and self.remote_writer
            proves_death = proves_death and not given_up
            LOG.info("link %d of a KV sender ended: %s", number, why)
        finally:
            self._links.pop(number, None)
            if link is not None:
                link.close()
            sock.close()
            if not self._closed.is_set():
                self._table.link_lost(number, why, proves_death)
            with self._lock:  # it still has to end, for which close() waits
                self._leaving = [*filter(threading.Thread.is_alive, self._leaving), self._threads.pop(number)]

    def _meet(self, sock: socket.socket) -> None:
        self._check_peer(sock)
        deadline = Deadline(self._clock, self._options.handshake_s)
        welcome, tail = self._welcome()
        admit(sock, self._secret, self._layout, deadline, welcome, tail)
        self._welcomed(sock, deadline)

    def _frames(self, number: int, link: Link) -> None:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        while True:
            poller.register(link, select.POLLIN | (select.POLLOUT if link.pending else 0))
            poller.poll(_POLL_MS)
            if self._closed.is_set():
                return
            link.flush()
            while (frame := link.read()) is not None:
                self._handle(number, link, frame)
                if self._closed.is_set():
                    return

    def _handle(self, number: int, link: Link, frame: Frame) -> None:
        token = frame.head.get("token")
        if frame.kind is Kind.WRITE:
            self._write(number, link, frame)
        elif frame.kind is Kind.OPEN:
            answer = self._table.grant(token, number)
            if isinstance(answer, str):
                link.write(Kind.DENY, {"token": token, "why": answer})
            else:
                link.write(Kind.GRANT, {"token": token, "epoch": answer.epoch, "blocks": answer.blocks})
        elif frame.kind is Kind.FINISH:
            self._finish(number, frame)
        elif frame.kind is Kind.ENDED:
            self._table.ended(token, number)
        else:
            raise LinkBroken(f"a sender sent {frame.kind.name}")

    def _finish(self, number: int, frame: Frame) -> None:
        head = frame.head
        entry = self._table.check(head.get("token"), number, head.get("epoch"), head.get("pieces"))
        if entry is None:
            return
        began_ns = self._clock.monotonic_ns()
        reservation = entry.reservation
        if self._verify is Verify.FULL:
            found = f"{pool_digest(self._pool, reservation.blocks):016x}"
            if found != head.get("digest"):
                self._table.broken(entry, Cause.CHECKSUM, f"the blocks hold {found}, the notice says "
                                                          f"{str(head.get('digest'))[:32]}")
                return
        now_ns = self._clock.monotonic_ns()
        self._table.arrived(entry, Arrived(reservation.token, reservation.epoch, frame.tail,
                                           len(reservation.blocks) * self._layout.block_bytes,
                                           now_ns - entry.granted_ns, now_ns - began_ns))
