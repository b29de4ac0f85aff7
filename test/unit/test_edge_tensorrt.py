"""The TensorRT engine's parts that need no GPU: cache, build settings, bindings, half precision, graph capture."""

import dataclasses
import hashlib
import inspect
import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))
sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import imitated_tensorrt as imitation
from edge_rig import DIM, HORIZON, TOKENS, make_model
from imitated_tensorrt import ImitatedCuda, imitated_tensorrt

from vla_common.manifest import Context
from vla_edge.adapters.cuda_driver import CudaError, Gpu
from vla_edge.adapters.denoiser_tensorrt import FP16_FILE, TensorRtDenoiser
from vla_edge.adapters.tensorrt_build import FP16_FLAG, FP16_TYPED, FP32, network_flags, precision_for
from vla_edge.adapters.tensorrt_cache import MAGIC, EngineCache, EngineKey, default_folder
from vla_edge.adapters.tensorrt_runner import Layout
from vla_edge.core.denoiser import DenoiserError

ROOT = Path(__file__).parents[2]
KEY = EngineKey.of("denoise", b"model", "10.3.0", "Orin", "8.7", FP32)


@pytest.fixture
def tiny(tmp_path):
    """(folder, manifest) of a hand-made model that takes no prefix."""
    return tmp_path / "model", make_model(tmp_path / "model")


def denoiser(tiny, tmp_path, *, version="10.3.0", fp16=False, cuda=None, trt=None):
    cuda = cuda or ImitatedCuda()
    trt = trt or imitated_tensorrt(cuda, version)
    return TensorRtDenoiser(*tiny, fp16, trt=trt, cuda=cuda, cache=EngineCache(tmp_path / "cache")), trt, cuda


def with_half(manifest):
    return dataclasses.replace(manifest, files={**manifest.files, FP16_FILE: "0" * 64})


def chunk(engine, fill=0.5):
    tokens = np.zeros((TOKENS, DIM), np.float32)
    tokens[0] = fill
    return engine.denoise(engine.encode_context(tokens, tokens), np.zeros(9), 0.0, 0.5, np.zeros((HORIZON, 8)))


# ------------------------------------------------------------------ cache


def test_an_engine_comes_back_for_the_same_key_only(tmp_path):
    cache = EngineCache(tmp_path / "a" / "b")
    assert cache.load(KEY) is None
    cache.store(KEY, b"plan")
    assert cache.load(KEY) == b"plan"
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [KEY.file_name]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    others = [EngineKey.of("denoise", b"model!", "10.3.0", "Orin", "8.7", FP32)]
    others += [dataclasses.replace(KEY, **{field.name: "x"}) for field in dataclasses.fields(KEY)]
    assert len({key.file_name for key in [KEY, *others]}) == len(others) + 1
    assert all(cache.load(key) is None for key in others)


@pytest.mark.parametrize("content, why", [
    (b"", "no engine of this release"), (MAGIC, "Expecting value"), (MAGIC + b"{}\nplan", "built for something else"),
    (MAGIC + b"[]\nplan", "built for something else"), (b"garbage" * 1000, "no engine of this release"),
    ("truncated", "damaged"), ("flipped", "damaged"), ("foreign", "built for something else"),
])
def test_what_is_not_the_engine_is_refused(tmp_path, caplog, content, why):
    cache = EngineCache(tmp_path)
    cache.store(KEY, b"plan" * 100)
    path = tmp_path / KEY.file_name
    whole = path.read_bytes()
    if content == "truncated":
        content = whole[:-1]
    elif content == "flipped":
        content = whole[:-1] + bytes([whole[-1] ^ 1])
    elif content == "foreign":
        other = dataclasses.replace(KEY, gpu="Thor")
        cache.store(other, b"plan" * 100)
        content = (tmp_path / other.file_name).read_bytes()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.load(KEY) is None
    assert why in caplog.text and "building the TensorRT engine again" in caplog.text
    cache.store(KEY, b"new")
    assert cache.load(KEY) == b"new"


def test_an_engine_of_another_user_is_refused(tmp_path, monkeypatch, caplog):
    cache = EngineCache(tmp_path)
    cache.store(KEY, b"plan")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert cache.load(KEY) is None and "another user" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    EngineCache(tmp_path / "file" / "cache").store(KEY, b"plan")
    assert "set XDG_CACHE_HOME" in caplog.text


def test_a_full_disk_leaves_no_part(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    EngineCache(tmp_path).store(KEY, b"plan")
    assert not list(tmp_path.iterdir()) and "No space left" in caplog.text


def test_the_folder_follows_the_xdg_specification():
    assert default_folder({"XDG_CACHE_HOME": "/var/c"}) == Path("/var/c/vla-runtime/tensorrt")
    for invalid in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert default_folder(invalid) == Path.home() / ".cache/vla-runtime/tensorrt"


# ------------------------------------------------------------------ build settings


@pytest.mark.parametrize("version, precision, bits", [
    ("10.3.0", FP32, 0b11), ("10.3.0", FP16_TYPED, 0b11), ("10.3.0", FP16_FLAG, 0b01), ("11.0.0", FP32, 0b10),
    ("11.0.0", FP16_TYPED, 0b10),
])
def test_networks_are_strongly_typed_unless_the_builder_chooses(version, precision, bits):
    assert network_flags(imitated_tensorrt(ImitatedCuda(), version), precision) == bits


def test_half_precision_by_graph_or_by_flag():
    trt_10, trt_11 = (imitated_tensorrt(ImitatedCuda(), version) for version in ("10.3.0", "11.0.0"))
    assert precision_for(trt_10, False, True) == precision_for(trt_11, False, False) == FP32
    assert precision_for(trt_10, True, True) == precision_for(trt_11, True, True) == FP16_TYPED
    assert precision_for(trt_10, True, False) == FP16_FLAG
    with pytest.raises(DenoiserError, match="'vla export --fp16'"):
        precision_for(trt_11, True, False)


@pytest.mark.parametrize("version", ["10.3.0", "11.4.0"])
def test_an_engine_is_built_once(tiny, tmp_path, version, caplog):
    caplog.set_level(logging.WARNING)
    first, trt, _ = denoiser(tiny, tmp_path, version=version)
    assert [build.typed for build in trt.built] == [True, True]
    assert all(build.config._flags == set() and build.config._limits == {0: 256 << 20} for build in trt.built)
    assert caplog.text.count("building the TensorRT engine for") == 2
    second, again, _ = denoiser(tiny, tmp_path, version=version)
    assert again.built == [] and chunk(first).tobytes() == chunk(second).tobytes()
    np.testing.assert_allclose(chunk(first)[:, 0], 0.5 * np.arange(1, 17) / 16, rtol=1e-6)
    assert first.engine == f"tensorrt {version} Imitated Orin sm_87, fp32, CUDA graph"


@pytest.mark.parametrize("changed", [{"version": "10.13.0"}, {"cuda": ImitatedCuda(Gpu("Other", "11.0", "13.0"))}])
def test_another_version_or_gpu_builds_again(tiny, tmp_path, changed):
    denoiser(tiny, tmp_path)
    _, trt, _ = denoiser(tiny, tmp_path, **changed)
    assert len(trt.built) == 2


def test_an_engine_that_tensorrt_refuses_is_built_again(tiny, tmp_path, caplog):
    _, trt, _ = denoiser(tiny, tmp_path)
    plan = imitation.PLAN + (tiny[0] / "denoise.onnx").read_bytes()
    other = imitated_tensorrt(ImitatedCuda())
    other.refuse_plans = {hashlib.sha256(plan).digest()}
    with pytest.raises(DenoiserError, match=r"does not load the engine it built for denoise\.onnx"):
        denoiser(tiny, tmp_path, trt=other)
    assert len(other.built) == 1 and "refuses its own cached engine" in caplog.text


@pytest.mark.parametrize("fault, message", [
    ("refuse_parse", r"cannot read context_kv\.onnx: operator 0 is not supported.*vla export --check"),
    ("refuse_build", r"cannot build context_kv\.onnx"),
])
def test_what_tensorrt_cannot_do_is_said_with_a_way_out(tiny, tmp_path, fault, message):
    trt = imitated_tensorrt(ImitatedCuda())
    setattr(trt, fault, True)
    with pytest.raises(DenoiserError, match=message + r".*onnxruntime"):
        denoiser(tiny, tmp_path, trt=trt)
    assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------ bindings


def test_tensors_lie_apart_and_aligned():
    layout = Layout.of({"a": (1, 9), "b": (1, 1), "c": (1, 16, 8)})
    assert layout.offsets == {"a": 0, "b": 256, "c": 512} and layout.size == 512 + 512
    cuda = ImitatedCuda()
    views = layout.views(cuda.malloc(layout.size))
    for value, view in enumerate(views.values()):
        view[...] = value
    assert [float(view.min()) for view in views.values()] == [0, 1, 2] == [float(view.max()) for view in views.values()]


@pytest.mark.parametrize("changes, message", [
    ({"horizon": 8}, "noise"), ({"context": Context(TOKENS + 1, DIM)}, "context"), ({"proprio_names": ["a"] * 8}, "proprio"),
])
def test_engines_that_are_not_those_of_the_manifest(tiny, tmp_path, changes, message):
    folder, manifest = tiny
    with pytest.raises(DenoiserError, match=f"{message} is .* not of one export"):
        denoiser((folder, dataclasses.replace(manifest, **changes)), tmp_path)


def test_graphs_that_do_not_fit_together(tiny, tmp_path):
    folder, _ = tiny
    (folder / "denoise.onnx").write_bytes((folder / "context_kv.onnx").read_bytes())
    with pytest.raises(DenoiserError, match=r"denoise\.onnx has inputs .* expected .* export the model again"):
        denoiser(tiny, tmp_path)
    (folder / "denoise.onnx").unlink()
    with pytest.raises(DenoiserError, match=r"cannot read .*denoise\.onnx"):
        denoiser(tiny, tmp_path)


def test_a_model_without_prefix_inputs(tiny, tmp_path):
    engine, _, _ = denoiser(tiny, tmp_path)
    assert not engine.supports_prefix


def test_memory_of_handles_is_used_again_and_given_back(tiny, tmp_path):
    engine, _, cuda = denoiser(tiny, tmp_path)
    tokens = np.zeros((TOKENS, DIM), np.float32)
    before = len(cuda.memory)
    for _ in range(20):
        engine.encode_context(tokens, tokens)
    assert len(cuda.memory) <= before + 1
    kept = [engine.encode_context(tokens, tokens) for _ in range(5)]
    assert len(cuda.memory) <= before + 5
    engine.close()
    assert not cuda.memory and not cuda.graphs
    del kept


# ------------------------------------------------------------------ CUDA graphs, half precision


def test_without_capture_the_work_is_enqueued(tiny, tmp_path, caplog):
    graphs, _, with_graphs = denoiser(tiny, tmp_path)
    plain, _, without = denoiser(tiny, tmp_path, cuda=ImitatedCuda(can_capture=False))
    assert "no CUDA graph" in caplog.text and plain.engine.endswith("enqueued")
    assert chunk(plain).tobytes() == chunk(graphs).tobytes()
    assert with_graphs.launches == 2 and without.launches == 0


def test_a_failing_gpu_at_the_start_is_a_denoiser_error(tiny, tmp_path):
    class Broken(ImitatedCuda):
        def synchronize(self):
            raise CudaError("cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)")

    with pytest.raises(DenoiserError, match="ILLEGAL_ADDRESS.*vla doctor"):
        denoiser(tiny, tmp_path, cuda=Broken())


def test_half_precision_by_the_builder_of_version_10(tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    engine, trt, cuda = denoiser(tiny, tmp_path, fp16=True)
    assert [(build.typed, build.half) for build in trt.built] == [(True, False), (True, False), (False, True)]
    assert FP16_FLAG in engine.engine and "differs from float32 by at most 0.0e+00 rad" in caplog.text


def test_half_precision_by_the_graph_of_version_11(tiny, tmp_path):
    folder, manifest = tiny
    (folder / FP16_FILE).write_bytes((folder / "denoise.onnx").read_bytes())
    with pytest.raises(DenoiserError, match="vla export --fp16"):  # not in the manifest: nobody verified it
        denoiser(tiny, tmp_path, version="11.0.0", fp16=True)
    engine, trt, _ = denoiser((folder, with_half(manifest)), tmp_path, version="11.0.0", fp16=True)
    assert FP16_TYPED in engine.engine and all(build.typed for build in trt.built)


def test_half_precision_that_differs_is_not_used(tiny, tmp_path, caplog):
    folder, manifest = tiny
    model = onnx.load(folder / "denoise.onnx")
    ramp = next(item for item in model.graph.initializer if item.name == "ramp")
    ramp.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(ramp) * np.float32(1.01), "ramp"))
    onnx.save(model, folder / FP16_FILE)
    engine, _, cuda = denoiser((folder, with_half(manifest)), tmp_path, fp16=True)
    assert ", fp32, CUDA graph" in engine.engine and "running in float32" in caplog.text
    np.testing.assert_allclose(chunk(engine)[-1, 0], 0.5, rtol=1e-6)
    engine.close()
    assert not cuda.memory  # that of the half precision engine went back too


# ------------------------------------------------------------------ against the real thing


def real_tensorrt():
    return pytest.importorskip("tensorrt_rtx", reason="pip install 'vla-runtime[dev]' on x86_64 Linux brings TensorRT-RTX")


ONLY_IN_10 = {"EXPLICIT_BATCH", "FP16", "INT8"}


def test_the_imitation_has_no_name_that_tensorrt_lacks():
    trt = real_tensorrt()
    pairs = [(imitation.Builder, trt.Builder), (imitation.BuilderConfig, trt.IBuilderConfig),
             (imitation.OnnxParser, trt.OnnxParser), (imitation.Runtime, trt.Runtime),
             (imitation.CudaEngine, trt.ICudaEngine), (imitation.ExecutionContext, trt.IExecutionContext),
             (imitation.Logger, trt.Logger), (imitation.DataType, trt.DataType), (imitation.TensorIOMode, trt.TensorIOMode)]
    for imitated, real in pairs:
        missing = {name for name, _ in inspect.getmembers(imitated) if not name.startswith("_")} - set(dir(real))
        assert missing <= {"name", "value", "min_severity"}, (real, missing)
    made = imitated_tensorrt(ImitatedCuda())
    for group in ("BuilderFlag", "NetworkDefinitionCreationFlag", "MemoryPoolType"):
        assert set(getattr(made, group).__members__) - ONLY_IN_10 <= set(dir(getattr(trt, group)))
    own = {"built", "refuse_parse", "refuse_build", "refuse_plans"}
    assert set(vars(made)) - own <= set(dir(trt)) | {"__version__"}


@pytest.mark.parametrize("file", ["context_kv.onnx", "denoise.onnx"])
def test_the_shipped_graphs_build(file):
    """Parsed and built by TensorRT-RTX on the CPU with the very settings of the engine; it takes seconds."""
    from vla_edge.adapters.tensorrt_build import build_plan

    trt = real_tensorrt()
    plan = build_plan(trt, trt.Logger(trt.Logger.ERROR), file, (ROOT / "models/tabletop" / file).read_bytes(), FP32)
    assert len(plan) > 100_000


def test_a_graph_that_tensorrt_cannot_read():
    from vla_edge.adapters.tensorrt_build import build_plan

    trt = real_tensorrt()
    with pytest.raises(DenoiserError, match=r"cannot read broken\.onnx: .+"):
        build_plan(trt, trt.Logger(trt.Logger.INTERNAL_ERROR), "broken.onnx", b"garbage", FP32)


def test_the_header_is_readable(tmp_path):
    EngineCache(tmp_path).store(KEY, b"plan")
    header = json.loads((tmp_path / KEY.file_name).read_bytes().split(b"\n")[1])
    assert header["key"]["tensorrt"] == "10.3.0" and len(header["sha256"]) == 64
