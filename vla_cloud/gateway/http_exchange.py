"""One request and its answer over ASGI: bounded reading, waiting for slow readers, and the end when a client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any

from vla_cloud.gateway.http_errors import HttpError
from vla_cloud.gateway.http_protocol import CONNECTION, GuardedProtocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientGone(Exception):
    """The client has closed the connection, or was cut off as it does not read."""


@dataclass(frozen=True)
class ExchangeRules:
    """Bounds of one request; see ``vla_cloud.config.GatewayConfig``."""

    max_body_bytes: int
    body_timeout_s: float
    stall_timeout_s: float


class Exchange:
    """For one task at a time, but :meth:`while_connected`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, rules: ExchangeRules) -> None:
        """Of an HTTP scope made by :class:`GuardedProtocol`."""
        self._receive, self._send, self._rules = receive, send, rules
        self.headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
        self.connection: GuardedProtocol = scope["state"][CONNECTION]
        self._is_1_1, self._is_chunked = scope.get("http_version") == "1.1" and scope.get("method") != "HEAD", False
        self.has_begun = False
        """Whether the status has been sent."""

    async def body(self) -> bytes:
        """The request's whole body.

        Raises:
            HttpError: 413, 408. ClientGone.
        """
        length = self.headers.get(b"content-length", b"0")
        if len(length) > 15 or int(length) > self._rules.max_body_bytes:  # h11 has checked that these are digits
            raise self._too_large()
        if self.connection.has_whole_request:
            return await self._read()  # nothing to wait for, nor to time
        try:
            return await asyncio.wait_for(self._read(), self._rules.body_timeout_s)
        except asyncio.TimeoutError:
            told = f"the body did not come within {self._rules.body_timeout_s:g} s"
            raise HttpError(408, "timeout_error", told, closes=True) from None

    async def begin(self, status: int, content_type: str, *headers: tuple[str, str]) -> None:
        """The status and headers; they are sent with the first :meth:`write`, which must follow at once."""
        self.has_begun = True
        self.connection.hold()
        self._is_chunked = self._is_1_1 and all(name != "content-length" for name, _ in headers)  # so does h11
        pairs = [("content-type", content_type), ("x-content-type-options", "nosniff"), *headers]
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the answer; waits while the client has too much unread.

        Raises:
            ClientGone: it has taken nothing for too long and was cut off, or it left while it was waited for.
        """
        if self.connection.is_paused:
            try:
                await asyncio.wait_for(self.connection.flow.drain(), self._rules.stall_timeout_s)
            except asyncio.TimeoutError:
                self.connection.rules.counts.add("evicted")
                self.connection.evict()
                raise ClientGone("it does not read") from None
            if self.connection.is_gone:  # before Python 3.12, wait_for may swallow a cancellation of this moment
                raise ClientGone("it has closed the connection")
        if not more:
            self.connection.hold()  # the body's end goes with it
        elif data and self._is_chunked:
            self.connection.write_chunk(data)
            return
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.connection.release()

    async def answer(self, status: int, content_type: str, body: bytes, *headers: tuple[str, str]) -> None:
        """A whole answer."""
        await self.begin(status, content_type, ("content-length", str(len(body))), *headers)
        await self.write(body, more=False)

    async def fail(self, error: HttpError, *headers: tuple[str, str]) -> None:
        """A whole answer that is an error."""
        close = (("connection", "close"),) if error.closes else ()
        await self.answer(error.status, "application/json", error.body(), *error.headers, *close, *headers)

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to its end; if the client leaves first, cancel and await it.

        Raises:
            ClientGone: it left. Whatever ``work`` raises.
        """
        connection = self.connection
        if connection.is_gone:
            work.close()
            raise ClientGone("it has closed the connection")
        connection.flow.resume_reading()  # a connection that is not read is not seen to close
        task = asyncio.ensure_future(work)
        connection.on_gone = task.cancel
        try:
            await task  # a cancellation of ours is passed on, and waits for its end
        except asyncio.CancelledError:
            if not connection.is_gone:
                raise
            raise ClientGone("it has closed the connection") from None
        finally:
            connection.on_gone = None
            del task  # else its error, this frame and it would keep each other, and all that they know, alive

    async def _read(self) -> bytes:
        body = bytearray()
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("it left before its request was complete")
                body += message.get("body", b"")
                if len(body) > self._rules.max_body_bytes:
                    raise self._too_large()
                if not message.get("more_body", False):
                    return bytes(body)
        except BaseException:
            body.clear()  # wait_for makes a cycle of the error and this frame, which a collection ends some time later
            raise

    def _too_large(self) -> HttpError:
        # The connection stays, and the rest of the body is read and dropped for as long as a head may take: closed at
        # once, the kernel would reset it, and the client might never read why.
        return HttpError(413, "invalid_request_error", f"the body is larger than {self._rules.max_body_bytes} bytes")
