"""The processes of this benchmark: they end with it, and their processor time can be read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_CPU_CLOCK = 2
_START_S = 60.0
# Set by the launcher before it becomes the other program: the kernel ends that with this process.
_LAUNCH = (
    "import os, sys; from vla_common.process import end_with_parent; "
    "end_with_parent(); os.execv(sys.argv[1], sys.argv[1:])"
)
ROUTERS = {
    "sglang": (
        "-m", "sglang_router.launch_router", "--log-level", "warn", "--prometheus-host", "127.0.0.1",
        "--worker-startup-timeout-secs", "30", "--worker-startup-check-interval", "1",
    ),
    "vllm": (
        "-m", "vllm_router.launch_router", "--log-level", "warning", "--prometheus-host", "127.0.0.1",
        "--worker-startup-timeout-secs", "30", "--worker-startup-check-interval", "1",
    ),
}  # fmt: skip


class PeerMissing(RuntimeError):
    """No such router there, or it did not start; says what was tried."""


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, all threads, in seconds."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


class Child:
    """A program of ours that prints one JSON object when it is ready, and answers orders with one each."""

    def __init__(self, program: str, *arguments: str, log: Path, root: Path = ROOT) -> None:
        """``root``: the checkout whose packages it uses."""
        path = os.pathsep.join((str(root), str(HERE.parent)))
        environment = {**os.environ, "PYTHONPATH": path, "VLA_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        self.name, self._log = program, log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / program), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, env=environment, text=True,
            )  # fmt: skip
        self.pid = self._process.pid

    def read(self) -> dict[str, Any]:
        """The next object. RuntimeError if the process has ended, or says that something failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            told = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} ended: {told}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"{self.name}: {found['error']}")
        return found

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """An order and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End it: its standard input ends, then it is told, then killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if self.name == "mock_worker.py":
            self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Router:
    """A router of another project, installed elsewhere, in front of ``urls``; its chatter goes to ``log``."""

    def __init__(self, name: str, python: Path, urls: list[str], log: Path) -> None:
        """Waits until it answers a question. PeerMissing if it does not."""
        if name not in ROUTERS:
            raise PeerMissing(f"--peer {name}: routers are {' and '.join(ROUTERS)}, as router=/path/to/python")
        if not python.is_file():
            raise PeerMissing(f"{name}: no Python at {python}")
        self.port, metrics = free_port(), free_port()
        command = [
            str(python), *ROUTERS[name], "--host", "127.0.0.1", "--port", str(self.port), "--policy", "cache_aware",
            "--prometheus-port", str(metrics), "--worker-urls", *urls,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLA_PARENT_PID": str(os.getpid())}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=environment,
            )  # fmt: skip
        self.pid = self._process.pid
        try:
            self._wait(name, log)
        except PeerMissing:
            self.close()
            raise

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self, name: str, log: Path) -> None:
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        asked = {"model": "bench", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        body = json.dumps(asked).encode()
        end_s = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < end_s:
            try:
                request = urllib.request.Request(url, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=5.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise PeerMissing(f"{name}: it does not answer; see {log}")


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
