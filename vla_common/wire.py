"""The wire: CDR payloads with version and checksum, without ROS installed.

Every vla_runtime message ends with ``crc32``, the CRC32 of all payload bytes before it with zeros in the padding. What
:func:`encode` makes is checked as it came, before it is parsed. ROS leaves padding bytes, and some bytes after the last
field, undefined; such a payload is parsed, written again with zeros, and checked then. :data:`UNCHECKED_IF_ZERO` names
the one type that a sender who knows nothing of this may publish without a checksum.

Reading never raises anything but a :class:`WireError`; whoever receives counts errors by :attr:`WireError.cause`.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from rosbags.serde import SerdeError

from vla_common.messages import (
    MAX_BYTES,
    UNCHECKED_IF_ZERO,
    WIRE_VERSION,
    field_kinds,
    full_type,
    is_own,
    max_trailing_bytes,
    new,
    type_of,
    typestore,
)

ENCAPSULATION_LE: Final = b"\x00\x01"
ENCAPSULATION_BYTES: Final = 4
NS_PER_S: Final = 1_000_000_000

_U32: Final = struct.Struct("<I")
_U16: Final = struct.Struct("<H")
_MIN_OWN_BYTES: Final = ENCAPSULATION_BYTES + 8 + 5 + 2 + 4  # stamp, empty frame_id, version, crc32


class WireError(Exception):
    """A payload that is refused. ``cause`` is a stable short name for counters."""

    cause: ClassVar[str] = "wire"


class Truncated(WireError):
    """The payload ends before its content does. Remedy: none needed if rare; look for a middlebox or a size limit."""

    cause = "truncated"


class Oversized(WireError):
    """The payload is larger than its type may be. Remedy: send smaller images or fewer tokens."""

    cause = "oversized"


class WrongVersion(WireError):
    """The payload is of another wire version. Remedy: run the same release of vla-runtime on robot and cloud."""

    cause = "wrong_version"


class ChecksumMismatch(WireError):
    """The bytes are not those that were sent."""

    cause = "checksum_mismatch"


class Malformed(WireError):
    """The payload is not CDR of its type."""

    cause = "malformed"


class EncodeError(ValueError):
    """A message that cannot be encoded: the programmer's error, so not a :class:`WireError`."""


def encode(message: Any) -> bytes:
    """CDR payload of a message, little-endian. Sets ``wire_version`` and ``crc32`` of our own types on the message.

    Raises:
        EncodeError: a field holds the wrong type or dtype, or the payload exceeds its type's limit.
    """
    name = type_of(message)
    _check_arrays(name, message)
    own = is_own(name)
    if own:
        message.wire_version = WIRE_VERSION
        message.crc32 = 0
    try:
        payload = _written(name, message)
    except (SerdeError, struct.error, AttributeError, TypeError, ValueError, AssertionError) as error:
        raise EncodeError(f"{name} cannot be encoded: {error}") from error
    if len(payload) > MAX_BYTES.get(name, len(payload)):
        raise EncodeError(f"{name} of {len(payload)} bytes exceeds its limit of {MAX_BYTES[name]} bytes")
    if not own:
        return payload
    message.crc32 = zlib.crc32(payload[:-4])
    return b"".join((payload[:-4], _U32.pack(message.crc32)))


def decode(type_name: str, payload: bytes | bytearray | memoryview, *, max_bytes: int | None = None) -> Any:
    """Message of a payload; numeric arrays are read-only numpy arrays of the field's dtype, aligned.

    Args:
        type_name: short or full type name the payload is expected to hold.
        payload: the bytes as received.
        max_bytes: a lower limit than the type's own.

    Raises:
        WireError: one of its subclasses, never another exception for any bytes.
        KeyError: unknown ``type_name``.
    """
    name = full_type(type_name)
    limit = min(MAX_BYTES.get(name, len(payload)), max_bytes if max_bytes is not None else len(payload))
    if len(payload) > limit:
        raise Oversized(f"{name}: {len(payload)} bytes, limit {limit}")
    if len(payload) < ENCAPSULATION_BYTES:
        raise Truncated(f"{name}: {len(payload)} bytes")
    data = bytes(payload)
    if data[:2] != ENCAPSULATION_LE:
        raise Malformed(f"{name}: encapsulation {data[:2].hex()}, expected little-endian CDR {ENCAPSULATION_LE.hex()}")
    return _checked(name, data) if is_own(name) else _parsed(name, data, max_trailing_bytes(name))


def _checked(name: str, data: bytes) -> Any:
    """Message of one of our types, whose checksum and version are right."""
    if len(data) < _MIN_OWN_BYTES:
        raise Truncated(f"{name}: {len(data)} bytes, at least {_MIN_OWN_BYTES} expected")
    if zlib.crc32(memoryview(data)[:-4]) == _U32.unpack_from(data, len(data) - 4)[0]:
        # Undamaged, so the version can be told whatever the layout of the rest.
        _require_version(name, _version(name, data))
        return _parsed(name, data, 0)
    try:
        message = _parsed(name, data, max_trailing_bytes(name))
    except Truncated:
        raise
    except WireError as error:
        raise ChecksumMismatch(str(error)) from error
    sent, found = int(message.crc32), zlib.crc32(_written(name, message)[:-4])
    if sent != found and not (sent == 0 and name in UNCHECKED_IF_ZERO):
        raise ChecksumMismatch(f"{name}: crc32 {found:#010x}, message says {sent:#010x}")
    _require_version(name, int(message.wire_version))
    return message


def _require_version(name: str, version: int) -> None:
    if version != WIRE_VERSION:
        raise WrongVersion(f"{name}: wire version {version}, this release reads {WIRE_VERSION}")


def _written(name: str, message: Any) -> bytes:
    """CDR with zeros in the padding and nothing after the last field."""
    return bytes(typestore().serialize_cdr(message, name, little_endian=True))


def _version(name: str, data: bytes) -> int:
    """``wire_version``, which follows the header in every version."""
    frame_id_at = ENCAPSULATION_BYTES + 8
    end = frame_id_at + 4 + _U32.unpack_from(data, frame_id_at)[0]
    at = end + end % 2
    if at + 2 > len(data):
        raise Malformed(f"{name}: header is longer than the payload")
    return int(_U16.unpack_from(data, at)[0])


def _parsed(name: str, data: bytes, trailing: int) -> Any:
    """Message of a payload with at most ``trailing`` bytes after its last field."""
    definition = typestore().get_msgdef(name)
    # Not typestore.deserialize_cdr: it refuses every byte after the last field.
    # The slice copies, so that arrays of doubles are aligned in memory and outlive the caller's buffer.
    body = data[ENCAPSULATION_BYTES:]
    try:
        message, end = definition.deserialize_cdr_le(body, 0, definition.cls, typestore())
    except struct.error as error:
        raise Truncated(f"{name}: {error}") from error
    except UnicodeDecodeError as error:
        raise Malformed(f"{name}: a string is not UTF-8") from error
    except (SerdeError, ValueError) as error:
        # rosbags: a length that points past the end; numpy: the same for numeric arrays.
        text = str(error)
        past_end = "Invalid string length" in text or "Invalid sequence length" in text or "buffer" in text
        raise (Truncated if past_end else Malformed)(f"{name}: {text}") from error
    except Exception as error:  # the contract is one family of exceptions whatever the bytes; nothing is swallowed
        raise Malformed(f"{name}: {type(error).__name__}: {error}") from error
    if end > len(body):
        raise Truncated(f"{name}: content needs {end - len(body)} bytes more")
    if len(body) - end > trailing:
        raise Malformed(f"{name}: {len(body) - end} bytes after the content")
    return message


def _check_arrays(name: str, message: Any) -> None:
    """rosbags writes whatever bytes an array holds, so a wrong dtype would go out silently."""
    for kind in field_kinds(name):
        value = getattr(message, kind.name)
        if kind.dtype is not None:
            if not isinstance(value, np.ndarray) or value.dtype != kind.dtype or value.ndim != 1:
                got = f"{value.ndim}-D {value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
                raise EncodeError(f"{name}.{kind.name} takes a 1-D {kind.dtype} array, got {got}; use messages.new()")
            if not value.flags.c_contiguous:
                raise EncodeError(f"{name}.{kind.name} is not contiguous; use numpy.ascontiguousarray()")
        elif kind.message_type is not None:
            for item in value if kind.is_array else (value,):
                _check_arrays(kind.message_type, item)


def make_header(stamp_ns: int, frame_id: str = "") -> Any:
    """``std_msgs/Header`` with a stamp of the robot's monotonic clock.

    Args:
        stamp_ns: nanoseconds, at least 0 and below 2**31 seconds.
        frame_id: coordinate frame or camera name.

    Raises:
        ValueError: stamp out of range.
    """
    if not 0 <= stamp_ns < 2**31 * NS_PER_S:
        raise ValueError(f"stamp of {stamp_ns} ns does not fit a ROS time (0 .. 2**31 s)")
    seconds, nanoseconds = divmod(int(stamp_ns), NS_PER_S)
    return new(
        "std_msgs/Header", stamp=new("builtin_interfaces/Time", sec=seconds, nanosec=nanoseconds), frame_id=frame_id
    )


def stamp_ns(header: Any) -> int:
    """Nanoseconds of a header's stamp."""
    return int(header.stamp.sec) * NS_PER_S + int(header.stamp.nanosec)


def normalise_instruction(text: str) -> str:
    """Instruction with case folded and runs of white space made one space; two equal ones ask for the same."""
    return " ".join(text.casefold().split())


def instruction_hash(text: str) -> npt.NDArray[np.uint8]:
    """sha256 of the normalised instruction, uint8[32], read-only."""
    return np.frombuffer(hashlib.sha256(normalise_instruction(text).encode()).digest(), dtype=np.uint8)
