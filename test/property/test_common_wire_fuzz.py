"""Whatever the bytes, decode returns a message or raises a WireError; and no damage to our own types goes unseen.

Damage to bytes that mean nothing (padding, a bool's spare bits) may go unseen: the message is then the one sent."""

import functools
import random
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_common import messages, wire

NAMES = sorted(messages.MAX_BYTES)
OWN = [name for name in NAMES if messages.is_own(name)]
FUZZ = settings(
    max_examples=2500, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def filled(name: str, seed: int = 1):
    """A message with a few random values in every field."""
    rng = random.Random(seed)
    fields = {}
    for kind in messages.field_kinds(name):
        if kind.dtype is not None:
            count = kind.length if kind.length is not None else rng.randrange(5)
            fields[kind.name] = np.array([rng.randrange(100) for _ in range(count)]).astype(kind.dtype)
        elif kind.is_string:
            words = ["".join(rng.choices("abcdé ", k=rng.randrange(6))) for _ in range(3)]
            fields[kind.name] = words if kind.is_array else words[0]
        elif kind.message_type is not None and kind.is_array:
            fields[kind.name] = [filled(kind.message_type, seed + n) for n in range(rng.randrange(3))]
    return messages.new(name, **fields)


PAYLOADS = {name: wire.encode(filled(name)) for name in NAMES}


def check(name: str, payload: bytes) -> None:
    try:
        message = wire.decode(name, payload)
    except wire.WireError as error:
        assert error.cause != "wire"
        return
    assert messages.type_of(message) == name
    if messages.is_own(name):
        said = message.crc32
        wire.encode(message)
        assert said in (message.crc32, zlib.crc32(payload[:-4])) or (said == 0 and name in messages.UNCHECKED_IF_ZERO)


@FUZZ
@given(name=st.sampled_from(NAMES), data=st.data())
def test_truncation(name, data):
    payload = PAYLOADS[name]
    size = data.draw(st.integers(0, len(payload) - 1))
    check(name, payload[:size])
    if messages.is_own(name):
        with pytest.raises((wire.Truncated, wire.ChecksumMismatch)):
            wire.decode(name, payload[:size])


@FUZZ
@given(name=st.sampled_from(NAMES), data=st.data())
def test_bit_flips(name, data):
    payload = bytearray(PAYLOADS[name])
    for bit in data.draw(st.lists(st.integers(0, 8 * len(payload) - 1), min_size=1, max_size=4, unique=True)):
        payload[bit // 8] ^= 1 << bit % 8
    check(name, bytes(payload))
    if messages.is_own(name):
        try:
            message = wire.decode(name, bytes(payload))
        except wire.WireError:
            return
        assert wire.encode(message) == PAYLOADS[name]


def content(value):
    """Every bit that the fields of a message hold."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, list):
        return [content(item) for item in value]
    if hasattr(value, "__msgtype__"):
        return [content(getattr(value, kind.name)) for kind in messages.field_kinds(messages.type_of(value))]
    return value


@functools.cache
def meaningless(name: str) -> list[int]:
    """Places of single bytes in which no change is seen by the parser."""
    definition, payload = messages.typestore().get_msgdef(name), PAYLOADS[name]

    def fields(at: int, mask: int):
        changed = payload[4:at] + bytes([payload[at] ^ mask]) + payload[at + 1 :]
        try:
            return content(definition.deserialize_cdr_le(changed, 0, definition.cls, messages.typestore())[0])
        except Exception:  # the change made nonsense of it, so it means something
            return None

    return [at for at in range(4, len(payload) - 4) if all(fields(at, mask) == fields(4, 0) for mask in (1, 0xA5, 0xFF))]


@settings(FUZZ, max_examples=300)
@given(name=st.sampled_from(OWN), data=st.data())
def test_whatever_ros_leaves_in_padding_is_accepted_and_all_else_is_not(name, data):
    payload = bytearray(PAYLOADS[name])
    padding = meaningless(name)
    assert padding  # every message has a byte of it, after the header's frame
    for at in padding:
        payload[at] = data.draw(st.integers(0, 255))
    trailing = data.draw(st.binary(max_size=messages.max_trailing_bytes(name)))
    assert wire.encode(wire.decode(name, bytes(payload) + trailing)) == PAYLOADS[name]
    at = data.draw(st.sampled_from([at for at in range(4, len(payload)) if at not in padding]))
    payload[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(wire.WireError):
        message = wire.decode(name, bytes(payload) + trailing)
        assert wire.encode(message) != PAYLOADS[name], f"byte {at} was not covered"


@FUZZ
@given(name=st.sampled_from(NAMES), garbage=st.binary(max_size=200))
def test_garbage(name, garbage):
    check(name, garbage)
    check(name, b"\x00\x01\x00\x00" + garbage)


@FUZZ
@given(name=st.sampled_from(OWN), garbage=st.binary(max_size=200), data=st.data())
def test_garbage_with_a_right_checksum(name, garbage, data):
    """The parser behind the checksum is not reached by chance, but by whoever can compute a CRC."""
    payload = PAYLOADS[name]
    keep = data.draw(st.integers(4, len(payload) - 4))
    body = payload[:keep] + garbage
    check(name, body + zlib.crc32(body).to_bytes(4, "little"))


@FUZZ
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32))
def test_round_trip(name, seed):
    payload = wire.encode(filled(name, seed))
    assert wire.encode(wire.decode(name, payload)) == payload


def test_huge_counts_do_not_allocate():
    """A count of 2**32 - 1 must be refused by the bytes that are there, not tried."""
    body = b"\x00\x01\x00\x00" + b"\x00" * 8 + b"\x01\x00\x00\x00\x00\x00\x00\x00" + b"\xff\xff\xff\xff" * 4
    for name in ("sensor_msgs/msg/JointState", "sensor_msgs/msg/CompressedImage"):
        with pytest.raises(wire.Truncated):
            wire.decode(name, body)
