"""The words scheduler and engine exchange: configuration, the plan of a step, its result."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from vla_cloud.core.block_pool import BLOCK_TOKENS
from vla_cloud.core.generate import FinishReason, RequestError
from vla_cloud.core.sequence import TokenSequence


class Role(enum.Enum):
    """What a worker does with a request."""

    PREFILL = "prefill"  # computes prompts, then hands the KV on
    DECODE = "decode"  # receives the KV of prompts, then decodes
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one worker. Wrong values raise ValueError.

    A step computes at most ``chunk_tokens`` prompt tokens, shared among at most ``max_partial_prefills`` prompts, of
    which at most ``max_long_prefills`` have more than ``long_prefill_tokens`` left; and at most ``max_running`` decode
    rows. ``max_admitted`` sequences hold blocks at a time; ``max_waiting`` wait (robots have as many places again).
    """

    role: Role = Role.BOTH
    max_model_len: int = 8192
    chunk_tokens: int = 512
    max_partial_prefills: int = 4
    max_long_prefills: int = 2
    long_prefill_tokens: int = 1024
    max_running: int = 32
    max_admitted: int = 64
    max_waiting: int = 256
    watermark_blocks: int = 4  # kept free at admission for the growth of those already running
    max_bypass: int = 64  # later arrivals that may go ahead of one that does not fit yet
    prefix_cache: bool = True
    # Cost model of preemption: the host copy is taken when moving the bytes out and in beats computing them again.
    host_blocks: int = 0  # KV blocks the host may hold; 0 never swaps
    bytes_per_block: int = 0
    host_bandwidth_bytes_s: float = 0.0
    prefill_tokens_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the values against each other."""
        if self.chunk_tokens < BLOCK_TOKENS * self.max_partial_prefills:
            raise ValueError(
                f"chunk_tokens {self.chunk_tokens} gives {self.max_partial_prefills} partial prefills less than one"
                f" block of {BLOCK_TOKENS} each: raise it or lower max_partial_prefills"
            )
        for name in ("max_model_len", "max_partial_prefills", "max_long_prefills", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_admitted < self.max_running:
            raise ValueError(f"max_admitted {self.max_admitted} is below max_running {self.max_running}")
        if self.max_long_prefills >= self.max_partial_prefills > 1:
            raise ValueError("max_long_prefills must be below max_partial_prefills, or long prompts starve short ones")
        if min(self.watermark_blocks, self.max_bypass, self.host_blocks, self.long_prefill_tokens) < 0:
            raise ValueError("watermark_blocks, max_bypass, host_blocks and long_prefill_tokens cannot be negative")
        if self.host_blocks and min(self.bytes_per_block, self.host_bandwidth_bytes_s, self.prefill_tokens_s) <= 0:
            raise ValueError("host_blocks > 0 needs bytes_per_block, host_bandwidth_bytes_s and prefill_tokens_s")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens [start, start + count) of a sequence; ``last`` when a token is to be sampled after them."""

    seq: TokenSequence
    start: int
    count: int
    last: bool

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute."""
        return self.seq.tokens[self.start : self.start + self.count]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy these blocks to the host before anything else of the step runs; keep them under the request's id."""

    seq: TokenSequence
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Fill ``blocks`` from the request's host copy, leaving out its first ``skip`` blocks; then drop the copy."""

    seq: TokenSequence
    blocks: tuple[int, ...]
    skip: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has ended, exactly once. Its blocks are back (or in quarantine under ``quarantined_writer``).

    The engine then stops any transfer of it and drops its host copy before it runs the next step.
    """

    seq: TokenSequence
    reason: FinishReason
    error: RequestError | None = None
    quarantined_writer: str | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.seq.request_id


@dataclass(slots=True)
class StepPlan:
    """One step, in the order the engine carries it out.

    ``finished`` (report), ``reserved`` (answer the gateway: these hold blocks now), ``swap_out``, ``swap_in``,
    then one forward pass for ``prefill`` and one for ``decode``, then Scheduler.commit.
    """

    finished: list[Finished] = field(default_factory=list)
    reserved: list[TokenSequence] = field(default_factory=list)
    preempted: list[TokenSequence] = field(default_factory=list)
    swap_out: list[SwapOut] = field(default_factory=list)
    swap_in: list[SwapIn] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    decode: list[TokenSequence] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Nothing to copy or compute; commit must be called all the same."""
        return not (self.prefill or self.decode or self.swap_out or self.swap_in)

    def sampling(self) -> Sequence[TokenSequence]:
        """The sequences for which commit wants a token."""
        last = [chunk.seq for chunk in self.prefill if chunk.last and chunk.seq.request.sampling.max_new_tokens]
        return [*last, *self.decode]


@dataclass(slots=True)
class StepResult:
    """What a step brought: tokens to deliver, prompts to push (role prefill), sequences that ended."""

    tokens: list[tuple[TokenSequence, int]] = field(default_factory=list)
    to_push: list[TokenSequence] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
