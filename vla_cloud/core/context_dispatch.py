"""Which lane computes whose context, and what becomes of the answers. Pure; the sockets are elsewhere.

A *lane* computes one batch at a time. A robot is in at most one *live* flight; meanwhile its newer observations wait in
the pacer. A flight that is not answered in time while another lane has nothing to do is given up: its lane gets nothing
until it answers or is lost, and the newest observation of each of its robots goes to another lane (a *hedge*). The
flights of a lost lane are given up at once. An observation is sent twice at most, so that one which kills whoever
decodes it does not go round.

Answers count in the order in which their observations were sent first: whatever is older than the last answer of its
robot, or came too late, is dropped. So nothing is answered twice, out of order, or stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from vla_cloud.core.context_pacer import ContextPacer
from vla_cloud.core.request import RobotRequest

Payload = TypeVar("Payload")

MAX_SENDS: Final = 2
_SMOOTHING: Final = 0.2
_SLOW_FACTOR: Final = 2.0


@dataclass(frozen=True)
class DispatchConfig:
    """Limits of the dispatch, nanoseconds.

    A flight is overdue after ``hedge_ns``, or twice the usual time of a round trip if that is longer (else a machine
    that is merely busy would compute everything twice), but at most ``hedge_max_ns``. An answer later than
    ``answer_within_ns`` after the arrival of its observation is dropped.
    """

    hedge_ns: int
    hedge_max_ns: int
    answer_within_ns: int
    max_batch: int


@dataclass
class DispatchCounts:
    """Totals since start, in requests except ``flights`` and ``hedged_flights`` (overdue) and ``lost_flights``."""

    flights: int = 0
    hedged_flights: int = 0
    lost_flights: int = 0
    resent: int = 0
    given_up: int = 0  # sent MAX_SENDS times without an answer
    late_answers: int = 0
    old_answers: int = 0  # a newer observation, or the same one, was answered before


@dataclass
class _Turn(Generic[Payload]):
    """One observation that was sent. ``rank`` counts the observations of all robots in order of their first sending."""

    request: RobotRequest[Payload]
    rank: int
    sends: int = 1
    is_back: bool = False  # given back to the pacer


@dataclass
class Flight(Generic[Payload]):
    """A batch on its way."""

    number: int
    lane: str
    sent_ns: int
    turns: list[_Turn[Payload]]
    is_live: bool = True

    @property
    def requests(self) -> list[RobotRequest[Payload]]:
        """The batch, in order."""
        return [turn.request for turn in self.turns]


class ContextDispatch(Generic[Payload]):
    """See the module. Single-threaded by contract, like the pacer, which it drives."""

    def __init__(self, pacer: ContextPacer[Payload], config: DispatchConfig) -> None:
        """No lanes yet."""
        self._pacer, self._config = pacer, config
        self._lanes: dict[str, Flight[Payload] | None] = {}  # what each computes; an overdue flight is not live
        self._turns: dict[str, _Turn[Payload]] = {}  # the last one sent of each robot
        self._flying: dict[str, Flight[Payload]] = {}  # live, by robot
        self._answered: dict[str, int] = {}  # rank of the last answer, by robot
        self._numbers = self._ranks = 0
        self._usual_ns = 0.0
        self.counts = DispatchCounts()

    @property
    def lanes(self) -> int:
        """Lanes that are up, overdue ones included."""
        return len(self._lanes)

    def lane_ready(self, lane: str) -> None:
        """A lane can be given work."""
        self._lanes.setdefault(lane, None)

    def lane_lost(self, lane: str) -> None:
        """Nothing comes from it any more."""
        flight = self._lanes.pop(lane, None)
        if flight is not None:
            self.counts.lost_flights += 1
            self._give_up(flight)

    def take(self, now_ns: int) -> list[Flight[Payload]]:
        """Batches to send now, to idle lanes, which share what is due. :meth:`lane_lost` if one cannot be sent."""
        self._give_up_overdue(now_ns)
        idle = self._idle()
        if not idle:
            return []
        due = self._pacer.take(now_ns, len(idle) * self._config.max_batch, self._flying)
        share = -(-len(due) // len(idle))
        parts = [due[start : start + share] for start in range(0, len(due), share or 1)]
        return [self._depart(lane, part, now_ns) for lane, part in zip(idle, parts, strict=False)]

    def landed(self, lane: str, number: int, now_ns: int) -> Flight[Payload] | None:
        """A lane has answered. None if it was asked nothing of the kind, else see :meth:`accept` for each request."""
        flight = self._lanes.get(lane)
        if flight is None or flight.number != number:
            return None
        self._lanes[lane] = None
        took_ns = now_ns - flight.sent_ns
        if flight.is_live:
            self._usual_ns += _SMOOTHING * (took_ns - self._usual_ns)
            self._end(flight)
        return flight

    def accept(self, flight: Flight[Payload], index: int, now_ns: int) -> bool:
        """Whether the answer to request ``index`` of a landed flight is to be published. Once per request."""
        turn = flight.turns[index]
        robot = turn.request.robot
        if turn.rank <= self._answered.get(robot, -1):
            self.counts.old_answers += 1
            return False
        if now_ns > turn.request.received_ns + self._config.answer_within_ns:
            self.counts.late_answers += 1
            return False
        self._answered[robot] = turn.rank
        if turn.is_back:
            turn.is_back = not self._pacer.withdraw(turn.request)
        return True

    def refused(self, flight: Flight[Payload], index: int) -> None:
        """Request ``index`` of a landed flight cannot be answered, by any lane."""
        turn = flight.turns[index]
        self._answered[turn.request.robot] = max(turn.rank, self._answered.get(turn.request.robot, -1))
        if turn.is_back:
            turn.is_back = not self._pacer.withdraw(turn.request)

    def next_wake_ns(self) -> int | None:
        """When :meth:`take` may next do something; None: not before an answer, a new lane or an observation."""
        times: list[int] = []
        idle = self._idle()
        if idle:
            due_ns = self._pacer.next_due_ns(self._flying)
            times += [] if due_ns is None else [due_ns]
        times += [self._overdue_ns(flight, bool(idle)) for flight in self._lanes.values() if flight and flight.is_live]
        return min(times, default=None)

    def forget(self) -> None:
        """Drop what is known of robots that the pacer has forgotten."""
        for robot in [robot for robot in self._turns if robot not in self._flying and not self._pacer.knows(robot)]:
            del self._turns[robot]
            self._answered.pop(robot, None)

    def _idle(self) -> list[str]:
        return [lane for lane, flight in self._lanes.items() if flight is None]

    def _overdue_ns(self, flight: Flight[Payload], others_idle: bool) -> int:
        """When it is given up: early if somebody else could do it, else when its answer is worth nothing any more."""
        config = self._config
        if others_idle:
            return flight.sent_ns + min(max(config.hedge_ns, round(_SLOW_FACTOR * self._usual_ns)), config.hedge_max_ns)
        return flight.sent_ns + config.answer_within_ns

    def _give_up_overdue(self, now_ns: int) -> None:
        others_idle = bool(self._idle())
        for flight in self._lanes.values():
            if flight and flight.is_live and now_ns >= self._overdue_ns(flight, others_idle):
                self.counts.hedged_flights += 1
                self._give_up(flight)

    def _give_up(self, flight: Flight[Payload]) -> None:
        """Its robots may fly again, with their newest observations."""
        if not flight.is_live:
            return
        self._end(flight)
        for turn in flight.turns:
            if turn.sends < MAX_SENDS:
                turn.is_back = True
                self._pacer.put_back(turn.request)
            else:
                self.counts.given_up += 1

    def _end(self, flight: Flight[Payload]) -> None:
        flight.is_live = False
        for request in flight.requests:
            del self._flying[request.robot]

    def _depart(self, lane: str, requests: list[RobotRequest[Payload]], now_ns: int) -> Flight[Payload]:
        self._numbers += 1
        self.counts.flights += 1
        flight = Flight(self._numbers, lane, now_ns, [self._turn(request) for request in requests])
        self._lanes[lane] = flight
        self._flying.update(dict.fromkeys((request.robot for request in requests), flight))
        return flight

    def _turn(self, request: RobotRequest[Payload]) -> _Turn[Payload]:
        turn = self._turns.get(request.robot)
        if turn is not None and turn.request is request:
            turn.sends += 1
            turn.is_back = False
            self.counts.resent += 1
            return turn
        self._ranks += 1
        self._turns[request.robot] = turn = _Turn(request, self._ranks)
        return turn
