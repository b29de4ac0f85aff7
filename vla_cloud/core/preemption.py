"""Who gives way when blocks run out, and whether its KV is copied to the host or computed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vla_cloud.core.block_pool import blocks_for
from vla_cloud.core.generate import Priority
from vla_cloud.core.sequence import TokenSequence


def choose_victim(running: Iterable[TokenSequence], below: Priority | None = None) -> TokenSequence | None:
    """The last in order of service: lowest priority, then latest arrival; only priorities after ``below`` if given."""
    candidates = [seq for seq in running if below is None or seq.priority > below]
    return max(candidates, key=lambda seq: seq.rank, default=None)


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Seconds of moving KV to the host and back against seconds of computing it again.

    The bandwidth and the prefill rate are measured by the engine on its machine; blocks are copied once each way.
    """

    host_blocks: int
    bytes_per_block: int
    host_bandwidth_bytes_s: float
    prefill_tokens_s: float

    def swap_s(self, num_tokens: int) -> float:
        """Out and in again."""
        return 2 * blocks_for(num_tokens) * self.bytes_per_block / self.host_bandwidth_bytes_s

    def recompute_s(self, num_tokens: int) -> float:
        """Prefill of the same tokens."""
        return num_tokens / self.prefill_tokens_s

    def prefers_swap(self, num_tokens: int, host_used: int) -> bool:
        """Whether to copy to the host: there is something to keep, room for it, and it is the faster way."""
        if num_tokens < 1 or host_used + blocks_for(num_tokens) > self.host_blocks:
            return False
        return self.swap_s(num_tokens) < self.recompute_s(num_tokens)
