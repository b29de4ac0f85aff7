"""Engine, recorder and scheduling: what they refuse, and in which words."""

import dataclasses
import gc
import logging
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from mcap.reader import make_reader

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

from edge_rig import DIM, HORIZON, TOKENS, make_model

from vla_common import wire
from vla_common.manifest import Context, Manifest, load_manifest
from vla_common.messages import new
from vla_edge.adapters import realtime
from vla_edge.adapters.denoiser_onnx import OnnxDenoiser
from vla_edge.adapters.mcap_recorder import McapRecorder, RecordingError
from vla_edge.core.denoiser import DenoiserError, Prefix
from vla_edge.recorder_main import free_path

# ------------------------------------------------------------------ engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


@pytest.fixture(scope="module")
def denoiser(folder):
    return OnnxDenoiser(folder, load_manifest(folder))


def inputs(fill=0.0):
    tokens = np.zeros((TOKENS, DIM), np.float32)
    tokens[0] = fill
    return tokens, np.zeros(9, np.float32), np.zeros((HORIZON, 8), np.float32)


def test_a_chunk_from_a_context(denoiser):
    tokens, proprio, noise = inputs(0.5)
    handle = denoiser.encode_context(tokens, tokens)
    deltas = denoiser.denoise(handle, proprio, 0.1, 0.5, noise)
    assert deltas.shape == (HORIZON, 8) and deltas.dtype == np.float32
    np.testing.assert_allclose(deltas[:, 0], 0.5 * np.arange(1, 17) / 16, rtol=1e-6)
    np.testing.assert_allclose(denoiser.denoise(handle, proprio, 0.1, 0.5, noise + 1), deltas + 1, rtol=1e-6)
    assert denoiser.engine.startswith("onnxruntime ")


def test_equal_inputs_give_equal_outputs_and_handles_keep_their_context(denoiser):
    tokens, proprio, noise = inputs(0.5)
    other = inputs(-0.5)[0]
    first, second = denoiser.encode_context(tokens, tokens), denoiser.encode_context(other, other)
    a = denoiser.denoise(first, proprio, 0.0, 0.5, noise)
    b = denoiser.denoise(second, proprio, 0.0, 0.5, noise)
    assert (denoiser.denoise(first, proprio, 0.0, 0.5, noise) == a).all() and (a == -b).all()


def test_a_model_without_prefix_inputs_says_so(denoiser):
    tokens, proprio, noise = inputs()
    assert not denoiser.supports_prefix
    with pytest.raises(DenoiserError, match="takes no prefix: use another ensemble.rule"):
        denoiser.denoise(denoiser.encode_context(tokens, tokens), proprio, 0.1, 0.5, noise,
                         Prefix(noise, np.zeros(HORIZON, np.float32)))


def test_half_of_the_prefix_inputs_is_no_signature(folder, tmp_path):
    manifest = make_model(tmp_path)
    model = onnx.load(tmp_path / "denoise.onnx")
    model.graph.input.append(onnx.helper.make_tensor_value_info("prefix", onnx.TensorProto.FLOAT, [1, HORIZON, 8]))
    onnx.save(model, str(tmp_path / "denoise.onnx"))
    with pytest.raises(DenoiserError, match=r"has inputs .*'prefix', 'proprio'.* expected .*'prefix_weight'"):
        OnnxDenoiser(tmp_path, manifest)


@pytest.mark.parametrize("changes, message", [
    ({"horizon": 8}, "noise"), ({"context": Context(TOKENS + 1, DIM)}, "context"),
    ({"context": Context(TOKENS, DIM * 2)}, "context"), ({"proprio_names": ["a"] * 8}, "proprio"),
])
def test_files_that_are_not_those_of_the_manifest(folder, changes, message):
    manifest: Manifest = dataclasses.replace(load_manifest(folder), **changes)
    with pytest.raises(DenoiserError, match=f"{message} is .* not of one export"):
        OnnxDenoiser(folder, manifest)


def test_graphs_with_other_inputs(folder, tmp_path):
    manifest = make_model(tmp_path)
    (tmp_path / "denoise.onnx").write_bytes((tmp_path / "context_kv.onnx").read_bytes())
    with pytest.raises(DenoiserError, match=r"denoise\.onnx has inputs .* expected .* export the model again"):
        OnnxDenoiser(tmp_path, manifest)


def test_files_that_are_no_graphs(tmp_path):
    manifest = make_model(tmp_path)
    (tmp_path / "context_kv.onnx").write_bytes(b"garbage")
    with pytest.raises(DenoiserError, match="cannot load .*export the model again"):
        OnnxDenoiser(tmp_path, manifest)


# ------------------------------------------------------------------ recorder


def test_wire_bytes_come_back_unchanged_with_their_definition(tmp_path):
    payload = wire.encode(new("ShieldCommand", header=wire.make_header(5), command=2, sequence=9))
    recorder = McapRecorder(tmp_path / "deep" / "a.mcap")
    for k in range(3):
        recorder.write("/arm1/shield_command", "ShieldCommand", payload, 100 + k, 90 + k, k)
    recorder.write("/arm1/instruction", "std_msgs/String", wire.encode(new("std_msgs/String", data="hi")), 200, 200, 0)
    recorder.close()
    recorder.close()
    assert recorder.messages == 4
    with (tmp_path / "deep" / "a.mcap").open("rb") as file:
        found = list(make_reader(file).iter_messages())
    schema, channel, message = found[0]
    assert (schema.name, schema.encoding, channel.topic) == ("vla_runtime/msg/ShieldCommand", "ros2msg",
                                                             "/arm1/shield_command")
    text = schema.data.decode()
    assert "uint8 ESTOP=2" in text and "MSG: std_msgs/Header" in text  # nested definitions too
    assert (message.data, message.log_time, message.publish_time, message.sequence) == (payload, 100, 90, 0)
    assert len(found) == 4


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full here")
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "full.mcap").symlink_to("/dev/full")
    recorder = McapRecorder(tmp_path / "full.mcap")
    payload = wire.encode(new("std_msgs/String", data="x" * 60_000))
    with pytest.raises(RecordingError, match="No space left on device; the robot goes on without it. Free space"):
        for k in range(200):
            recorder.write("/t", "std_msgs/String", payload, k, k, k)
    with pytest.raises(RecordingError, match="No space left"):
        recorder.close()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="stopped"):
        McapRecorder(tmp_path / "file" / "a.mcap")


def test_a_restarted_recorder_keeps_the_first_file(tmp_path):
    path = tmp_path / "a.mcap"
    assert free_path(path) == path
    path.write_bytes(b"1")
    (tmp_path / "a-2.mcap").write_bytes(b"2")
    assert free_path(path) == tmp_path / "a-3.mcap"


# ------------------------------------------------------------------ scheduling


@pytest.fixture
def restored_gc():
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_not_permitted_is_said_loudly(monkeypatch, caplog, restored_gc):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(realtime.os, "sched_setscheduler", refuse)
    monkeypatch.setattr(realtime.os, "sched_setaffinity", refuse)
    monkeypatch.setattr(realtime.ctypes, "CDLL", lambda *_, **__: object())
    with caplog.at_level(logging.WARNING):
        assert realtime.enter_realtime(80, True, 0) == "ordinary, gc off"
    assert caplog.text.count("DEGRADED") == 3
    for remedy in ("rtprio 99", "memlock unlimited", "motor.cpu"):
        assert remedy in caplog.text


def test_ordinary_scheduling_on_request_is_no_degradation(monkeypatch, caplog, restored_gc):
    monkeypatch.setattr(realtime.os, "sched_setscheduler", lambda *_: pytest.fail("not asked for"))
    assert realtime.enter_realtime(0, False, None) == "ordinary, gc off"
    assert not caplog.text and not gc.isenabled()
