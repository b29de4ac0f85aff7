"""What the bytes of a KV pool mean, compared field by field when two workers meet, and the pool itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

WIRE_VERSION: Final = 1
"""Version of frames, checksum and layout together; peers of different versions refuse each other."""

_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


class LayoutMismatch(ValueError):
    """The two workers' KV bytes mean different things. ``field`` names the first difference."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        """``ours`` and ``theirs`` are the values of that field."""
        super().__init__(f"KV layout differs in {field}: ours {ours!r}, the peer's {theirs!r}; start both workers "
                         "with the same model, dtype and version")
        self.field, self.ours, self.theirs = field, ours, theirs


@dataclass(frozen=True)
class KvLayout:
    """Meaning of a pool ``[layers, num_blocks, 2 (k, v), kv_heads, block_size, head_dim]`` of ``dtype``, C-contiguous.

    Attributes:
        model_hash: of the weights (sha256 hex), as KV of other weights is worthless. model: for people and logs.
        dtype: one of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8.
        block_size: tokens.
    """

    model: str
    model_hash: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"
    version: int = WIRE_VERSION

    def __post_init__(self) -> None:
        """Raises ValueError for a dtype or size that no pool can have."""
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r}; known: {', '.join(_ITEM_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "block_size", "version"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} of a KV layout is {value!r}; it must be a whole number of at least 1")

    @property
    def piece_bytes(self) -> int:
        """Bytes of one layer of one block (keys and values): the smallest thing that is sent, and contiguous."""
        return 2 * self.kv_heads * self.block_size * self.head_dim * _ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.piece_bytes

    def require(self, theirs: KvLayout) -> None:
        """Raise LayoutMismatch unless the peer's layout is this one; the model's name alone may differ."""
        # The version first: a peer of another version may mean something else by the other fields.
        for name in ("version", "model_hash", "layers", "kv_heads", "head_dim", "block_size", "dtype"):
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                raise LayoutMismatch(name, ours, other)

    def to_json(self) -> dict[str, Any]:
        """Plain fields, for the hand-shake."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> KvLayout:
        """Inverse of :meth:`to_json`; raises ValueError for anything else, unknown fields included."""
        names = {field.name: field.type for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != set(names):
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"not a KV layout: {json.dumps(found)[:200]}")
        for name in ("model", "model_hash", "dtype"):
            if not isinstance(value[name], str):
                raise ValueError(f"{name} of a KV layout is not a string")
        return cls(**value)


def check_pool(layout: KvLayout, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The array itself if it is a pool of this layout: u8[layers, num_blocks, piece_bytes], C-contiguous.

    Raises:
        ValueError: it is not.
    """
    good = array.dtype == np.uint8 and array.ndim == 3 and array.flags.c_contiguous
    if not good or array.shape[0] != layout.layers or array.shape[2] != layout.piece_bytes:
        raise ValueError(f"a KV pool is u8[{layout.layers}, num_blocks, {layout.piece_bytes}], C-contiguous; "
                         f"this is {array.dtype}{list(array.shape)}")
    return array
