"""Settings of the router; ``config/cloud.yaml`` explains each value."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal


class Tier(enum.Enum):
    """Where a worker keeps cached blocks. Events name no tier: all of them are of the pool that attention reads."""

    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Thresholds in tokens, weights per token, times in seconds.

    Attributes:
        scorer: how a worker is chosen; see ``vla_cloud.core.router.scoring``.
        min_affinity_tokens: a shorter common beginning does not count.
        imbalance_tokens, imbalance_ratio: if loads differ by more than both, load decides alone.
        imbalance_s: instead of ``imbalance_tokens`` where it is more, at the speed at which prompts are seen to be
            computed.
        skip_transfer_tokens: a prompt with at most so many tokens unseen by some decode worker is computed there,
            without P and transfer; 0: never.
        prefill_weight: cost of a token to compute, against one that is counted as load.
        transfer_weight: the same for a token whose KV is to be sent to D.
        tier_weights: share of a cached token's worth, by where it is cached; tiers left out count in full.
        temperature_tokens: 0 takes the cheapest worker; above, one that costs so many more is chosen 1/e as often.
        expected_answer_tokens: most tokens of an answer that count as load before they exist.
        unconfirmed_s: how long a placed prompt counts as cached without a word from the worker.
        snapshot_retry_s: between two requests for a list of what a worker holds.
        session_s: how long a session's workers are remembered; 0: never. max_sessions: the oldest go first.
        max_prefix_tokens: beginning of a prompt that is looked at.
    """

    scorer: Literal["cost", "least_load", "round_robin"] = "cost"
    min_affinity_tokens: int = 64
    imbalance_tokens: int = 8192
    imbalance_s: float = 26.0
    imbalance_ratio: float = 1.5
    skip_transfer_tokens: int = 0
    prefill_weight: float = 3.0
    transfer_weight: float = 0.25
    tier_weights: dict[Tier, float] = field(default_factory=lambda: {Tier.DEVICE: 1.0})
    temperature_tokens: float = 0.0
    expected_answer_tokens: int = 1024
    unconfirmed_s: float = 30.0
    snapshot_retry_s: float = 5.0
    session_s: float = 600.0
    max_sessions: int = 65536
    max_prefix_tokens: int = 131072

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("min_affinity_tokens", "imbalance_tokens", "imbalance_s", "skip_transfer_tokens", "prefill_weight",
                     "transfer_weight", "temperature_tokens", "expected_answer_tokens", "unconfirmed_s", "session_s",
                     "max_prefix_tokens"):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} cannot be negative, got {getattr(self, name)}")
        if not self.imbalance_ratio >= 1.0:
            raise ValueError(f"imbalance_ratio must be at least 1, got {self.imbalance_ratio}")
        if not self.snapshot_retry_s > 0:
            raise ValueError(f"snapshot_retry_s must be positive, got {self.snapshot_retry_s}")
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions must be at least 1, got {self.max_sessions}; session_s 0 switches them off")
        for tier, weight in self.tier_weights.items():
            if not 0.0 <= weight <= 1.0:
                raise ValueError(f"the weight of tier {tier.value} must be 0 to 1, got {weight}")
