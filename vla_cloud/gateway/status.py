"""The state of the whole gateway as one JSON object, for ``vla top`` and the web page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from vla_cloud.gateway.metrics import GatewayMetrics, Health
from vla_common.clock import NS_PER_S, Clock

VERSION: Final = 1
"""Raised when a field changes its meaning; new fields do not count."""

KEEP_NS: Final = 200_000_000
"""A state so young is given again: many who look cost the server no more than one."""


class StatusSource:
    """Plain values from what the doors count and the pools tell."""

    def __init__(self, metrics: GatewayMetrics, health: Health, clock: Clock, is_serving: Callable[[], bool]) -> None:
        """Asked as often as somebody looks."""
        self._metrics, self._health, self._clock, self._is_serving = metrics, health, clock, is_serving
        self._begun_ns = self._kept_ns = clock.monotonic_ns()
        self._kept: dict[str, Any] | None = None

    def status(self) -> dict[str, Any]:
        """``models`` as in ``/health``; ``latencies`` of the last minute; ``robots``: null if none are served."""
        now_ns = self._clock.monotonic_ns()
        if self._kept is not None and now_ns - self._kept_ns < KEEP_NS:
            return self._kept
        self._kept, self._kept_ns = self._look(now_ns), now_ns
        return self._kept

    def _look(self, now_ns: int) -> dict[str, Any]:
        models = {name: dict(health) for name, health in self._health().items()}
        for health in models.values():
            health.pop("queue_wait", None)
        robots = self._metrics.robots()
        if robots is not None:
            robots = {key: value for key, value in robots.items() if key != "answer_s"}
        told = {
            "version": VERSION, "up_s": (now_ns - self._begun_ns) / NS_PER_S, "serving": self._is_serving(),
            "models": models, "latencies": self._latencies(now_ns), "requests": self._requests(), "robots": robots,
        }  # fmt: skip
        return {key: _finite(value) for key, value in told.items()}

    def _latencies(self, now_ns: int) -> dict[str, Any]:
        tokens = self._metrics.recent_tokens.total(now_ns)
        window_s = self._metrics.recent_tokens.window_s
        since_s = max(1.0, min(window_s, (now_ns - self._begun_ns) / NS_PER_S))
        return {
            "window_s": window_s, "tokens_per_s": tokens / since_s,
            **{name: recent.summary(now_ns) for name, recent in self._metrics.recent.items()},
        }  # fmt: skip

    def _requests(self) -> dict[str, int]:
        """Ended ones by outcome, all doors together."""
        result = dict.fromkeys(("served", "refused", "failed", "cancelled"), 0)
        for (_, outcome, _), count in self._metrics.ends.items():
            result[outcome] = result.get(outcome, 0) + count
        return result


def _finite(value: Any) -> Any:
    """JSON knows no NaN: null instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
