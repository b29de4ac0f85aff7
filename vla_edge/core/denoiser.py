"""What the policy asks of an engine that turns context into motion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class DenoiserError(RuntimeError):
    """The engine could not be made or answered nonsense; the message holds the remedy."""


@dataclass(frozen=True)
class Prefix:
    """Actions that are already committed: the chunk is generated so that it agrees with them.

    Attributes:
        actions: float32[H, n] deltas to the commanded pose, rad (closure); rows without weight are not looked at.
        weights: float32[H] in 0 .. 1, not rising with the row: 1 freezes a row, 0 leaves it free, between them it is
            guided.
    """

    actions: FloatArray
    weights: FloatArray


class Denoiser(Protocol):
    """Two steps: the context's keys and values once per context, then any number of chunks from them.

    Deterministic: equal inputs give equal outputs. Not thread-safe.
    """

    @property
    def engine(self) -> str:
        """Name, version and device, for the status."""

    @property
    def supports_prefix(self) -> bool:
        """The model takes a :class:`Prefix`."""

    def encode_context(self, now: FloatArray, previous: FloatArray) -> Any:
        """Prepare a context.

        Args:
            now, previous: float32[K, D] context tokens.

        Returns:
            A handle for :meth:`denoise`; it owns its memory.
        """

    def denoise(self, handle: Any, proprio: FloatArray, age_s: float, gap_s: float, noise: FloatArray,
                prefix: Prefix | None = None) -> FloatArray:
        """Make a chunk.

        Args:
            handle: from :meth:`encode_context`.
            proprio: float32[P]: commanded joints (rad), commanded closure, measured closure.
            age_s: instant of the base tick minus stamp of the context.
            gap_s: stamp difference of the two contexts.
            noise: float32[H, n], standard normal times the model's scale.
            prefix: committed actions, only where :attr:`supports_prefix`; None: none.

        Returns:
            float32[H, n] deltas to the commanded pose, rad (closure); may hold values that are not finite, which the
            caller refuses.

        Raises:
            DenoiserError: a prefix for a model without support.
        """
