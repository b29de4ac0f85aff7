"""What is left when a gateway ends, however it ends: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serving_rig import BASE, ROOT, rig

from vla_cloud.core.generate import RequestError
from vla_cloud.pools.socket_folder import SocketFolder, remove_abandoned
from vla_common.process import spawn, stop_all

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def temporary() -> Iterator[Path]:
    """Where gateways have their sockets: short, for a socket's name has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="vg") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield Path(folder)


def start() -> tuple[subprocess.Popen[bytes], list[int]]:
    read_fd, write_fd = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLA_LOG": "error"}
    gateway = subprocess.Popen([sys.executable, str(HERE / "gateway.py")], stdout=write_fd, env=environment)
    os.close(write_fd)
    with os.fdopen(read_fd) as output:
        pids = [int(word) for word in output.readline().split()]
    assert len(pids) == 3
    return gateway, pids


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_gateway_leaves_nothing_behind_and_the_next_one_starts(temporary: Path, number: int) -> None:
    gateway, pids = start()
    gateway.send_signal(number)
    assert gateway.wait(60) in (-number, 0)
    for _ in range(6000):
        if not any(is_alive(pid) for pid in pids):
            break
        time.sleep(0.01)
    assert not [pid for pid in pids if is_alive(pid)]
    if number == signal.SIGKILL:
        (left,) = temporary.iterdir()  # its socket
        gateway, pids = start()
        assert not left.exists() and len(list(temporary.iterdir())) == 1
        gateway.terminate()
        assert gateway.wait(60) == 0
    assert not list(temporary.iterdir())


def test_a_stopped_worker_ends_with_a_killed_gateway() -> None:
    gateway, pids = start()
    os.kill(pids[0], signal.SIGSTOP)
    gateway.kill()
    gateway.wait(60)
    for _ in range(6000):
        if not any(is_alive(pid) for pid in pids):
            break
        time.sleep(0.01)
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_stopped_worker_does_not_keep_the_gateway_from_ending() -> None:
    gateway, pids = start()
    os.kill(pids[0], signal.SIGSTOP)
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(60) == 0
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_a_gateway_that_was_stopped_for_a_while_does_not_blame_its_workers() -> None:
    gateway, pids = start()
    gateway.send_signal(signal.SIGSTOP)
    time.sleep(4.0)  # longer than the time after which a silent worker is killed
    gateway.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    try:
        assert [pid for pid in pids if is_alive(pid)] == pids
    finally:
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(60) == 0


def test_a_worker_without_a_gateway_ends() -> None:
    settings = (
        '{"role": "both", "model": "chain", "context_tokens": null, "transfer": "tcp", "blocks": 8, "chunk_tokens": 64,'
        ' "max_running": 1, "max_waiting": 1, "threads": 1}'
    )
    command = [sys.executable, str(HERE / "chain_worker.py"), "--connect", "unix:/nowhere/link", "--worker", "w0.1"]
    worker = spawn([*command, "--settings", settings], environment={"PYTHONPATH": str(ROOT)})
    try:
        assert worker.wait(60) == 1
    finally:
        stop_all([worker])


def test_workers_of_different_kv_get_no_work_together() -> None:  # llm-d#2433: an error, not a hang
    async def go() -> None:
        retry = replace(BASE.retry, capacity_wait_s=1.0)
        async with rig(per_worker={"d0": {"CHAIN_MODEL_HASH": "other"}}, retry=retry) as it:
            with pytest.raises(RequestError) as caught:
                await asyncio.wait_for(it.ask([1, 2, 3], 4), 60.0)
            assert caught.value.code == "UNAVAILABLE"

    asyncio.run(go())


def test_the_folder_of_a_living_gateway_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    first = SocketFolder()
    second = SocketFolder()
    assert first.path.is_dir() and second.path.is_dir() and first.path.stat().st_mode & 0o777 == 0o700
    foreign = temporary / "vla-serving-foreign"  # without a lock: perhaps of another version
    foreign.mkdir()
    first.close()
    first.close()
    remove_abandoned()
    assert sorted(temporary.iterdir()) == sorted([second.path, foreign])
    second.close()
