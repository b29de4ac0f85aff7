"""What model_speed.py asks of other engines: what is timed, and what happens where there is none."""

from __future__ import annotations

import importlib.util
import stat
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "model_peers"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"model_peers_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


child, peer = load("child"), load("peer")


class Engine:
    """Two prompts' chunks a step; all that are through decode in the same step."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.limit: dict[str, int] = {}
        self.waiting: list[str] = []
        self.asked: list[tuple[int, bool]] = []
        self.steps = 0

    def add(self, name, prompt, tokens, cached):
        self.asked.append((tokens, cached))
        self.count[name], self.limit[name] = 0, tokens
        self.waiting.append(name)

    def step(self):
        self.steps += 1
        for name in self.count:
            if name not in self.waiting:
                self.count[name] = min(self.limit[name], self.count[name] + 1)
        for name in self.waiting[:2]:
            self.count[name] = 1
        del self.waiting[:2]

    def drain(self):
        while any(self.count[name] < self.limit[name] for name in self.count):
            self.step()
        self.count.clear()


@pytest.fixture
def clock(monkeypatch):
    """Engine whose step takes one second."""
    engine = Engine()
    monkeypatch.setattr(child.time, "perf_counter", lambda: float(engine.steps))
    monkeypatch.setattr(child.time, "process_time", lambda: 0.5 * engine.steps)
    return engine


def test_a_prefill_is_timed_to_the_first_token_of_all_and_not_read_from_a_cache(clock):
    assert child.answer(clock, {"prompts": [[1], [2], [3]], "steps": 0}, 0) == {"wall_s": 2.0, "cpu_s": 1.0}
    assert [cached for _, cached in clock.asked] == [False] * 3 and not clock.count


def test_decode_steps_are_timed_once_all_decode_without_the_prompts(clock):
    prompts = [[index] for index in range(6)]
    assert child.answer(clock, {"prompts": prompts, "steps": 8}, 0) == {"wall_s": 8.0, "cpu_s": 4.0}
    assert [tokens for tokens, _ in clock.asked] == [1] * 6 + [12] * 6


def test_a_sequence_that_would_end_early_is_an_error_not_a_smaller_batch(clock):
    with pytest.raises(RuntimeError, match="ended before"):
        child.answer(clock, {"prompts": [[index] for index in range(20)], "steps": 8}, 0)


def test_an_engine_that_is_not_there_is_said(tmp_path):
    with pytest.raises(peer.PeerMissing, match="no Python at /nowhere"):
        peer.Peer("vllm", Path("/nowhere/python"), tmp_path, tmp_path / "log")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(peer.PeerMissing, match="the process ended; see"):
        peer.Peer("vllm", broken, tmp_path, tmp_path / "log")
    assert "no such module" in (tmp_path / "log").read_text()
