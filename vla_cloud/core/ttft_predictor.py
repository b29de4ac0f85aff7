"""How long a new request would wait for its first token, learnt from recent ones.

A straight line, seconds over prompt tokens to compute (its own and those of all requests that wait before it), fitted
by least squares with exponential forgetting. A wrong refusal costs more than a late answer, so where the samples say
little the prediction is low: the slope is shrunk towards 0 (ridge regression), a request's own tokens count as cached
as those of recent ones were, and old knowledge is no knowledge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NS_PER_S: Final = 1_000_000_000
_KEEP: Final = 0.95  # weight of the past at each sample: about the last 20 count
_RIDGE_TOKENS2: Final = 64.0**2  # samples that differ by fewer tokens tell no slope


@dataclass(slots=True)
class _Waiting:
    begun_ns: int
    prompt_tokens: int
    expected_tokens: float  # to compute, own
    before_tokens: float  # to compute before its own
    first_ns: int | None = None


class TtftPredictor:
    """Not thread-safe. ``now_ns`` is the caller's monotonic clock."""

    def __init__(self, min_samples: int = 8, fresh_s: float = 30.0) -> None:
        """No prediction before ``min_samples`` first tokens, nor ``fresh_s`` after the last one."""
        self._min_samples, self._fresh_ns = min_samples, round(fresh_s * NS_PER_S)
        self._requests: dict[str, _Waiting] = {}
        self._before_first_token = 0.0  # expected tokens of requests that wait for their first token
        self._samples = 0
        self._weight = self._mean_x = self._mean_y = self._var = self._cov = 0.0
        self._uncached = 1.0  # part of a prompt that is computed, smoothed
        self._last_ns = 0

    @property
    def waiting_tokens(self) -> float:
        """Tokens to compute of requests that have no token yet, as expected."""
        return self._before_first_token

    def predict_s(self, prompt_tokens: int, now_ns: int) -> float | None:
        """Seconds to the first token of a request that came now; None if too little is known."""
        if self._samples < self._min_samples or now_ns - self._last_ns > self._fresh_ns:
            return None
        slope = max(0.0, self._cov / (self._var + _RIDGE_TOKENS2))
        work = self._before_first_token + self._uncached * prompt_tokens
        return max(0.0, self._mean_y + slope * (work - self._mean_x))

    def begin(self, request_id: str, prompt_tokens: int, now_ns: int) -> None:
        """A request was accepted. An id that is here already begins anew."""
        self.end(request_id, None, now_ns)
        expected = self._uncached * prompt_tokens
        self._requests[request_id] = _Waiting(now_ns, prompt_tokens, expected, self._before_first_token)
        self._before_first_token += expected

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Its first token is here; later calls change nothing."""
        request = self._requests.get(request_id)
        if request is not None and request.first_ns is None:
            request.first_ns = now_ns
            self._no_longer_waits(request)

    def end(self, request_id: str, cached_tokens: int | None, now_ns: int) -> None:
        """It has ended, well or not; only one whose cached part is known teaches. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.first_ns is None:
            self._no_longer_waits(request)
        elif cached_tokens is not None:
            computed = max(0, request.prompt_tokens - cached_tokens)
            self._learn(request.before_tokens + computed, (request.first_ns - request.begun_ns) / NS_PER_S)
            self._uncached += (1 - _KEEP) * (computed / request.prompt_tokens - self._uncached)
            self._last_ns = now_ns

    def _no_longer_waits(self, request: _Waiting) -> None:
        self._before_first_token = max(0.0, self._before_first_token - request.expected_tokens)

    def _learn(self, x: float, y: float) -> None:
        """Weighted means, variance and covariance, updated (West 1979, with forgetting)."""
        self._samples += 1
        self._weight = self._weight * _KEEP + 1.0
        share = 1.0 / self._weight
        dx, dy = x - self._mean_x, y - self._mean_y
        self._mean_x += share * dx
        self._mean_y += share * dy
        self._var = (1 - share) * (self._var + share * dx * dx)
        self._cov = (1 - share) * (self._cov + share * dx * dy)
