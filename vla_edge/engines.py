"""Which engine denoises on this machine, and why. The engines themselves are imported only when they are used."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from vla_common.clock import NS_PER_S, Clock
from vla_common.manifest import Manifest
from vla_edge.core.denoiser import Denoiser, DenoiserError
from vla_edge.core.denoiser_io import DenoiserShapes

LOG = logging.getLogger(__name__)

EngineName = Literal["onnxruntime", "torch", "tensorrt"]
EngineSetting = Literal["auto", "onnxruntime", "torch", "tensorrt"]

REMEDIES: Final[dict[EngineName, str]] = {
    "onnxruntime": "pip install 'vla-runtime[edge]'",
    "torch": "pip install torch safetensors (or 'vla-runtime[cloud]')",
    "tensorrt": "install TensorRT and the GPU's driver ('vla doctor' says what is missing)",
}


@dataclass(frozen=True)
class EngineChoice:
    """Outcome of :func:`choose_engine`: the engine, and why this one, in words for an operator."""

    name: EngineName
    why: str


@dataclass(frozen=True)
class EngineProbe:
    """How a missing engine shows. Each returns None if it is there, else what is missing."""

    onnxruntime: Callable[[], str | None]
    torch: Callable[[], str | None]
    tensorrt: Callable[[], str | None]
    gpu: Callable[[], str | None]


def choose_engine(setting: EngineSetting, probe: EngineProbe | None = None) -> EngineChoice:
    """The engine for ``policy.engine``: ``auto`` takes TensorRT where it and a GPU are there, else ONNX Runtime.

    Raises:
        DenoiserError: what was asked for is not there; holds the remedy.
    """
    probe = probe or system_probe()
    if setting != "auto":
        missing = getattr(probe, setting)() or (probe.gpu() if setting == "tensorrt" else None)
        if missing is not None:
            raise DenoiserError(f"policy.engine is {setting}, but {missing}: {REMEDIES[setting]}, or set "
                                "policy.engine to auto")
        return EngineChoice(setting, f"policy.engine is {setting}")
    without = probe.gpu() or probe.tensorrt()
    if without is None:
        return EngineChoice("tensorrt", "TensorRT and a GPU are there")
    missing = probe.onnxruntime()
    if missing is not None:
        raise DenoiserError(f"no engine for the policy: {missing}: {REMEDIES['onnxruntime']}; TensorRT: {without}")
    return EngineChoice("onnxruntime", f"TensorRT is no choice: {without}")


def make_denoiser(folder: Path, manifest: Manifest, setting: EngineSetting = "auto", fp16: bool = False,
                  probe: EngineProbe | None = None) -> Denoiser:
    """The denoiser of a verified model folder on the chosen engine.

    Under ``auto`` a TensorRT that cannot make its engine is a warning, and ONNX Runtime takes over.

    Args:
        folder: model folder. manifest: of it.
        setting, fp16: ``policy.engine`` and ``policy.fp16``.
        probe: looks for engines, default this machine.

    Raises:
        DenoiserError: no engine, or files that do not fit; holds the remedy.
        ManifestError: the engine needs a file that the folder lacks.
    """
    choice = choose_engine(setting, probe)
    LOG.info("engine %s: %s", choice.name, choice.why)
    if fp16 and choice.name != "tensorrt":
        LOG.warning("policy.fp16 concerns TensorRT only: %s computes in float32", choice.name)
    try:
        return _make(choice.name, folder, manifest, fp16)
    except DenoiserError as error:
        if setting != "auto" or choice.name != "tensorrt":
            raise
        LOG.warning("DEGRADED: TensorRT is there but of no use (%s): going on with ONNX Runtime; set policy.engine to "
                    "onnxruntime if that is meant", error)
    return _make("onnxruntime", folder, manifest, False)


def _make(name: EngineName, folder: Path, manifest: Manifest, fp16: bool) -> Denoiser:
    if name == "tensorrt":
        from vla_edge.adapters.denoiser_tensorrt import TensorRtDenoiser

        return TensorRtDenoiser(folder, manifest, fp16)
    if name == "torch":
        from vla_edge.adapters.denoiser_torch import TorchDenoiser

        return TorchDenoiser(folder, manifest)
    from vla_edge.adapters.denoiser_onnx import OnnxDenoiser

    return OnnxDenoiser(folder, manifest)


def system_probe() -> EngineProbe:
    """Looks at this machine. TensorRT is imported, because its bindings are often there without its libraries."""

    def installed(*modules: str) -> Callable[[], str | None]:
        def look() -> str | None:
            missing = [module for module in modules if importlib.util.find_spec(module) is None]
            return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed" if missing else None

        return look

    return EngineProbe(installed("onnxruntime"), installed("torch", "safetensors"), missing_tensorrt, missing_gpu)


def missing_tensorrt() -> str | None:
    """What keeps TensorRT from being imported; None if nothing does."""
    if importlib.util.find_spec("tensorrt") is None:
        return "tensorrt is not installed"
    try:
        importlib.import_module("tensorrt")
    except Exception as error:  # a broken installation raises whatever its loader meets
        return f"tensorrt is installed but cannot be imported ({type(error).__name__}: {error})"
    return None


def missing_gpu() -> str | None:
    """Why no GPU can be used; None if one can."""
    from vla_edge.adapters.cuda_driver import CudaError, find_gpu

    try:
        find_gpu()
    except CudaError as error:
        return f"no GPU can be used ({error})"
    return None


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one job over many rounds."""

    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    rounds: int

    @classmethod
    def of(cls, taken_ns: list[int]) -> Latency:
        """Quantiles of measured nanoseconds."""
        p50, p99, p999, worst = np.percentile(np.asarray(taken_ns, dtype=np.float64) / (NS_PER_S / 1e3),
                                              [50.0, 99.0, 99.9, 100.0])
        return cls(float(p50), float(p99), float(p999), float(worst), len(taken_ns))


def measure_latency(denoiser: Denoiser, manifest: Manifest, clock: Clock, rounds: int = 200) -> dict[str, Latency]:
    """How long an engine takes here, for the context reused (``denoise``) and for ``encode``, one after the other.

    Args:
        denoiser: made for ``manifest``.
        manifest: of the model.
        clock: the host's.
        rounds: of each.
    """
    shapes = DenoiserShapes.of(manifest)
    rng = np.random.default_rng(0)
    now, previous = (rng.standard_normal((shapes.tokens, shapes.dim)).astype(np.float32) for _ in range(2))
    noise, proprio = np.zeros((shapes.horizon, shapes.joints), np.float32), np.zeros(shapes.proprio, np.float32)
    encode_ns, denoise_ns = [], []
    for _ in range(rounds):
        start_ns = clock.monotonic_ns()
        handle = denoiser.encode_context(now, previous)
        middle_ns = clock.monotonic_ns()
        denoiser.denoise(handle, proprio, 0.1, 0.5, noise)
        end_ns = clock.monotonic_ns()
        encode_ns.append(middle_ns - start_ns)
        denoise_ns.append(end_ns - middle_ns)
    return {"encode": Latency.of(encode_ns), "denoise": Latency.of(denoise_ns)}
