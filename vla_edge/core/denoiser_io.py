"""The tensors of a model folder's two graphs: names, shapes, and the arrays an engine feeds. Shared by all engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vla_common.manifest import Manifest
from vla_edge.core.denoiser import Denoiser, DenoiserError, FloatArray, Prefix

CONTEXT_FILE: Final = "context_kv.onnx"
DENOISE_FILE: Final = "denoise.onnx"
HANDLE_NAMES: Final = ("k", "v", "keypoint")
PREFIX_NAMES: Final = ("prefix", "prefix_weight")
KEYPOINT_SHAPE: Final = (1, 6)
_EXPORT_AGAIN: Final = "export the model again with 'vla export'"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DenoiserShapes:
    """Sizes of one model: K tokens of D, P proprioceptive numbers, H steps of n joints."""

    tokens: int
    dim: int
    proprio: int
    horizon: int
    joints: int

    @classmethod
    def of(cls, manifest: Manifest) -> DenoiserShapes:
        """Sizes that a manifest states."""
        return cls(manifest.context.num_tokens, manifest.context.dim, len(manifest.proprio_names), manifest.horizon,
                   len(manifest.joint_names))

    def context_inputs(self) -> dict[str, Shape | None]:
        """Inputs of ``context_kv.onnx``."""
        shape = (1, self.tokens, self.dim)
        return {"context": shape, "context_prev": shape}

    def handle(self) -> dict[str, Shape | None]:
        """Outputs of ``context_kv.onnx`` and first inputs of ``denoise.onnx``; None: the model's own affair."""
        return {"k": None, "v": None, "keypoint": KEYPOINT_SHAPE}

    def denoise_inputs(self, with_prefix: bool) -> dict[str, Shape | None]:
        """Inputs of ``denoise.onnx``."""
        actions = (1, self.horizon, self.joints)
        shapes: dict[str, Shape | None] = {**self.handle(), "proprio": (1, self.proprio), "age_s": (1, 1),
                                           "dt_s": (1, 1), "noise": actions}
        if with_prefix:
            shapes |= {"prefix": actions, "prefix_weight": (1, self.horizon, 1)}
        return shapes

    def denoise_outputs(self) -> dict[str, Shape | None]:
        """Outputs of ``denoise.onnx``."""
        return {"actions": (1, self.horizon, self.joints)}


def feed_context(shapes: DenoiserShapes, now: npt.ArrayLike, previous: npt.ArrayLike) -> dict[str, FloatArray]:
    """Arrays for ``context_kv.onnx``.

    Args:
        shapes: of the model.
        now, previous: float32[K, D].

    Raises:
        DenoiserError: another shape.
    """
    expected = (shapes.tokens, shapes.dim)
    return {"context": _checked("context", now, expected)[None],
            "context_prev": _checked("context_prev", previous, expected)[None]}


def feed_denoise(shapes: DenoiserShapes, proprio: npt.ArrayLike, age_s: float, gap_s: float, noise: npt.ArrayLike,
                 prefix: Prefix | None, with_prefix: bool) -> dict[str, FloatArray]:
    """Arrays for ``denoise.onnx`` besides the handle's; see :meth:`vla_edge.core.denoiser.Denoiser.denoise`.

    Args:
        shapes: of the model.
        proprio: float32[P].
        age_s, gap_s: s.
        noise: float32[H, n].
        prefix: committed actions or None.
        with_prefix: the graph has the two inputs for it.

    Raises:
        DenoiserError: another shape, weights outside 0 .. 1 or rising, or a prefix that the graph cannot take.
    """
    actions = (shapes.horizon, shapes.joints)
    feeds = {"proprio": _checked("proprio", proprio, (shapes.proprio,))[None],
             "age_s": np.full((1, 1), age_s, np.float32), "dt_s": np.full((1, 1), gap_s, np.float32),
             "noise": _checked("noise", noise, actions)[None]}
    if prefix is None:
        if with_prefix:
            feeds |= {"prefix": np.zeros((1, *actions), np.float32),
                      "prefix_weight": np.zeros((1, shapes.horizon, 1), np.float32)}
        return feeds
    if not with_prefix:
        raise DenoiserError(f"this model takes no prefix: use another ensemble.rule, or {_EXPORT_AGAIN}")
    weights = _checked("prefix weights", prefix.weights, (shapes.horizon,))
    # One comparison chain that NaN fails too. The smoothing goes by the leading rows, hence no rising weights.
    if not (weights[0] <= 1.0 and weights[-1] >= 0.0 and (weights[1:] <= weights[:-1]).all()):
        raise DenoiserError(f"prefix weights must lie in 0 .. 1 and not rise with the row, got {weights.tolist()}")
    return feeds | {"prefix": _checked("prefix actions", prefix.actions, actions)[None],
                    "prefix_weight": weights[None, :, None]}


def check_tensors(file: str, kind: str, found: Mapping[str, tuple[str, tuple[Any, ...]]],
                  expected: Mapping[str, Shape | None], optional: Iterable[str] = ()) -> None:
    """Compare a graph's inputs or outputs with what the manifest asks for.

    Args:
        file, kind: for the message; ``kind`` is "inputs" or "outputs".
        found: element type ("float32" ...) and dimensions by name; a dimension that is no int fits anything.
        expected: shape by name, None for any.
        optional: expected names that may be missing, all together.

    Raises:
        DenoiserError: other names, an element type other than float32 or another shape.
    """
    names = set(expected)
    if set(found) not in (names, names - set(optional)):
        raise DenoiserError(f"{file} has {kind} {sorted(found)}, expected {sorted(names)}: {_EXPORT_AGAIN}")
    for name, (element, shape) in found.items():
        if element != "float32" or not _fits(shape, expected[name]):
            raise DenoiserError(f"{file}: {name} is {element} {list(shape)}, expected float32 {expected[name]}: model "
                                "files and manifest.json are not of one export")


def warm_up(denoiser: Denoiser, shapes: DenoiserShapes, runs: int = 3) -> None:
    """Run both graphs so that the first chunk is as fast as the others, and check what comes back.

    Raises:
        DenoiserError: the chunk has another shape.
    """
    tokens = np.zeros((shapes.tokens, shapes.dim), np.float32)
    noise = np.zeros((shapes.horizon, shapes.joints), np.float32)
    for _ in range(runs):
        handle = denoiser.encode_context(tokens, tokens)
        deltas = denoiser.denoise(handle, np.zeros(shapes.proprio, np.float32), 0.0, 0.5, noise)
    if deltas.shape != noise.shape:
        raise DenoiserError(f"{DENOISE_FILE} answers {deltas.shape}, the manifest says {noise.shape}: {_EXPORT_AGAIN}")


def _checked(name: str, value: npt.ArrayLike, shape: Shape) -> FloatArray:
    array = np.ascontiguousarray(value, dtype=np.float32)
    if array.shape != shape:
        raise DenoiserError(f"{name} must be float32{list(shape)}, got shape {list(array.shape)}")
    return array


def _fits(found: tuple[Any, ...], expected: Shape | None) -> bool:
    if expected is None:
        return True
    return len(found) == len(expected) and all(
        not isinstance(size, int) or size == wanted for size, wanted in zip(found, expected, strict=True))
