"""Finds out before any work whether the workers could serve a grammar, in a process that a bad one cannot stop."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import select
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from vla_cloud.core.generate import InvalidRequest, QueueFull, RequestError
from vla_cloud.core.grammar import checked
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.gateway.settings import GrammarRules

LOG = logging.getLogger(__name__)
MISSING: Final = "structured output needs xgrammar: pip install 'vla-runtime[structured]'"
PROGRAM: Final = "vla_cloud.engine.grammar_child"
_KEPT: Final = 256
_START_S: Final = 120.0
_ANSWER_FACTOR: Final = 12.0
"""Of the processor time; the child itself gives up after ten times that."""


class CheckerFailed(RequestError):
    """The process that checks does not work."""

    code = "UNAVAILABLE"


class GrammarChecker:
    """Used in one event loop. The process is started by the first grammar, which takes seconds."""

    def __init__(self, folder: Path, eos_token_ids: Iterable[int], rules: GrammarRules) -> None:
        """``folder``: of the model's tokenizer. Nothing is started."""
        self._rules = rules
        self._child = _Child(folder, sorted(eos_token_ids), rules)
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._known: OrderedDict[Grammar, str] = OrderedDict()
        self._running: dict[Grammar, Future[str]] = {}

    async def check(self, grammar: Grammar) -> None:
        """Return if the grammar can be served; known ones at once.

        Raises:
            InvalidRequest: it cannot, or the library is not installed. QueueFull: too many wait to be checked.
            CheckerFailed: the process ends, or does not answer.
        """
        checked(grammar)
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidRequest(MISSING)
        error = self._known.get(grammar)
        if error is None:
            future = self._running.get(grammar)
            if future is None or future.done():
                future = self._submit(grammar)
            # Others may wait for the same: a client that leaves does not end it.
            error = await asyncio.shield(asyncio.wrap_future(future))
            self._running.pop(grammar, None)
            self._known[grammar] = error
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(grammar)
        if error:
            raise InvalidRequest(error)

    def close(self) -> None:
        """End the process and the thread. Safe to call twice."""
        self._child.kill()
        try:
            self._thread.submit(self._child.end)
        except RuntimeError:  # closed before
            return
        self._thread.shutdown(wait=True)

    def _submit(self, grammar: Grammar) -> Future[str]:
        for done in [one for one, future in self._running.items() if future.done()]:
            del self._running[done]  # whose clients have left, or that failed
        if len(self._running) >= self._rules.max_waiting:
            error = QueueFull(f"overloaded: {len(self._running)} schemas wait to be compiled; try again")
            error.retry_after_s = 1.0  # type: ignore[attr-defined]
            raise error
        try:
            future = self._running[grammar] = self._thread.submit(self._child.ask, grammar)
        except RuntimeError as closed:
            raise CheckerFailed("the server ends") from closed
        return future


class _Child:
    """The process; used by one thread, save :meth:`kill`."""

    def __init__(self, folder: Path, eos_token_ids: list[int], rules: GrammarRules) -> None:
        self._command = [
            sys.executable, "-m", PROGRAM, "--folder", str(folder), "--eos", *map(str, eos_token_ids),
            "--cpu-s", str(rules.cpu_s), "--memory-bytes", str(rules.memory_bytes),
        ]  # fmt: skip
        self._answer_s = rules.cpu_s * _ANSWER_FACTOR
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def ask(self, grammar: Grammar) -> str:
        """What is wrong with it, or "". Raises CheckerFailed."""
        if self._is_closed:
            raise CheckerFailed("the server ends")
        try:
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            line = json.dumps({"kind": grammar.kind, "text": grammar.text}).encode() + b"\n"
            self._process.stdin.write(line)
            self._process.stdin.flush()
            return self._read(self._answer_s)
        except OSError as error:
            self.end()
            raise CheckerFailed(f"schemas cannot be checked: {error}") from error
        except BaseException:
            self.end()
            raise

    def kill(self) -> None:
        """From another thread: whoever waits for an answer gets an end of file, and none is begun any more."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )  # fmt: skip
        if self._is_closed:
            self._process.kill()
        error = self._read(_START_S)
        if error:
            raise CheckerFailed(f"schemas cannot be checked: {error}")

    def _read(self, timeout_s: float) -> str:
        process = self._process
        assert process is not None and process.stdout is not None
        descriptor, line = process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], timeout_s)
            part = os.read(descriptor, 65536) if ready else b""
            if not part:
                raise CheckerFailed("the process that checks schemas does not answer: try again")
            line += part
        return str(json.loads(line)["error"])

    def end(self) -> None:
        """The process is gone, and its pipes are closed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                try:
                    if pipe is not None:
                        pipe.close()
                except OSError:  # what was not written went with the process
                    pass
