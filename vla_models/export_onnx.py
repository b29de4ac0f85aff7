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
CONTEXT_KV, DENOISE, DENOISE_FP16 = "context_kv.onnx", "denoise.onnx", "denoise_fp16.onnx"
MAX_DIFFERENCE_RAD = {DENOISE: 1e-4, DENOISE_FP16: 1e-3}
"""Between ONNX Runtime and torch in float32, by file."""


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
        self,
        k: Tensor,
        v: Tensor,
        keypoint: Tensor,
        proprio: Tensor,
        age_s: Tensor,
        dt_s: Tensor,
        noise: Tensor,
        prefix: Tensor,
        prefix_weight: Tensor,
    ) -> Tensor:
        kv = ContextKv(k, v, keypoint)
        return self.head.denoise(kv, proprio, age_s, dt_s, noise, self.steps, prefix, prefix_weight)


class _HalfVelocity(FlowHead):
    """The head with its transformer in float16. Kinematics, residuals, the sum over Euler steps and the smoothing stay
    in float32: half precision is 1 mrad of a joint at 1 rad."""

    @classmethod
    def of(cls, head: FlowHead) -> _HalfVelocity:
        half = cls(head.config)
        half.load_state_dict(head.state_dict())
        for module in (half.time, half.action_in, half.blocks, half.norm_out, half.action_out):
            module.half()
        half.position.data = half.position.data.half()
        return half.eval()

    def velocity(self, x: Tensor, time: Tensor, state: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().velocity(x.half(), time, state.half(), k.half(), v.half())


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
        "prefix": 0.5 * head.action_std[None] * torch.randn(1, c.horizon, c.action_dim, generator=generator),
        # Free at seed 0; with each further seed more rows are guided, then frozen.
        "prefix_weight": torch.linspace(seed / 4, seed / 4 - 1, c.horizon).clamp(0, 1)[None, :, None],
    }
    return contexts, state


def export_head(head: FlowHead, folder: Path, steps: int | None = None, fp16: bool = False) -> None:
    """Write ``context_kv.onnx`` and ``denoise.onnx`` (weights inside) into ``folder``.

    ``fp16`` adds ``denoise_fp16.onnx``, for TensorRT: float32 outside, the transformer in float16 (strongly typed).
    """
    head = head.eval()
    contexts, state = example_inputs(head)
    with torch.no_grad():
        kv = head.context_kv(contexts["context"], contexts["context_prev"])
    _export(_ContextKvGraph(head), contexts, ["k", "v", "keypoint"], folder / CONTEXT_KV)
    inputs = {"k": kv.k, "v": kv.v, "keypoint": kv.keypoint, **state}
    steps = steps or head.config.euler_steps
    _export(_DenoiseGraph(head, steps), inputs, ["actions"], folder / DENOISE)
    if fp16:
        _export(_DenoiseGraph(_HalfVelocity.of(head), steps), inputs, ["actions"], folder / DENOISE_FP16)


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


def check_export(head: FlowHead, folder: Path, seeds: int = 8, file: str = DENOISE) -> float:
    """Largest absolute difference between ONNX Runtime and torch over random inputs (deltas, rad)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # it warns about every half precision operator that a CPU has to widen
    first = onnxruntime.InferenceSession(str(folder / CONTEXT_KV), options, providers=["CPUExecutionProvider"])
    second = onnxruntime.InferenceSession(str(folder / file), options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for seed in range(seeds):
        contexts, state = example_inputs(head, seed)
        k, v, keypoint = first.run(None, {name: t.numpy() for name, t in contexts.items()})
        (got,) = second.run(None, {"k": k, "v": v, "keypoint": keypoint, **{n: t.numpy() for n, t in state.items()}})
        with torch.no_grad():
            kv = head.context_kv(contexts["context"], contexts["context_prev"])
            want = head.denoise(kv, **state)
        worst = max(worst, float(np.abs(got - want.numpy()).max()))
    return worst
