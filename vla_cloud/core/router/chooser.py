"""One choice among workers: imbalance first, then the session's worker, then the scorer; every way is counted."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vla_cloud.core.router.scoring import Candidate, is_unbalanced, least_loaded, make_scorer
from vla_cloud.core.router.settings import PlacementConfig, Tier
from vla_common.metrics import Counters

STAGE_COUNTS: Final = ("imbalance", "session", "scored", "only", "hits", "misses")
"""Counted with the stage in front, such as ``prefill_hits``."""


@dataclass(slots=True)
class WorkerState:
    """What is placed on a worker, in tokens."""

    role: str
    load_tokens: int = 0
    placed_tokens: int = 0  # as the worker counts them: with what it has cached
    foreign_tokens: int = 0  # reported and not placed from here
    last_turn: int = 0
    draining: bool = False


class Chooser:
    """Picks by the configured rule."""

    def __init__(
        self, config: PlacementConfig, rng: random.Random, counters: Counters, workers: Mapping[str, WorkerState],
        block_tokens: int,
    ) -> None:  # fmt: skip
        """``workers`` is the owner's own, as it changes."""
        self._config, self._counters, self._workers = config, counters, workers
        self._scorer = make_scorer(config, rng)
        self._block_tokens = block_tokens
        self._weight = config.tier_weights.get(Tier.DEVICE, 1.0)
        self._turn = 0
        self.guard_tokens = config.imbalance_tokens
        """Difference of loads above which load decides alone."""

    def pick(
        self, stage: str, names: Sequence[str], matched: Mapping[str, int], prompt_tokens: int, last: str | None,
        computes: bool,
    ) -> str:  # fmt: skip
        """One of ``names``, of at least one.

        Args:
            matched: blocks of the prompt's beginning that a worker has; those without any may be left out.
            last: the worker of this session, if there is one. computes: see ``Scorer.pick``.
        """
        candidates = [self._candidate(name, matched.get(name, 0)) for name in names]
        config, scorer = self._config, self._scorer
        if len(names) == 1:
            path, at = "only", 0
        elif scorer.guarded and is_unbalanced(candidates, self.guard_tokens, config.imbalance_ratio):
            path, at = "imbalance", least_loaded(candidates)
        elif last in names:
            path, at = "session", names.index(last)
        else:
            path, at = "scored", scorer.pick(candidates, prompt_tokens, computes)
        self._turn += 1
        self._workers[names[at]].last_turn = self._turn
        self._counters.add(f"{stage}_{path}")
        self._counters.add(f"{stage}_hits" if candidates[at].cached_tokens else f"{stage}_misses")
        return names[at]

    def _candidate(self, name: str, blocks: int) -> Candidate:
        worker, cached = self._workers[name], blocks * self._block_tokens
        counted = round(cached * self._weight) if cached and cached >= self._config.min_affinity_tokens else 0
        return Candidate(worker.load_tokens + worker.foreign_tokens, counted, worker.last_turn)
