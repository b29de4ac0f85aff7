"""Which of several workers takes a prompt: cached tokens against load, pluggable by the name in the configuration.

A scorer sees one candidate per worker and gives the index of its choice. None of them looks at how much a worker has
cached in all: a miss that goes to the smallest cache floods the worker that has just started.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from vla_cloud.core.router.settings import PlacementConfig


class Candidate(NamedTuple):
    """A worker that may be chosen.

    Attributes:
        load_tokens: counted there now.
        cached_tokens: of this prompt, weighted by tier; 0 if too few to count.
        last_turn: number of the decision that chose it last; equal workers take turns by it.
    """

    load_tokens: int
    cached_tokens: int
    last_turn: int


class Scorer(Protocol):
    """A way to choose."""

    guarded: bool
    """A large imbalance of load is to be settled before it is asked."""

    def pick(self, candidates: Sequence[Candidate], prompt_tokens: int, computes: bool) -> int:
        """Index of the chosen one, of at least one. ``computes``: the prompt is computed there, not only sent there."""
        ...


class CostScorer:
    """The least ``load + weight x uncached tokens``, or one near it, by a temperature.

    ``load + uncached`` alone would be the time until the prompt is computed. A token computed again also takes time
    from all who come later, hence a weight above 1 where it is computed. Where it is only sent, the weight is small.
    """

    guarded = True

    def __init__(self, config: PlacementConfig, rng: random.Random) -> None:
        """``rng`` is used at temperatures above 0 only."""
        self._prefill_weight, self._transfer_weight = config.prefill_weight, config.transfer_weight
        self._temperature, self._rng = config.temperature_tokens, rng

    def pick(self, candidates: Sequence[Candidate], prompt_tokens: int, computes: bool) -> int:
        """See :class:`Scorer`."""
        weight = self._prefill_weight if computes else self._transfer_weight
        costs = [load + weight * max(0, prompt_tokens - cached) for load, cached, _ in candidates]
        least = min(costs)
        if self._temperature > 0:
            shares = [math.exp((least - cost) / self._temperature) for cost in costs]
            return self._rng.choices(range(len(costs)), shares)[0]
        best = [at for at, cost in enumerate(costs) if cost == least]
        if len(best) == 1:
            return best[0]
        return min(best, key=lambda at: (candidates[at].load_tokens, candidates[at].last_turn))


class LeastLoad:
    """The least loaded; equal ones take turns."""

    guarded = False

    def pick(self, candidates: Sequence[Candidate], prompt_tokens: int, computes: bool) -> int:
        """See :class:`Scorer`."""
        return least_loaded(candidates)


class RoundRobin:
    """One after the other."""

    guarded = False

    def pick(self, candidates: Sequence[Candidate], prompt_tokens: int, computes: bool) -> int:
        """See :class:`Scorer`."""
        return min(range(len(candidates)), key=lambda at: candidates[at].last_turn)


SCORERS: Final[dict[str, Callable[[PlacementConfig, random.Random], Scorer]]] = {
    "cost": CostScorer,
    "least_load": lambda config, rng: LeastLoad(),
    "round_robin": lambda config, rng: RoundRobin(),
}


def make_scorer(config: PlacementConfig, rng: random.Random) -> Scorer:
    """The scorer of ``config.scorer``. ValueError names those there are."""
    if config.scorer not in SCORERS:
        raise ValueError(f"no scorer {config.scorer!r}; there are {', '.join(SCORERS)}")
    return SCORERS[config.scorer](config, rng)


def least_loaded(candidates: Sequence[Candidate]) -> int:
    """Index of the least loaded; equal ones take turns."""
    return min(range(len(candidates)), key=lambda at: (candidates[at].load_tokens, candidates[at].last_turn))


def is_unbalanced(candidates: Sequence[Candidate], tokens: int, ratio: float) -> bool:
    """The loads differ by more than ``tokens``, and by more than the factor ``ratio``."""
    loads = [candidate.load_tokens for candidate in candidates]
    low, high = min(loads), max(loads)
    return high - low > tokens and high > ratio * low
