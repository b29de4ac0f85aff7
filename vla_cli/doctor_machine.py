"""``vla doctor`` on the operating system: what keeps the motor clock on time. ``root`` is / except in tests."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from vla_cli.finding import Finding

ROOT = Path("/")
LIMITS = "/etc/security/limits.conf for the robot's group, then log in again"
MIN_LOCKED_BYTES = 512 << 20


def check_realtime() -> Finding:
    """Permission for SCHED_FIFO 80, which keeps the motor clock on time under load."""
    allowed = os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_RTPRIO)[0] >= 80
    if allowed:
        # Tried for real: containers often have the limit but not the capability.
        try:
            previous = os.sched_getscheduler(0), os.sched_getparam(0)
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(80))
            os.sched_setscheduler(0, previous[0], previous[1])
        except (PermissionError, OSError):
            allowed = False
    if not allowed:
        text = "no permission for SCHED_FIFO 80: the motor clock runs at ordinary priority"
        return Finding("note", "real time", text,
                       f"add '@robot - rtprio 80' to {LIMITS}; or give the container CAP_SYS_NICE")
    return Finding("ok", "real time", "SCHED_FIFO 80 permitted")


def check_memory_lock() -> Finding:
    """Permission to keep the motor process in memory."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() == 0 or locked in (-1, resource.RLIM_INFINITY) or locked >= MIN_LOCKED_BYTES:
        return Finding("ok", "memory lock", "permitted")
    return Finding("note", "memory lock", f"only {locked >> 10} KiB may be locked; a page fault can delay a tick",
                   f"add '@robot - memlock unlimited' to {LIMITS}; or give the container CAP_IPC_LOCK")


def check_governor(root: Path = Path("/sys/devices/system/cpu")) -> Finding:
    """CPU frequency governor; ``powersave`` adds wake-up latency."""
    names = {path.read_text().strip() for path in root.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    if not names:
        return Finding("ok", "cpu governor", "none (a virtual machine, or fixed frequency)")
    if names == {"performance"}:
        return Finding("ok", "cpu governor", "performance")
    return Finding("note", "cpu governor", ", ".join(sorted(names)),
                   "cpupower frequency-set -g performance (on a Jetson: jetson_clocks)")


def check_swap(root: Path = ROOT) -> Finding:
    """Swap: pages of processes that may not lock their memory go there."""
    try:
        rows = (root / "proc/swaps").read_text().splitlines()[1:]
    except OSError:
        rows = []
    if not rows:
        return Finding("ok", "swap", "none")
    used_mib = sum(int(row.split()[3]) for row in rows) >> 10
    names = ", ".join(row.split()[0] for row in rows)
    if used_mib == 0:
        return Finding("ok", "swap", f"{names}, unused")
    return Finding("note", "swap", f"{used_mib} MiB in use on {names}: policy and io can stall for long",
                   "free memory, or swapoff -a while the robot runs")


def check_kernel(root: Path = ROOT) -> Finding:
    """PREEMPT_RT and isolated cores: both optional, both shorten the tail of the motor clock."""

    def read(name: str) -> str:
        try:
            return (root / name).read_text().strip()
        except OSError:
            return ""

    is_realtime = read("sys/kernel/realtime") == "1"
    isolated = read("sys/devices/system/cpu/isolated")
    text = f"{'PREEMPT_RT' if is_realtime else 'not PREEMPT_RT'}, isolated cores: {isolated or 'none'}"
    if isolated:
        return Finding("ok", "kernel", f"{text}; put the motor process there with --set motor.cpu=N")
    return Finding("ok", "kernel", f"{text} (optional: isolcpus=N on the kernel's command line, then motor.cpu: N)")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Room for the mailboxes between the edge's processes."""
    try:
        free_mib = shutil.disk_usage(folder).free >> 20
    except OSError:
        return Finding("fail", "shared memory", f"no {folder}", "mount a tmpfs there")
    if free_mib < 16:
        return Finding("fail", "shared memory", f"{free_mib} MiB free in {folder}", "give the container --shm-size=64m")
    return Finding("ok", "shared memory", f"{free_mib} MiB free")
