"""The thread that talks to one receiver: grants, batches, notices, and every way in which a transfer ends."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vla_cloud.kv_transfer.connector import Cause, Failed, PeerRefused, PeerUnreachable, Pushed, Verify
from vla_cloud.kv_transfer.frames import Frame, Kind, Link, LinkBroken
from vla_cloud.kv_transfer.layout import LayoutMismatch
from vla_cloud.kv_transfer.transfer import Misdirected, Transfer

if TYPE_CHECKING:
    from vla_cloud.kv_transfer.sender import Sender

LOG = logging.getLogger(__name__)

_POLL_MS = 50


class Peer(threading.Thread):
    """One receiver. Calls from the engine's thread take a lock for an instant; the thread does the rest."""

    def __init__(self, sender: Sender, address: str, name: str) -> None:
        """Not started."""
        super().__init__(name=name, daemon=True)
        self.address = address
        self.met = threading.Event()
        self.error: LayoutMismatch | PeerUnreachable | PeerRefused | None = None
        self.link: Link | None = None
        self.context: Any = None
        self.hashing = True
        """Whether the receiver compares checksums; if not, none is computed."""
        self._sender = sender
        self._lock = threading.Lock()
        self._transfers: dict[str, Transfer] = {}
        self._over = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def add(self, transfer: Transfer) -> bool:
        """Take it on; False if this peer has ended."""
        with self._lock:
            if self._over:
                return False
            self._transfers[transfer.token] = transfer
            self._rouse()
            return True

    def push(self, token: str, layers: range, local: Sequence[int], remote: Sequence[int]) -> None:
        """Queue a push; ignored if the transfer has just failed, as the event says."""
        with self._lock:
            transfer = self._transfers.get(token)
            if transfer is not None:
                if transfer.payload is not None:
                    raise ValueError(f"transfer {token!r} is finished")
                transfer.began_ns = transfer.began_ns or self._sender.clock.monotonic_ns()
                transfer.push(layers, local, remote)
        if transfer is not None:
            self._at_once(transfer)

    def finish(self, token: str, payload: bytes) -> None:
        """Send the notice after what was pushed."""
        with self._lock:
            transfer = self._transfers.get(token)
            if transfer is not None:
                transfer.payload = payload
        if transfer is not None:
            self._at_once(transfer)

    def _at_once(self, transfer: Transfer) -> None:
        """Write in the engine's own thread what takes no longer than waking the peer's; leave the rest to that."""
        link, left = self.link, True
        small = transfer.queued_bytes <= self._sender.inline_bytes > 0
        if small and link is not None and transfer.granted and transfer.step.acquire(blocking=False):
            try:
                while transfer.live and self._write(link, transfer):
                    pass
                left = transfer.queued_bytes > 0 or (transfer.payload is not None and not transfer.noticed)
            except Misdirected as error:
                self._fail(transfer, Cause.REFUSED, str(error))
            except LinkBroken:
                pass  # the peer's thread finds out by itself
            finally:
                transfer.step.release()
        if left or link is None or link.pending:
            with self._lock:
                self._rouse()

    def abort(self, token: str) -> None:
        """When this returns, nothing more is written."""
        with self._lock:
            transfer = self._transfers.pop(token, None)
        if transfer is not None:
            self._halt(transfer)

    def stop(self) -> None:
        """End the thread; join it afterwards."""
        with self._lock:
            self._over = True
            self._rouse()

    def _rouse(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # -- both ------------------------------------------------------------------------------------------------------

    def _halt(self, transfer: Transfer) -> None:
        transfer.live = False
        self._sender.halt(transfer)
        if transfer.opened and self.link is not None:
            try:
                self.link.write(Kind.ENDED, {"token": transfer.token})
            except LinkBroken:
                pass  # the receiver sees the end of the link instead

    def _fail(self, transfer: Transfer, cause: Cause, detail: str) -> None:
        with self._lock:
            if self._transfers.pop(transfer.token, None) is not transfer:
                return
            self._halt(transfer)
            self._sender.events.put(Failed(transfer.token, cause, detail))
        self._sender.forget(transfer.token)

    # -- the peer's thread -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Meet, work, and fail what is left when the link ends."""
        cause, detail = Cause.UNREACHABLE, "the sender was closed"
        try:
            self.link, welcome, self.context = self._sender.meet(self.address)
            self.hashing = welcome.head.get("verify") != Verify.NOTICE.value
            self.met.set()
            self._work(self.link)
        except LayoutMismatch as error:
            self.error, cause, detail = error, Cause.LAYOUT, str(error)
        except PeerRefused as error:
            self.error, cause, detail = error, Cause.REFUSED, str(error)
        except PeerUnreachable as error:
            self.error, detail = error, str(error)
        except LinkBroken as error:
            detail = str(error)
            LOG.info("link to a KV receiver ended: %s", detail)
        finally:
            self._leave(cause, detail)

    def _leave(self, cause: Cause, detail: str) -> None:
        self._sender.left(self)
        with self._lock:
            self._over = True
            remaining = list(self._transfers.values())
        # Before the link is closed: its end tells the receiver that nothing more is written.
        for transfer in remaining:
            self._fail(transfer, cause, detail)
        if self.link is not None:
            self._sender.part(self)
            self.link.close()
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        self.met.set()

    def _work(self, link: Link) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        busy = False
        while True:
            poller.register(link, select.POLLIN | (select.POLLOUT if link.pending else 0))
            ready = poller.poll(0 if busy else _POLL_MS)
            if any(fd == self._wake for fd, _ in ready):
                os.eventfd_read(self._wake)
            with self._lock:
                if self._over:
                    return
                transfers = list(self._transfers.values())
            link.flush()
            while (frame := link.read()) is not None:
                self._handle(link, frame)
            busy = False
            for transfer in transfers:
                busy |= self._advance(link, transfer)

    def _handle(self, link: Link, frame: Frame) -> None:
        token = str(frame.head.get("token"))
        with self._lock:
            transfer = self._transfers.get(token)
        if transfer is None:
            if frame.kind is not Kind.DENY:  # granted or revoked after an abort: D waits to hear that we are out
                link.write(Kind.ENDED, {"token": token})
        elif frame.kind is Kind.GRANT:
            try:
                transfer.grant(int(frame.head["epoch"]), [int(block) for block in frame.head["blocks"]])
            except (KeyError, TypeError, ValueError):
                raise LinkBroken("a receiver sent a grant without epoch and blocks") from None
        elif frame.kind is Kind.DENY:
            transfer.opened = False
            self._fail(transfer, Cause.REFUSED, f"the receiver refused: {frame.head.get('why')}")
        elif frame.kind is Kind.REVOKE:
            self._fail(transfer, Cause.REVOKED, "the receiver cancelled the reservation")
        else:
            raise LinkBroken(f"a receiver sent {frame.kind.name}")

    def _advance(self, link: Link, transfer: Transfer) -> bool:
        """One step of one transfer; whether it can go on at once."""
        if not transfer.step.acquire(blocking=False):
            return False  # the engine's thread is at it, and rouses us if it leaves anything
        try:
            return self._step(link, transfer)
        finally:
            transfer.step.release()

    def _step(self, link: Link, transfer: Transfer) -> bool:
        if not transfer.live:
            return False
        if self._sender.clock.monotonic_ns() >= transfer.deadline_ns and not transfer.noticed:
            self._fail(transfer, Cause.DEADLINE, "the transfer's deadline passed")
            return False
        if not transfer.opened:
            transfer.opened = True
            link.write(Kind.OPEN, {"token": transfer.token})
            return False
        try:
            return self._write(link, transfer)
        except Misdirected as error:
            self._fail(transfer, Cause.REFUSED, str(error))
            return False

    def _write(self, link: Link, transfer: Transfer) -> bool:
        finishing = transfer.payload is not None  # read first: a push never comes after finish
        batch = transfer.peek()
        if batch is not None:
            if not self._sender.room(self):
                return False
            digest = self._sender.put(self, transfer, batch)
            if digest is None:
                return False
            transfer.done(batch, digest)
            return True
        if not finishing or not transfer.granted:
            return False
        if not transfer.noticed:
            transfer.noticed = True
            assert transfer.payload is not None
            link.write(Kind.FINISH, {"token": transfer.token, "epoch": transfer.epoch, "pieces": transfer.pieces,
                                     "digest": transfer.digest}, transfer.payload)
        if link.pending:
            return False
        self._pushed(transfer)
        return False

    def _pushed(self, transfer: Transfer) -> None:
        with self._lock:
            if self._transfers.pop(transfer.token, None) is not transfer:
                return
            elapsed_ns = self._sender.clock.monotonic_ns() - transfer.began_ns if transfer.began_ns else 0
            self._sender.events.put(Pushed(transfer.token, transfer.num_bytes, elapsed_ns))
        self._sender.forget(transfer.token)
