"""Schedule of a faulty link, pure: which copies of a message arrive, when, and with which bits flipped.

The core decides at the moment a message enters; the adapter in ``link_main.py`` only waits and sends. All randomness
comes from one seed per direction, so a run's faults depend on the order of its messages and nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from vla_sim.faults import DirectionFaults, EpisodeOutage, LinkFaults

NS_PER_S: Final = 1_000_000_000
Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Delivery:
    """One copy of a message: when it leaves the link, and the positions of the bits that are flipped."""

    at_ns: int
    flipped_bits: tuple[int, ...] = ()


@dataclass
class LinkCounters:
    """What happened to messages of one direction."""

    received: int = 0
    delivered: int = 0
    lost: int = 0
    cut: int = 0  # fell into an outage
    duplicated: int = 0
    reordered: int = 0
    corrupted: int = 0
    overflowed: int = 0


class DirectionSchedule:
    """Fate of the messages of one direction. Not thread-safe."""

    def __init__(self, faults: DirectionFaults, seed: int) -> None:
        """Equal seeds give equal fates to equal sequences of messages."""
        self.faults = faults
        self.counters = LinkCounters()
        self._rng = np.random.default_rng(seed)
        self._newest_ns = 0

    def admit(self, now_ns: int, size_bytes: int, in_outage: bool) -> list[Delivery]:
        """Copies of a message that entered now; none when it is lost or cut.

        The same number of draws is made for every message, so that a lost one does not shift the fate of later ones.
        """
        faults, counters = self.faults, self.counters
        counters.received += 1
        lost, doubled, held, broken = self._rng.random(4) < (
            faults.loss, faults.duplicate, faults.reorder, faults.corrupt)
        jitter = self._rng.uniform(-1.0, 1.0, 2) * faults.jitter_s
        bits = self._rng.integers(0, max(1, size_bytes * 8), faults.corrupt_bits)
        if in_outage:
            counters.cut += 1
            return []
        if lost:
            counters.lost += 1
            return []
        counters.duplicated += int(doubled)
        counters.reordered += int(held)
        counters.corrupted += int(broken)
        extra_s = faults.reorder_hold_s if held else 0.0
        flipped = tuple(int(bit) for bit in np.unique(bits)) if broken else ()
        delays_s = [faults.delay_s + draw + extra_s for draw in jitter[: 2 if doubled else 1]]
        return [Delivery(self._at_ns(now_ns, delay_s, bool(held)), flipped) for delay_s in delays_s]

    def _at_ns(self, now_ns: int, delay_s: float, held: bool) -> int:
        at_ns = now_ns + round(delay_s * NS_PER_S)
        if self.faults.keep_order and not held:
            at_ns = max(at_ns, self._newest_ns)
            self._newest_ns = at_ns
        return at_ns


class OutagePlan:
    """Windows in which nothing passes, in either direction."""

    def __init__(self, faults: LinkFaults, seed: int) -> None:
        """Windows of single episodes are drawn from (seed, episode)."""
        self._episode_outage: EpisodeOutage | None = faults.episode_outage
        self._timed = faults.outages
        self._seed = seed
        self._episodes: set[int] = set()
        self.windows_ns: list[tuple[int, int]] = []

    def begin_episode(self, episode: int, start_ns: int) -> list[tuple[int, int]]:
        """An episode's running phase began; returns the windows that follow from it, as (start, end) in ns."""
        if episode in self._episodes:
            return []
        added: list[tuple[int, int]] = []
        if not self._episodes:
            added += [_window(start_ns, outage.at_s, outage.duration_s) for outage in self._timed]
        self._episodes.add(episode)
        outage = self._episode_outage
        if outage is not None:
            draw = np.random.default_rng([self._seed, episode]).uniform(outage.start_min_s, outage.start_max_s)
            added.append(_window(start_ns, float(draw), outage.duration_s))
        self.windows_ns += added
        return added

    def is_cut(self, now_ns: int) -> bool:
        """True inside a window."""
        return any(start <= now_ns < end for start, end in self.windows_ns)


@dataclass(order=True)
class _Pending:
    at_ns: int
    order: int
    direction: Direction = field(compare=False)
    payload: bytes = field(compare=False)
    tag: object = field(compare=False)


class Link:
    """Both directions with their messages under way. Not thread-safe; owns no clock.

    ``tag`` travels with the message untouched (the adapter's attachment).
    """

    def __init__(self, faults: LinkFaults, seed: int, capacity: int = 512) -> None:
        """At most ``capacity`` messages are under way; further ones are dropped and counted."""
        self.outages = OutagePlan(faults, seed)
        self._schedules = {
            "up": DirectionSchedule(faults.up, 2 * seed), "down": DirectionSchedule(faults.down, 2 * seed + 1)}
        self._pending: list[_Pending] = []
        self._capacity = capacity
        self._order = 0

    @property
    def counters(self) -> dict[str, LinkCounters]:
        """Counters by direction."""
        return {name: schedule.counters for name, schedule in self._schedules.items()}

    def change(self, faults: LinkFaults) -> None:
        """Treat messages that enter from now on by other faults; outages, draws, counters and messages under way
        stay as they are."""
        self._schedules["up"].faults, self._schedules["down"].faults = faults.up, faults.down

    def enter(self, now_ns: int, direction: Direction, payload: bytes, tag: object = None) -> None:
        """A message enters the link."""
        schedule = self._schedules[direction]
        for delivery in schedule.admit(now_ns, len(payload), self.outages.is_cut(now_ns)):
            if len(self._pending) >= self._capacity:
                schedule.counters.overflowed += 1
                continue
            self._order += 1
            heapq.heappush(self._pending, _Pending(delivery.at_ns, self._order, direction,
                                                   flip_bits(payload, delivery.flipped_bits), tag))

    def next_due_ns(self) -> int | None:
        """When the next message leaves; None while there is none."""
        return self._pending[0].at_ns if self._pending else None

    def leave(self, now_ns: int) -> list[tuple[Direction, bytes, object]]:
        """Messages that leave by now, in order of their times. An outage that has begun since swallows them."""
        out: list[tuple[Direction, bytes, object]] = []
        while self._pending and self._pending[0].at_ns <= now_ns:
            item = heapq.heappop(self._pending)
            counters = self._schedules[item.direction].counters
            if self.outages.is_cut(item.at_ns):
                counters.cut += 1
                continue
            counters.delivered += 1
            out.append((item.direction, item.payload, item.tag))
        return out


def flip_bits(payload: bytes, positions: Iterable[int]) -> bytes:
    """Payload with the bits at these positions inverted (bit 0 is the lowest of byte 0)."""
    positions = tuple(positions)
    if not positions or not payload:
        return payload
    data = bytearray(payload)
    for position in positions:
        data[position // 8] ^= 1 << position % 8
    return bytes(data)


def _window(start_ns: int, offset_s: float, duration_s: float) -> tuple[int, int]:
    begin_ns = start_ns + round(offset_s * NS_PER_S)
    return begin_ns, begin_ns + round(duration_s * NS_PER_S)
