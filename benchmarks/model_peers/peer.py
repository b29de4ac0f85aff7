"""Another engine in a process of its own, and its cases for model_speed.py."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Took:
    """Seconds per token of a prefill, or per decode step."""

    wall_s: float
    cpu_s: float


class PeerMissing(RuntimeError):
    """No such engine there, or it did not start; says what was tried."""


class Peer:
    """``engine`` (vllm, openvino) of the Python at ``python``, given ``model``; its chatter goes to ``log``."""

    def __init__(self, engine: str, python: Path, model: Path, log: Path) -> None:
        if not python.is_file():
            raise PeerMissing(f"{engine}: no Python at {python}")
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("w") as stderr:
            # Not resolved: the name of a virtual environment's Python is what tells it where its packages are.
            self._process = subprocess.Popen(
                [python, CHILD, engine, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env=environment | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._failed = f"{engine}: the process ended; see {log}"
        self._read()

    def ask(self, prompts: list[list[int]], steps: int, profile: bool = False) -> dict[str, Any]:
        """One job; see child.py."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "steps": steps, "profile": profile}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def profile(self, tokens: int, vocabulary: int) -> str:
        """Where the time of a prefill goes, by operator (vllm)."""
        return str(self.ask([np.random.default_rng().integers(0, vocabulary, tokens).tolist()], 0, True)["profile"])

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise PeerMissing(self._failed)
        return json.loads(line)

    def work(self, vocabulary: int, context: int, steps: int) -> tuple[Callable[[int], Took], Callable[[int], Took]]:
        """Prefill of so many tokens, new ones each time, and decoding of so many sequences, always the same."""
        rng = np.random.default_rng()

        def prefill(tokens: int) -> Took:
            took = self.ask([rng.integers(0, vocabulary, tokens).tolist()], 0)
            return Took(took["wall_s"] / tokens, took["cpu_s"] / tokens)

        def decode(batch: int) -> Took:
            fixed = np.random.default_rng(0)
            took = self.ask([fixed.integers(0, vocabulary, context).tolist() for _ in range(batch)], steps)
            return Took(took["wall_s"] / steps, took["cpu_s"] / steps)

        return prefill, decode
