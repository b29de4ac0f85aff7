"""What one worker has done since it started, for metrics: recorded as it happens, told with each Pong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vla_cloud.core.sequence import TokenSequence
from vla_cloud.core.step_plan import StepPlan

NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class Totals:
    """Counts since the start of the process.

    Attributes:
        computed_tokens: prompt tokens whose KV was computed here, those computed again after a preemption included.
        cached_tokens: prompt tokens found in the prefix tree as a request came in; on D, those that needed no transfer.
        transfers, transfer_bytes, transfer_ns: KV handed over (P), or arrived and verified (D).
        transfer_failures: by cause, see ``kv_transfer.connector.Cause``; ``stuck`` and ``late`` are P's own.
        leases_expired: reservations that nobody extended in time.
    """

    computed_tokens: int = 0
    cached_tokens: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_ns: int = 0
    transfer_failures: dict[str, int] = field(default_factory=dict)
    leases_expired: int = 0

    def planned(self, plan: StepPlan) -> None:
        """A step is about to run."""
        self._came_in(plan.reserved)
        for chunk in plan.prefill:
            self.computed_tokens += chunk.count
            # The first chunk of a sequence starts where its cached prefix ends; what comes back later is no new hit.
            if chunk.start == chunk.seq.cached_tokens and not chunk.seq.preemptions:
                self.cached_tokens += chunk.seq.cached_tokens

    def transferred(self, num_bytes: int, elapsed_ns: int) -> None:
        """A transfer is complete."""
        self.transfers += 1
        self.transfer_bytes += num_bytes
        self.transfer_ns += elapsed_ns

    def transfer_failed(self, cause: str) -> None:
        """A transfer ended without KV."""
        self.transfer_failures[cause] = self.transfer_failures.get(cause, 0) + 1

    @property
    def transfer_s(self) -> float:
        """Time of complete transfers, together."""
        return self.transfer_ns / NS_PER_S

    def _came_in(self, reserved: Iterable[TokenSequence]) -> None:
        self.cached_tokens += sum(seq.cached_tokens for seq in reserved)
