"""Copies of KV pieces that go past the caches: the only file here that imports numba, which may be missing.

An ordinary store first reads the cache line it overwrites, and leaves in the writer's cache what only another process
will read. Non-temporal stores do neither: two thirds of the memory traffic (benchmarks/kv_transfer.py has the figures).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LOG = logging.getLogger(__name__)

GRAIN: Final = 512
"""Pieces are whole multiples of so many bytes, and begin at multiples of a cache line."""
_LINE: Final = 64

StreamingCopy = Callable[[int, int, int, int, NDArray[np.int64], NDArray[np.int64], int, int, int], None]
"""``copy(target, source, target_layer, source_layer, to, at, first, stop, size)``: of layers ``first`` .. ``stop - 1``
the pieces ``at`` to the places ``to``. Addresses, bytes from layer to layer, and bytes of a piece; nothing is checked.
When it returns, whoever hears of it sees the bytes. Other Python threads run meanwhile."""


def streaming_copy(piece_bytes: int) -> StreamingCopy | None:
    """Compiled and ready; None if pieces of this size cannot be copied so, or numba is not installed."""
    return _compiled() if piece_bytes % GRAIN == 0 else None


@cache
def _compiled() -> StreamingCopy | None:
    try:
        kernel = _kernel()
    except ImportError as error:
        LOG.info("KV is copied through the caches: %s (pip install 'vla-runtime[chat]')", error)
        return None

    def copy(target: int, source: int, target_layer: int, source_layer: int, to: NDArray[np.int64],
             at: NDArray[np.int64], first: int, stop: int, size: int) -> None:
        kernel(np.uint64(target), np.uint64(source), target_layer, source_layer, to, at, first, stop, size)

    none = np.zeros(0, np.int64)
    copy(0, 0, 0, 0, none, none, 0, 0, 0)  # compile now, not within the first transfer
    return copy


def _kernel() -> Any:
    from llvmlite import ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    integer, line = ir.IntType(64), ir.VectorType(ir.IntType(64), _LINE // 8)

    @intrinsic
    def stream(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
        """``size`` bytes, a multiple of GRAIN, in lines of 64 (one register of AVX-512, two of AVX2, four of NEON)."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
            to, at, count = args
            grain = ir.Constant(integer, GRAIN)
            with cgutils.for_range_slice(builder, ir.Constant(integer, 0), count, grain, intp=integer) as (start, _):
                for offset in range(0, GRAIN, _LINE):
                    place = builder.add(start, ir.Constant(integer, offset))
                    near = builder.inttoptr(builder.add(at, place), line.as_pointer())
                    far = builder.inttoptr(builder.add(to, place), line.as_pointer())
                    builder.store(builder.load(near, align=_LINE), far, align=_LINE).set_metadata("nontemporal", mark)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64, types.uint64), codegen

    @intrinsic
    def fence(typingctx: Any) -> Any:
        """Non-temporal stores are ordered with nothing else: without this the notice could overtake them."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), codegen

    @njit(nogil=True)
    def kernel(target, source, target_layer, source_layer, to, at, first, stop, size):  # type: ignore[no-untyped-def]
        for layer in range(first, stop):
            far, near = target + np.uint64(layer * target_layer), source + np.uint64(layer * source_layer)
            for i in range(len(to)):
                stream(far + np.uint64(to[i] * size), near + np.uint64(at[i] * size), np.uint64(size))  # type: ignore[call-arg]
        fence()  # type: ignore[call-arg]

    return kernel
