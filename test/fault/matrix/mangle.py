"""What the fake cloud and the fake robot do to their own messages, and how they are told.

A process reads one JSON object per line from its standard input; ``{"fault": {"kind": "delay", "delay_s": 0.3}}`` sets
the fault. Nothing here is random but the bytes of garbage, which are seeded.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import os
import select
from typing import Any

import numpy as np

MS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Fault:
    """kind: what is done; share: of all messages, evenly spread; delay_s: of ``delay`` and ``reorder``."""

    kind: str = "none"
    share: float = 1.0
    delay_s: float = 0.0


class Share:
    """True for a share of its calls, evenly spread."""

    def __init__(self) -> None:
        self._due = 0.0

    def hit(self, share: float) -> bool:
        self._due += share
        if self._due >= 1.0 - 1e-9:
            self._due -= 1.0
            return True
        return False


class Outbox:
    """Sends payloads through a publisher, treated by a transport fault."""

    def __init__(self, publisher: Any, flips: bool = True, seed: int = 0) -> None:
        """``flips``: garbage may be a message with flipped bits, which only a type with a checksum can refuse."""
        self._publisher = publisher
        self._random = np.random.default_rng(seed)
        self._flips = flips
        self._waiting: list[tuple[int, int, bytes]] = []
        self._count = 0
        self._broken = 0

    def send(self, now_ns: int, payload: bytes, fault: Fault, is_hit: bool) -> None:
        """Queue a message; ``is_hit``: the fault applies to it."""
        later_ns = now_ns + round(fault.delay_s * 1e9)
        if not is_hit or fault.kind not in ("drop", "duplicate", "reorder", "delay", "garbage"):
            self._put(now_ns, payload)
        elif fault.kind == "duplicate":
            self._put(now_ns, payload)
            self._put(later_ns, payload)
        elif fault.kind in ("delay", "reorder"):
            self._put(later_ns, payload)
        elif fault.kind == "garbage":
            self._put(now_ns, self.garbage(payload))

    def flush(self, now_ns: int) -> None:
        """Publish what is due."""
        while self._waiting and self._waiting[0][0] <= now_ns:
            self._publisher.put(heapq.heappop(self._waiting)[2])

    def _put(self, at_ns: int, payload: bytes) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (at_ns, self._count, payload))

    def garbage(self, payload: bytes) -> bytes:
        """Something that is no message, of another sort each time."""
        self._broken += 1
        kind = self._broken % (7 if self._flips else 6)
        if kind == 0:
            return b""
        if kind == 1:
            return payload[: len(payload) // 2]
        if kind == 2:
            return self._random.bytes(len(payload))
        if kind == 3:
            return self._random.bytes(3)
        if kind == 4:
            return payload[:4] + b"\xff" * (len(payload) - 4)
        if kind == 5:
            return payload + b"\0" * 4096
        data = bytearray(payload)
        for bit in self._random.integers(0, 8 * len(data), 8):
            data[bit // 8] ^= 1 << bit % 8
        return bytes(data)


class Orders:
    """Lines of JSON from standard input, without waiting."""

    def __init__(self) -> None:
        self._rest = b""
        self.open = True

    def poll(self) -> list[dict[str, Any]]:
        """Objects that have arrived; :attr:`open` turns false when the other side has closed."""
        while self.open and select.select([0], [], [], 0.0)[0]:
            data = os.read(0, 65536)
            self.open = bool(data)
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]


class Pendulum:
    """Which way each joint shall go so that it swings about the ready pose."""

    def __init__(self, ready: np.ndarray, weights: np.ndarray, amplitude: float) -> None:
        self._ready, self._amplitude = ready, amplitude * np.abs(weights)
        self._weights, self._sign = weights, np.sign(weights)

    def direction(self, position: np.ndarray) -> np.ndarray:
        """Deltas per chunk of unit speed, float64[n]."""
        away = position - self._ready
        self._sign = np.where(away > self._amplitude, -1.0, np.where(away < -self._amplitude, 1.0, self._sign))
        return np.abs(self._weights) * self._sign


SWING = np.array([1.0, 0.6, 0.8, 0.6, 1.0, 0.9, 1.0, 0.0])
AMPLITUDE = 0.35
"""Rad; of joint 1 about the ready pose, the others in proportion."""
DELTA = 0.2
"""Rad per chunk of 16 ticks, so 1.25 rad/s for joint 1."""
