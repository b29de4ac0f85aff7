"""All sequences of a worker that have not ended, by what they are doing."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from vla_cloud.core.generate import DuplicateRequest, Priority, QueueFull
from vla_cloud.core.sequence import SequenceState, TokenSequence

_HOLDING = (SequenceState.RUNNING, SequenceState.RESERVED, SequenceState.TO_PUSH)


def _waiting_order(seq: TokenSequence) -> tuple[int, bool, tuple[int, int, int]]:
    """By priority; within it those that were preempted resume before newcomers start; then in order of service."""
    return seq.priority, seq.state is not SequenceState.PREEMPTED, seq.rank


class LiveSequences:
    """The waiting queue (bounded for newcomers) and the sequences that hold blocks."""

    def __init__(self, max_waiting: int) -> None:
        """Empty. Robots have ``max_waiting`` places of their own, so that chat cannot fill theirs."""
        self._max_waiting = max_waiting
        self._all: dict[str, TokenSequence] = {}
        self._waiting: list[TokenSequence] = []
        self._in_state: dict[SequenceState, dict[str, TokenSequence]] = {state: {} for state in _HOLDING}

    def __iter__(self) -> Iterator[TokenSequence]:
        """Every live sequence in order of arrival; a copy, so that they may be moved meanwhile."""
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        """Live sequences."""
        return len(self._all)

    def get(self, request_id: str) -> TokenSequence | None:
        """The live sequence of a request."""
        return self._all.get(request_id)

    def enqueue(self, seq: TokenSequence) -> None:
        """Let a newcomer wait. Raises DuplicateRequest or QueueFull, at once and before any work."""
        if seq.request_id in self._all:
            raise DuplicateRequest(f"request {seq.request_id} is still alive here: use another id or abort it")
        robot = seq.priority is Priority.ROBOT
        places = sum(
            (other.priority is Priority.ROBOT) == robot and other.state is SequenceState.WAITING
            for other in self._waiting
        )
        if places >= self._max_waiting:
            raise QueueFull(f"{places} requests wait already: retry later or raise max_waiting")
        self._all[seq.request_id] = seq
        insort(self._waiting, seq, key=_waiting_order)

    def move(self, seq: TokenSequence, state: SequenceState) -> None:
        """Change a live sequence's state and place."""
        self._leave(seq)
        seq.state = state
        if state is SequenceState.FINISHED:
            del self._all[seq.request_id]
        elif state in _HOLDING:
            self._in_state[state][seq.request_id] = seq
        else:
            insort(self._waiting, seq, key=_waiting_order)

    def waiting(self) -> list[TokenSequence]:
        """Newcomers and preempted ones, best first; a copy."""
        return list(self._waiting)

    def running(self) -> list[TokenSequence]:
        """Those that prefill or decode; a copy."""
        return list(self._in_state[SequenceState.RUNNING].values())

    def count(self, state: SequenceState) -> int:
        """Sequences in a state."""
        if state in _HOLDING:
            return len(self._in_state[state])
        return sum(seq.state is state for seq in self._waiting)

    @property
    def holding(self) -> int:
        """Sequences that hold blocks."""
        return sum(len(group) for group in self._in_state.values())

    def _leave(self, seq: TokenSequence) -> None:
        if seq.state in _HOLDING:
            del self._in_state[seq.state][seq.request_id]
        else:
            self._waiting.remove(seq)
