"""``vla doctor`` on the policy's engine: which one this machine uses, why, and what keeps the faster one away."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vla_cli.finding import Finding
from vla_edge.core.denoiser import DenoiserError
from vla_edge.engines import EngineProbe, choose_engine, missing_tensorrt, system_probe

TEGRA_RELEASE = Path("/etc/nv_tegra_release")
OLDEST_TENSORRT = (10, 3)
ORIN = "8.7"


class GpuInfo(Protocol):
    """What is known of a GPU; see :class:`vla_edge.adapters.cuda_driver.Gpu`."""

    @property
    def name(self) -> str:
        """As the driver calls it."""

    @property
    def compute(self) -> str:
        """Compute capability such as "8.7"."""

    @property
    def driver_cuda(self) -> str:
        """Newest CUDA version that the driver serves."""


@dataclass(frozen=True)
class EngineFacts:
    """What is there, gathered once.

    Attributes:
        gpu: the first one, or in words why none can be used.
        tensorrt: version of the module, or in words why it cannot be imported.
        jetpack: "6.1/6.2" and so on; None: not a Jetson.
    """

    gpu: GpuInfo | str
    tensorrt: tuple[int, ...] | str
    jetpack: str | None


def jetpack_of(release: str) -> str | None:
    """JetPack version from /etc/nv_tegra_release, "# R36 (release), REVISION: 4.3, ..."; None if it says nothing.

    Source: NVIDIA, "JetPack Archive" (Jetson Linux 35: JetPack 5, 36.2 and 36.3: 6.0, 36.4: 6.1 and 6.2, 38: 7).
    """
    found = re.search(r"R(\d+) \(release\), REVISION: (\d+)", release)
    if found is None:
        return None
    major, minor = int(found[1]), int(found[2])
    if major <= 35:
        return "5 or older"
    if major == 36:
        return "6.0" if minor < 4 else "6.1/6.2"
    return "7 or newer"


def gather(tegra_release: Path = TEGRA_RELEASE) -> EngineFacts:
    """Look at this machine."""
    from vla_edge.adapters.cuda_driver import CudaError, find_gpu

    gpu: GpuInfo | str
    try:
        gpu = find_gpu()
    except CudaError as error:
        gpu = str(error)
    missing = missing_tensorrt()
    version: tuple[int, ...] | str = missing or ()
    if missing is None:
        module = importlib.import_module("tensorrt")
        version = tuple(int(part) for part in re.findall(r"\d+", str(getattr(module, "__version__", "0")))[:3])
    try:
        jetpack = jetpack_of(tegra_release.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        jetpack = None
    return EngineFacts(gpu, version, jetpack)


def findings() -> Iterator[Finding]:
    """All checks of this module."""
    facts = gather()
    yield check_engine()
    yield check_gpu(facts)
    yield check_tensorrt(facts)


def check_engine(probe: EngineProbe | None = None) -> Finding:
    """The engine that ``policy.engine: auto`` takes here."""
    try:
        choice = choose_engine("auto", probe or system_probe())
    except DenoiserError as error:
        return Finding("note", "engine", str(error).split(":")[0] + ": vla edge cannot run here",
                       "pip install 'vla-runtime[edge]'")
    try:
        version = " " + importlib.metadata.version(choice.name)
    except importlib.metadata.PackageNotFoundError:  # such as onnxruntime-gpu, or a vendor's build
        version = ""
    return Finding("ok", "engine", f"{choice.name}{version}: {choice.why}")


def check_gpu(facts: EngineFacts) -> Finding:
    """GPU and driver."""
    if not isinstance(facts.gpu, str):
        gpu = facts.gpu
        return Finding("ok", "gpu", f"{gpu.name}, compute capability {gpu.compute}, driver for CUDA {gpu.driver_cuda}")
    if facts.jetpack is not None:
        return Finding("note", "gpu", f"a Jetson, but {facts.gpu}",
                       "in a container: start it with --runtime nvidia; else reinstall nvidia-l4t-cuda")
    return Finding("ok", "gpu", f"none ({facts.gpu}); the policy runs on the CPU")


def check_tensorrt(facts: EngineFacts, python: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """TensorRT, where a GPU makes it worth having."""
    where = f"JetPack {facts.jetpack}" if facts.jetpack else "no Jetson"
    if isinstance(facts.tensorrt, str):
        if isinstance(facts.gpu, str) and facts.jetpack is None:
            return Finding("ok", "tensorrt", "not needed without a GPU")
        return Finding("note", "tensorrt", f"{where}; {facts.tensorrt}", _how_to_install(facts.jetpack, python))
    version = ".".join(map(str, facts.tensorrt))
    if facts.tensorrt < OLDEST_TENSORRT:
        return Finding("fail", "tensorrt", f"{version} ({where}) is too old: the exported graphs need 10.3",
                       "flash JetPack 6.1 or newer, or set policy.engine to onnxruntime")
    if not isinstance(facts.gpu, str) and facts.gpu.compute == ORIN and (10, 13) <= facts.tensorrt < (10, 16):
        return Finding("fail", "tensorrt", f"{version} has no kernels for compute capability {ORIN} (Orin)",
                       "use JetPack 6.1/6.2 (10.3) or 7.2 (10.16), or set policy.engine to onnxruntime")
    if isinstance(facts.gpu, str):
        return Finding("note", "tensorrt", f"{version}, but no GPU ({facts.gpu})", "see the line above")
    return Finding("ok", "tensorrt", f"{version} ({where}); the engine is built at the first start and kept")


def _how_to_install(jetpack: str | None, python: tuple[int, int]) -> str:
    if jetpack is None:
        return "pip install tensorrt (10.3 or newer), or keep policy.engine at auto: ONNX Runtime on the CPU"
    if jetpack in ("5 or older", "6.0"):
        return "flash JetPack 6.1 or newer: TensorRT of this one is older than 10.3"
    if jetpack == "6.1/6.2" and python != (3, 10):
        return f"JetPack 6 has TensorRT for Python 3.10 only, this is {python[0]}.{python[1]}: make the virtual " \
               "environment with python3.10 -m venv --system-site-packages"
    return "apt install python3-libnvinfer, and make the virtual environment with --system-site-packages"
