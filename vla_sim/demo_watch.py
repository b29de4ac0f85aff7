"""What the demo sees of a run from outside: the newest statuses on the robot bus, and events. It only listens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from vla_common.clock import NS_PER_S
from vla_common.metrics import Histogram, Summary
from vla_common.wire import WireError, decode, stamp_ns
from vla_common.zenoh_session import Bus, QueueSubscriber

EVENTS_SHOWN: Final = 6
RATE_BATCHES: Final = 30


@dataclass
class LiveState:
    """Newest knowledge about a run; None before the first message.

    ``stale_s`` tells how long each status has not been heard.
    """

    title: str
    faults: str = ""
    task: Any = None
    shield: Any = None
    policy: Any = None
    heard_ns: dict[str, int] = field(default_factory=dict)
    tick_rate_hz: float = 0.0
    lateness: Summary | None = None
    cpu: dict[str, float] = field(default_factory=dict)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    results: list[tuple[str, str]] = field(default_factory=list)  # outcome and words per finished episode
    start_ns: int = 0

    def stale_s(self, name: str, now_ns: int) -> float:
        """Seconds since a status was last heard; infinite if never."""
        at_ns = self.heard_ns.get(name)
        return float("inf") if at_ns is None else (now_ns - at_ns) / NS_PER_S


def batch_rate_hz(batches: list[tuple[int, int]]) -> float:
    """Ticks per second from (publication stamp in ns, number of ticks) of consecutive batches; 0 for fewer than two."""
    if len(batches) < 2 or batches[-1][0] <= batches[0][0]:
        return 0.0
    return sum(count for _, count in batches[1:]) * NS_PER_S / (batches[-1][0] - batches[0][0])


class Watcher:
    """Polls the statuses on the robot bus into a :class:`LiveState`. For one thread."""

    def __init__(self, bus: Bus, robot: str, state: LiveState) -> None:
        """Subscribe."""
        self._state = state
        self._latest: dict[str, QueueSubscriber] = {
            "task": bus.latest("task_status", robot), "shield": bus.latest("shield_status", robot),
            "policy": bus.latest("policy_status", robot)}
        self._ticks = bus.queue("motor_ticks", robot, capacity=64)
        self._lateness_s = Histogram(100_000)
        self._batches: deque[tuple[int, int]] = deque(maxlen=RATE_BATCHES)  # stamp and number of ticks
        self.refused = 0

    def poll(self, now_ns: int) -> None:
        """Take what has arrived."""
        state = self._state
        for name, subscriber in self._latest.items():
            message = self._take(subscriber)
            if message is not None:
                setattr(state, name, message)
                state.heard_ns[name] = now_ns
        while (batch := self._take(self._ticks)) is not None:
            for lateness_ns in batch.lateness_ns:
                self._lateness_s.record(float(lateness_ns) / NS_PER_S)
            self._batches.append((stamp_ns(batch.header), len(batch.tick)))
            state.tick_rate_hz = batch_rate_hz(list(self._batches))

    def summarise(self) -> None:
        """Refresh the percentiles; sorts up to 100,000 values, so not at every poll."""
        self._state.lateness = self._lateness_s.summary()

    def _take(self, subscriber: QueueSubscriber) -> Any | None:
        received = subscriber.try_recv()
        if received is None:
            return None
        try:
            return decode(subscriber.spec.type_name, received.payload)
        except WireError:
            self.refused += 1
            return None
