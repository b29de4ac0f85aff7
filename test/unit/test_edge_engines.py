"""Which engine is chosen, in which words, and what happens when it cannot be had."""

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

from edge_rig import make_model

import vla_edge.adapters.denoiser_tensorrt as tensorrt_adapter
from vla_common.clock import ManualClock
from vla_common.config import ConfigError
from vla_common.manifest import ManifestError
from vla_edge.config import load_edge_config
from vla_edge.core.denoiser import DenoiserError
from vla_edge.engines import EngineProbe, Latency, choose_engine, make_denoiser, measure_latency, system_probe

ROOT = Path(__file__).parents[2]


def probe(*there):
    """Everything is missing but what is named."""
    def look(name):
        return lambda: None if name in there else f"{name} is not installed"

    return EngineProbe(look("onnxruntime"), look("torch"), look("tensorrt"), look("gpu"))


@pytest.mark.parametrize("setting, there, name, why", [
    ("auto", ("onnxruntime", "tensorrt", "gpu"), "tensorrt", "TensorRT and a GPU are there"),
    ("auto", ("onnxruntime", "tensorrt"), "onnxruntime", "TensorRT is no choice: gpu is not installed"),
    ("auto", ("onnxruntime", "gpu"), "onnxruntime", "TensorRT is no choice: tensorrt is not installed"),
    ("auto", ("onnxruntime", "torch"), "onnxruntime", "TensorRT is no choice: gpu is not installed"),
    ("auto", ("tensorrt", "gpu"), "tensorrt", "TensorRT and a GPU are there"),
    ("onnxruntime", ("onnxruntime", "tensorrt", "gpu"), "onnxruntime", "policy.engine is onnxruntime"),
    ("torch", ("torch",), "torch", "policy.engine is torch"),
    ("tensorrt", ("tensorrt", "gpu"), "tensorrt", "policy.engine is tensorrt"),
])
def test_the_choice_and_why(setting, there, name, why):
    choice = choose_engine(setting, probe(*there))
    assert (choice.name, choice.why) == (name, why)


@pytest.mark.parametrize("setting, there, message", [
    ("auto", (), r"no engine for the policy: onnxruntime is not installed: pip install 'vla-runtime\[edge\]'"),
    ("auto", ("torch", "gpu"), "TensorRT: tensorrt is not installed"),
    ("onnxruntime", ("torch",), r"policy.engine is onnxruntime, but .*vla-runtime\[edge\]"),
    ("torch", ("onnxruntime",), r"policy.engine is torch, but torch is not installed: pip install torch.* to auto"),
    ("tensorrt", ("gpu",), "policy.engine is tensorrt, but tensorrt is not installed: install TensorRT"),
    ("tensorrt", ("tensorrt",), "policy.engine is tensorrt, but gpu is not installed"),
])
def test_what_is_missing_is_said_with_the_remedy(setting, there, message):
    with pytest.raises(DenoiserError, match=message):
        choose_engine(setting, probe(*there))


def test_this_machine_is_looked_at():
    found = system_probe()
    assert found.onnxruntime() is None and found.torch() is None
    assert choose_engine("onnxruntime").name == "onnxruntime"


def test_bindings_without_libraries_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.10: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert "installed but cannot be imported (ImportError: libnvinfer.so.10" in system_probe().tensorrt()


def test_engines_are_made(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    manifest = make_model(tmp_path)
    engine = make_denoiser(tmp_path, manifest, probe=probe("onnxruntime"), fp16=True)
    assert engine.engine.startswith("onnxruntime ") and not engine.supports_prefix
    assert "engine onnxruntime: TensorRT is no choice" in caplog.text and "policy.fp16 concerns TensorRT only" in caplog.text
    with pytest.raises(ManifestError, match="not a policy of this release"):  # it has no head.safetensors
        make_denoiser(tmp_path, manifest, "torch")


def test_torch_serves_the_shipped_model_and_checks_the_manifest():
    from vla_common.manifest import load_manifest

    folder = ROOT / "models/tabletop"
    manifest = load_manifest(folder)
    engine = make_denoiser(folder, manifest, "torch")
    assert engine.engine.startswith("torch ") and engine.supports_prefix
    with pytest.raises(DenoiserError, match="horizon=16.*horizon=8"):
        make_denoiser(folder, dataclasses.replace(manifest, horizon=8), "torch")


def test_a_tensorrt_that_fails_is_left_only_under_auto(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise DenoiserError("TensorRT 10.3.0 cannot build denoise.onnx")

    monkeypatch.setattr(tensorrt_adapter, "TensorRtDenoiser", fail)
    manifest, there = make_model(tmp_path), probe("onnxruntime", "tensorrt", "gpu")
    assert make_denoiser(tmp_path, manifest, probe=there).engine.startswith("onnxruntime")
    assert "DEGRADED" in caplog.text and "cannot build denoise.onnx" in caplog.text
    with pytest.raises(DenoiserError, match=r"cannot build denoise\.onnx"):
        make_denoiser(tmp_path, manifest, "tensorrt", probe=there)


def test_settings():
    assert (load_edge_config(None, []).policy.engine, load_edge_config(None, []).policy.fp16) == ("auto", False)
    config = load_edge_config(None, ["policy.engine=tensorrt", "policy.fp16=true"])
    assert (config.policy.engine, config.policy.fp16) == ("tensorrt", True)
    with pytest.raises(ConfigError, match="engine"):
        load_edge_config(None, ["policy.engine=tensorflow"])


def test_choosing_imports_no_engine():
    code = ("import sys; from vla_edge.engines import *; from vla_edge import policy_main\n"
            "probe = EngineProbe(*[lambda: None] * 4); choose_engine('torch', probe)\n"
            "print(sorted({'torch', 'onnxruntime', 'tensorrt', 'vla_models'} & set(sys.modules)))")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_quantiles_of_latency(tmp_path):
    latency = Latency.of([k * 1_000_000 for k in range(1, 101)])
    assert (latency.p50_ms, latency.max_ms, latency.rounds) == (50.5, 100.0, 100)
    assert latency.p50_ms < latency.p99_ms < latency.p999_ms < latency.max_ms
    manifest = make_model(tmp_path)

    class Slow(ManualClock):
        def monotonic_ns(self):
            self.advance_ns(2_000_000)
            return super().monotonic_ns()

    report = measure_latency(make_denoiser(tmp_path, manifest, "onnxruntime"), manifest, Slow(), rounds=4)
    assert report["denoise"] == report["encode"] == Latency(2.0, 2.0, 2.0, 2.0, 4)
