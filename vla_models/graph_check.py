"""What an exported graph is made of, and whether TensorRT 10.3 (JetPack 6) can be expected to take it.

A check of names only: whether an engine builds is known when TensorRT has built it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

LOWEST_OPSET, HIGHEST_OPSET = 17, 20

TENSORRT_OPERATORS = frozenset(
    """Abs Add And Cast Clip Concat Constant Conv Cos Div Equal Erf Exp Expand Flatten Gather Gelu Gemm Greater
    GreaterOrEqual Identity LayerNormalization LeakyRelu Less LessOrEqual Log MatMul Max Min Mul Neg Not Or Pow
    ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Sigmoid Sign Sin Slice Softmax Softplus Split Sqrt Squeeze Sub
    Sum Tanh Tile Transpose Unsqueeze Where""".split()
)
"""Operators that TensorRT 10.0 and later parse for float32 and float16 without restrictions that matter here
(onnx-tensorrt, docs/operators.md). ``Attention`` is missing on purpose: from opset 23 on it parses, but 10.x does not
build it in float32."""

_CONSTANT_INPUT = {**dict.fromkeys("Squeeze Unsqueeze ReduceMean ReduceSum ReduceMax ReduceMin".split(), 1), "Slice": 3}
"""Position of the input that TensorRT before 10.7 wants to be a constant: the axes."""

_ELEMENTS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64, onnx.TensorProto.INT32,
             onnx.TensorProto.BOOL}

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class GraphReport:
    """One ONNX file: opset, number of nodes by operator, and everything that is wrong with it."""

    file: str
    opset: int
    operators: dict[str, int]
    problems: list[str]

    def __str__(self) -> str:
        """One line for people."""
        nodes = sum(self.operators.values())
        text = f"{self.file}: opset {self.opset}, {nodes} nodes of {len(self.operators)} operators"
        return f"{text}, all known to TensorRT 10.3" if not self.problems else f"{text}; {'; '.join(self.problems)}"


def check_graph(path: Path, shapes: Shapes | None = None) -> GraphReport:
    """Look through an ONNX file.

    Args:
        path: the file, weights inside.
        shapes: every input and output by name, float32; None: they are not compared.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf's and the checker's errors share no base
        return GraphReport(path.name, 0, {}, [f"not a valid ONNX file: {error}"])
    opset = next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), 0)
    operators = Counter(node.op_type for node in model.graph.node)
    problems = [*_problems_of_nodes(model, operators), *_problems_of_tensors(model)]
    if not LOWEST_OPSET <= opset <= HIGHEST_OPSET:
        problems.append(f"opset must be {LOWEST_OPSET} .. {HIGHEST_OPSET} for TensorRT 10.3 and onnxruntime 1.19")
    if shapes is not None:
        problems += _problems_of_signature(model, shapes)
    return GraphReport(path.name, opset, dict(operators), problems)


def _problems_of_nodes(model: onnx.ModelProto, operators: Counter[str]) -> list[str]:
    problems = []
    unknown = sorted(set(operators) - TENSORRT_OPERATORS)
    if unknown:
        problems.append(f"operators that TensorRT 10.3 may not take: {', '.join(unknown)}")
    domains = {node.domain for node in model.graph.node} - {"", "ai.onnx"}
    if domains or model.functions:
        problems.append(f"operators of domains {sorted(domains)}, {len(model.functions)} local functions")
    constant = {item.name for item in model.graph.initializer}
    constant |= {output for node in model.graph.node if node.op_type == "Constant" for output in node.output}
    for node in model.graph.node:
        index = _CONSTANT_INPUT.get(node.op_type)
        if index is not None and index < len(node.input) and node.input[index] and node.input[index] not in constant:
            problems.append(f"{node.op_type} {node.name!r} computes its axes, TensorRT 10.3 wants them constant")
    return problems


def _problems_of_tensors(model: onnx.ModelProto) -> list[str]:
    problems = []
    for item in model.graph.initializer:
        if item.data_type not in _ELEMENTS:
            problems.append(f"{item.name} is {onnx.TensorProto.DataType.Name(item.data_type)}")
        if item.data_location == onnx.TensorProto.EXTERNAL:
            problems.append(f"{item.name} lies in another file")
    return problems


def _problems_of_signature(model: onnx.ModelProto, shapes: Shapes) -> list[str]:
    found = {}
    for value in (*model.graph.input, *model.graph.output):
        tensor = value.type.tensor_type
        found[value.name] = (tensor.elem_type, [dim.dim_value or dim.dim_param or "?" for dim in tensor.shape.dim])
    if set(found) != set(shapes):
        return [f"inputs and outputs are {sorted(found)}, expected {sorted(shapes)}"]
    return [
        f"{name} is {onnx.TensorProto.DataType.Name(element)} {shape}, expected FLOAT {list(shapes[name])}"
        for name, (element, shape) in found.items()
        if element != onnx.TensorProto.FLOAT or shape != list(shapes[name])
    ]
