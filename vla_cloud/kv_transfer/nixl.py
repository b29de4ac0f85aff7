"""KV transfer over NIXL (UCX): one-sided writes into the receiver's registered pool; extra ``[nixl]``.

Grants and notices use a TCP link of ours, the bytes NIXL. On one machine start both workers with
``UCX_TLS=tcp,cma,self``: copies at memory speed, and a dead peer is an error (UCX's posix transports do not tell).
On a cluster leave UCX_TLS to the administrator: the same calls use RDMA.

The receiver does no writing itself, so a cancelled reservation waits for the sender's word or its death, as with shared
memory. The end of the link proves a death on this machine only; from another one it may be the network, so such blocks
wait ``orphan_s`` more, by which time the transport has given its writes up.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import socket
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config
from numpy.typing import NDArray

from vla_cloud.kv_transfer.connector import PeerRefused, PeerUnreachable, TransferError, Verify
from vla_cloud.kv_transfer.frames import Frame, Link, LinkBroken
from vla_cloud.kv_transfer.handshake import Address, Deadline, greet, new_secret
from vla_cloud.kv_transfer.layout import KvLayout, LayoutMismatch
from vla_cloud.kv_transfer.memory import base_address
from vla_cloud.kv_transfer.peer import Peer
from vla_cloud.kv_transfer.receiver import Receiver, ReceiverOptions
from vla_cloud.kv_transfer.sender import Sender, SenderOptions
from vla_cloud.kv_transfer.tcp import dial, listen, place
from vla_cloud.kv_transfer.transfer import Batch, Transfer, runs
from vla_common.clock import Clock, sleep_s

LOG = logging.getLogger(__name__)

POLL_S: Final = 50e-6
"""Between two looks at a transfer: short against its time, and it leaves the processor to others."""
_IDLE_S: Final = 2e-3
_GIVE_UP_NS: Final = 500_000_000
"""How long a write may go on after its transfer was aborted or late, before the whole link is given up."""
_NIXL_ERRORS: Final = tuple(error for name, error in vars(importlib.import_module("nixl_cu12._bindings")).items()
                            if name.startswith("nixl") and name.endswith("Error"))


class _Agent:
    """A NIXL agent with UCX over one pool; a lock, as agents are not for several threads."""

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self.lock = threading.Lock()
        self.base = base_address(pool)
        self.agent = nixl_agent(f"vla-{secrets.token_hex(8)}", nixl_agent_config(enable_prog_thread=False, backends=[]))
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        self._registered = self.agent.register_memory([(self.base, pool.nbytes, 0, "")], "DRAM")

    def close(self) -> None:
        with self.lock:
            self.agent.deregister_memory(self._registered)


class NixlReceiver(Receiver):
    """KvReceiver whose pool is registered with NIXL."""

    kind = "nixl"
    remote_writer = True
    # The transports check what they carry, and memory of a GPU could not be read back at this price.
    default_verify = Verify.NOTICE

    def __init__(self, layout: KvLayout, pool: NDArray[np.uint8], clock: Clock,
                 options: ReceiverOptions | None = None, host: str = "127.0.0.1", port: int = 0,
                 advertise: str | None = None) -> None:
        """As TcpReceiver. Raises OSError, or NIXL's own errors if it finds no transport."""
        listener = listen(host, port)
        address = Address(self.kind, place(listener, advertise), new_secret())
        self.address = str(address)
        super().__init__(layout, pool, listener, address.secret, clock, options or ReceiverOptions())
        self._nixl = _Agent(self._pool)
        self._metadata = bytes(self._nixl.agent.get_agent_metadata())
        self._progress = threading.Thread(target=self._turn, name="kv-nixl-progress", daemon=True)
        self._progress.start()
        self._start()

    def _welcome(self) -> tuple[dict[str, Any], bytes]:
        head, _ = super()._welcome()
        return head | {"base": self._nixl.base}, self._metadata

    def _loss_proves_death(self, sock: socket.socket) -> bool:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])

    def _turn(self) -> None:
        """UCX answers a sender's flushes, and copies where the transport cannot, only while we call into it."""
        while not self._closed.is_set():
            with self._nixl.lock:
                self._nixl.agent.get_new_notifs()
            sleep_s(self._clock, POLL_S if self._table.busy else _IDLE_S)

    def close(self) -> None:
        """See KvReceiver."""
        if not self._closed.is_set():
            super().close()
            self._progress.join()
            self._nixl.close()


@dataclass
class _Remote:
    name: str
    base: int
    num_blocks: int


class NixlSender(Sender):
    """KvSender by NIXL writes."""

    kind = "nixl"
    batch_bytes = 16 << 20

    def __init__(self, layout: KvLayout, pool: NDArray[np.uint8], clock: Clock,
                 options: SenderOptions | None = None) -> None:
        """See Sender. Raises NIXL's own errors if it finds no transport."""
        super().__init__(layout, pool, clock, options)
        self._nixl = _Agent(self.pool)

    def meet(self, address: str) -> tuple[Link, Frame, _Remote]:
        """See Sender; the context is the receiver's agent."""
        try:
            where = Address.parse(address, self.kind)
        except ValueError as error:
            raise PeerUnreachable(str(error)) from error
        deadline = Deadline(self.clock, self.options.connect_s)
        sock = dial(where, deadline)
        try:
            welcome = greet(sock, where.secret, self.layout, deadline)
            with self._nixl.lock:
                name = self._nixl.agent.add_remote_agent(welcome.tail)
            remote = _Remote(name if isinstance(name, str) else name.decode(), int(welcome.head["base"]),
                             int(welcome.head["num_blocks"]))
            return Link(sock), welcome, remote
        except _NIXL_ERRORS as error:
            sock.close()
            raise PeerRefused(f"NIXL does not take the receiver's metadata: {error}") from error
        except (LayoutMismatch, TransferError):
            sock.close()
            raise

    def put(self, peer: Peer, transfer: Transfer, batch: Batch) -> int | None:
        """See Sender. The write runs without the transfer's lock; :meth:`halt` waits for its end."""
        remote: _Remote = peer.context
        size = self.layout.piece_bytes
        found = list(runs(batch.local, batch.remote))
        near, far = self.pool.shape[1], remote.num_blocks
        own = _descriptors([(layer * near + at, count) for layer in batch.layers for at, _, count in found], size,
                           self._nixl.base)
        other = _descriptors([(layer * far + to, count) for layer in batch.layers for _, to, count in found], size,
                             remote.base)
        with transfer.lock:
            if not transfer.live:
                return None
            digest = self.hash_pieces(batch) if peer.hashing else 0
            transfer.idle.clear()
        try:
            self._write(peer, transfer, own, other)
            return digest
        except _NIXL_ERRORS as error:
            raise LinkBroken(f"NIXL cannot write to the receiver: {error}") from error
        finally:
            transfer.idle.set()

    def _write(self, peer: Peer, transfer: Transfer, own: NDArray[np.uint64], other: NDArray[np.uint64]) -> None:
        agent, lock = self._nixl.agent, self._nixl.lock
        with lock:
            handle = agent.initialize_xfer("WRITE", agent.get_xfer_descs(own, "DRAM"),
                                           agent.get_xfer_descs(other, "DRAM"), peer.context.name)
        give_up_ns = 0
        try:
            with lock:
                state = agent.transfer(handle)
            while state == "PROC":
                now_ns = self.clock.monotonic_ns()
                if not give_up_ns and (not transfer.live or now_ns >= transfer.deadline_ns):
                    give_up_ns = now_ns + _GIVE_UP_NS
                if give_up_ns and now_ns >= give_up_ns:
                    raise LinkBroken("the receiver does not complete a write; the link is given up")
                sleep_s(self.clock, POLL_S)
                with lock:
                    state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise LinkBroken(f"a NIXL write ended as {state}")
        except BaseException:
            self._cancel(handle)
            self.part(peer)
            raise
        with lock:
            agent.release_xfer_handle(handle)

    def _cancel(self, handle: Any) -> None:
        with self._nixl.lock:
            try:
                self._nixl.agent.release_xfer_handle(handle)
            except _NIXL_ERRORS as error:
                LOG.info("a NIXL write could not be cancelled: %s", error)

    def halt(self, transfer: Transfer) -> None:
        """See Sender: a write that has begun ends first, or is cancelled with its link."""
        super().halt(transfer)
        transfer.idle.wait()

    def part(self, peer: Peer) -> None:
        """See Sender: disconnect, which ends what was still on its way."""
        remote, peer.context = peer.context, None
        if remote is not None:
            with self._nixl.lock:
                try:
                    self._nixl.agent.remove_remote_agent(remote.name)
                except _NIXL_ERRORS:
                    pass  # NIXL dropped it when it saw the receiver die

    def close(self) -> None:
        """See KvSender."""
        if not self.closed:
            super().close()
            self._nixl.close()


def _descriptors(pieces: list[tuple[int, int]], size: int, base: int) -> NDArray[np.uint64]:
    """``[address, bytes, device 0]`` for each ``(first piece, count)``."""
    table = np.zeros((len(pieces), 3), np.uint64)
    table[:, 0] = [base + first * size for first, _ in pieces]
    table[:, 1] = [count * size for _, count in pieces]
    return table
