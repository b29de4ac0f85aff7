"""Model folders: weights as safetensors, the head as ONNX, and the manifest that ties them together.

manifest.json  vlm.safetensors (cloud)  head.safetensors (reference, re-export)  context_kv.onnx  denoise.onnx (edge)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

from vla_common.manifest import (
    Camera,
    Context,
    Instruction,
    Manifest,
    ManifestError,
    hash_files,
    load_manifest,
    write_manifest,
)

from .flow_head import FlowHead, FlowHeadConfig
from .vlm import Vlm, VlmConfig

VLM, HEAD = "vlm.safetensors", "head.safetensors"


class NotAPolicy(ManifestError):
    """The folder is whole, but does not hold the modules of this release."""


def save_modules(path: Path, **modules: nn.Module) -> None:
    """Weights and buffers of named modules in one safetensors file."""
    tensors = {f"{name}.{k}": v.contiguous().clone() for name, m in modules.items() for k, v in m.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path))
    path.chmod(0o644)  # newer releases of safetensors leave it readable by its owner only


def load_modules(path: Path, **modules: nn.Module) -> None:
    """Inverse of ``save_modules``; missing or unexpected tensors raise RuntimeError."""
    tensors = load_file(str(path))
    for name, module in modules.items():
        module.load_state_dict({k[len(name) + 1 :]: v for k, v in tensors.items() if k.startswith(name + ".")})


def load_vlm(folder: str | Path) -> tuple[Vlm, Manifest]:
    """The backbone of a verified model folder, ready for inference. Raises ManifestError."""
    manifest = load_manifest(folder)
    with _policy_errors(folder):
        vlm = Vlm(VlmConfig.from_dict(manifest.extra["vlm"]))
        load_modules(Path(folder) / VLM, vlm=vlm)
    return vlm.eval(), manifest


def load_head(folder: str | Path) -> tuple[FlowHead, Manifest]:
    """The action head of a verified model folder as a torch module. Raises ManifestError."""
    manifest = load_manifest(folder)
    with _policy_errors(folder):
        head = FlowHead(FlowHeadConfig(**manifest.extra["head"]))
        load_modules(Path(folder) / HEAD, head=head)
    return head.eval(), manifest


@contextmanager
def _policy_errors(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, FileNotFoundError) as error:
        raise NotAPolicy(
            f"{folder} is not a policy of this release ({error}): export it again with 'vla export'"
        ) from error


def write_model_folder(
    folder: Path,
    name: str,
    vlm: Vlm,
    head: FlowHead,
    *,
    joint_names: list[str],
    proprio_names: list[str],
    cameras: list[Camera],
    vocabulary: list[str],
    period_s: float,
    licence: str,
    training_command: str,
    seeds: Mapping[str, int],
    metrics: Mapping[str, Any],
    fp16: bool = False,
) -> Manifest:
    """Write weights, ONNX graphs and manifest; the ONNX graphs are checked against torch before the manifest exists.

    ``fp16`` adds the graph for TensorRT in half precision, see :func:`vla_models.export_onnx.export_head`.
    """
    from . import export_onnx  # needs onnx, which a cloud that only serves does not have

    folder.mkdir(parents=True, exist_ok=True)
    save_modules(folder / VLM, vlm=vlm)
    save_modules(folder / HEAD, head=head)
    (folder / export_onnx.DENOISE_FP16).unlink(missing_ok=True)  # never one of an export before
    export_onnx.export_head(head, folder, fp16=fp16)
    graphs = [export_onnx.DENOISE, export_onnx.DENOISE_FP16][: 1 + fp16]
    differences = {file: export_onnx.check_export(head, folder, file=file) for file in graphs}
    for file, difference in differences.items():
        if not difference <= export_onnx.MAX_DIFFERENCE_RAD[file]:
            raise RuntimeError(
                f"{file} differs from torch by {difference:.2e} rad: the export is wrong, nothing was released"
            )
    c = head.config
    manifest = Manifest(
        name=name,
        joint_names=joint_names,
        horizon=c.horizon,
        period_s=period_s,
        context=Context(c.context_tokens, c.context_dim),
        proprio_names=proprio_names,
        cameras=cameras,
        instruction=Instruction(vocabulary, vlm.config.text_length),
        files=hash_files(folder, (VLM, HEAD, export_onnx.CONTEXT_KV, *graphs)),
        licence=licence,
        training_command=training_command,
        shapes=graph_shapes(head),
        normalisation={
            "action_std": head.action_std.tolist(),
            "proprio_mean": head.proprio_mean.tolist(),
            "proprio_std": head.proprio_std.tolist(),
            "pixel_mean": vlm.config.pixel_mean,
            "pixel_std": vlm.config.pixel_std,
        },
        seeds=dict(seeds),
        metrics={**metrics, "onnx_max_difference": differences[export_onnx.DENOISE]},
        extra={"vlm": vlm.config.to_dict(), "head": c.to_dict(), "noise_scale": 0.0, "opset": export_onnx.OPSET},
    )
    write_manifest(folder, manifest)
    return manifest


def graph_shapes(head: FlowHead) -> dict[str, dict[str, list[int]]]:
    """Inputs and outputs of both graphs: shape by file and name."""
    from . import export_onnx

    contexts, state = export_onnx.example_inputs(head)
    kv = head.context_kv(contexts["context"], contexts["context_prev"])
    cached = {"k": kv.k, "v": kv.v, "keypoint": kv.keypoint}
    denoise = {**cached, **state, "actions": state["noise"]}
    return {
        export_onnx.CONTEXT_KV: {n: list(t.shape) for n, t in {**contexts, **cached}.items()},
        export_onnx.DENOISE: {n: list(t.shape) for n, t in denoise.items()},
    }
