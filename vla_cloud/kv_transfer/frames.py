"""Frames between two workers: a small header, a JSON head, and bytes; over any stream socket, never blocking.

    magic "VLKV" | version u8 | kind u8 | 0 u16 | head bytes u32 | tail bytes u32 | head (JSON object) | tail

little-endian. A frame over the limits, of another version or with a head that is no JSON object ends the link.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

from vla_cloud.kv_transfer.layout import WIRE_VERSION, LayoutMismatch

MAGIC: Final = b"VLKV"
HEADER: Final = struct.Struct("<4sBBHII")
MAX_HEAD: Final = 1 << 20
MAX_TAIL: Final = 1 << 17
MAX_WRITE: Final = 4 << 20
MAX_PAYLOAD: Final = 1 << 16
_IOV: Final = 256
_ZEROS: Final = memoryview(bytes(MAX_WRITE))


class Kind(IntEnum):
    """What a frame says. P is the sender of KV, D the receiver."""

    CHALLENGE = 1  # D: nonce
    HELLO = 2      # P: layout, proof, nonce
    WELCOME = 3    # D: proof and what the connector needs
    REFUSED = 4    # D: why not; the link ends
    OPEN = 5       # P: token
    GRANT = 6      # D: token, epoch, blocks
    DENY = 7       # D: token, why
    WRITE = 8      # P: token, layer, blocks; the pieces follow (TCP only)
    FINISH = 9     # P: token, epoch, pieces, digest; payload
    REVOKE = 10    # D: token; answered by ENDED
    ENDED = 11     # P: token; nothing more is written for it


class LinkBroken(ConnectionError):
    """The peer closed, died, or does not speak this protocol."""


class LinkEnded(LinkBroken):
    """The peer closed or died: it was not this end that gave the link up."""


@dataclass(frozen=True)
class Frame:
    """``tail`` of a WRITE is not read yet: ``tail_bytes`` wait in the socket."""

    kind: Kind
    head: dict[str, Any]
    tail: bytes = b""
    tail_bytes: int = 0


class Owner(Protocol):
    """Whose bytes wait to be sent: read only under the lock and while live; else zeros go out in their place."""

    lock: threading.Lock
    live: bool


def encode(kind: Kind, head: dict[str, Any], tail_bytes: int = 0) -> bytes:
    """Header and head."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return HEADER.pack(MAGIC, WIRE_VERSION, kind, 0, len(text), tail_bytes) + text


def decode_header(data: bytes | bytearray) -> tuple[Kind, int, int]:
    """``(kind, head bytes, tail bytes)``. Raises LinkBroken, or LayoutMismatch naming ``version``."""
    magic, version, kind, _, head, tail = HEADER.unpack(data)
    if magic != MAGIC:
        raise LinkBroken("the peer is not a KV worker")
    if version != WIRE_VERSION:
        raise LayoutMismatch("version", WIRE_VERSION, version)
    if head > MAX_HEAD or tail > (MAX_WRITE if kind == Kind.WRITE else MAX_TAIL):
        raise LinkBroken(f"a frame of {head} + {tail} bytes is over the limit")
    try:
        return Kind(kind), head, tail
    except ValueError:
        raise LinkBroken(f"a frame of unknown kind {kind}") from None


def decode_head(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object. Raises LinkBroken."""
    try:
        head = json.loads(data)
    except (ValueError, RecursionError):
        raise LinkBroken("the head of a frame is not JSON") from None
    if not isinstance(head, dict):
        raise LinkBroken("the head of a frame is not an object")
    return head


class Link:
    """One end of a stream: frames in by one thread, frames out from any thread; no call waits."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket."""
        sock.setblocking(False)
        self.socket = sock
        self._lock = threading.Lock()
        self._out: deque[tuple[memoryview, Owner | None]] = deque()
        self._in = bytearray(HEADER.size)
        self._have = 0
        self._stage: tuple[Kind, int, int] | None = None

    def fileno(self) -> int:
        """For poll."""
        return self.socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._out)

    def write(self, kind: Kind, head: dict[str, Any], tail: bytes = b"") -> None:
        """Send a frame, now or at a later flush, after those before it. Raises LinkBroken."""
        with self._lock:
            self._out.append((memoryview(encode(kind, head, len(tail)) + tail), None))
            self._flush()

    def write_pieces(self, head: dict[str, Any], pieces: list[memoryview], owner: Owner) -> None:
        """Send a WRITE whose tail is read from these views while ``owner.live``. Raises LinkBroken."""
        with self._lock:
            self._out.append((memoryview(encode(Kind.WRITE, head, sum(map(len, pieces)))), None))
            self._out.extend((piece, owner) for piece in pieces)
            self._flush()

    def flush(self) -> bool:
        """Send what fits; True when nothing waits. Raises LinkBroken."""
        with self._lock:
            self._flush()
            return not self._out

    def _flush(self) -> None:
        out = self._out
        while out:
            owner = out[0][1]
            views: list[memoryview] = []
            for view, whose in out:
                if whose is not owner or len(views) == _IOV:
                    break
                views.append(view)
            try:
                if owner is None:
                    sent = self.socket.sendmsg(views, [], socket.MSG_NOSIGNAL)
                else:
                    with owner.lock:
                        if not owner.live:
                            views = [_ZEROS[:len(view)] for view in views]
                        sent = self.socket.sendmsg(views, [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkEnded(f"cannot send: {error}") from error
            while sent:
                view, whose = out.popleft()
                if sent < len(view):
                    out.appendleft((view[sent:], whose))
                    break
                sent -= len(view)

    def read(self) -> Frame | None:
        """The next frame if all of it is here (of a WRITE: all but the tail). Raises LinkBroken, LayoutMismatch."""
        while True:
            if self._have < len(self._in):
                try:
                    count = self.socket.recv_into(memoryview(self._in)[self._have:])
                except BlockingIOError:
                    return None
                except OSError as error:
                    raise LinkEnded(f"link lost: {error}") from error
                if count == 0:
                    raise LinkEnded("the peer closed the link or died")
                self._have += count
                if self._have < len(self._in):
                    continue
            if self._stage is None:
                self._stage = decode_header(self._in)
                kind, head_bytes, tail_bytes = self._stage
                self._in = bytearray(head_bytes + (0 if kind is Kind.WRITE else tail_bytes))
                self._have = 0
                continue
            kind, head_bytes, tail_bytes = self._stage
            frame = Frame(kind, decode_head(self._in[:head_bytes]), bytes(self._in[head_bytes:]), tail_bytes)
            self._stage, self._in, self._have = None, bytearray(HEADER.size), 0
            return frame

    def close(self) -> None:
        """Close the socket; frames that wait are lost."""
        with self._lock:
            self._out.clear()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first
        self.socket.close()
