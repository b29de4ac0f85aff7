"""One HTTP connection: uvicorn's, with time limits on everything a client can leave unfinished.

uvicorn limits only the pause between two requests. Here a connection without a request under way lives for
``head_timeout_s`` at most, whatever trickles in, and one whose client takes nothing is cut off by its writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vla_cloud.gateway.http_errors import HttpError
from vla_common.metrics import Counters

CONNECTION: Final = "vla.connection"
"""Key of the :class:`GuardedProtocol` in an ASGI scope's state."""

_EVENTS: Final = ("opened", "refused", "timed_out", "evicted", "malformed", "oversized")


@dataclass(frozen=True)
class ConnectionRules:
    """Bounds of all connections of one server, and their counts.

    Attributes:
        head_timeout_s: to send a request's head, from the opening of the connection or the end of the last answer.
        write_buffer_bytes: of an answer, kept for a client that does not read; beyond that the writer waits.
        send_buffer_bytes: the same, in the kernel.
        drop_bytes: of a body that was answered before it was complete, read so that the answer arrives; beyond that the
            connection is cut.
        read_bytes: taken from a connection at a time: parsing a chunk of one byte costs 20 us, and others wait.
    """

    max_connections: int
    head_timeout_s: float
    write_buffer_bytes: int = 65_536
    send_buffer_bytes: int = 131_072
    drop_bytes: int = 4_194_304
    read_bytes: int = 16_384
    counts: Counters = field(default_factory=lambda: Counters(*_EVENTS))


class GuardedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """Made by uvicorn, which gets the rules as ``rules`` of a subclass: see :func:`guarded_by`."""

    rules: ConnectionRules
    read_buffer: memoryview  # of all connections: what is in it is taken out before another one is read

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn's."""
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, CONNECTION: self}
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._held: _Held | None = None
        self.on_gone: Callable[[], object] | None = None
        """Called when nothing can be answered any more, while it is set."""
        self._dropped_bytes = 0

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Serve it, or refuse it if there are too many."""
        rules = self.rules
        if len(self.connections) >= rules.max_connections:
            self._is_refused = True
            rules.counts.add("refused")
            told = f"overloaded: {rules.max_connections} connections are open; try again"
            error = HttpError(503, "server_error", told, "UNAVAILABLE", headers=(("retry-after", "1"),))
            transport.write(_whole(error, "Service Unavailable"))
            transport.close()
            return
        rules.counts.add("opened")
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, rules.send_buffer_bytes)
        transport.set_write_buffer_limits(high=rules.write_buffer_bytes)
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: what it asked for is aborted."""
        self._disarm()
        if not self._is_refused:
            super().connection_lost(exc)
            self._tell_gone()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        self.data_received(bytes(self.read_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_answering and not self.cycle.more_body and data.strip(b"\r\n"):
            # Pipelining: reading would have to pause, and a client that leaves would not be seen.
            self.evict()
            return
        if not self._is_answering and self.conn.their_state is h11.SEND_BODY:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > self.rules.drop_bytes:
                self.rules.counts.add("oversized")
                self.evict()
                return
        super().data_received(data)
        if self._is_answering:
            self._disarm()

    # uvicorn

    def on_response_complete(self) -> None:
        """The next request's head is due, and so is the reading of this answer."""
        self.release()
        self._disarm()
        self._dropped_bytes = 0
        if not self.transport.is_closing():
            super().on_response_complete()
        if not self._is_answering:
            self._arm()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self.rules.counts.add("malformed")
        if self._is_answering:
            if self.cycle.response_started:
                self.evict()
                return
            self.cycle.disconnected = True  # its handler writes nothing more, and ends
            self.cycle.message_event.set()
            self._tell_gone()
        self.transport.write(_whole(HttpError(400, "invalid_request_error", msg), "Bad Request"))
        self.transport.close()

    def shutdown(self) -> None:
        """The server ends: after the answer under way, if there is one. A question that is not complete gets none."""
        if self._is_answering and self.cycle.more_body:
            self.evict()
            return
        try:
            super().shutdown()
        except h11.LocalProtocolError:
            self.evict()

    # ours

    def evict(self) -> None:
        """Cut the connection at once; what is unsent is dropped."""
        if self.transport is not None:
            self.transport.abort()

    def hold(self) -> None:
        """Keep what is written of the present answer until :meth:`release`: one packet for its head and body."""
        if self._held is None:
            self._held = self.cycle.transport = _Held(self.transport)  # type: ignore[assignment]

    def release(self) -> None:
        """Write what was held, if anything."""
        if self._held is not None:
            self._held.flush()
            self._held, self.cycle.transport = None, self.transport

    def write_chunk(self, data: bytes) -> None:
        """Write a part, not empty, of a body sent in chunks: the bytes that h11 would make of it, in less time."""
        if not self.cycle.disconnected:
            self.cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.release()

    @property
    def has_whole_request(self) -> bool:
        """Whether the body of the present request has come."""
        return not self.cycle.more_body

    @property
    def is_gone(self) -> bool:
        """Whether the present request's answer would reach nobody."""
        return self.cycle.disconnected

    @property
    def is_paused(self) -> bool:
        """Whether the client has left so much unread that the writer must wait."""
        return self.flow.write_paused

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _tell_gone(self) -> None:
        if self.on_gone is not None:
            self.on_gone()

    def _arm(self) -> None:
        self._disarm()
        self._head_timer = self.loop.call_later(self.rules.head_timeout_s, self._timed_out)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _timed_out(self) -> None:
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.rules.counts.add("evicted")
            self.evict()  # it does not read: what is left would stay for ever
            return
        with contextlib.suppress(h11.RemoteProtocolError, AttributeError):
            if self.conn.trailing_data[0]:
                self.rules.counts.add("timed_out")
                told = f"no complete request head within {self.rules.head_timeout_s:g} s"
                self.transport.write(_whole(HttpError(408, "timeout_error", told), "Request Timeout"))
        self.transport.close()


class _Held:
    """Stands in for a transport while the parts of an answer are put together."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        self._transport.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.flush()
        self._transport.close()


def guarded_by(rules: ConnectionRules) -> type[GuardedProtocol]:
    """The protocol class for one server."""
    return type("Guarded", (GuardedProtocol,), {"rules": rules, "read_buffer": memoryview(bytearray(rules.read_bytes))})


def _whole(error: HttpError, phrase: str) -> bytes:
    """An answer without a request that could be parsed."""
    body = error.body()
    more = "".join(f"{name}: {value}\r\n" for name, value in error.headers)
    head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{more}connection: close\r\n\r\n".encode() + body
