"""Who may begin, who waits, who is refused at once: bounded queues in front of the workers.

Every answer is immediate. A request waits only in a queue of bounded length, and a refusal says when to come back.
Requests of one priority begin in turn by whom they are for (a tenant), so that nobody waits behind all of another's.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from vla_cloud.core.generate import Priority

NS_PER_S: Final = 1_000_000_000
_MIN_RETRY_S: Final = 0.1
_SMOOTHING: Final = 0.1


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds. Wrong values raise ValueError.

    Attributes:
        max_active: requests that have begun and not ended.
        max_queued: requests that wait, all priorities together.
        max_queued_tokens: prompt tokens of those.
        share: part of ``max_queued`` (0 .. 1] that a priority may fill; one that is not named may fill it all.
        tenant_share: the same for one tenant.
        max_retry_s: longest delay a refusal names.
    """

    max_active: int = 128
    max_queued: int = 512
    max_queued_tokens: int = 2_000_000
    share: dict[Priority, float] = field(default_factory=lambda: {Priority.LOW: 0.5, Priority.NORMAL: 0.9})
    tenant_share: float = 0.5
    max_retry_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse bounds that admit nobody."""
        for name in ("max_active", "max_queued", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not all(0.0 < share <= 1.0 for share in (*self.share.values(), self.tenant_share)):
            raise ValueError(f"shares must be in (0, 1], got {self.share} and tenant_share {self.tenant_share}")
        if not self.max_retry_s >= _MIN_RETRY_S:
            raise ValueError(f"max_retry_s must be at least {_MIN_RETRY_S}, got {self.max_retry_s}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not now: why, and after how many seconds it is worth another try."""

    message: str
    retry_after_s: float


class Admission:
    """Requests from their arrival to their end; ``now_ns`` is the caller's monotonic clock."""

    def __init__(self, config: AdmissionConfig) -> None:
        """Nobody is here yet."""
        self._config = config
        self._queues: dict[Priority, _Turns] = {priority: _Turns() for priority in sorted(Priority)}
        self._waiting: dict[str, tuple[Priority, int, bytes]] = {}  # id -> priority, prompt tokens, tenant
        self._active: set[str] = set()
        self._queued_tokens = 0
        self._per_priority: dict[Priority, int] = dict.fromkeys(Priority, 0)
        self._per_tenant: Counter[bytes] = Counter()
        self._interval_s = 0.0  # smoothed time between two ends
        self._last_end_ns: int | None = None
        self.refused = 0

    @property
    def active(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._active)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return self._queued_tokens

    def offer(
        self, request_id: str, priority: Priority, prompt_tokens: int, tenant: bytes = b""
    ) -> Refusal | None:  # fmt: skip
        """Take a new request into the queue (:meth:`next` says when it begins), or refuse it at once.

        ``tenant``: whom it is for; b"" is nobody in particular, and has no share of its own.

        Raises:
            ValueError: a request of this id is here.
        """
        if request_id in self._waiting or request_id in self._active:
            raise ValueError(f"a request {request_id!r} is being served: ids must be unique")
        config = self._config
        if len(self._active) + len(self._waiting) >= config.max_active:  # it will wait
            room = math.ceil(config.max_queued * config.share.get(priority, 1.0))
            begins = max(0, config.max_active - len(self._active))  # of those that wait
            if len(self._waiting) - begins >= config.max_queued:
                return self._refuse(f"{len(self._waiting)} requests wait")
            if self._per_priority[priority] - begins >= room:
                return self._refuse(f"{self._per_priority[priority]} requests of priority {priority.name} wait")
            if tenant and self._per_tenant[tenant] - begins >= math.ceil(config.max_queued * config.tenant_share):
                return self._refuse(f"{self._per_tenant[tenant]} requests of this tenant wait")
            if self._waiting and self._queued_tokens + prompt_tokens > config.max_queued_tokens:
                return self._refuse(f"{self._queued_tokens} prompt tokens wait")
        self._waiting[request_id] = (priority, prompt_tokens, tenant)
        self._queues[priority].append(tenant, request_id)
        self._queued_tokens += prompt_tokens
        self._per_priority[priority] += 1
        self._per_tenant[tenant] += 1
        return None

    def next(self) -> str | None:
        """The request that begins now: highest priority first, then the tenant whose turn it is, then the oldest.

        None if there is no room or nobody.
        """
        if len(self._active) >= self._config.max_active:
            return None
        for queue in self._queues.values():
            request_id = queue.pop()
            if request_id is not None:
                self._unqueue(request_id)
                self._active.add(request_id)
                return request_id
        return None

    def end(self, request_id: str, now_ns: int) -> None:
        """A request has ended or gone away, begun or not. Unknown ids are ignored."""
        if request_id in self._waiting:
            priority, _, tenant = self._waiting[request_id]
            self._unqueue(request_id)
            self._queues[priority].remove(tenant, request_id)
        elif request_id in self._active:
            self._active.discard(request_id)
            if self._last_end_ns is not None:
                interval_s = (now_ns - self._last_end_ns) / NS_PER_S
                known = self._interval_s > 0.0
                self._interval_s += (_SMOOTHING if known else 1.0) * (interval_s - self._interval_s)
            self._last_end_ns = now_ns

    def retry_after_s(self) -> float:
        """When a refused client should come back: when half of those that wait will have begun, by the rate of ends."""
        expected_s = 0.5 * self._interval_s * max(1, len(self._waiting))
        return min(max(expected_s, _MIN_RETRY_S), self._config.max_retry_s)

    def _unqueue(self, request_id: str) -> None:
        priority, tokens, tenant = self._waiting.pop(request_id)
        self._queued_tokens -= tokens
        self._per_priority[priority] -= 1
        self._per_tenant[tenant] -= 1
        if not self._per_tenant[tenant]:
            del self._per_tenant[tenant]

    def _refuse(self, why: str) -> Refusal:
        self.refused += 1
        retry_after_s = self.retry_after_s()
        return Refusal(f"overloaded: {why}; try again in {retry_after_s:.1f} s", retry_after_s)


class _Turns:
    """Those of one priority that wait: a queue for each tenant, served one request each in turn."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, deque[str]] = OrderedDict()  # the next one's first; none is empty

    def append(self, tenant: bytes, request_id: str) -> None:
        self._queues.setdefault(tenant, deque()).append(request_id)

    def pop(self) -> str | None:
        if not self._queues:
            return None
        tenant, queue = next(iter(self._queues.items()))
        request_id = queue.popleft()
        if queue:
            self._queues.move_to_end(tenant)
        else:
            del self._queues[tenant]
        return request_id

    def remove(self, tenant: bytes, request_id: str) -> None:
        self._queues[tenant].remove(request_id)
        if not self._queues[tenant]:
            del self._queues[tenant]
