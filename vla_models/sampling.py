"""Draws the next token from logits: greedy, or temperature, top-k, top-p and a repetition penalty. numpy only.

A random number depends on the request's seed and the token's position and on nothing else, so a request that goes on
in another batch, after a preemption or on another worker draws the same tokens from the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 20
"""Most alternatives that can be asked for per token, as in the OpenAI API."""


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``repetition_penalty`` 1 are off.

    ``logprobs`` None asks for none, 0 for that of the drawn token, n > 0 also for those of the n most likely ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value without a meaning; comparisons are written so that NaN fails them."""
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} is not a number from 0 on")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative; 0 switches it off")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty {self.repetition_penalty} is not a positive number")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed {self.seed} does not fit in 64 bits unsigned")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs {self.logprobs} is outside 0 .. {MAX_LOGPROBS}")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token; ``logprob`` and ``top`` (token, logprob; best first) are of the model's own logits, before penalties."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, position: int) -> float:
    """The one random number in [0, 1) of this seed and position."""
    # Philox is a counter-based generator (Salmon et al., SC 2011): the key chooses the stream, no state is kept.
    key = np.array([seed, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def draw(logits: NDArray[np.float32], rule: SamplingRule, position: int, history: Sequence[int] = ()) -> Drawn:
    """The token for ``position``, from f32[vocabulary]; ``logits`` is left unchanged.

    ``history`` holds the tokens before ``position``; it is read only for a repetition penalty.

    Raises:
        ValueError: a logit is NaN, which no token can be drawn from.
    """
    adjusted = logits
    if rule.repetition_penalty != 1.0:
        adjusted = _penalised(logits, history, rule.repetition_penalty)
    if rule.temperature == 0.0:
        token = int(adjusted.argmax())  # NaN counts as the greatest
        if np.isnan(adjusted[token]):
            raise ValueError("the logits hold NaN")
    else:
        token = _random(adjusted, rule, position)
    if rule.logprobs is None:
        return Drawn(token)
    logprobs = _log_softmax(logits)
    best = _largest(logprobs, rule.logprobs)
    return Drawn(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def _penalised(logits: NDArray[np.float32], history: Sequence[int], penalty: float) -> NDArray[np.float32]:
    # CTRL's rule (Keskar et al. 2019, section 4.1), as in Hugging Face: a token counts once, however often it stood.
    seen = np.unique(np.asarray(history, dtype=np.int64))
    adjusted = logits.copy()
    values = logits[seen]
    adjusted[seen] = np.where(values > 0, values / penalty, values * penalty)
    return adjusted


def _random(logits: NDArray[np.float32], rule: SamplingRule, position: int) -> int:
    order, weights = _candidates(logits, rule)
    cumulative = np.cumsum(weights)
    drawn = uniform(rule.seed, position) * cumulative[-1]
    # A product rounded up to the whole sum must not fall off the end, nor on a token of no weight there.
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    return int(order[min(int(np.searchsorted(cumulative, drawn, side="right")), last)])


def _candidates(
    logits: NDArray[np.float32], rule: SamplingRule
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that may be drawn and their weights."""
    top = logits.max()
    if np.isnan(top):
        raise ValueError("the logits hold NaN")
    if 0 < rule.top_k < len(logits):
        order = _largest(logits, rule.top_k)
        weights = _weights(logits[order], top, rule.temperature)
        return _nucleus(order, weights, rule.top_p * weights.sum())
    weights = _weights(logits, top, rule.temperature)
    if rule.top_p == 1.0:
        return np.arange(len(logits)), weights
    wanted = rule.top_p * weights.sum()
    # Sorting a whole vocabulary takes milliseconds; the nucleus is nearly always among the first few hundred.
    for count in (512, len(logits)):
        order = _largest(logits, min(count, len(logits)))
        if weights[order].sum() >= wanted:
            break
    return _nucleus(order, weights[order], wanted)


def _weights(logits: NDArray[np.float32], top: np.float32, temperature: float) -> NDArray[np.float64]:
    return np.exp((logits.astype(np.float64) - float(top)) / temperature)


def _nucleus(
    order: NDArray[np.int64], weights: NDArray[np.float64], wanted: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    # The smallest set whose probability reaches top_p (Holtzman et al. 2020); the best token is always in it.
    kept = int(np.searchsorted(np.cumsum(weights), wanted)) + 1
    return order[:kept], weights[:kept]


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices of the ``count`` largest above -inf, falling; equal values by rising index."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    if values.min() == -np.inf:  # what a grammar forbids; a partition of thousands of equal values takes milliseconds
        finite = np.flatnonzero(values > -np.inf)
        return finite[_largest(values[finite], min(count, len(finite)))]
    if count < len(values):
        bound = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= bound)
    else:
        candidates = np.arange(len(values))
    falling = np.argsort(-values[candidates], kind="stable")
    return candidates[falling][:count]


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())
