"""HTTP/2 and gRPC as bytes, for clients that do what no library would: cut anywhere, say nonsense, never read.

Header blocks need the package hpack (``pip install hpack``).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535
MAX_FRAME = 16_384


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One frame; the length is that of the body."""
    return len(body).to_bytes(3, "big") + bytes((kind & 255, flags & 255)) + stream.to_bytes(4, "big") + body


def settings(**values: int) -> bytes:
    """A SETTINGS frame: ``window`` of each stream, ``table`` of header compression."""
    keys = {"table": 1, "push": 2, "streams": 3, "window": 4, "frame": 5}
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", keys[name], value) for name, value in values.items()))


def window_update(stream: int, count: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", count))


def header_block(pairs: Sequence[tuple[str | bytes, str | bytes]]) -> bytes:
    """Without the dynamic table, so that blocks may be lost and repeated."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(pairs, huffman=False)


def call_headers(method: str, *more: tuple[str | bytes, str | bytes]) -> list[tuple[str | bytes, str | bytes]]:
    """Of a call of vla.v1.Chat."""
    return [
        (":method", "POST"), (":scheme", "http"), (":path", f"/vla.v1.Chat/{method}"), (":authority", "127.0.0.1"),
        ("te", "trailers"), ("content-type", "application/grpc"), *more,
    ]  # fmt: skip


def message(data: bytes, compressed: int = 0, length: int | None = None) -> bytes:
    """A gRPC message with its prefix."""
    return bytes((compressed,)) + struct.pack(">I", len(data) if length is None else length) + data


def call(stream: int, method: str, data: bytes, *more: tuple[str, str]) -> bytes:
    """The frames of a call with one message (already with its prefix)."""
    pieces = [data[at : at + MAX_FRAME] for at in range(0, len(data), MAX_FRAME)] or [b""]
    frames = [frame(HEADERS, END_HEADERS, stream, header_block(call_headers(method, *more)))]
    frames += [frame(DATA, END_STREAM * (i == len(pieces) - 1), stream, piece) for i, piece in enumerate(pieces)]
    return b"".join(frames)


@dataclass
class Reply:
    """What has come on one stream."""

    data: bytearray = field(default_factory=bytearray)
    headers: dict[str, str] = field(default_factory=dict)
    has_ended: bool = False

    @property
    def status(self) -> int | None:
        """gRPC's number; None if there is none."""
        text = self.headers.get("grpc-status", "")
        return int(text) if text.isdecimal() else None

    @property
    def told(self) -> str:
        return unquote(self.headers.get("grpc-message", ""))


class RawConnection:
    """A client's end. It gives no window back unless told to (``window``: of the connection and each stream)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.replies: dict[int, Reply] = {}
        self.has_gone = False
        self.goaway = b""
        self.pongs = 0
        self.windows: dict[int, int] = {0: FIRST_WINDOW}  # ours to send
        self.first_window = FIRST_WINDOW
        self._decoder = hpack.Decoder()

    @classmethod
    async def open(cls, port: int, window: int = MAX_WINDOW) -> RawConnection:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        it = cls(reader, writer)
        it.write(PREFACE + settings(window=window))
        if window > FIRST_WINDOW:
            it.write(window_update(0, window - FIRST_WINDOW))
        return it

    def write(self, data: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(data)

    def reply(self, stream: int) -> Reply:
        return self.replies.setdefault(stream, Reply())

    async def read_frame(self) -> int | None:
        """Take one frame in; its kind, or None when the connection has ended."""
        try:
            head = await self.reader.readexactly(9)
            kind, flags = head[3], head[4]
            stream = int.from_bytes(head[5:9], "big") & MAX_WINDOW
            body = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.has_gone = True
            return None
        self._take(kind, flags, stream, body)
        return kind

    async def until_ended(self, *streams: int) -> None:
        """Until all these streams, or the connection, have ended."""
        while not self.has_gone and not all(self.reply(stream).has_ended for stream in streams):
            await self.read_frame()

    def window_of(self, stream: int) -> int:
        """Bytes that may be sent."""
        return min(self.windows[0], self.windows.setdefault(stream, self.first_window))

    def close(self, reset: bool = False) -> None:
        if reset:
            self.writer.transport.abort()
        else:
            self.writer.close()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(body) - 5, 6):
                key, value = struct.unpack_from(">HI", body, at)
                if key == 4:
                    for each in self.windows:
                        self.windows[each] += value - self.first_window if each else 0
                    self.first_window = value
            self.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and flags & ACK:
            self.pongs += 1
        elif kind == PING:
            self.write(frame(PING, ACK, 0, body))
        elif kind == WINDOW_UPDATE:
            self.windows[stream] = self.windows.get(stream, self.first_window) + struct.unpack(">I", body)[0]
        elif kind == DATA:
            self.reply(stream).data += body
        elif kind == HEADERS:
            pairs = self._decoder.decode(body, raw=True)  # a text that quotes ours may not be UTF-8
            self.reply(stream).headers.update({name.decode(): value.decode(errors="replace") for name, value in pairs})
        elif kind == GOAWAY:
            self.goaway = body
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.reply(stream).has_ended = True
