"""The denoiser on ONNX Runtime, one thread: predictable, and no competition with the motor clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort

from vla_common.manifest import Manifest
from vla_edge.core.denoiser import DenoiserError, FloatArray, Prefix

CONTEXT_FILE: Final = "context_kv.onnx"
DENOISE_FILE: Final = "denoise.onnx"
_WARM_UP_RUNS: Final = 3

ContextHandle = Mapping[str, FloatArray]


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
        self._horizon, self._joints = manifest.horizon, len(manifest.joint_names)
        self._context_shape = (1, manifest.context.num_tokens, manifest.context.dim)
        self._proprio = len(manifest.proprio_names)
        self._context = _session(folder / CONTEXT_FILE)
        self._denoise = _session(folder / DENOISE_FILE)
        actions = (1, self._horizon, self._joints)
        _expect(CONTEXT_FILE, self._context,
                {"context": self._context_shape, "context_prev": self._context_shape}, {"k": None, "v": None,
                                                                                       "keypoint": (1, 6)})
        _expect(DENOISE_FILE, self._denoise,
                {"k": None, "v": None, "keypoint": (1, 6), "proprio": (1, self._proprio), "age_s": (1, 1),
                 "dt_s": (1, 1), "noise": actions}, {"actions": actions})
        self._warm_up()

    @property
    def engine(self) -> str:
        """Name, version and device."""
        return f"onnxruntime {ort.__version__} cpu, 1 thread"

    def encode_context(self, now: FloatArray, previous: FloatArray) -> ContextHandle:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        names = ["k", "v", "keypoint"]
        values = self._context.run(names, {"context": now.reshape(self._context_shape),
                                           "context_prev": previous.reshape(self._context_shape)})
        return dict(zip(names, values, strict=True))

    @property
    def supports_prefix(self) -> bool:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        return False

    def denoise(self, handle: ContextHandle, proprio: FloatArray, age_s: float, gap_s: float,
                noise: FloatArray, prefix: Prefix | None = None) -> FloatArray:
        """See :class:`vla_edge.core.denoiser.Denoiser`."""
        if prefix is not None:
            raise DenoiserError("this model takes no prefix: use another ensemble.rule")
        feeds = {**handle, "proprio": proprio.reshape(1, self._proprio), "age_s": np.full((1, 1), age_s, np.float32),
                 "dt_s": np.full((1, 1), gap_s, np.float32),
                 "noise": noise.reshape(1, self._horizon, self._joints)}
        actions: FloatArray = np.asarray(self._denoise.run(["actions"], feeds)[0], dtype=np.float32)
        return actions.reshape(self._horizon, self._joints)

    def _warm_up(self) -> None:
        tokens = np.zeros(self._context_shape, np.float32)
        noise = np.zeros((self._horizon, self._joints), np.float32)
        for _ in range(_WARM_UP_RUNS):
            deltas = self.denoise(self.encode_context(tokens, tokens), np.zeros(self._proprio, np.float32), 0.0, 0.5,
                                  noise)
        if deltas.shape != noise.shape:
            raise DenoiserError(f"{DENOISE_FILE} answers {deltas.shape}, the manifest says {noise.shape}: export again")


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises types of its own that share no base
        raise DenoiserError(f"ONNX Runtime cannot load {path}: {error}; export the model again with 'vla export'"
                            ) from error


def _expect(file: str, session: ort.InferenceSession, inputs: Mapping[str, tuple[int, ...] | None],
            outputs: Mapping[str, tuple[int, ...] | None]) -> None:
    """Compare names, element type and, where given, shapes."""
    sides = (("inputs", inputs, session.get_inputs()), ("outputs", outputs, session.get_outputs()))
    for kind, expected, found in sides:
        nodes = {node.name: node for node in found}
        if set(nodes) != set(expected):
            raise DenoiserError(f"{file} has {kind} {sorted(nodes)}, expected {sorted(expected)}: export the model "
                                "again with 'vla export'")
        for name, shape in expected.items():
            node = nodes[name]
            if node.type != "tensor(float)" or not _fits(node.shape, shape):
                raise DenoiserError(f"{file}: {name} is {node.type} {node.shape}, expected float {shape}: model files "
                                    "and manifest.json are not of one export")


def _fits(found: list[int | str | None], expected: tuple[int, ...] | None) -> bool:
    """Symbolic dimensions fit anything; so does everything where the manifest says nothing."""
    if expected is None:
        return True
    return len(found) == len(expected) and all(
        not isinstance(size, int) or size == wanted for size, wanted in zip(found, expected, strict=True))
