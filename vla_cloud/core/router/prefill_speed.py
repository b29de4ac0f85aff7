"""How many prompt tokens a P computes per second, learnt from when prompts that were placed there are done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vla_common.clock import NS_PER_S

_KEEP: Final = 0.95  # weight of the past at each prompt: about the last 20 count
_LEAST_SAMPLES: Final = 8


@dataclass(slots=True)
class _Busy:
    prompts: int = 0
    since_ns: int = 0  # when its first prompt came, or the last one was done


class PrefillSpeed:
    """One mean for all workers: while a worker has prompts, the time between two ends belongs to the later one."""

    def __init__(self) -> None:
        """Nothing known."""
        self._workers: dict[str, _Busy] = {}
        self._tokens = self._seconds = 0.0
        self._samples = 0

    @property
    def tokens_s(self) -> float:
        """Tokens per second and worker; 0 before enough prompts were done."""
        return self._tokens / self._seconds if self._samples >= _LEAST_SAMPLES and self._seconds > 0 else 0.0

    def begun(self, worker: str, now_ns: int) -> None:
        """A prompt was placed there."""
        busy = self._workers.setdefault(worker, _Busy())
        if not busy.prompts:
            busy.since_ns = now_ns
        busy.prompts += 1

    def done(self, worker: str, tokens: int, now_ns: int) -> None:
        """It was computed: ``tokens`` of it, what was cached left out."""
        busy = self._workers.get(worker)
        if busy is None:
            return
        self._tokens = _KEEP * self._tokens + tokens
        self._seconds = _KEEP * self._seconds + (now_ns - busy.since_ns) / NS_PER_S
        self._samples += 1
        self._left(busy, now_ns)

    def given_up(self, worker: str, now_ns: int) -> None:
        """It will not be done there."""
        busy = self._workers.get(worker)
        if busy is not None:
            self._left(busy, now_ns)

    def remove(self, worker: str) -> None:
        """The worker is gone, and its prompts with it."""
        self._workers.pop(worker, None)

    def _left(self, busy: _Busy, now_ns: int) -> None:
        busy.prompts = max(0, busy.prompts - 1)
        busy.since_ns = now_ns
