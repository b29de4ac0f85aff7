"""What a grammar forbids, taken out of the logits of a batch before tokens are drawn. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def forbid_others(logits: NDArray[np.float32], allowed: Sequence[NDArray[np.int32] | None]) -> None:
    """Set to -inf, in place, what a row's mask leaves out; rows without a mask stay as they are, to the bit.

    ``logits`` is f32[rows, vocabulary], each mask i32[ceil(vocabulary / 32)]: bit i % 32 of word i // 32 is token i.
    """
    rows = [row for row, mask in enumerate(allowed) if mask is not None]
    if not rows:
        return
    words = np.stack([mask for mask in allowed if mask is not None]).astype("<i4", copy=False)
    bits = np.unpackbits(np.invert(words).view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    for row, forbidden in zip(rows, bits.view(np.bool_), strict=True):
        np.copyto(logits[row], -np.inf, where=forbidden)
