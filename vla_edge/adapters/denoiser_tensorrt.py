"""The denoiser on TensorRT 10.3 .. 11: which engines are built, and half precision where it agrees with float32."""

from __future__ import annotations

import importlib
import logging
import math
from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_common.manifest import Manifest
from vla_edge.adapters.cuda_driver import CudaDriver, CudaError
from vla_edge.adapters.tensorrt_build import FP32, load_engine, precision_for
from vla_edge.adapters.tensorrt_cache import EngineCache, EngineKey, default_folder
from vla_edge.adapters.tensorrt_runner import Handle, Runner
from vla_edge.core.denoiser import DenoiserError, FloatArray, Prefix
from vla_edge.core.denoiser_io import (
    CONTEXT_FILE,
    DENOISE_FILE,
    DenoiserShapes,
    feed_context,
    feed_denoise,
    warm_up,
)

LOG = logging.getLogger(__name__)

FP16_FILE: Final = "denoise_fp16.onnx"
FP16_TOLERANCE_RAD: Final = 1e-3
"""A tenth of what the shield lets a joint move in a tick at 0.1 rad/s; half precision beyond this is not used."""

_COMPARED: Final = 8


class TensorRtDenoiser:
    """Both graphs of a model folder on the first GPU; see :class:`vla_edge.core.denoiser.Denoiser`."""

    def __init__(self, folder: Path, manifest: Manifest, fp16: bool = False, *, trt: Any = None, cuda: Any = None,
                 cache: EngineCache | None = None) -> None:
        """Build the engines or take them from the cache, check them against the manifest, run them once.

        Args:
            folder: model folder, its files already verified by :func:`vla_common.manifest.load_manifest`.
            manifest: its manifest.
            fp16: half precision, if it agrees with float32 to :data:`FP16_TOLERANCE_RAD`; said in the log if not.
            trt: the module, default ``tensorrt``. cuda: default the driver. cache: default the user's.

        Raises:
            DenoiserError: no TensorRT, no GPU, or the files do not fit; the message holds the remedy.
        """
        self._cuda = cuda if cuda is not None else _driver()
        self._trt = trt if trt is not None else import_tensorrt()
        self._shapes, self._files = DenoiserShapes.of(manifest), frozenset(manifest.files)
        self._cache = cache or EngineCache(default_folder())
        self._logger = self._trt.Logger(self._trt.Logger.WARNING)
        self._runtime = self._trt.Runtime(self._logger)
        try:
            self._runner = self._make(folder, FP32, DENOISE_FILE)
            if fp16:
                self._runner = self._half(folder, self._runner)
            warm_up(self, self._shapes)
            self._runner.capture()
        except CudaError as error:
            raise DenoiserError(f"the GPU failed while the engine was set up: {error}; see 'vla doctor', or set "
                                "policy.engine to onnxruntime") from error

    @property
    def engine(self) -> str:
        """Name, version and device."""
        gpu, runner = self._cuda.gpu, self._runner
        replay = "CUDA graph" if runner.is_captured else "enqueued"
        return f"tensorrt {self._trt.__version__} {gpu.name} sm_{gpu.compute.replace('.', '')}, {runner.precision}, " \
               f"{replay}"

    @property
    def supports_prefix(self) -> bool:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        return self._runner.with_prefix

    def encode_context(self, now: FloatArray, previous: FloatArray) -> Handle:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        return self._runner.encode(feed_context(self._shapes, now, previous))

    def denoise(self, handle: Handle, proprio: FloatArray, age_s: float, gap_s: float, noise: FloatArray,
                prefix: Prefix | None = None) -> FloatArray:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        feeds = feed_denoise(self._shapes, proprio, age_s, gap_s, noise, prefix, self._runner.with_prefix)
        return self._runner.denoise(handle, feeds)

    def close(self) -> None:
        """Give GPU and pinned memory back; handles are void after it."""
        self._runner.close()

    def _make(self, folder: Path, precision: str, denoise_file: str) -> Runner:
        context = self._engine(folder, CONTEXT_FILE, FP32)
        denoise = self._engine(folder, denoise_file, precision)
        return Runner(self._trt, self._cuda, self._shapes, (CONTEXT_FILE, context), (denoise_file, denoise), precision)

    def _engine(self, folder: Path, file: str, precision: str) -> Any:
        try:
            onnx = (folder / file).read_bytes()
        except OSError as error:
            raise DenoiserError(f"cannot read {folder / file}: {error}; export the model again with 'vla export'"
                                ) from error
        gpu = self._cuda.gpu
        key = EngineKey.of(Path(file).stem, onnx, str(self._trt.__version__), gpu.name, gpu.compute, precision)
        return load_engine(self._trt, self._logger, self._runtime, self._cache, key, file, onnx)

    def _half(self, folder: Path, full: Runner) -> Runner:
        has_typed = FP16_FILE in self._files  # what the manifest does not list was not verified
        precision = precision_for(self._trt, True, has_typed)
        half = self._make(folder, precision, FP16_FILE if has_typed else DENOISE_FILE)
        difference = _largest_difference(full, half, self._shapes)
        if difference <= FP16_TOLERANCE_RAD:
            LOG.info("half precision differs from float32 by at most %.1e rad over %d chunks", difference, _COMPARED)
            full.close()
            return half
        LOG.warning("half precision differs from float32 by %.1e rad, more than %.0e: running in float32; set "
                    "policy.fp16 to false", difference, FP16_TOLERANCE_RAD)
        half.close()
        return full


def import_tensorrt() -> Any:
    """The module.

    Raises:
        DenoiserError: it cannot be imported; says what was missing.
    """
    try:
        return importlib.import_module("tensorrt")
    except Exception as error:  # a broken installation raises whatever its loader meets
        raise DenoiserError(f"TensorRT cannot be imported: {type(error).__name__}: {error}. On a Jetson: apt install "
                            "python3-libnvinfer, and a virtual environment with --system-site-packages; else "
                            "pip install tensorrt; or set policy.engine to onnxruntime") from error


def _driver() -> CudaDriver:
    try:
        return CudaDriver()
    except CudaError as error:
        raise DenoiserError(f"policy.engine tensorrt needs a GPU: {error}; install its driver, or set policy.engine to "
                            "onnxruntime") from error


def _largest_difference(a: Runner, b: Runner, shapes: DenoiserShapes) -> float:
    """Between two runners over random contexts, rad; inf if one is not finite."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(_COMPARED):
        now, previous = rng.standard_normal((2, shapes.tokens, shapes.dim))
        context = feed_context(shapes, now, previous)
        proprio = rng.standard_normal(shapes.proprio) * 0.5
        feeds = feed_denoise(shapes, proprio, 0.1, 0.5, np.zeros((shapes.horizon, shapes.joints)), None, a.with_prefix)
        chunks = [runner.denoise(runner.encode(context), feeds) for runner in (a, b)]
        difference = float(np.abs(chunks[0] - chunks[1]).max())
        worst = max(worst, difference) if math.isfinite(difference) else math.inf
    return worst
