"""Links that carry control messages: a Unix socket, or TCP on loopback.

Worker side (:class:`WorkerLink`): one thread, which never waits except where it asks to. Gateway side
(:class:`LinkServer`, :class:`GatewayLink`): asyncio; sending only appends to a buffer, and a peer that does not read
its messages is cut off when the buffer is full, so that a slow, stopped or dead worker never blocks the gateway.

An address is ``unix:/path`` or ``tcp:127.0.0.1:port``. A Unix socket lies in a folder that only its user can enter; on
TCP every local user could connect, and on both the first message must hold a secret that only started processes know.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from vla_cloud.pools.codec import MessageError, decode_to_gateway, decode_to_worker, encode
from vla_cloud.pools.frames import FrameDecoder, FrameError, frame
from vla_cloud.pools.message_parts import MAX_MESSAGE_BYTES, Message
from vla_cloud.pools.messages import Join, ToGateway, ToWorker

LOG = logging.getLogger(__name__)

MAX_UNSENT_BYTES: Final = 64 * 1024 * 1024
"""Most bytes that wait for a peer; a peer with more unread is cut off. Four of the largest messages."""

MAX_JOIN_BYTES: Final = 1024
"""A peer that has not shown the secret may send this much and no more."""

JOIN_TIMEOUT_S: Final = 5.0
MAX_STRANGERS: Final = 64
"""Connections without the secret at one time; further ones are closed at once."""

_READ_BYTES: Final = 256 * 1024
_MESSAGES_AT_ONCE: Final = 4096


class LinkClosed(ConnectionError):
    """The other side is gone, or sent what is no message, or does not read."""


def _parse(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdigit():
        try:
            is_loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            is_loopback = host == "localhost"
        if not is_loopback:
            raise ValueError(f"control link {address!r} is not on loopback (it is not encrypted)")
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host.strip("[]"), int(port))
    raise ValueError(f"control link {address!r} is neither unix:/path nor tcp:127.0.0.1:port")


class WorkerLink:
    """The worker's end. All calls from one thread; only :meth:`poll` waits, for as long as it is told."""

    def __init__(self, connected: socket.socket, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        """Takes the socket over."""
        connected.setblocking(False)
        self._socket = connected
        self._decoder = FrameDecoder(MAX_MESSAGE_BYTES)
        self._unsent = bytearray()
        self._max_unsent_bytes = max_unsent_bytes

    @classmethod
    def connect(cls, address: str, join: Join, timeout_s: float = 10.0) -> WorkerLink:
        """Connect to the gateway and say who is there.

        Raises:
            LinkClosed: nobody listens, or no answer within the time.
            ValueError: malformed address.
        """
        family, where = _parse(address)
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(where)
        except OSError as error:
            connection.close()
            raise LinkClosed(f"no gateway at {address}: {error}") from error
        if family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = cls(connection)
        link.send(join)
        return link

    def fileno(self) -> int:
        """For a selector that also waits for other things."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, or keep what the socket does not take for the next call or poll. Never waits.

        Raises:
            LinkClosed: the gateway is gone, or has not read for too long.
        """
        self._unsent += frame(encode(message))
        self._flush()
        if len(self._unsent) > self._max_unsent_bytes:
            raise LinkClosed(f"the gateway does not read: {len(self._unsent)} bytes wait")

    def poll(self, timeout_s: float = 0.0, others: Sequence[int] = ()) -> list[ToWorker]:
        """Messages that have arrived; waits up to ``timeout_s`` for the first, or until one of ``others`` is readable.

        Raises:
            LinkClosed: the gateway is gone or sent what is no message; what came in the same read is lost.
        """
        self._flush()
        writers = [self._socket] if self._unsent else []
        sources: list[socket.socket | int] = [self._socket, *others]
        readable, writable, _ = select.select(sources, writers, [], timeout_s)
        if writable:
            self._flush()
        return self._read() if self._socket in readable else []

    def drain(self, timeout_s: float) -> None:
        """Wait until all that was sent has left, for so long at most; never raises."""
        try:
            # One wait of the whole time at most: whoever reads does so at once.
            while self._unsent and select.select([], [self._socket], [], timeout_s)[1]:
                self._flush()
        except (LinkClosed, OSError):
            return

    def close(self) -> None:
        """Close; what is unsent is lost."""
        self._socket.close()

    def _read(self) -> list[ToWorker]:
        messages: list[ToWorker] = []
        try:
            while True:
                data = self._socket.recv(_READ_BYTES)
                if not data and not messages:
                    raise LinkClosed("the gateway closed the link")
                self._decoder.append(data)
                while (payload := self._decoder.next()) is not None:
                    messages.append(decode_to_worker(payload))
                if len(data) < _READ_BYTES or len(messages) >= _MESSAGES_AT_ONCE:
                    return messages
        except (BlockingIOError, InterruptedError):
            return messages
        except (FrameError, MessageError) as error:
            raise LinkClosed(str(error)) from error
        except LinkClosed:
            raise
        except OSError as error:
            raise LinkClosed(f"the gateway is gone: {error}") from error

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(memoryview(self._unsent)[:_READ_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise LinkClosed(f"the gateway is gone: {error}") from error
            del self._unsent[:sent]


class LinkListener(Protocol):
    """Who is told of the workers' links; called in the event loop, and must not block."""

    def link_opened(self, join: Join, link: GatewayLink) -> bool:
        """A worker has shown the secret. False refuses it: the link is closed."""
        ...

    def link_message(self, link: GatewayLink, message: ToGateway) -> None:
        """A message came (never Join)."""
        ...

    def link_closed(self, link: GatewayLink, reason: str) -> None:
        """The link is gone; comes once, for opened links only."""
        ...


class GatewayLink(asyncio.Protocol):
    """One worker's link, gateway end."""

    def __init__(self, server: LinkServer) -> None:
        """Made by the server for each connection."""
        self._server = server
        self._decoder = FrameDecoder(MAX_JOIN_BYTES)
        self._transport: asyncio.Transport | None = None
        self._join_timer: asyncio.TimerHandle | None = None
        self._reason = "the worker closed the link"
        self.worker = ""

    def send(self, message: Message) -> bool:
        """Queue a message. False: the link is closed, or is cut off now because the worker does not read."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        data = encode(message)
        if transport.get_write_buffer_size() + len(data) > self._server.max_unsent_bytes:
            self.cut("the worker does not read its messages")
            return False
        transport.write(frame(data))
        return True

    def cut(self, reason: str) -> None:
        """Close without waiting for anything unsent."""
        if self._transport is not None and not self._transport.is_closing():
            self._reason = reason
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Event loop: somebody connected; it has JOIN_TIMEOUT_S to say who."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._server.admit(self):
            self.cut("too many connections without the secret")
            return
        self._join_timer = asyncio.get_running_loop().call_later(JOIN_TIMEOUT_S, self.cut, "no Join in time")

    def data_received(self, data: bytes) -> None:
        """Event loop: bytes came."""
        transport, listener = self._transport, self._server.listener
        assert transport is not None
        try:
            self._decoder.append(data)
            while not transport.is_closing() and (payload := self._decoder.next()) is not None:
                message = decode_to_gateway(payload)
                if not self.worker:
                    self._join(message)
                elif isinstance(message, Join):
                    raise MessageError("a second Join")
                else:
                    listener.link_message(self, message)
        except (FrameError, MessageError) as error:
            LOG.warning("link of %s: %s", self.worker or "a stranger", error)
            self.cut(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        """Event loop: it is over."""
        if self._join_timer is not None:
            self._join_timer.cancel()
        self._server.forget(self)
        if self.worker:
            self._server.listener.link_closed(self, str(error) if error else self._reason)

    def _join(self, message: ToGateway) -> None:
        if not isinstance(message, Join) or not self._server.knows(message.secret):
            raise MessageError("the first message is no Join with the right secret")
        assert self._join_timer is not None
        self._join_timer.cancel()
        self._server.forget(self)
        self._decoder.max_bytes = MAX_MESSAGE_BYTES
        self.worker = message.worker
        if not self._server.listener.link_opened(message, self):
            self.worker = ""
            self.cut("refused")


class LinkServer:
    """Listens for workers in the running event loop."""

    def __init__(self, listener: LinkListener, secret: str, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        """``secret``: what a worker must show; at least 16 characters. ``max_unsent_bytes``: per worker."""
        if len(secret) < 16:
            raise ValueError("the secret of the control links needs at least 16 characters: use secrets.token_hex()")
        self.listener = listener
        self.max_unsent_bytes = max_unsent_bytes
        self.address = ""
        self._secret = secret
        self._strangers: set[GatewayLink] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, address: str) -> str:
        """Start to listen; returns the address with the port that was taken for ``tcp:127.0.0.1:0``.

        Raises:
            ValueError: malformed, or not on loopback. OSError: taken, or no permission.
        """
        family, where = _parse(address)
        loop = asyncio.get_running_loop()
        if isinstance(where, str):
            self._server = await loop.create_unix_server(lambda: GatewayLink(self), where)
            os.chmod(where, 0o600)
            self.address = address
        else:
            self._server = await loop.create_server(lambda: GatewayLink(self), where[0], where[1], family=family)
            host, port = self._server.sockets[0].getsockname()[:2]
            self.address = f"tcp:{host}:{port}"
        return self.address

    async def close(self) -> None:
        """Stop listening; opened links stay until they are cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for stranger in list(self._strangers):
            stranger.cut("the gateway ends")
        if self.address.startswith("unix:"):
            Path(self.address[len("unix:") :]).unlink(missing_ok=True)

    def knows(self, secret: str) -> bool:
        """Whether it is the right secret, in constant time."""
        return hmac.compare_digest(secret.encode(), self._secret.encode())

    def admit(self, link: GatewayLink) -> bool:
        """Room for one more connection that has not shown the secret."""
        if len(self._strangers) >= MAX_STRANGERS:
            return False
        self._strangers.add(link)
        return True

    def forget(self, link: GatewayLink) -> None:
        """The connection joined or is over."""
        self._strangers.discard(link)
