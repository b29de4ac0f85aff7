"""Grammars of the requests of one worker: compiled in a thread, then one matcher per sequence.

A matcher is fed from the sequence's own tokens each time a mask is asked for, so that nothing has to be told of
preemptions, repeated steps, a first token that came from elsewhere, or an answer that another worker began.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vla_cloud.core.generate import EngineFailed, GenerateRequest, InvalidRequest, RequestError
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.core.sequence import TokenSequence

KEPT: Final = 64
"""Compiled grammars that are kept for later requests."""


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def accept(self, token: int) -> bool:
        """Go on by a token; False if the grammar has no place for it."""
        ...

    def fill(self, row: NDArray[np.int32]) -> None:
        """Write the tokens that may follow: bit i % 32 of word i // 32 is token i."""
        ...


class GrammarBackend(Protocol):
    """A grammar library over one vocabulary."""

    def compile(self, grammar: Grammar) -> Any:
        """Called in a thread, once for a grammar that is not kept. Raises InvalidRequest."""
        ...

    def matcher(self, compiled: Any, stop_token_ids: Sequence[int]) -> Matcher:
        """At the beginning of an answer, which one of ``stop_token_ids`` ends."""
        ...


@dataclass(slots=True)
class _Live:
    matcher: Matcher
    fed: int  # tokens of the sequence that it knows of


class Grammars:
    """Used by the engine's thread."""

    def __init__(self, backend: GrammarBackend | None, vocab_size: int) -> None:
        """``backend`` None: requests with a grammar are refused."""
        self._backend = backend
        self._words = -(-vocab_size // 32)
        self._compiled: OrderedDict[Grammar, Future[Any]] = OrderedDict()
        self._live: dict[str, _Live] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._wake: tuple[int, int] | None = None
        self._told = False

    def __len__(self) -> int:
        """Sequences with a grammar."""
        return len(self._live)

    def is_ready(self, grammar: Grammar) -> bool:
        """Whether :meth:`begin` would not wait; otherwise it is being compiled from now on.

        Raises:
            InvalidRequest: this worker has no grammar library, or the grammar is none.
        """
        if self._backend is None:
            raise InvalidRequest("this worker has no grammars: pip install 'vla-runtime[structured]'")
        future = self._compiled.get(grammar)
        if future is None:
            future = self._submit(grammar)
        self._compiled.move_to_end(grammar)
        if not future.done():
            return False
        error = future.exception()
        if error is None:
            return True
        del self._compiled[grammar]
        if isinstance(error, RequestError):
            raise error
        raise InvalidRequest(f"the grammar cannot be compiled: {error}")

    def begin(self, seq: TokenSequence) -> None:
        """A sequence whose grammar is ready. Without a grammar: nothing."""
        request = seq.request
        if request.grammar is None:
            return
        assert self._backend is not None
        compiled = self._compiled[request.grammar].result()
        matcher = self._backend.matcher(compiled, sorted(request.sampling.stop_token_ids))
        self._live[seq.request_id] = _Live(matcher, _answer_start(request))

    def end(self, key: str) -> None:
        """The sequence has ended; unknown ones are ignored."""
        self._live.pop(key, None)

    def masks(self, seqs: Iterable[TokenSequence]) -> tuple[dict[str, NDArray[np.int32]], dict[str, RequestError]]:
        """The tokens that may follow each of these sequences, i32[words], and those that cannot go on.

        Sequences without a grammar are in neither.
        """
        masks: dict[str, NDArray[np.int32]] = {}
        errors: dict[str, RequestError] = {}
        for seq in seqs:
            live = self._live.get(seq.request_id)
            if live is None:
                continue
            try:
                masks[seq.request_id] = self._mask(live, seq)
            except RequestError as error:
                errors[seq.request_id] = error
            except Exception as error:  # the library is foreign code, and its fault is this request's alone
                errors[seq.request_id] = EngineFailed(f"the grammar failed: {error}")
        return masks, errors

    def wait_fds(self) -> list[int]:
        """A descriptor that is readable when something was compiled; see :meth:`woken`."""
        return [] if self._wake is None else [self._wake[0]]

    def woken(self) -> None:
        """Read the descriptor empty."""
        if self._told and self._wake is not None:
            self._told = False  # before the reading: a byte that comes in between is told again
            try:
                os.read(self._wake[0], 4096)
            except BlockingIOError:
                pass

    def close(self) -> None:
        """End the thread as soon as it is done with what it does. Safe to call twice."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        wake, self._wake = self._wake, None
        for descriptor in wake or ():
            os.close(descriptor)
        self._live.clear()

    def _mask(self, live: _Live, seq: TokenSequence) -> NDArray[np.int32]:
        while live.fed < len(seq.tokens):
            if not live.matcher.accept(seq.tokens[live.fed]):
                raise EngineFailed(f"token {seq.tokens[live.fed]} of the answer does not fit its grammar")
            live.fed += 1
        row = np.zeros(self._words, np.int32)
        live.matcher.fill(row)
        if not row.any():
            raise InvalidRequest("no token can follow: nothing this model can write fits the grammar")
        return row

    def _submit(self, grammar: Grammar) -> Future[Any]:
        assert self._backend is not None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "grammars")
            self._wake = os.pipe()
            for descriptor in self._wake:
                os.set_blocking(descriptor, False)
        future = self._compiled[grammar] = self._threads.submit(self._backend.compile, grammar)
        future.add_done_callback(self._tell)
        for old in list(self._compiled):
            if len(self._compiled) <= KEPT:
                break
            if self._compiled[old].done():
                del self._compiled[old]
        return future

    def _tell(self, _: Future[Any]) -> None:
        wake = self._wake
        if wake is not None:
            try:
                os.write(wake[1], b"\0")
                self._told = True  # after the byte, so that there is one to read
            except OSError:  # full, and so readable; or closed, and nobody waits
                pass


def _answer_start(request: GenerateRequest) -> int:
    return len(request.tokens) - request.answered
