"""What one client has used of what it may: buckets of requests and tokens, and requests under way.

A request's tokens are not known when it begins, so the most it can use is taken from the buckets (prompt and longest
answer), and what was not used is given back when it ends. Nothing here waits: a refusal says when to come back.
"""

from __future__ import annotations

from typing import Final

from vla_cloud.core.client import ClientRules, LimitReached
from vla_cloud.core.generate import InvalidRequest

NS_PER_S: Final = 1_000_000_000
MINUTE_NS: Final = 60 * NS_PER_S
DAY_NS: Final = 24 * 60 * MINUTE_NS
_TOKENS: Final = ("tokens_per_minute", "tokens_per_day")
_MIN_RETRY_S: Final = 0.1
_MAX_BUSY_RETRY_S: Final = 30.0
_SMOOTHING: Final = 0.2


class Bucket:
    """``capacity`` per period: so much at once, refilled evenly. Over any time t, at most capacity x (1 + t / period).

    The level is an integer of (amount x nanoseconds), so that nothing is lost or gained by rounding. It is below zero
    only if more was used than had been taken.
    """

    def __init__(self, capacity: int, period_ns: int, now_ns: int) -> None:
        """Full."""
        self.capacity, self._period_ns = capacity, period_ns
        self._level = capacity * period_ns
        self._filled_ns = now_ns

    def level(self, now_ns: int) -> float:
        """What is there."""
        self._fill(now_ns)
        return self._level / self._period_ns

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """Until so much is there, if nobody else takes any: 0 if it is. ``amount`` is at most the capacity."""
        self._fill(now_ns)
        missing = amount * self._period_ns - self._level
        return max(0, -(-missing // self.capacity))

    def take(self, amount: int, now_ns: int) -> None:
        """After :meth:`wait_ns` was 0. A negative amount gives back; what is above the capacity is lost."""
        self._fill(now_ns)
        self._level = min(self._level - amount * self._period_ns, self.capacity * self._period_ns)

    def resized(self, capacity: int, now_ns: int) -> Bucket:
        """Another capacity, filled to the same part."""
        self._fill(now_ns)
        other = Bucket(capacity, self._period_ns, now_ns)
        other._level = self._level * capacity // self.capacity
        return other

    def _fill(self, now_ns: int) -> None:
        if now_ns > self._filled_ns:
            gained = self.capacity * (now_ns - self._filled_ns)
            self._level = min(self._level + gained, self.capacity * self._period_ns)
            self._filled_ns = now_ns


class ClientLimits:
    """One client, from its first request on. ``now_ns`` is the caller's monotonic clock."""

    def __init__(self, name: str, rules: ClientRules, now_ns: int) -> None:
        """Nothing is used yet. ``name`` stands in refusals."""
        self._name = name
        self.rules = rules
        self._buckets = {limit: Bucket(size, period, now_ns) for limit, (size, period) in _sizes(rules).items()}
        self._request_s = 0.0  # smoothed time from begin to end
        self.active = 0

    def level(self, limit: str, now_ns: int) -> float:
        """What is left of ``requests_per_minute``, ``tokens_per_minute`` or ``tokens_per_day``; KeyError without it."""
        return self._buckets[limit].level(now_ns)

    def change(self, rules: ClientRules, now_ns: int) -> None:
        """Other limits from now on; a bucket that stays is filled to the same part."""
        buckets = {}
        for limit, (size, period_ns) in _sizes(rules).items():
            known = self._buckets.get(limit)
            buckets[limit] = known.resized(size, now_ns) if known is not None else Bucket(size, period_ns, now_ns)
        self.rules, self._buckets = rules, buckets

    def begin(self, least_tokens: int, now_ns: int) -> Ticket:
        """A request comes in, before any work on it. ``least_tokens``: what it uses at least, for an early refusal.

        Raises:
            LimitReached: nothing is counted then. InvalidRequest: more tokens than the client ever may use at once.
        """
        self._check_possible(least_tokens)
        most = self.rules.max_concurrent
        if most is not None and self.active >= most:
            told = f"{self.active} requests of key {self._name!r} are being served (max_concurrent: {most})"
            raise self._reached(told, "max_concurrent", self._busy_s())
        self._require({"requests_per_minute": 1, **dict.fromkeys(_TOKENS, least_tokens)}, now_ns)
        if "requests_per_minute" in self._buckets:
            self._buckets["requests_per_minute"].take(1, now_ns)
        self.active += 1
        return Ticket(self, now_ns)

    def _check_possible(self, tokens: int) -> None:
        for limit in _TOKENS:
            if limit in self._buckets and tokens > self._buckets[limit].capacity:
                told = f"the request may use {tokens} tokens (prompt and max_tokens), key {self._name!r} has "
                remedy = "shorten the prompt or lower max_tokens"
                raise InvalidRequest(f"{told}{limit}: {self._buckets[limit].capacity}; {remedy}")

    def _require(self, amounts: dict[str, int], now_ns: int) -> None:
        """The longest wait is told: with any other, the client would come back in vain."""
        waits = [
            (self._buckets[limit].wait_ns(amount, now_ns), limit)
            for limit, amount in amounts.items() if limit in self._buckets
        ]  # fmt: skip
        wait_ns, limit = max(waits, default=(0, ""))
        if wait_ns:
            told = f"key {self._name!r} has used its {limit}: {self._buckets[limit].capacity}"
            raise self._reached(told, limit, wait_ns / NS_PER_S)

    def _take_tokens(self, tokens: int, now_ns: int) -> None:
        for limit in _TOKENS:
            if limit in self._buckets:
                self._buckets[limit].take(tokens, now_ns)

    def _ended(self, duration_s: float) -> None:
        self.active -= 1
        self._request_s += (_SMOOTHING if self._request_s else 1.0) * (duration_s - self._request_s)

    def _busy_s(self) -> float:
        """When one of those under way may end, by how long requests took so far."""
        return min(self._request_s / max(1, self.active), _MAX_BUSY_RETRY_S)

    def _reached(self, told: str, limit: str, retry_after_s: float) -> LimitReached:
        retry_after_s = max(retry_after_s, _MIN_RETRY_S)
        return LimitReached(f"{told}; try again in {retry_after_s:.1f} s", limit, retry_after_s)


class Ticket:
    """One request of a client, from its arrival to its end. Call :meth:`end` on every path; again does no harm."""

    def __init__(self, limits: ClientLimits, now_ns: int) -> None:
        """Made by :meth:`ClientLimits.begin`."""
        self._limits, self._begun_ns = limits, now_ns
        self._reserved = 0
        self._prompt = 0
        self._generated = 0
        self._is_forgiven = False
        self._has_ended = False

    def reserve(self, prompt_tokens: int, answer_tokens: int, now_ns: int) -> None:
        """The prompt is known and goes to the pools: take the most that the request can use. Once.

        Raises:
            LimitReached, InvalidRequest: nothing is taken then.
        """
        self._limits._check_possible(prompt_tokens + answer_tokens)
        self._limits._require(dict.fromkeys(_TOKENS, prompt_tokens + answer_tokens), now_ns)
        self._prompt, self._reserved = prompt_tokens, prompt_tokens + answer_tokens
        self._limits._take_tokens(self._reserved, now_ns)

    def generated(self, tokens: int) -> None:
        """So many tokens of the answer were computed, in all."""
        self._generated = max(self._generated, tokens)

    def forgive(self) -> None:
        """The request was refused, or failed by no fault of the client: its prompt costs nothing if no token came."""
        self._is_forgiven = True

    @property
    def used(self) -> int:
        """Tokens that the client pays for."""
        return 0 if self._is_forgiven and not self._generated else self._prompt + self._generated

    def end(self, now_ns: int) -> None:
        """Give back what was not used."""
        if self._has_ended:
            return
        self._has_ended = True
        self._limits._take_tokens(self.used - self._reserved, now_ns)
        self._limits._ended((now_ns - self._begun_ns) / NS_PER_S)


def _sizes(rules: ClientRules) -> dict[str, tuple[int, int]]:
    limits = {
        "requests_per_minute": (rules.requests_per_minute, MINUTE_NS),
        "tokens_per_minute": (rules.tokens_per_minute, MINUTE_NS),
        "tokens_per_day": (rules.tokens_per_day, DAY_NS),
    }
    return {name: (size, period_ns) for name, (size, period_ns) in limits.items() if size is not None}
