"""Grammars without a model: a backend for engine tests, and answers drawn at random from what a grammar allows."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_cloud.core.generate import InvalidRequest
from vla_cloud.core.grammar_spec import Grammar


class CountingBackend:
    """A grammar's text is a JSON list of lists: the tokens allowed at each place of the answer; then a stop token.

    ``gate``: compiling waits for it. Needs numpy alone.
    """

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.compiled: list[str] = []
        self.matchers: list[CountingMatcher] = []

    def compile(self, grammar: Grammar) -> Any:
        if self.gate is not None:
            assert self.gate.wait(20.0)
        self.compiled.append(grammar.text)
        if grammar.text == "bad":
            raise InvalidRequest("the schema cannot be compiled: bad")
        return json.loads(grammar.text)

    def matcher(self, compiled: Any, stop_token_ids: Sequence[int]) -> CountingMatcher:
        self.matchers.append(CountingMatcher(compiled, stop_token_ids))
        return self.matchers[-1]


class CountingMatcher:
    def __init__(self, places: list[list[int]], stops: Sequence[int]) -> None:
        self._places, self._stops = places, list(stops)
        self.accepted: list[int] = []

    def _allowed(self) -> list[int]:
        place = len(self.accepted)
        return self._places[place] if place < len(self._places) else self._stops

    def accept(self, token: int) -> bool:
        if token not in self._allowed():
            return False
        self.accepted.append(token)
        return True

    def fill(self, row: NDArray[np.int32]) -> None:
        for token in self._allowed():
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def allowed_tokens(row: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def walk(backend: Any, grammar: Grammar, stop: int, seed: int, ending: Sequence[int] = (), limit: int = 400) -> list[int] | None:
    """Tokens drawn from those allowed, without the stop token; ``ending`` ones are preferred. None: never ended."""
    chance = random.Random(seed)
    matcher = backend.matcher(backend.compile(grammar), [stop])
    tokens: list[int] = []
    while len(tokens) < limit:
        row = np.zeros(backend.words, np.int32)
        matcher.fill(row)
        allowed = allowed_tokens(row)
        assert len(allowed), "a dead end"
        preferred = [token for token in (stop, *ending) if token in allowed and chance.random() < 0.3]
        token = preferred[0] if preferred else int(chance.choice(allowed))
        assert matcher.accept(token)
        if token == stop:
            return tokens
        tokens.append(token)
    return None
