"""A lean HTTP/1.1 client for OpenAI's chat completions that does not know what it is talking to."""

from __future__ import annotations

import asyncio
import json
import re
import time

from gateway_parts.phases import SYSTEM, Phase, Questions, Took

_WORDS = re.compile(rb'"content": ?"([ 0-9]+)"')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


def question(text: str, phase: Phase) -> bytes:
    """A request, head and body."""
    body = json.dumps({
        "model": "bench", "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        "max_tokens": phase.tokens, "temperature": 0, "seed": phase.pace_ms, "stream": phase.stream,
    }).encode()  # fmt: skip
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


class AnswerReader:
    """Bytes of answers, cut however they are, to bodies. For one answer after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self._has_head = self._is_chunked = False
        self._left = 0  # of the body, or of the chunk and its line end

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """The part of the body that came, and whether the answer is complete. RuntimeError for a status above 200."""
        self._buffer += data
        if not self._has_head and not self._head():
            return b"", False
        if not self._is_chunked:
            part, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
            self._left -= len(part)
            return part, self._ended(self._left == 0)
        parts = []
        while True:
            if self._left:
                part, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
                self._left -= len(part)
                parts.append(part if self._left >= 2 else part[: len(part) - 2 + self._left])
                if self._left:
                    return b"".join(parts), False
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return b"".join(parts), False
            size = int(self._buffer[:end].split(b";")[0], 16)
            if not size:
                if len(self._buffer) < end + 4:
                    return b"".join(parts), False
                self._buffer = self._buffer[end + 4 :]
                return b"".join(parts), self._ended(True)
            self._buffer, self._left = self._buffer[end + 2 :], size + 2

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head, self._buffer = self._buffer[: end + 2], self._buffer[end + 4 :]
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the answer is {head[:60]!r} {self._buffer[:300]!r}")
        self._has_head, self._is_chunked = True, _CHUNKED.search(head) is not None
        length = _LENGTH.search(head)
        self._left = int(length.group(1)) if length and not self._is_chunked else 0
        return True

    def _ended(self, is_complete: bool) -> bool:
        if is_complete:
            self._has_head, self._left = False, 0
        return is_complete


class Client(asyncio.Protocol):
    """One connection. Set ``on_end`` before :meth:`ask`."""

    def __init__(self, questions: Questions, ended: asyncio.Future[None]) -> None:
        self._questions, self.ended = questions, ended
        self._reader = AnswerReader()
        self._body = b""
        self._tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"the connection was closed ({error})"))

    def ask(self, phase: Phase, took: Took) -> None:
        """Ask until the phase is over; ``ended`` tells."""
        self._phase, self._took = phase, took
        self._next()

    def _next(self) -> None:
        data = question(self._questions.next(), self._phase)
        self._body, self._tokens, self._begin_ns = b"", 0, time.monotonic_ns()
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        try:
            part, is_complete = self._reader.feed(data)
            self._body += part
            if self._phase.stream:
                self._events(now_ns)
            if not is_complete:
                return
            if not self._phase.stream:
                found = _WORDS.search(self._body)
                self._tokens = len(found.group(1).split()) if found else 0
            self._took.answered(self._begin_ns, self._tokens, self._phase)
        except Exception as error:  # whoever waits is told
            if not self.ended.done():
                self.ended.set_exception(error)
            return
        if self._took.is_over:
            self.ended.set_result(None)
        else:
            self._next()

    def _events(self, now_ns: int) -> None:
        end = self._body.rfind(b"\n\n")
        if end < 0:
            return
        for found in _WORDS.findall(self._body, 0, end):
            words = [int(word) for word in found.split()]
            self._tokens += len(words)
            self._took.words(words, now_ns)
        if b'"error"' in self._body[:end]:
            raise RuntimeError(f"an answer failed: {self._body[:500]!r}")
        self._body = self._body[end + 2 :]


class HttpCrowd:
    """All clients of a phase."""

    def __init__(self, ports: list[int]) -> None:
        """The clients take the servers in turn."""
        self._ports, self._questions = ports, Questions()
        self._clients: list[Client] = []

    async def open(self, phase: Phase) -> None:
        """Connect, and ask something once."""
        loop = asyncio.get_running_loop()
        for index in range(phase.clients):
            ended = loop.create_future()
            make = lambda ended=ended: Client(self._questions, ended)  # noqa: E731
            _, client = await loop.create_connection(make, "127.0.0.1", self._ports[index % len(self._ports)])
            self._clients.append(client)
        await self._ask(Phase(phase.clients, 1, phase.stream, 0, 0.0), Took())

    async def go(self, phase: Phase) -> Took:
        """The phase."""
        took = Took()
        await self._ask(phase, took)
        return took

    async def _ask(self, phase: Phase, took: Took) -> None:
        took.begin(phase)
        for client in self._clients:
            client.ended = asyncio.get_running_loop().create_future()
            client.ask(phase, took)
        await asyncio.gather(*(client.ended for client in self._clients))

    async def close(self) -> None:
        """Disconnect."""
        for client in self._clients:
            if not client.ended.done():
                client.ended.set_result(None)
            client.transport.abort()
        self._clients.clear()
