"""How two workers meet: each proves that it knows the secret of the address, then the layouts are compared.

The secret itself never crosses the link. What follows is neither encrypted nor signed: on a network that is not
trusted, run the link inside a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vla_cloud.kv_transfer.connector import PeerRefused, PeerUnreachable
from vla_cloud.kv_transfer.frames import HEADER, Frame, Kind, LinkBroken, decode_head, decode_header, encode
from vla_cloud.kv_transfer.layout import KvLayout, LayoutMismatch
from vla_common.clock import NS_PER_S, Clock


@dataclass(frozen=True)
class Address:
    """``vla-kv+<kind>://<place>#<secret>``; the place is ``host:port``, or the name of an abstract Unix socket."""

    kind: str
    place: str
    secret: str

    def __str__(self) -> str:
        """As handed to a sender."""
        return f"vla-kv+{self.kind}://{self.place}#{self.secret}"

    def __repr__(self) -> str:
        """For logs: without the secret."""
        return f"vla-kv+{self.kind}://{self.place}"

    @classmethod
    def parse(cls, text: str, kind: str) -> Address:
        """Raises ValueError: not an address of this kind."""
        parts = urlsplit(text)
        if parts.scheme != f"vla-kv+{kind}" or not parts.netloc or not parts.fragment:
            raise ValueError(f"not the address of a {kind} receiver: {text.split('#')[0]!r}; both workers need the "
                             "same kv_transfer setting")
        return cls(kind, parts.netloc, parts.fragment)

    @property
    def host_port(self) -> tuple[str, int]:
        """The place of a TCP receiver. Raises ValueError."""
        parts = urlsplit(f"//{self.place}")
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{self.place!r} is not host:port")
        return parts.hostname, parts.port


def new_secret() -> str:
    """256 random bits."""
    return secrets.token_hex(32)


class Deadline:
    """A point in time that a blocking socket respects."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        """``seconds`` from now."""
        self._clock = clock
        self.seconds = seconds
        self._at_ns = clock.monotonic_ns() + round(seconds * NS_PER_S)

    def left_s(self) -> float:
        """What is left. Raises TimeoutError: nothing."""
        left_ns = self._at_ns - self._clock.monotonic_ns()
        if left_ns <= 0:
            raise TimeoutError(f"no answer within {self.seconds:g} s")
        return left_ns / NS_PER_S

    def arm(self, sock: socket.socket) -> None:
        """Set the socket's timeout to what is left. Raises TimeoutError."""
        sock.settimeout(self.left_s())


def read_exactly(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Raises LinkBroken, TimeoutError."""
    data = bytearray()
    while len(data) < count:
        deadline.arm(sock)
        piece = sock.recv(count - len(data))
        if not piece:
            raise LinkBroken("the peer closed the link")
        data += piece
    return bytes(data)


def read_frame(sock: socket.socket, deadline: Deadline) -> Frame:
    """A whole frame. Raises LinkBroken, LayoutMismatch (version), TimeoutError."""
    kind, head, tail = decode_header(read_exactly(sock, HEADER.size, deadline))
    return Frame(kind, decode_head(read_exactly(sock, head, deadline)), read_exactly(sock, tail, deadline))


def _send(sock: socket.socket, deadline: Deadline, kind: Kind, head: dict[str, Any], tail: bytes = b"") -> None:
    deadline.arm(sock)
    sock.sendall(encode(kind, head, len(tail)) + tail)


def _proof(secret: str, side: bytes, nonce: bytes) -> str:
    return hmac.new(secret.encode(), side + nonce, hashlib.sha256).hexdigest()


def admit(sock: socket.socket, secret: str, layout: KvLayout, deadline: Deadline, welcome: dict[str, Any],
          tail: bytes = b"") -> dict[str, Any]:
    """D's side of the meeting; returns the peer's HELLO.

    Raises:
        LayoutMismatch, PeerRefused: the peer was told why.
        LinkBroken, TimeoutError, OSError: it went away, or never spoke.
    """
    nonce = os.urandom(32)
    _send(sock, deadline, Kind.CHALLENGE, {}, nonce)
    try:
        hello = read_frame(sock, deadline)
    except LayoutMismatch:
        _send(sock, deadline, Kind.REFUSED, {"why": "version"})
        raise
    proof = hello.head.get("proof")
    if hello.kind is not Kind.HELLO or not isinstance(proof, str) or not hmac.compare_digest(
            proof.encode(), _proof(secret, b"P", nonce).encode()):
        _send(sock, deadline, Kind.REFUSED, {"why": "secret"})
        raise PeerRefused("a sender did not know the secret of this receiver")
    try:
        layout.require(KvLayout.from_json(hello.head.get("layout")))
    except (LayoutMismatch, ValueError):
        _send(sock, deadline, Kind.REFUSED, {"why": "layout", "layout": layout.to_json()})
        raise
    _send(sock, deadline, Kind.WELCOME, welcome | {"proof": _proof(secret, b"D", hello.tail)}, tail)
    return hello.head


def greet(sock: socket.socket, secret: str, layout: KvLayout, deadline: Deadline,
          hello: dict[str, Any] | None = None) -> Frame:
    """P's side of the meeting; returns D's WELCOME.

    Raises:
        LayoutMismatch: names the field.
        PeerRefused: wrong secret on either side.
        PeerUnreachable: no answer within the deadline, or not a KV worker.
    """
    try:
        challenge = read_frame(sock, deadline)
        if challenge.kind is not Kind.CHALLENGE:
            raise PeerUnreachable("the peer is not a KV receiver")
        nonce = os.urandom(32)
        _send(sock, deadline, Kind.HELLO, (hello or {}) | {"layout": layout.to_json(),
                                                           "proof": _proof(secret, b"P", challenge.tail)}, nonce)
        answer = read_frame(sock, deadline)
    except TimeoutError as error:
        raise PeerUnreachable(f"the receiver did not answer within {deadline.seconds:g} s") from error
    except OSError as error:
        raise PeerUnreachable(f"the receiver went away during the hand-shake: {error}") from error
    if answer.kind is Kind.WELCOME:
        proof = answer.head.get("proof")
        if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), _proof(secret, b"D", nonce).encode()):
            raise PeerRefused("the receiver does not know its own secret: it is someone else")
        return answer
    if answer.head.get("why") == "layout":
        layout.require(KvLayout.from_json(answer.head.get("layout")))
    raise PeerRefused(f"the receiver refused: {answer.head.get('why')}")
