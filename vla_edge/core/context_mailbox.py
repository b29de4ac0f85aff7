"""The newest context of the present instruction, and the earlier one that the denoiser compares it with."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Context:
    """Context tokens of one observation.

    Attributes:
        session: session of the observation answered; sequence: its number there.
        stamp_ns: the observation's own stamp, robot's CLOCK_MONOTONIC.
        model_hash, instruction_hash: 32 bytes each.
        tokens: float32[K, D].
    """

    session: str
    sequence: int
    stamp_ns: int
    model_hash: bytes
    instruction_hash: bytes
    tokens: npt.NDArray[np.float32]


class ContextReject(str, Enum):
    """Why a context is refused. Values are the names shown to the operator."""

    MODEL_HASH = "context_model_hash"
    INSTRUCTION_HASH = "context_instruction_hash"
    SESSION = "context_session"
    SHAPE = "context_shape"
    NOT_FINITE = "context_not_finite"
    FUTURE_STAMP = "context_future_stamp"
    STALE = "context_stale"
    OUT_OF_ORDER = "context_out_of_order"


@dataclass(frozen=True)
class ContextPair:
    """What the denoiser is conditioned on.

    Attributes:
        now: newest context. previous: the one before it, or ``now`` again.
        gap_s: stamp difference of the two; the nominal gap if ``previous`` is ``now``.
        age_s: instant asked about minus stamp of ``now``.
    """

    now: Context
    previous: Context
    gap_s: float
    age_s: float


@dataclass(frozen=True)
class MailboxConfig:
    """Ages and gaps, seconds; shape of the tokens."""

    tokens_shape: tuple[int, int]
    max_age_s: float = 0.6
    future_tolerance_s: float = 0.005
    nominal_gap_s: float = 0.5
    min_gap_s: float = 0.2
    max_gap_s: float = 0.8
    depth: int = 32


class ContextMailbox:
    """Keeps contexts of one model, one observation session and one instruction, newest last. Not thread-safe."""

    def __init__(self, model_hash: bytes, config: MailboxConfig) -> None:
        """Only contexts of this model hash are taken."""
        self._model_hash = model_hash
        self._config = config
        self._instruction_hash: bytes | None = None
        self._session: str | None = None
        self._held: deque[Context] = deque(maxlen=config.depth)

    def set_instruction(self, instruction_hash: bytes | None) -> None:
        """Switch to another instruction (None: accept nothing); contexts of the former one are forgotten."""
        if instruction_hash != self._instruction_hash:
            self._instruction_hash = instruction_hash
            self._held.clear()

    def set_session(self, session: str | None) -> None:
        """Bind to the observation session of this robot's io process; None takes any. Others are forgotten."""
        if session != self._session:
            self._session = session
            self._held.clear()

    def offer(self, context: Context, now_ns: int) -> ContextReject | None:
        """Take a context.

        Args:
            context: as received.
            now_ns: robot's CLOCK_MONOTONIC.

        Returns:
            None if taken, else the first reason against it.
        """
        reject = self._check(context, now_ns)
        if reject is None:
            if self._held and self._held[-1].session != context.session:
                self._held.clear()
            self._held.append(context)
        return reject

    def _check(self, context: Context, now_ns: int) -> ContextReject | None:
        config = self._config
        if context.model_hash != self._model_hash:
            return ContextReject.MODEL_HASH
        if self._session is not None and context.session != self._session:
            return ContextReject.SESSION
        if self._instruction_hash is None or context.instruction_hash != self._instruction_hash:
            return ContextReject.INSTRUCTION_HASH
        if context.tokens.shape != config.tokens_shape:
            return ContextReject.SHAPE
        age_s = (now_ns - context.stamp_ns) * 1e-9
        if age_s < -config.future_tolerance_s:
            return ContextReject.FUTURE_STAMP
        if age_s > config.max_age_s:
            return ContextReject.STALE
        if self._held and (context.stamp_ns <= self._held[-1].stamp_ns or (
                context.session == self._held[-1].session and context.sequence <= self._held[-1].sequence)):
            return ContextReject.OUT_OF_ORDER
        if not np.isfinite(context.tokens).all():
            return ContextReject.NOT_FINITE
        return None

    def newest(self) -> Context | None:
        """The newest context held, whatever its age."""
        return self._held[-1] if self._held else None

    def pair(self, now_ns: int) -> ContextPair | None:
        """Newest context and the one whose stamp is nearest to the nominal gap before it.

        Args:
            now_ns: instant from which the age counts, robot's CLOCK_MONOTONIC.

        Returns:
            None if there is no context young enough.
        """
        if not self._held:
            return None
        config = self._config
        now = self._held[-1]
        age_s = (now_ns - now.stamp_ns) * 1e-9
        if age_s > config.max_age_s:
            return None
        best, best_gap_s = now, config.nominal_gap_s
        error_s = float("inf")
        for earlier in self._held:
            gap_s = (now.stamp_ns - earlier.stamp_ns) * 1e-9
            if config.min_gap_s <= gap_s <= config.max_gap_s and abs(gap_s - config.nominal_gap_s) < error_s:
                best, best_gap_s, error_s = earlier, gap_s, abs(gap_s - config.nominal_gap_s)
        return ContextPair(now, best, best_gap_s, age_s)
