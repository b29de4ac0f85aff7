"""The exported graphs: what is in them, what TensorRT 10.3 would not take, and the command that says so."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from vla_cli import export_main
from vla_common.manifest import hash_files, load_manifest, write_manifest
from vla_models.graph_check import TENSORRT_OPERATORS, check_graph

MODEL = Path(__file__).parents[2] / "models" / "tabletop"


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped model that may be damaged."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def seal(folder, **changes):
    """Make the manifest agree with the files again, as an export by other tools would."""
    manifest = load_manifest(folder, verify=False)
    files = changes.pop("files", manifest.files)
    write_manifest(folder, dataclasses.replace(manifest, files=hash_files(folder, files), **changes))


def graph(path, nodes, opset=20, shape=(1, 4), initializers=(), ir_version=10):
    made = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
                             [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)], list(initializers))
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version), str(path))
    return path


def test_the_shipped_graphs_have_nothing_wrong():
    shapes = json.loads((MODEL / "manifest.json").read_text())["shapes"]
    for name in ("context_kv.onnx", "denoise.onnx"):
        report = check_graph(MODEL / name, shapes[name])
        assert report.problems == [] and report.opset == 20 and "all known to TensorRT 10.3" in str(report)
        assert set(report.operators) <= TENSORRT_OPERATORS
    assert {"prefix", "prefix_weight"} <= set(shapes["denoise.onnx"])


@pytest.mark.parametrize("nodes, opset, problem", [
    ([helper.make_node("Relu", ["x"], ["y"])], 20, None),
    ([helper.make_node("Relu", ["x"], ["y"])], 21, r"opset must be 17 \.\. 20"),
    ([helper.make_node("Relu", ["x"], ["y"])], 16, r"opset must be 17 \.\. 20"),
    ([helper.make_node("Hardmax", ["x"], ["y"])], 20, "may not take: Hardmax"),
    ([helper.make_node("Relu", ["x"], ["z"]), helper.make_node("Det", ["z"], ["y"])], 20, "may not take: Det"),
])
def test_operators_and_opset(tmp_path, nodes, opset, problem):
    problems = check_graph(graph(tmp_path / "g.onnx", nodes, opset)).problems
    if problem is None:
        assert problems == []
    else:
        (found,) = problems
        assert re.search(problem, found)


def test_attention_of_newer_opsets_is_named(tmp_path):
    if onnx.defs.onnx_opset_version() < 23:
        pytest.skip("this onnx has no Attention")
    path = graph(tmp_path / "g.onnx", [helper.make_node("Attention", ["x", "x", "x"], ["y"])], 23, (1, 1, 4, 4), (), 11)
    problems = " ".join(check_graph(path).problems)
    assert "may not take: Attention" in problems and "opset must be" in problems


def test_computed_axes_and_doubles_are_named(tmp_path):
    nodes = [helper.make_node("Cast", ["x"], ["axes"], to=TensorProto.INT64), helper.make_node("Unsqueeze", ["x", "axes"], ["y"])]
    assert any("computes its axes" in text for text in check_graph(graph(tmp_path / "a.onnx", nodes)).problems)
    constant = onnx.numpy_helper.from_array(np.zeros(4), "c")
    nodes = [helper.make_node("Cast", ["c"], ["f"], to=TensorProto.FLOAT), helper.make_node("Add", ["x", "f"], ["y"])]
    assert check_graph(graph(tmp_path / "d.onnx", nodes, initializers=[constant])).problems == ["c is DOUBLE"]


def test_signature_and_garbage(tmp_path):
    path = graph(tmp_path / "g.onnx", [helper.make_node("Relu", ["x"], ["y"])])
    assert check_graph(path, {"x": [1, 4]}).problems == ["inputs and outputs are ['x', 'y'], expected ['x']"]
    assert "x is FLOAT [1, 4], expected FLOAT [1, 5]" in check_graph(path, {"x": [1, 5], "y": [1, 4]}).problems
    (tmp_path / "bad.onnx").write_bytes(b"garbage")
    assert "not a valid ONNX file" in check_graph(tmp_path / "bad.onnx").problems[0]


# ------------------------------------------------------------------ vla export --check


def test_the_shipped_folder_passes(capsys):
    assert export_main.main(["--check", "--model", str(MODEL)]) == 0
    out = capsys.readouterr().out
    assert "opset 20" in out and "4 Euler steps, differs from torch by at most" in out and ": ok, model hash" in out


def test_other_numbers_fail(folder, capsys):
    model = onnx.load(folder / "denoise.onnx")
    bias = next(item for item in model.graph.initializer if item.data_type == TensorProto.FLOAT and len(item.dims) == 2)
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) * np.float32(1.5), bias.name))
    onnx.save(model, str(folder / "denoise.onnx"))
    seal(folder)
    assert export_main.main(["--check", "--model", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "may differ by 1e-04 rad" in captured.err and "FAILED" in captured.out


def test_a_graph_of_another_signature_fails(folder, capsys):
    shutil.copy(folder / "context_kv.onnx", folder / "denoise.onnx")
    seal(folder)
    assert export_main.main(["--check", "--model", str(folder)]) == 1
    assert "inputs and outputs are ['context', 'context_prev'" in capsys.readouterr().err


def test_a_graph_that_is_not_listed_fails(folder, capsys):
    seal(folder, files=[name for name in load_manifest(folder).files if name != "context_kv.onnx"])
    assert export_main.main(["--check", "--model", str(folder)]) == 1
    assert "context_kv.onnx is not in the manifest" in capsys.readouterr().err


def test_what_is_refused(folder, tmp_path, capsys):
    (folder / "denoise.onnx").write_bytes(b"tampered")
    assert export_main.main(["--check", "--model", str(folder)]) == 2
    assert "sha256" in capsys.readouterr().err
    assert export_main.main(["--check", "--model", str(tmp_path / "none")]) == 2
    assert export_main.main(["--check", "--fp16"]) == 2
    assert export_main.main(["--out", str(tmp_path), "--steps", "0"]) == 2
    for arguments in ([], ["--check", "--out", str(tmp_path)]):
        with pytest.raises(SystemExit) as exit_info:
            export_main.main(arguments)
        assert exit_info.value.code == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_half_precision_is_exported_and_builds(folder, capsys):
    """float32 outside, 1 mrad from torch, listed in the manifest, and gone again without --fp16."""
    assert export_main.main(["--model", str(folder), "--out", str(folder), "--fp16", "--steps", "1"]) == 0
    assert "denoise_fp16.onnx: 1 Euler steps, differs" in capsys.readouterr().out
    raw = (folder / "denoise_fp16.onnx").read_bytes()
    types = {item.data_type for item in onnx.load_from_string(raw).graph.initializer}
    assert TensorProto.FLOAT16 in types and len(raw) < 0.6 * (folder / "denoise.onnx").stat().st_size
    trt = pytest.importorskip("tensorrt_rtx")
    from vla_edge.adapters.tensorrt_build import FP16_TYPED, build_plan

    assert build_plan(trt, trt.Logger(trt.Logger.ERROR), "denoise_fp16.onnx", raw, FP16_TYPED)
    assert export_main.main(["--model", str(folder), "--out", str(folder)]) == 0
    assert "denoise_fp16.onnx" not in load_manifest(folder).files and not (folder / "denoise_fp16.onnx").exists()
