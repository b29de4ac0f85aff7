"""Checksum of a transfer that does not depend on the order in which pieces travel.

The sum modulo 2^64 of XXH3-64 of each piece (one layer of one block), seeded with the layer and the block's position in
the sequence: pieces that were lost, torn, swapped or written twice with other bytes change it. It tells accidents, not
forgers; who may write is the matter of the hand-shake.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

MASK = (1 << 64) - 1

piece_hash = xxhash.xxh3_64_intdigest
"""``piece_hash(bytes, seed)``; see :func:`seed`."""


def seed(layer: int, position: int) -> int:
    """Seed of the piece of this layer of the ``position``-th block of the transfer."""
    return layer << 32 | position


def pool_view(array: NDArray[np.uint8]) -> memoryview:
    """A pool's bytes in one line: piece (layer, block) starts at ``(layer * num_blocks + block) * piece_bytes``."""
    return array.reshape(-1).data.cast("B")


def pool_digest(array: NDArray[np.uint8], blocks: Sequence[int]) -> int:
    """Checksum of these blocks of a pool u8[layers, num_blocks, piece_bytes], all layers."""
    layers, num_blocks, size = array.shape
    view = pool_view(array)
    total = 0
    for layer in range(layers):
        first = layer * num_blocks
        base = layer << 32
        for position, block in enumerate(blocks):
            at = (first + block) * size
            total += piece_hash(view[at:at + size], base | position)
    return total & MASK
