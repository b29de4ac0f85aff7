"""One measurement: so many clients ask at the same time, each its next question when it has its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from gateway_parts.stamps import since_ms

SYSTEM = "You are a helpful robot."


@dataclass(frozen=True)
class Phase:
    """What is asked.

    Attributes:
        clients: each has a connection of its own.
        tokens: of each answer.
        stream: token by token, or each answer in one piece.
        pace_ms: between two tokens; 0: as fast as they come.
        seconds: afterwards no client begins another question; each asks one at least.
    """

    clients: int
    tokens: int
    stream: bool
    pace_ms: int
    seconds: float


@dataclass
class Took:
    """What came of it. Milliseconds; ``token_ms`` from the engine to the client, of streamed answers."""

    requests: int = 0
    chunks: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    request_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)
    tokens: int = 0

    def begin(self, phase: Phase) -> None:
        """The clock starts."""
        self.begin_ns = time.monotonic_ns()
        self._until_ns = self.begin_ns + round(phase.seconds * 1e9)

    @property
    def is_over(self) -> bool:
        """Nobody begins another question."""
        return time.monotonic_ns() >= self._until_ns

    def words(self, words: list[int], now_ns: int) -> None:
        """A chunk of an answer came."""
        self.chunks += 1
        self.token_ms += [since_ms(word, now_ns) for word in words]

    def answered(self, begin_ns: int, tokens: int, phase: Phase) -> None:
        """An answer is complete. RuntimeError if it is not what was asked for."""
        if tokens != phase.tokens:
            raise RuntimeError(f"an answer has {tokens} tokens, {phase.tokens} were asked for")
        self.end_ns = time.monotonic_ns()
        self.requests += 1
        self.tokens += tokens
        self.request_ms.append((self.end_ns - begin_ns) / 1e6)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "requests": self.requests, "tokens": self.tokens, "chunks": self.chunks,
            "seconds": (self.end_ns - self.begin_ns) / 1e9, "request_ms": self.request_ms, "token_ms": self.token_ms,
        }  # fmt: skip


class Questions:
    """None like another, all equally long, with a common beginning."""

    def __init__(self) -> None:
        self._number = time.monotonic_ns() // 1000 % 10**9  # another range in each process

    def next(self) -> str:
        self._number += 1
        return f"Question {self._number:09d}: how far is it to the red block?"
