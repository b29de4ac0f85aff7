"""One worker as its supervisor keeps it: what to run, what runs, what it said last."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vla_cloud.config import WorkerRules
from vla_cloud.pools.link import GatewayLink
from vla_cloud.pools.messages import LaneReady, Load, Ready
from vla_common.backoff import Backoff


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to run. ``command(address, worker_id)`` is its program and arguments."""

    name: str
    role: str
    command: Callable[[str, str], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    log_path: Path | None = None


class WorkerChild:
    """One worker: its present process, if any, and when the next is due."""

    def __init__(self, spec: WorkerSpec, rules: WorkerRules) -> None:
        """Not started."""
        self.spec = spec
        self.backoff = Backoff(rules.backoff_min_s, rules.backoff_max_s, rules.backoff_reset_s)
        self.starts = 0
        self.child: subprocess.Popen[bytes] | None = None
        self.link: GatewayLink | None = None
        self.state = "stopped"
        self.detail = ""
        self.lost = True  # the listener was told, or never heard of it
        self.announced = False
        self.kill_ns = 0  # when a lost one is killed
        self.next_ping_ns = 0
        self.answered_ns = 0
        self.sequence = 0
        self.ready: Ready | LaneReady | None = None
        self.load: Load | None = None
        self.role_switches = 0

    @property
    def worker_id(self) -> str:
        """Of the present process, or the last one."""
        return f"{self.spec.name}.{self.starts}"

    @property
    def child_pid(self) -> int:
        """0 if none runs."""
        return 0 if self.child is None else self.child.pid

    def kill(self) -> None:
        """Kill the process and what it started; the caller learns of its end from ``child.poll()``."""
        if self.child is not None and self.child.returncode is None:
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
