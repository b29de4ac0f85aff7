"""Between message fields and shaped arrays: context tokens and action chunks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vla_common.wire import Malformed

TOKEN_DTYPES: Final[dict[str, np.dtype[Any]]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}


def token_fields(tokens: npt.NDArray[Any], dtype: str = "float32") -> dict[str, Any]:
    """Fields ``num_tokens``, ``dim``, ``dtype``, ``data`` of a ContextTokens message.

    Args:
        tokens: float array [K, D].
        dtype: ``"float32"`` or ``"float16"`` on the wire.

    Raises:
        ValueError: wrong number of dimensions or unknown dtype.
    """
    if tokens.ndim != 2 or dtype not in TOKEN_DTYPES:
        raise ValueError(f"tokens must be [K, D] sent as one of {list(TOKEN_DTYPES)}; got {tokens.shape} as {dtype!r}")
    data = np.ascontiguousarray(tokens, dtype=TOKEN_DTYPES[dtype])
    return {
        "num_tokens": data.shape[0],
        "dim": data.shape[1],
        "dtype": dtype,
        "data": np.frombuffer(data.tobytes(), dtype=np.uint8),
    }


def tokens_of(message: Any) -> npt.NDArray[np.float32]:
    """Context tokens float32[K, D] of a ContextTokens message.

    Raises:
        Malformed: unknown dtype, a length that is not K x D, or a value that is not finite.
    """
    dtype = TOKEN_DTYPES.get(message.dtype)
    if dtype is None:
        raise Malformed(f"context tokens of dtype {message.dtype!r}, expected one of {list(TOKEN_DTYPES)}")
    shape = (int(message.num_tokens), int(message.dim))
    if message.data.size != shape[0] * shape[1] * dtype.itemsize:
        raise Malformed(f"context tokens: {message.data.size} bytes are not {shape[0]} x {shape[1]} {message.dtype}")
    tokens = np.frombuffer(message.data.tobytes(), dtype=dtype).reshape(shape).astype(np.float32)
    if not np.isfinite(tokens).all():
        raise Malformed("context tokens hold a value that is not finite")
    return tokens


def rows_of(values: npt.NDArray[np.float64], rows: int, columns: int, what: str) -> npt.NDArray[np.float64]:
    """Row-major field as float64[rows, columns], a view.

    Raises:
        Malformed: the field does not hold rows x columns values.
    """
    if values.size != rows * columns:
        raise Malformed(f"{what}: {values.size} values do not make {rows} x {columns}")
    return values.reshape(rows, columns)


def positions_of(chunk: Any) -> npt.NDArray[np.float64]:
    """Positions float64[horizon, joints] of an ActionChunk message (rad; gripper: closure).

    Raises:
        Malformed: the field's length differs.
    """
    return rows_of(chunk.positions, int(chunk.horizon), len(chunk.joint_names), "action chunk")
