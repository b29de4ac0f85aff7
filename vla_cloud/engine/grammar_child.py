"""A process that finds out whether grammars can be served: JSON lines in, JSON lines out, one at a time.

Each grammar is compiled, and a few masks are made, in a fork of its own with a limit of processor time and memory:
what a hostile schema costs is bounded, whatever it does to the library. Started by the gateway, which loads no torch.

    {"kind": ..., "text": ...}  ->  {"error": ""}  or  {"error": "why not"}
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from vla_cloud.core.generate import InvalidRequest
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.engine.grammar_xgrammar import XGrammarBackend

_TRIAL_TOKENS: Final = 64
_WALL_FACTOR: Final = 10
"""A busy machine may take so many times the processor time."""
_MAX_ANSWER: Final = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the end of standard input."""
    parser = argparse.ArgumentParser(description="Started by 'vla cloud', not by hand.")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--eos", type=int, nargs="+", required=True)
    parser.add_argument("--cpu-s", type=float, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process by closing its input
    backend = XGrammarBackend(options.folder, None, options.eos)
    try:
        backend.load()
    except Exception as error:
        _say(str(error))
        return 1
    _say("")
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        _say(_checked_apart(backend, Grammar(asked["kind"], asked["text"]), options))
    return 0


def _say(error: str) -> None:
    sys.stdout.buffer.write(json.dumps({"error": error}).encode() + b"\n")
    sys.stdout.buffer.flush()


def _checked_apart(backend: XGrammarBackend, grammar: Grammar, options: Any) -> str:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        _in_fork(backend, grammar, options, writable)
    os.close(writable)
    try:
        ready, _, _ = select.select([readable], [], [], options.cpu_s * _WALL_FACTOR)
        told = os.read(readable, _MAX_ANSWER) if ready else b""
    finally:
        os.close(readable)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(pid, 0)
    if told:
        return told[1:].decode(errors="replace")
    return f"the schema takes more than {options.cpu_s:g} s or {options.memory_bytes >> 20} MiB to compile: simplify it"


def _in_fork(backend: XGrammarBackend, grammar: Grammar, options: Any, writable: int) -> None:
    """Never returns. Writes one byte and the error, or nothing if a limit ends it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library's warnings are about the client's schema
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, options.cpu_s)
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        limit = size + options.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            _try(backend, grammar, options.eos)
            error = ""
        except (InvalidRequest, MemoryError) as caught:
            error = str(caught) or "the schema takes too much memory: simplify it"
        os.write(writable, b"=" + error.encode(errors="replace")[: _MAX_ANSWER - 1])
    finally:
        os._exit(0)


def _try(backend: XGrammarBackend, grammar: Grammar, eos: Sequence[int]) -> None:
    matcher = backend.matcher(backend.compile(grammar), eos)
    row = np.zeros(backend.words, np.int32)
    chance = random.Random(0)
    for _ in range(_TRIAL_TOKENS):
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed):
            raise InvalidRequest("the schema admits no answer")
        token = int(chance.choice(allowed))
        matcher.accept(token)
        if token in eos:
            return


if __name__ == "__main__":
    sys.exit(main())
