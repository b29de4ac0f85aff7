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
        self._connection: GuardedProtocol = scope["state"][CONNECTION]
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
        try:
            return await asyncio.wait_for(self._read(), self._rules.body_timeout_s)
        except asyncio.TimeoutError:
            told = f"the body did not come within {self._rules.body_timeout_s:g} s"
            raise HttpError(408, "timeout_error", told, closes=True) from None

    async def begin(self, status: int, content_type: str, *headers: tuple[str, str]) -> None:
        """Send the status and headers."""
        self.has_begun = True
        pairs = [("content-type", content_type), ("x-content-type-options", "nosniff"), *headers]
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the answer; waits while the client has too much unread.

        Raises:
            ClientGone: it has taken nothing for too long and was cut off.
        """
        if self._connection.is_paused:
            try:
                await asyncio.wait_for(self._connection.flow.drain(), self._rules.stall_timeout_s)
            except asyncio.TimeoutError:
                self._connection.rules.counts.add("evicted")
                self._connection.evict()
                raise ClientGone("it does not read") from None
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

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
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._until_gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            is_done = task.done()
            task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        if not is_done:
            raise ClientGone("it has closed the connection")
        task.result()

    async def _read(self) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("it left before its request was complete")
            body += message.get("body", b"")
            if len(body) > self._rules.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _too_large(self) -> HttpError:
        # The connection stays, and the rest of the body is read and dropped for as long as a head may take: closed at
        # once, the kernel would reset it, and the client might never read why.
        return HttpError(413, "invalid_request_error", f"the body is larger than {self._rules.max_body_bytes} bytes")
