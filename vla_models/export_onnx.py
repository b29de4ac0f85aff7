"""ONNX export of the action head as two graphs, and the check that they compute what torch computes.

Opset 20 with attention written out as matrix products: TensorRT 10.x accepts it, and opset 23's fused ``Attention``
parses there but does not build in fp32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from .flow_head import ContextKv, FlowHead

OPSET = 20
CONTEXT_KV, DENOISE = "context_kv.onnx", "denoise.onnx"


class _ContextKvGraph(nn.Module):
    def __init__(self, head: FlowHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, context: Tensor, context_prev: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(self.head.context_kv(context, context_prev))  # type: ignore[return-value]


class _DenoiseGraph(nn.Module):
    def __init__(self, head: FlowHead, steps: int) -> None:
        super().__init__()
        self.head, self.steps = head, steps

    def forward(
        self, k: Tensor, v: Tensor, keypoint: Tensor, proprio: Tensor, age_s: Tensor, dt_s: Tensor, noise: Tensor
    ) -> Tensor:
        return self.head.denoise(ContextKv(k, v, keypoint), proprio, age_s, dt_s, noise, self.steps)


def example_inputs(head: FlowHead, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random named inputs of both graphs, batch 1: (context_kv, denoise without k, v and keypoint)."""
    c, generator = head.config, torch.Generator().manual_seed(seed)
    shape = (1, c.context_tokens, c.context_dim)
    contexts = {name: torch.randn(shape, generator=generator) for name in ("context", "context_prev")}
    state = {
        "proprio": head.proprio_mean[None]
        + 0.3 * torch.randn(1, c.proprio_dim, generator=generator) * head.proprio_std,
        "age_s": torch.full((1, 1), 0.12),
        "dt_s": torch.full((1, 1), 0.5),
        "noise": torch.randn(1, c.horizon, c.action_dim, generator=generator),
    }
    return contexts, state


def export_head(head: FlowHead, folder: Path, steps: int | None = None) -> None:
    """Write ``context_kv.onnx`` and ``denoise.onnx`` (weights inside) into ``folder``."""
    head = head.eval()
    contexts, state = example_inputs(head)
    with torch.no_grad():
        kv = head.context_kv(contexts["context"], contexts["context_prev"])
    _export(_ContextKvGraph(head), contexts, ["k", "v", "keypoint"], folder / CONTEXT_KV)
    inputs = {"k": kv.k, "v": kv.v, "keypoint": kv.keypoint, **state}
    _export(_DenoiseGraph(head, steps or head.config.euler_steps), inputs, ["actions"], folder / DENOISE)


def _export(module: nn.Module, inputs: dict[str, Tensor], outputs: list[str], path: Path) -> None:
    program = torch.onnx.export(
        module.eval(),
        tuple(inputs.values()),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(inputs),
        output_names=outputs,
        optimize=True,
        verbose=False,
    )
    with tempfile.TemporaryDirectory() as scratch:
        part = Path(scratch) / path.name
        program.save(str(part))
        model = onnx.load(str(part))  # gathers external data, if any
    _strip_history(model)
    onnx.checker.check_model(model)
    onnx.save_model(model, str(path))


def _strip_history(model: onnx.ModelProto) -> None:
    """Remove stack traces and source paths that the exporter leaves in the metadata: bytes must not name a machine."""
    for item in (
        model,
        model.graph,
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
    ):
        del item.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""
    model.doc_string = model.graph.doc_string = ""


def check_export(head: FlowHead, folder: Path, seeds: int = 8) -> float:
    """Largest absolute difference between ONNX Runtime and torch over random inputs (deltas, rad)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    first = onnxruntime.InferenceSession(str(folder / CONTEXT_KV), options, providers=["CPUExecutionProvider"])
    second = onnxruntime.InferenceSession(str(folder / DENOISE), options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for seed in range(seeds):
        contexts, state = example_inputs(head, seed)
        k, v, keypoint = first.run(None, {name: t.numpy() for name, t in contexts.items()})
        (got,) = second.run(None, {"k": k, "v": v, "keypoint": keypoint, **{n: t.numpy() for n, t in state.items()}})
        with torch.no_grad():
            kv = head.context_kv(contexts["context"], contexts["context_prev"])
            want = head.denoise(kv, state["proprio"], state["age_s"], state["dt_s"], state["noise"])
        worst = max(worst, float(np.abs(got - want.numpy()).max()))
    return worst
