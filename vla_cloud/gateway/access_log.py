"""One line in the log for each chat request that ended. Never what was asked or answered."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vla_cloud.gateway.chat_types import MAX_ID_CHARS, Usage
from vla_common.clock import NS_PER_S

LOG = logging.getLogger(__name__)


@dataclass
class RequestTimes:
    """What a request was and how it went. Instants are of the gateway's monotonic clock, None if it did not happen."""

    door: str
    request_id: str
    model: str
    begun_ns: int
    outcome: str = "cancelled"
    code: str = "CANCELLED"
    first_ns: int | None = None
    last_ns: int | None = None
    ended_ns: int | None = None
    tokens: int = 0
    usage: Usage | None = None

    @property
    def first_token_s(self) -> float | None:
        """From the request to its first token (TTFT)."""
        return None if self.first_ns is None else (self.first_ns - self.begun_ns) / NS_PER_S

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first (TPOT)."""
        if self.first_ns is None or self.last_ns is None or self.tokens < 2:
            return None
        return (self.last_ns - self.first_ns) / NS_PER_S / (self.tokens - 1)

    @property
    def total_s(self) -> float:
        """From the request to its end, 0 before."""
        return 0.0 if self.ended_ns is None else (self.ended_ns - self.begun_ns) / NS_PER_S


def log_request(times: RequestTimes) -> None:
    """Write the line. What a client may choose (id, model) cannot break it or make it long."""
    usage, first_s = times.usage, times.first_token_s
    is_id = 0 < len(times.request_id) <= MAX_ID_CHARS and times.request_id.isascii() and times.request_id.isprintable()
    request_id = times.request_id if is_id else "-"
    told = {
        "request_id": request_id, "door": times.door, "model": times.model[:MAX_ID_CHARS] or None,
        "outcome": times.outcome, "code": times.code, "total_s": round(times.total_s, 4),
        "first_token_s": None if first_s is None else round(first_s, 4),
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": times.tokens if usage is None else usage.completion_tokens,
    }  # fmt: skip
    LOG.info("request %s (%s): %s %s, %d tokens, first after %s s, all after %.3f s", request_id, times.door,
             times.outcome, times.code, told["completion_tokens"], "-" if first_s is None else f"{first_s:.3f}",
             times.total_s, extra=told)  # fmt: skip
