"""What a front door gets from :class:`vla_cloud.pools.service.ServingService` for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vla_cloud.core.generate import (
    DeadlineExceeded,
    EngineFailed,
    FinishReason,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    RequestError,
    WorkerLost,
)
from vla_cloud.core.life_events import Fail


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens since the last event, at least one; log-probabilities run along if they were asked for, else empty."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that was served. Counts are tokens; ``cached_tokens`` are part of the prompt's."""

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    attempts: int


_CLASSES: Final[dict[str, type[RequestError]]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "FAILED_PRECONDITION": InvalidRequest,
    "RESOURCE_EXHAUSTED": QueueFull,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": RequestAborted,
    "UNAVAILABLE": WorkerLost,
}


def request_error(fail: Fail) -> RequestError:
    """The exception for the end of a request; ``retry_after_s`` is set on it, 0 if waiting does not help."""
    error = _CLASSES.get(fail.code, EngineFailed)(fail.message)
    error.retry_after_s = fail.retry_after_s  # type: ignore[attr-defined]
    return error
