"""One request inside one worker: its tokens, its blocks, how far its KV is computed."""

from __future__ import annotations

import enum

from vla_cloud.core.block_pool import BLOCK_TOKENS, blocks_for
from vla_cloud.core.generate import FinishReason, GenerateRequest, Priority, RequestError
from vla_cloud.core.prefix_key import PrefixKey
from vla_cloud.core.radix_tree import PrefixMatch

MAX_NS = 2**63 - 1


class SequenceState(enum.Enum):
    """Where a sequence is. Only the scheduler moves it.

    WAITING -> RUNNING -> FINISHED                         role both
    WAITING -> RUNNING -> TO_PUSH -> FINISHED              role prefill
    WAITING -> RESERVED -> RUNNING -> FINISHED             role decode
    RUNNING -> PREEMPTED -> RUNNING                        blocks ran out; all but TO_PUSH and RESERVED
    """

    WAITING = "waiting"  # holds no blocks
    RESERVED = "reserved"  # holds blocks that a remote writer fills; never read, never preempted
    RUNNING = "running"  # holds blocks; prefilling, or decoding once all but its last token are computed
    PREEMPTED = "preempted"  # holds no blocks; its KV is lost or on the host
    TO_PUSH = "to_push"  # holds blocks that a sender reads, until pushed() or abort()
    FINISHED = "finished"  # holds no blocks


class TokenSequence:
    """State of one request. Read it freely; only the scheduler writes it.

    ``tokens`` is prompt and outputs; ``table[i]`` holds the KV of tokens [16 i, 16 i + 16); KV of tokens
    [0, computed) is valid. ``cached_tokens`` is how much of the prompt came from the prefix tree.
    """

    __slots__ = (
        "request", "prompt_tokens", "tokens", "table", "computed", "state", "match", "order", "writer", "cached_tokens",
        "swapped_tokens", "preemptions", "bypassed", "finish_reason", "aborting", "local",
    )  # fmt: skip

    def __init__(
        self, request: GenerateRequest, order: int = 0, writer: str | None = None, local: bool = False
    ) -> None:
        """A waiting sequence; ``order`` is its place of arrival, ``writer`` names who fills reserved blocks."""
        self.request = request
        self.prompt_tokens = len(request.tokens)
        self.tokens: list[int] = list(request.tokens)
        self.table: list[int] = []
        self.computed = 0
        self.state = SequenceState.WAITING
        self.match: PrefixMatch | None = None
        self.order = order
        self.writer = writer if writer is not None else request.request_id
        self.cached_tokens = 0
        self.swapped_tokens = 0  # computed tokens whose KV lies on the host
        self.preemptions = 0
        self.local = local  # role decode: nothing is reserved for a writer, the prompt is computed here
        self.bypassed = 0  # later arrivals that went ahead while this one did not fit
        self.finish_reason: FinishReason | None = None
        self.aborting: RequestError | None = None  # set while a step that uses the blocks is running

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def priority(self) -> Priority:
        """The request's priority."""
        return self.request.priority

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service, best first: priority, among robots the nearest deadline, then arrival."""
        deadline_ns = self.request.deadline_ns
        if self.priority is not Priority.ROBOT or deadline_ns is None:
            return self.priority, 0 if self.priority is not Priority.ROBOT else MAX_NS, self.order
        return self.priority, deadline_ns, self.order

    @property
    def outputs(self) -> list[int]:
        """Tokens generated here so far (on a decode worker with the first one, which came from elsewhere)."""
        return self.tokens[self.prompt_tokens :]

    @property
    def num_outputs(self) -> int:
        """Count of :attr:`outputs`."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not computed yet: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the next step of this running sequence is a decode row: one output exists, one token is left."""
        return self.prompt_tokens < len(self.tokens) == self.computed + 1

    @property
    def lent_blocks(self) -> list[int]:
        """Role decode: the blocks a remote writer fills, from token ``cached_tokens`` on; the rest is valid here."""
        return self.table[self.cached_tokens // BLOCK_TOKENS : blocks_for(self.prompt_tokens)]

    def key(self, num_tokens: int) -> PrefixKey:
        """The prefix key of the first ``num_tokens`` tokens."""
        return PrefixKey(self.request.salt, self.tokens[:num_tokens], self.request.images)

    def __repr__(self) -> str:
        """For logs and failing tests."""
        return (
            f"<{self.request_id} {self.state.value} {self.computed}/{len(self.tokens)} tokens,"
            f" {len(self.table)} blocks, {self.num_outputs} outputs>"
        )
