"""What /proc knows about the processes of a run: who is whose child, and how much CPU each has used. Linux only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_MODULE_SUFFIX: Final = "_main"


def parent_of(pid: int) -> int | None:
    """Parent's id; None when the process is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def cpu_ticks(pid: int) -> int | None:
    """Clock ticks of user and system time so far, all threads; None when the process is gone."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else None


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the third (state) on; the second may contain spaces and brackets."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return text.rpartition(")")[2].split()


def edge_children(edge_pid: int) -> dict[str, int]:
    """Ids of the processes that an edge supervisor started, by name (motor, policy, io, recorder)."""
    found: dict[str, int] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or parent_of(int(entry.name)) != edge_pid:
            continue
        name = _edge_module(entry)
        if name:
            found[name] = int(entry.name)
    return found


def _edge_module(entry: Path) -> str:
    """``policy`` for a process started as ``python -m vla_edge.policy_main``; empty for others."""
    try:
        arguments = (entry / "cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    for argument in arguments[:4]:
        package, _, module = argument.decode(errors="replace").partition(".")
        if package == "vla_edge" and module.endswith(_MODULE_SUFFIX):
            return module[: -len(_MODULE_SUFFIX)]
    return ""


class CpuSampler:
    """Share of one core per process, between consecutive samples."""

    def __init__(self) -> None:
        """Nothing sampled yet."""
        self.shares: dict[str, list[float]] = {}
        self._last: dict[str, tuple[int, int, int]] = {}  # name → pid, ticks, instant
        self._hz = os.sysconf("SC_CLK_TCK")

    def sample(self, now_ns: int, pids: dict[str, int]) -> dict[str, float]:
        """Shares since the last sample, by name; a restarted process begins anew."""
        newest: dict[str, float] = {}
        for name, pid in pids.items():
            ticks = cpu_ticks(pid)
            before = self._last.get(name)
            if ticks is None:
                self._last.pop(name, None)
                continue
            self._last[name] = (pid, ticks, now_ns)
            if before is not None and before[0] == pid and now_ns > before[2]:
                newest[name] = (ticks - before[1]) / self._hz / ((now_ns - before[2]) * 1e-9)
                self.shares.setdefault(name, []).append(newest[name])
        return newest
