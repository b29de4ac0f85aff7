"""``vla doctor``: what works on this machine, and the remedy for what does not.

Every check is a function that returns one :class:`Finding`; none changes anything.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from vla_cli.graphics import APT_LINE, working_backend
from vla_common.manifest import FILE_NAME, ManifestError, load_manifest

Level = Literal["ok", "note", "fail"]

EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "base": ("numpy", "yaml", "rosbags", "xxhash", "zenoh"),
    "cloud": ("torch", "safetensors", "PIL"),
    "edge": ("onnxruntime", "PIL", "mcap"),
    "sim": ("mujoco", "PIL", "matplotlib", "mcap", "imageio_ffmpeg", "rich"),
    "train": ("torch", "onnx", "onnxscript"),
}


@dataclass(frozen=True)
class Finding:
    """Result of one check. ``note``: something works with a limitation; ``fail``: something cannot work."""

    level: Level
    subject: str
    text: str
    remedy: str = ""


def check_python() -> Finding:
    """Python version."""
    text = f"{platform.python_version()} on {platform.machine()}"
    if sys.version_info < (3, 10):  # noqa: UP036 (a source tree can be run with any Python)
        return Finding("fail", "python", text, "install Python 3.10 or newer")
    return Finding("ok", "python", text)


def check_extra(extra: str) -> Finding:
    """Whether the modules of an extra are there (found, not imported)."""
    missing = [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]
    if missing:
        level: Level = "fail" if extra == "base" else "note"
        return Finding(
            level,
            f"extra {extra}",
            f"missing: {', '.join(missing)}",
            f"pip install 'vla-runtime[{extra}]'" if extra != "base" else "pip install vla-runtime",
        )
    return Finding("ok", f"extra {extra}", "present")


def check_graphics() -> Finding:
    """Off-screen rendering, which the simulator needs."""
    if importlib.util.find_spec("mujoco") is None:
        return Finding("note", "rendering", "not tried: mujoco is not installed", "pip install 'vla-runtime[sim]'")
    backend = working_backend()
    if backend is None:
        return Finding("fail", "rendering", "neither EGL nor OSMesa draws a frame", f"as root: {APT_LINE}")
    return Finding("ok", "rendering", f"works with MUJOCO_GL={backend}")


def check_realtime() -> Finding:
    """Permission for SCHED_FIFO 80 and locked memory, which keep the motor clock on time under load."""
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
        return Finding(
            "note",
            "real time",
            "no permission for SCHED_FIFO 80; the motor clock runs at ordinary priority",
            "add '@robot - rtprio 80' and '@robot - memlock unlimited' to /etc/security/limits.conf for the "
            "robot's group, or give the container CAP_SYS_NICE and CAP_IPC_LOCK",
        )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() != 0 and locked not in (-1, resource.RLIM_INFINITY) and locked < 512 << 20:
        return Finding(
            "note",
            "real time",
            f"SCHED_FIFO permitted, but only {locked >> 20} MiB of memory may be locked",
            "add '@robot - memlock unlimited' to /etc/security/limits.conf",
        )
    return Finding("ok", "real time", "SCHED_FIFO 80 and locked memory permitted")


def check_governor(root: Path = Path("/sys/devices/system/cpu")) -> Finding:
    """CPU frequency governor; ``powersave`` adds wake-up latency."""
    names = {path.read_text().strip() for path in root.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    if not names:
        return Finding("ok", "cpu governor", "none (a virtual machine, or fixed frequency)")
    if names == {"performance"}:
        return Finding("ok", "cpu governor", "performance")
    return Finding("note", "cpu governor", ", ".join(sorted(names)), "cpupower frequency-set -g performance")


def check_engines() -> Finding:
    """Denoiser engines on this machine."""
    found = []
    for module, distribution in (
        ("onnxruntime", "onnxruntime"),
        ("openvino", "openvino"),
        ("tensorrt", "tensorrt"),
        ("torch", "torch"),
    ):
        if importlib.util.find_spec(module) is not None:
            try:
                found.append(f"{module} {importlib.metadata.version(distribution)}")
            except importlib.metadata.PackageNotFoundError:  # such as onnxruntime-gpu, or a vendor's build
                found.append(module)
    if not any(engine.startswith("onnxruntime") for engine in found):
        return Finding("note", "engines", ", ".join(found) or "none", "pip install 'vla-runtime[edge]'")
    return Finding("ok", "engines", ", ".join(found))


def check_ros() -> Finding:
    """ROS 2, which is optional: the wire needs none."""
    distribution = os.environ.get("ROS_DISTRO", "")
    has_rclpy = importlib.util.find_spec("rclpy") is not None
    if has_rclpy:
        return Finding("ok", "ros 2", f"rclpy present{f', {distribution}' if distribution else ''}")
    if distribution or Path("/opt/ros").is_dir():
        return Finding(
            "note",
            "ros 2",
            "installed, but rclpy is not importable here",
            "source /opt/ros/<distribution>/setup.bash before starting",
        )
    return Finding("ok", "ros 2", "not installed (optional)")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Room for the mailboxes between the edge's processes."""
    try:
        free_mib = shutil.disk_usage(folder).free >> 20
    except OSError:
        return Finding("fail", "shared memory", f"no {folder}", "mount a tmpfs there")
    if free_mib < 16:
        return Finding("fail", "shared memory", f"{free_mib} MiB free in {folder}", "give the container --shm-size=64m")
    return Finding("ok", "shared memory", f"{free_mib} MiB free")


def check_models(root: Path) -> Iterator[Finding]:
    """Verify every model folder under ``root``."""
    folders = sorted(path.parent for path in root.glob(f"*/{FILE_NAME}"))
    if not folders:
        yield Finding("note", "models", f"no model folder in {root}/", "run from the source tree, or give --models")
    for folder in folders:
        try:
            manifest = load_manifest(folder)
        except ManifestError as error:
            yield Finding("fail", f"model {folder.name}", str(error))
        else:
            yield Finding(
                "ok",
                f"model {folder.name}",
                f"{len(manifest.files)} files verified, hash {manifest.model_hash.hex()[:12]}",
            )


def findings(models: Path) -> Iterator[Finding]:
    """All checks in order."""
    yield check_python()
    for extra in EXTRAS:
        yield check_extra(extra)
    checks: tuple[Callable[[], Finding], ...] = (
        check_graphics,
        check_realtime,
        check_governor,
        check_engines,
        check_ros,
        check_shared_memory,
    )
    for check in checks:
        yield check()
    yield from check_models(models)


def main(argv: list[str]) -> int:
    """Print all findings. Returns 1 if any check failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="vla doctor", description="Check this machine and say what to do about what is missing."
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of model folders (default: models)")
    arguments = parser.parse_args(argv)
    failed = 0
    for finding in findings(arguments.models):
        failed += finding.level == "fail"
        print(f"{finding.level:<4}  {finding.subject:<14} {finding.text}")
        if finding.remedy:
            print(f"{'':<21}→ {finding.remedy}")
    return 1 if failed else 0
