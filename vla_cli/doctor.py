"""``vla doctor``: what works on this machine, and the remedy for what does not.

Every check is a function that returns one :class:`Finding`; none changes anything.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vla_cli.doctor_keys import check_certificates
from vla_cli.doctor_machine import (
    check_governor,
    check_kernel,
    check_memory_lock,
    check_realtime,
    check_shared_memory,
    check_swap,
)
from vla_cli.finding import Finding, Level
from vla_cli.graphics import APT_LINE, working_backend
from vla_common.clock import SystemClock
from vla_common.manifest import FILE_NAME, ManifestError, load_manifest

EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "base": ("numpy", "yaml", "rosbags", "xxhash", "zenoh"),
    "cloud": ("torch", "safetensors", "PIL"),
    "edge": ("onnxruntime", "PIL", "mcap"),
    "sim": ("mujoco", "PIL", "matplotlib", "mcap", "imageio_ffmpeg", "rich"),
    "train": ("torch", "onnx", "onnxscript"),
}


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


def check_engines() -> Iterator[Finding]:
    """The policy's engine, GPU and TensorRT."""
    try:
        from vla_cli.doctor_engine import findings as of_engines  # needs numpy, whose absence was said above
    except ImportError as error:
        yield Finding("fail", "engine", f"not looked at: {error}", "pip install vla-runtime")
    else:
        yield from of_engines()


def check_ros() -> Finding:
    """ROS 2, which is optional: the wire needs none."""
    distribution = os.environ.get("ROS_DISTRO", "")
    has_rclpy = importlib.util.find_spec("rclpy") is not None
    if has_rclpy:
        middleware = os.environ.get("RMW_IMPLEMENTATION", "")
        text = f"rclpy present{f', {distribution}' if distribution else ''}, middleware {middleware or 'the default'}"
        if middleware != "rmw_zenoh_cpp":
            return Finding("note", "ros 2", f"{text}: its nodes do not see the Zenoh bus",
                           "'bus: ros' for the edge, or RMW_IMPLEMENTATION=rmw_zenoh_cpp for the robot's ROS nodes")
        return Finding("ok", "ros 2", text)
    if distribution or Path("/opt/ros").is_dir():
        return Finding(
            "note",
            "ros 2",
            "installed, but rclpy is not importable here",
            "source /opt/ros/<distribution>/setup.bash before starting",
        )
    return Finding("ok", "ros 2", "not installed (optional)")


def check_zenoh() -> Finding:
    """The transport of both networks."""
    if importlib.util.find_spec("zenoh") is None:
        return Finding("fail", "zenoh", "not installed", "pip install vla-runtime")
    try:
        version = importlib.metadata.version("eclipse-zenoh")
    except importlib.metadata.PackageNotFoundError:
        return Finding("note", "zenoh", "present, version unknown", "pip install 'eclipse-zenoh>=1.10.2,<1.11'")
    if not version.startswith("1.10."):
        return Finding("note", "zenoh", f"{version}; tested is 1.10", "pip install 'eclipse-zenoh>=1.10.2,<1.11'")
    return Finding("ok", "zenoh", version)


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
    yield check_graphics()
    for check in (check_realtime, check_memory_lock, check_governor, check_swap, check_kernel, check_shared_memory):
        yield check()
    yield from check_engines()
    yield check_zenoh()
    yield check_ros()
    yield check_certificates(None, SystemClock())
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
