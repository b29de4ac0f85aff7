"""The denoiser on ONNX Runtime, one thread: predictable, and no competition with the motor clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort

from vla_common.manifest import Manifest
from vla_edge.core.denoiser import DenoiserError, FloatArray, Prefix
from vla_edge.core.denoiser_io import (
    CONTEXT_FILE,
    DENOISE_FILE,
    HANDLE_NAMES,
    PREFIX_NAMES,
    DenoiserShapes,
    check_tensors,
    feed_context,
    feed_denoise,
    warm_up,
)

ContextHandle = Mapping[str, FloatArray]

_HANDLE: Final = list(HANDLE_NAMES)
_ELEMENTS: Final = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class OnnxDenoiser:
    """Both graphs of a model folder; see :class:`vla_edge.core.denoiser.Denoiser`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Load, check against the manifest, run once so that the first chunk is as fast as the others.

        Args:
            folder: model folder, its files already verified by :func:`vla_common.manifest.load_manifest`.
            manifest: its manifest.

        Raises:
            DenoiserError: a file cannot be loaded, or inputs and outputs are not those of the manifest.
        """
        shapes = self._shapes = DenoiserShapes.of(manifest)
        self._context, self._denoise = make_session(folder / CONTEXT_FILE), make_session(folder / DENOISE_FILE)
        _check(CONTEXT_FILE, self._context, shapes.context_inputs(), shapes.handle())
        _check(DENOISE_FILE, self._denoise, shapes.denoise_inputs(with_prefix=True), shapes.denoise_outputs())
        self._with_prefix = PREFIX_NAMES[0] in {node.name for node in self._denoise.get_inputs()}
        warm_up(self, shapes)

    @property
    def engine(self) -> str:
        """Name, version and device."""
        return f"onnxruntime {ort.__version__} cpu, 1 thread"

    @property
    def supports_prefix(self) -> bool:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        return self._with_prefix

    def encode_context(self, now: FloatArray, previous: FloatArray) -> ContextHandle:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        values = self._context.run(_HANDLE, feed_context(self._shapes, now, previous))
        return dict(zip(_HANDLE, values, strict=True))

    def denoise(self, handle: ContextHandle, proprio: FloatArray, age_s: float, gap_s: float,
                noise: FloatArray, prefix: Prefix | None = None) -> FloatArray:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        feeds = feed_denoise(self._shapes, proprio, age_s, gap_s, noise, prefix, self._with_prefix)
        actions: FloatArray = np.asarray(self._denoise.run(["actions"], {**handle, **feeds})[0], dtype=np.float32)
        return actions[0]


def make_session(path: Path) -> ort.InferenceSession:
    """A session on one thread.

    Raises:
        DenoiserError: ONNX Runtime cannot load the file.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises types of its own that share no base
        raise DenoiserError(f"ONNX Runtime cannot load {path}: {error}; export the model again with 'vla export'"
                            ) from error


def _check(file: str, session: ort.InferenceSession, inputs: Mapping[str, tuple[int, ...] | None],
           outputs: Mapping[str, tuple[int, ...] | None]) -> None:
    for kind, expected, nodes in (("inputs", inputs, session.get_inputs()), ("outputs", outputs,
                                                                             session.get_outputs())):
        found = {node.name: (_ELEMENTS.get(node.type, node.type), tuple(node.shape)) for node in nodes}
        check_tensors(file, kind, found, expected, PREFIX_NAMES)
