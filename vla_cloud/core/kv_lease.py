"""Leases of KV blocks: who reserved blocks and falls silent loses them after a known time.

A lease runs from the moment its request is queued on D, not from when blocks are found for it. Heartbeats of the
gateway (every 5 s) extend it to 20 s from now, if that is later: nothing ever shortens a lease. ``sweep`` looks at all
leases each time, so one that ended is found whatever the order of the others. The numbers (30 s, 5 s, 20 s) are those
that vLLM's NIXL connector settled on.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_common.clock import NS_PER_S, Clock


@dataclass(frozen=True)
class LeaseConfig:
    """All in seconds. ``initial_s`` from queue entry; a heartbeat every ``heartbeat_s`` extends to ``extension_s``."""

    initial_s: float = 30.0
    heartbeat_s: float = 5.0
    extension_s: float = 20.0

    def __post_init__(self) -> None:
        """Raises ValueError unless a lease outlives two lost heartbeats."""
        if not 0.0 < 3.0 * self.heartbeat_s <= min(self.initial_s, self.extension_s):
            raise ValueError("lease: initial_s and extension_s must be at least 3 x heartbeat_s > 0, so that two lost "
                             "heartbeats end nothing")


@dataclass
class _Lease:
    ends_ns: int


class LeaseTable:
    """D's leases by token. Not thread-safe."""

    def __init__(self, config: LeaseConfig, clock: Clock) -> None:
        """Empty."""
        self._config = config
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self.late = 0
        """Heartbeats for leases that had ended or never were."""

    def __len__(self) -> int:
        """Leases that run, or ended and were not swept."""
        return len(self._leases)

    def __contains__(self, token: str) -> bool:
        """Whether the lease exists, swept ones not."""
        return token in self._leases

    def begin(self, token: str, initial_s: float | None = None) -> None:
        """The request was queued; ``initial_s`` if not the configured one. Raises ValueError: the token has a lease."""
        if token in self._leases:
            raise ValueError(f"{token!r} has a lease already")
        seconds = self._config.initial_s if initial_s is None else initial_s
        self._leases[token] = _Lease(self._clock.monotonic_ns() + round(seconds * NS_PER_S))

    def heartbeat(self, token: str, extension_s: float | None = None) -> bool:
        """Extend. False: it has ended (even if not yet swept) or never was; the sender must give the request up."""
        lease = self._leases.get(token)
        now_ns = self._clock.monotonic_ns()
        if lease is None or lease.ends_ns <= now_ns:
            self.late += 1
            return False
        seconds = self._config.extension_s if extension_s is None else extension_s
        lease.ends_ns = max(lease.ends_ns, now_ns + round(seconds * NS_PER_S))
        return True

    def left_s(self, token: str) -> float:
        """Seconds to its end, 0 if it has none."""
        lease = self._leases.get(token)
        return max(0, lease.ends_ns - self._clock.monotonic_ns()) / NS_PER_S if lease else 0.0

    def end(self, token: str) -> bool:
        """The request is over; False if there is no such lease."""
        return self._leases.pop(token, None) is not None

    def sweep(self) -> list[str]:
        """Take out every lease that has ended; what it held must be given back, or quarantined."""
        now_ns = self._clock.monotonic_ns()
        ended = [token for token, lease in self._leases.items() if lease.ends_ns <= now_ns]
        for token in ended:
            del self._leases[token]
        return ended
