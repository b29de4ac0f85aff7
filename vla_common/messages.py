"""Message types: definitions from ``msg/*.msg``, dataclasses with defaults, ROS type hashes.

The ``.msg`` files are the only definition. They lie in ``msg/`` of a source tree (where ROS looks for them) and
inside this package once installed (``setup.py`` copies them); :func:`definition_texts` reads whichever is there.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

PACKAGE: Final = "vla_runtime"

WIRE_VERSION: Final = 4
"""Version of the vla_runtime messages: raised on any change of their meaning or layout; readers refuse every other.

It is also the default value of ``wire_version`` in every ``.msg`` file, so that a ROS node sends it without knowing.
"""

UNCHECKED_IF_ZERO: Final = frozenset({"vla_runtime/msg/ShieldCommand"})
"""Types in which ``crc32`` 0 says that the sender made no checksum: what an operator's plain ROS node publishes on the
robot bus. Never a type of a topic on the cloud link."""

KIB: Final = 1024
MIB: Final = 1024 * KIB

MAX_BYTES: Final[dict[str, int]] = {
    # Largest payload accepted per type, encapsulation included. A bound, not an expectation: it caps what a
    # broken or hostile peer can make us copy and parse.
    "vla_runtime/msg/Observation": 8 * MIB,
    "vla_runtime/msg/ContextTokens": 4 * MIB,
    "vla_runtime/msg/ActionChunk": 256 * KIB,
    "vla_runtime/msg/ShieldCommand": 4 * KIB,
    "vla_runtime/msg/ShieldStatus": 64 * KIB,
    "vla_runtime/msg/MotorTicks": 1 * MIB,
    "vla_runtime/msg/PolicyStatus": 64 * KIB,
    "vla_runtime/msg/TaskStatus": 64 * KIB,
    "vla_runtime/msg/SimState": 1 * MIB,
    "sensor_msgs/msg/JointState": 64 * KIB,
    "sensor_msgs/msg/CompressedImage": 4 * MIB,
    "std_msgs/msg/String": 64 * KIB,
    "std_msgs/msg/Bool": 64,
}


@dataclass(frozen=True)
class FieldKind:
    """How one field of a message is held in Python.

    ``dtype`` is set for numeric arrays, ``length`` for arrays of fixed length; ``message_type`` for nested messages.
    """

    name: str
    is_array: bool
    dtype: np.dtype[Any] | None
    length: int | None
    message_type: str | None
    is_string: bool


def definition_dir() -> Path:
    """Folder of the ``.msg`` files: inside the installed package, else the source tree's ``msg/``.

    Raises:
        FileNotFoundError: neither exists; reinstall the package.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "msg", here.parent / "msg"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no message definitions beside {here}: reinstall with 'pip install vla-runtime'")


def definition_texts() -> dict[str, str]:
    """Text of every ``.msg`` file by full type name, such as ``vla_runtime/msg/Observation``."""
    files = sorted(definition_dir().glob("*.msg"))
    return {f"{PACKAGE}/msg/{file.stem}": file.read_text(encoding="utf-8") for file in files}


@lru_cache(maxsize=1)
def typestore() -> Typestore:
    """The rosbags type store with the standard ROS types and ours. Built once per process."""
    store = get_typestore(Stores.ROS2_KILTED)
    for name, text in definition_texts().items():
        store.register(get_types_from_msg(text, name))
    return store


@lru_cache(maxsize=64)
def full_type(name: str) -> str:
    """Full type name for a short or full one: ``ContextTokens`` → ``vla_runtime/msg/ContextTokens``.

    Raises:
        KeyError: unknown type; the message names the nearest known one.
    """
    known = typestore().fielddefs
    parts = name.split("/")
    candidates = [name] if len(parts) == 3 else [f"{parts[0]}/msg/{parts[-1]}"] if len(parts) == 2 else []
    if len(parts) == 1:
        candidates = [f"{package}/msg/{name}" for package in (PACKAGE, "sensor_msgs", "std_msgs", "builtin_interfaces")]
    for candidate in candidates:
        if candidate in known:
            return candidate
    near = difflib.get_close_matches(name, [*MAX_BYTES, *(t.rsplit("/", 1)[1] for t in MAX_BYTES)], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise KeyError(f"unknown message type {name!r}{hint}")


@lru_cache(maxsize=64)
def type_hash(name: str) -> str:
    """ROS type hash (REP 2016), ``RIHS01_`` and 64 hex digits."""
    return typestore().hash_rihs01(full_type(name))


@lru_cache(maxsize=64)
def dds_type(name: str) -> str:
    """Type name as rmw_zenoh writes it in keys: ``std_msgs::msg::dds_::String_``."""
    package, kind, short = full_type(name).split("/")
    return f"{package}::{kind}::dds_::{short}_"


def type_of(message: Any) -> str:
    """Full type name of a message object."""
    return str(message.__msgtype__)


def is_own(name: str) -> bool:
    """True for our own types, which carry ``wire_version`` and ``crc32``."""
    return name.startswith(PACKAGE + "/")


@lru_cache(maxsize=64)
def max_trailing_bytes(name: str) -> int:
    """Most bytes that ROS leaves after the last field of a type; they mean nothing.

    rclpy's ``serialize_message`` returns as many bytes as it estimated beforehand, and the estimate counts the
    alignment of every empty array of 8-byte values, 4 bytes each, which Fast-CDR then does not write; Fast DDS rounds
    up to a multiple of 4.
    """
    wide = [kind for kind in field_kinds(name) if kind.dtype is not None and kind.dtype.itemsize == 8]
    return 4 * len(wide) + 3


@lru_cache(maxsize=64)
def field_kinds(name: str) -> tuple[FieldKind, ...]:
    """Fields of a message type, in order."""
    return tuple(_field_kind(field, desc) for field, desc in typestore().fielddefs[full_type(name)][1])


def _field_kind(field: str, desc: Any) -> FieldKind:
    length = None
    is_array = desc[0] in (Nodetype.ARRAY, Nodetype.SEQUENCE)
    if is_array:
        (desc, count), is_fixed = desc[1], desc[0] == Nodetype.ARRAY
        length = int(count) if is_fixed else None
    message_type = desc[1] if desc[0] == Nodetype.NAME else None
    base = desc[1][0] if message_type is None else ""
    is_string = base == "string"
    dtype = None
    if is_array and base and not is_string:
        dtype = np.dtype({"bool": "bool", "byte": "uint8", "char": "uint8"}.get(base, base))
    return FieldKind(field, is_array, dtype, length, message_type, is_string)


def new(type_name: str, **fields: Any) -> Any:
    """Make a message; omitted fields are zero, empty or false, arrays become numpy arrays of the field's dtype.

    Args:
        type_name: short or full name, such as ``"ContextTokens"`` or ``"sensor_msgs/JointState"``.
        fields: values by field name; ``bytes`` are taken for ``uint8[]``; arrays of any shape are flattened row-major.

    Returns:
        The message object (a dataclass made by rosbags); constants of the type are attributes of it.

    Raises:
        KeyError: unknown type or field, with the nearest valid name.
        TypeError, ValueError: an array that cannot become the field's dtype or length without loss.
    """
    name = full_type(type_name)
    kinds = field_kinds(name)
    known = [kind.name for kind in kinds]
    for field in fields:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            raise KeyError(f"{name} has no field {field!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    values = {
        kind.name: _coerce(name, kind, fields[kind.name]) if kind.name in fields else _default(name, kind)
        for kind in kinds
    }
    if is_own(name) and "wire_version" not in fields:
        values["wire_version"] = WIRE_VERSION
    return typestore().types[name](**values)


def _default(owner: str, kind: FieldKind) -> Any:
    if kind.is_array:
        if kind.dtype is not None:
            return np.zeros(kind.length or 0, dtype=kind.dtype)
        return []
    if kind.message_type is not None:
        return new(kind.message_type)
    if kind.is_string:
        return ""
    base = dict(typestore().fielddefs[owner][1])[kind.name][1][0]
    return False if base == "bool" else 0.0 if str(base).startswith("float") else 0


def _coerce(owner: str, kind: FieldKind, value: Any) -> Any:
    if kind.dtype is None:
        return list(value) if kind.is_array else value
    array = as_field_array(value, kind.dtype, f"{owner}.{kind.name}")
    if kind.length is not None and array.size != kind.length:
        raise ValueError(f"{owner}.{kind.name} takes {kind.length} values, got {array.size}")
    return array


def as_field_array(value: Any, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    """One-dimensional contiguous array of ``dtype`` with the values of ``value``, without loss.

    Raises:
        TypeError: the conversion would change values (float to integer, out of range).
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, dtype=dtype)
    source = np.asarray(value)
    if source.size == 0:
        return np.zeros(0, dtype=dtype)
    converted = np.ascontiguousarray(source, dtype=dtype).reshape(-1)
    if dtype.kind in "iub" and (source.dtype.kind not in "iub" or not np.array_equal(converted, source.reshape(-1))):
        raise TypeError(f"{where} takes {dtype} values; {source.dtype} given does not fit")
    return converted
