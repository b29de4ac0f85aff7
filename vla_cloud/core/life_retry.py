"""Where the next attempt of a request may go, and how long it may take to find a place for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vla_cloud.core.life_events import Fail

NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LifeConfig:
    """Bounds of retrying.

    Attributes:
        max_failures: attempts that may fail; refusals of busy workers do not count.
        capacity_wait_s: longest time without a worker that takes the request; then it ends with the last reason.
        retry_delay_s, max_retry_delay_s: between tries to place it; doubles.
        settle_s: how long an acknowledgement of a stopped writer is awaited; D's lease.
        writer_word_s: when D says that KV will not come and P has said nothing: how long it is awaited whether P died.
        transfer_late_s: from pushed bytes to the time after Prefilled in which D must show the first token.
    """

    max_failures: int = 5
    capacity_wait_s: float = 10.0
    retry_delay_s: float = 0.02
    max_retry_delay_s: float = 1.0
    settle_s: float = 60.0
    writer_word_s: float = 0.05
    transfer_late_s: Callable[[int], float] = lambda num_bytes: 2.0 + num_bytes / 0.2e9


class Retries:
    """Of one request. ``exclude``: workers to avoid next; ``prefer``: the P whose cache has the prompt."""

    def __init__(self, config: LifeConfig) -> None:
        """Nothing has failed."""
        self._config = config
        self.failures = 0
        self.exclude: frozenset[str] = frozenset()
        self.prefer: str | None = None
        self._cause: Fail | None = None
        self._waiting_since_ns: int | None = None
        self._delay_s = config.retry_delay_s
        self._retry_after_s = 0.0
        self._failed_push: str | None = None
        """The P of the last failed transfer since a token came: it is not preferred a second time."""

    def progress(self) -> None:
        """Tokens came: what failed before does not count for the way on."""
        self._waiting_since_ns, self._delay_s, self._retry_after_s = None, self._config.retry_delay_s, 0.0
        self._failed_push = self._cause = None

    def begin_again(self, cause: Fail, exclude: frozenset[str], prefer: str | None) -> None:
        """Another attempt, because of ``cause``."""
        self._cause, self.exclude, self.prefer = cause, exclude, prefer

    def no_place(self, reason: str, now_ns: int) -> int | Fail:
        """When to try again, or how the request ends."""
        self.exclude = frozenset()  # better the same worker again than none
        if self._cause is None:
            self._cause = Fail("UNAVAILABLE", reason, 1.0)
        if self.waited_too_long(now_ns):
            return self._cause
        delay_s = min(max(self._delay_s, self._retry_after_s), self._config.max_retry_delay_s)
        self._delay_s = min(2.0 * self._delay_s, self._config.max_retry_delay_s)
        return now_ns + max(1, round(delay_s * NS_PER_S))

    def refused(self, worker: str, fail: Fail, now_ns: int) -> bool:
        """A busy worker did not take it; False: that has gone on for too long."""
        if self.waited_too_long(now_ns):
            return False
        self._retry_after_s = fail.retry_after_s
        self.begin_again(fail, self.exclude | {worker}, None)
        return True

    def waited_too_long(self, now_ns: int) -> bool:
        """No worker has taken it for ``capacity_wait_s``; the wait begins with the first question."""
        if self._waiting_since_ns is None:
            self._waiting_since_ns = now_ns
        return now_ns - self._waiting_since_ns >= self._config.capacity_wait_s * NS_PER_S

    def after_failed_transfer(self, prefill: str | None, decode: str) -> tuple[set[str], str | None]:
        """Whom to avoid and to prefer: another D first, with the same P; the second time another P too."""
        exclude, prefer = {decode}, prefill
        if prefill is not None and prefill == self._failed_push:
            exclude.add(prefill)
            prefer = None
        self._failed_push = prefill
        return exclude, prefer
