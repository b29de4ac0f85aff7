"""The engine beside other work of a process: in a thread of its own, and in `vla cloud`."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from serving_rig import BASE, ROOT, chain_specs, reference

from vla_cloud.core.generate import GenerateRequest, SamplingParams
from vla_cloud.pools.events import TokenEvent
from vla_cloud.pools.serving_thread import ServingError, ServingThread, StartInterrupted
from vla_common.clock import SystemClock
from vla_common.process import StopFlag


async def ask(thread: ServingThread, tokens: list[int], count: int) -> list[int]:
    got: list[int] = []
    async for event in thread.service.generate(GenerateRequest("r", tuple(tokens), SamplingParams(max_new_tokens=count))):
        if isinstance(event, TokenEvent):
            got.extend(event.tokens)
    return got


def test_a_thread_serves_and_stops() -> None:
    thread = ServingThread(BASE, SystemClock(), chain_specs(BASE))
    with pytest.raises(ServingError, match="not running"):
        thread.call(ask(thread, [1], 1))
    thread.start()
    try:
        assert thread.call(ask(thread, [1, 2, 3], 5)) == reference([1, 2, 3], 5)
        assert thread.service.health()["serving"]
    finally:
        thread.stop(drain_s=1.0)
        thread.stop()
    assert {info.state for info in thread.supervisor.infos()} == {"stopped"}


def test_a_stop_does_not_wait_for_workers_that_load() -> None:
    stop = StopFlag()
    threading.Timer(0.2, stop.set).start()
    def sleep(address: str, worker: str) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(60)"]

    thread = ServingThread(BASE, SystemClock(), [replace(spec, command=sleep) for spec in chain_specs(BASE)])
    with pytest.raises(StartInterrupted):
        thread.start(stop)
    assert {info.state for info in thread.supervisor.infos()} == {"stopped"}


def test_workers_that_cannot_start_are_an_error_that_names_them() -> None:
    config = replace(BASE, model="unloadable", colocated=True)
    with pytest.raises(ServingError, match="w0 failed"):
        ServingThread(config, SystemClock(), chain_specs(config)).start()


def test_vla_cloud_says_which_chat_model_is_missing(tmp_path: Path) -> None:
    settings = [f"serving.model={tmp_path}/no", "serving.nice=0", "serving.supervisor.start_s=250"]
    arguments = ["--listen", "tcp/127.0.0.1:0", *(part for one in settings for part in ("--set", one))]
    command = [sys.executable, "-m", "vla_cloud.cloud_main", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 2, result.stderr
    assert "not all workers are ready" in result.stderr and ("p0 failed" in result.stderr or "d0 failed" in result.stderr)
    assert f"{tmp_path}/no" in result.stderr
