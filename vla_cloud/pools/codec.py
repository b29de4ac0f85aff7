"""Control messages as bytes and back. What is not exactly a message of this protocol version is refused."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from vla_cloud.pools.message_parts import MAX_MESSAGE_BYTES, Message
from vla_cloud.pools.messages import PROTOCOL_VERSION, ToGateway, ToWorker

T = TypeVar("T")


class MessageError(ValueError):
    """Bytes that are no message of this protocol; the link is to be closed."""


_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_TO_GATEWAY = msgspec.msgpack.Decoder(ToGateway)


def encode(message: Message) -> bytes:
    """Message as bytes.

    Raises:
        MessageError: longer than MAX_MESSAGE_BYTES.
    """
    data = _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a {type(message).__name__} of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} may be sent")
    return data


def decode_to_worker(data: bytes | memoryview) -> ToWorker:
    """What the gateway sent.

    Raises:
        MessageError: malformed, unknown type or field, a value out of range.
    """
    return _decode(_TO_WORKER, data)


def decode_to_gateway(data: bytes | memoryview) -> ToGateway:
    """What a worker sent.

    Raises:
        MessageError: as above.
    """
    return _decode(_TO_GATEWAY, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} are taken")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise MessageError(f"not a message of protocol version {PROTOCOL_VERSION}: {error}") from error


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian i32 bytes; OverflowError outside 31 bits."""
    data = array("i", tokens)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Token ids of :func:`pack_tokens`.

    Raises:
        MessageError: not a multiple of four bytes, or a negative id.
    """
    if len(data) % 4:
        raise MessageError(f"{len(data)} bytes are no whole number of 4-byte token ids")
    tokens = array("i", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    if tokens and min(tokens) < 0:
        raise MessageError("a token id is negative")
    return tokens.tolist()
