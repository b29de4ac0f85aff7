"""P workers that were told to stop while they might write into blocks of a D worker, until that is known to be over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vla_cloud.core.life_events import (
    Aborted,
    Event,
    Failed,
    Prefilled,
    PushFailed,
    Refused,
    SendWriterDone,
    WorkerDead,
    WorkerLost,
)


@dataclass(frozen=True, slots=True)
class _Writer:
    prefill: str
    decode: str
    until_ns: int


class Writers:
    """Of one request, by attempt. D is told (SendWriterDone) when P has spoken its last word or is dead."""

    def __init__(self) -> None:
        """None yet."""
        self._by_attempt: dict[int, _Writer] = {}

    def __bool__(self) -> bool:
        """Whether any is awaited."""
        return bool(self._by_attempt)

    @property
    def until_ns(self) -> int | None:
        """When the first is given up: D's lease is over then."""
        return min((writer.until_ns for writer in self._by_attempt.values()), default=None)

    @property
    def workers(self) -> frozenset[str]:
        """Workers whose loss or death matters."""
        return frozenset(name for writer in self._by_attempt.values() for name in (writer.prefill, writer.decode))

    def add(self, attempt: int, prefill: str, decode: str, until_ns: int) -> None:
        """P of this attempt may still write to D."""
        self._by_attempt[attempt] = _Writer(prefill, decode, until_ns)

    def handle(self, event: Event, now_ns: int) -> Iterator[SendWriterDone]:
        """Whom to tell because of this event; consume it all."""
        for attempt, writer in list(self._by_attempt.items()):
            decode_lost = isinstance(event, WorkerLost | WorkerDead) and event.worker == writer.decode
            if decode_lost or now_ns >= writer.until_ns:
                del self._by_attempt[attempt]
                continue
            match event:
                case WorkerDead(worker) if worker == writer.prefill:
                    is_over = True
                case Aborted(worker, number) | Prefilled(worker, number) | PushFailed(worker, number):
                    is_over = (worker, number) == (writer.prefill, attempt)
                case Refused(worker, number) | Failed(worker, number):
                    is_over = (worker, number) == (writer.prefill, attempt)
                case _:
                    is_over = False
            if is_over:
                del self._by_attempt[attempt]
                yield SendWriterDone(writer.decode, attempt)
