"""Which robots to serve next: one slot a robot, the newest observation wins, nobody starves (stage 3, router).

A robot's context is worth something only while it is fresh. So there is no queue to fall behind on: each robot has
one slot, a newer observation replaces the one that waits in it, and one whose deadline passed is dropped.

Single-threaded by contract: the caller serialises :meth:`ContextPacer.offer` and :meth:`ContextPacer.take`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from vla_cloud.core.request import RobotRequest

Payload = TypeVar("Payload")

SILENT_PERIODS = 10
"""A robot that sent nothing for this many periods may come back with an older clock (it rebooted)."""


class Offer(Enum):
    """What became of an offered request."""

    QUEUED = "queued"
    REPLACED_OLDER = "replaced_older"  # queued; one that still waited was given up for it
    STALE = "stale"  # a newer one of this robot was seen before
    TOO_MANY_ROBOTS = "too_many_robots"


@dataclass
class PacerCounts:
    """Totals since start. offered = served + replaced + late + stale + refused + forgotten + (now waiting)."""

    offered: int = 0
    served: int = 0
    replaced: int = 0
    late: int = 0
    stale: int = 0
    refused: int = 0
    forgotten: int = 0


@dataclass
class _Slot(Generic[Payload]):
    newest: RobotRequest[Payload]  # the last one accepted
    is_waiting: bool = False
    turn: int = 0  # grows with every service of any robot; 0 before the first
    allowance_ns: int = 0  # when the robot's average rate will be back at the cap
    is_paid: bool = False  # the last service came to nothing: the next one is due at once and counts as the same


class ContextPacer(Generic[Payload]):
    """Slots of all robots."""

    def __init__(self, period_ns: int, *, max_robots: int, forget_after_ns: int) -> None:
        """Serve each robot at most once per ``period_ns`` on average.

        At most ``max_robots`` are known at a time; one unheard of for ``forget_after_ns`` makes room for another.
        """
        self._period_ns = period_ns
        # Observations of a 10 Hz robot do not arrive every 100 ms sharp. Half a period of tolerance serves the early
        # one at once, instead of delaying it; the average rate stays capped.
        self._tolerance_ns = period_ns // 2
        self._silence_ns = SILENT_PERIODS * period_ns
        self._max_robots = max_robots
        self._forget_after_ns = forget_after_ns
        self._slots: dict[str, _Slot[Payload]] = {}
        self._turns = 0
        self.counts = PacerCounts()

    @property
    def num_robots(self) -> int:
        """Robots known now."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Requests that wait now."""
        return sum(slot.is_waiting for slot in self._slots.values())

    def knows(self, robot: str) -> bool:
        """Whether the robot has a slot."""
        return robot in self._slots

    def offer(self, request: RobotRequest[Payload]) -> Offer:
        """Puts a request into its robot's slot."""
        self.counts.offered += 1
        slot = self._slots.get(request.robot)
        if slot is None:
            if not self._make_room(request.received_ns):
                self.counts.refused += 1
                return Offer.TOO_MANY_ROBOTS
            self._slots[request.robot] = _Slot(request, is_waiting=True)
            return Offer.QUEUED
        if not self._is_newer(request, slot.newest):
            self.counts.stale += 1
            return Offer.STALE
        replaced = slot.is_waiting
        self.counts.replaced += replaced
        slot.newest, slot.is_waiting = request, True
        return Offer.REPLACED_OLDER if replaced else Offer.QUEUED

    def take(self, now_ns: int, limit: int, busy: Container[str] = ()) -> list[RobotRequest[Payload]]:
        """Up to ``limit`` requests to serve now, at most one a robot, the longest unserved robot first.

        Drops those whose deadline has passed. Robots in ``busy`` wait.
        """
        due: list[_Slot[Payload]] = []
        for robot, slot in self._slots.items():
            if not slot.is_waiting:
                continue
            if now_ns > slot.newest.deadline_ns:
                slot.is_waiting = False
                self.counts.late += 1
            elif now_ns >= self._due_ns(slot) and robot not in busy:
                due.append(slot)
        due.sort(key=lambda slot: slot.turn)  # stable, so that new robots go in order of arrival
        return [self._serve(slot, now_ns) for slot in due[:limit]]

    def next_due_ns(self, busy: Container[str] = ()) -> int | None:
        """When :meth:`take` may next have something, or None while nothing waits."""
        slots = self._slots.items()
        return min((self._due_ns(slot) for robot, slot in slots if slot.is_waiting and robot not in busy), default=None)

    def put_back(self, request: RobotRequest[Payload]) -> None:
        """A taken request was not served: it waits again unless a newer one waits, and the next is due at once.

        Not twice, and not after the robot's next request was taken.
        """
        self.counts.served -= 1
        slot = self._slots.get(request.robot)
        if slot is None:
            self.counts.forgotten += 1
            return
        slot.is_paid = True
        if slot.newest is request:
            slot.is_waiting = True
        else:
            self.counts.replaced += 1

    def withdraw(self, request: RobotRequest[Payload]) -> bool:
        """A request that was put back is answered after all. False if it does not wait any more."""
        slot = self._slots.get(request.robot)
        if slot is None or slot.newest is not request or not slot.is_waiting:
            return False
        slot.is_waiting = slot.is_paid = False
        self.counts.served += 1
        return True

    def _serve(self, slot: _Slot[Payload], now_ns: int) -> RobotRequest[Payload]:
        self._turns += 1
        slot.is_waiting, slot.turn = False, self._turns
        if not slot.is_paid:
            slot.allowance_ns = max(slot.allowance_ns, now_ns) + self._period_ns
        slot.is_paid = False
        self.counts.served += 1
        return slot.newest

    def _due_ns(self, slot: _Slot[Payload]) -> int:
        return 0 if slot.is_paid else slot.allowance_ns - self._tolerance_ns

    def _is_newer(self, request: RobotRequest[Payload], last: RobotRequest[Payload]) -> bool:
        if request.session == last.session:
            return request.sequence > last.sequence
        # Another session: the robot's edge restarted, or this is a straggler from before. The stamps tell, as both are
        # of the robot's own clock, unless the robot rebooted and its clock began anew: then the last session is silent.
        return request.stamp_ns > last.stamp_ns or request.received_ns - last.received_ns > self._silence_ns

    def _make_room(self, now_ns: int) -> bool:
        if len(self._slots) < self._max_robots:
            return True
        for robot, slot in list(self._slots.items()):
            if now_ns - slot.newest.received_ns > self._forget_after_ns:
                self.counts.forgotten += slot.is_waiting
                del self._slots[robot]
        return len(self._slots) < self._max_robots
