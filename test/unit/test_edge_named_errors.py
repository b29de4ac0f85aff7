"""What an integrator gets wrong first, each with a name of its own: settings, joint names, encodings, cameras, widths."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from io_rig import LIMITS, MS, Edge

from vla_common import messages, tensors, wire
from vla_common.config import ConfigError
from vla_edge.config import load_edge_config
from vla_edge.core.chunk import ActionChunk, ChunkGate, Reject
from vla_edge.core.context_mailbox import ContextMailbox, ContextReject, MailboxConfig
from vla_edge.core.trace import TraceError, chunk_of
from vla_edge.policy_main import context_of

N = len(LIMITS)


@pytest.mark.parametrize("setting, named", [
    ("motor.period_s=0.2", "motor: period_s must be 0.001 .. 0.1, got 0.2"),
    ("motor.fifo_priority=100", "motor: fifo_priority"), ("io.poll_s=0", "io: poll_s"),
    ("io.camera_window_s=0.51", "io: camera_window_s must be 0 .. 0.5"), ("io.camera_window_s=-0.01", "camera_window_s"),
    ("io.camera_window_s=.nan", "camera_window_s"), ("shield.stall_ticks=0", "shield: .*stall_ticks"),
    ("policy.home_limit_share=1", "policy: home_limit_share"), ("ros.jpeg_quality=0", "ros: jpeg_quality"),
    ("ros.observation_hz=0", "observation_hz"), ("io.camera_window=0.1", "did you mean 'camera_window_s'"),
    ("io.camera_window_s=wide", "io.camera_window_s: expected float")])
def test_a_setting_out_of_range(setting, named):
    with pytest.raises(ConfigError, match=named):
        load_edge_config(None, [setting])


@pytest.mark.parametrize("changes, name", [
    ({"name": list(LIMITS.names[1:]), "position": np.zeros(N - 1)}, f"joint_states_missing_{LIMITS.names[0]}"),
    ({"name": ["x", *LIMITS.names[1:]]}, f"joint_states_missing_{LIMITS.names[0]}"),
    ({"name": [*LIMITS.names, LIMITS.names[2]], "position": np.zeros(N + 1)}, f"joint_states_twice_{LIMITS.names[2]}"),
    ({"position": np.zeros(N - 1)}, "joint_states_position"), ({"position": np.zeros(N + 1)}, "joint_states_position"),
    ({"position": np.zeros(0)}, "joint_states_position"), ({"velocity": np.zeros(N - 1)}, "joint_states_velocity"),
    ({"velocity": np.zeros(N + 2)}, "joint_states_velocity")])
def test_joint_names_and_widths(changes, name):
    edge = Edge()
    edge.turn()
    edge.arrives("joint_states", messages.new("sensor_msgs/JointState", **{
        "name": list(LIMITS.names), "position": np.array(LIMITS.ready), **changes}))
    edge.turn()
    assert edge.io.rejects() == {name: 1} and edge.measured() is None


@pytest.mark.parametrize("encoding, name", [("yuv422", "image_encoding_yuv422"), ("16UC1", "image_encoding_16UC1"),
                                            ("no such thing", "image_encoding_unknown"), ("rgb8", "image_size")])
def test_encodings_and_the_camera_that_is_missing_for_them(encoding, name):
    edge = Edge("ros.image_transport=raw")
    edge.joints(0)
    for _ in range(20):
        edge.image(height=8, width=8, encoding=encoding, step=16, data=np.zeros(128, np.uint8))
        edge.turn(50 * MS)
    # Looked at as often as observations go up.
    assert set(edge.io.rejects()) == {name} and 8 <= edge.io.rejects()[name] <= 12
    assert edge.io.cameras == "camera_missing_front: no image that can be used yet"


@pytest.mark.parametrize("fields, name", [
    (tensors.token_fields(np.zeros((4, 7), np.float32)), "context_shape"),
    (tensors.token_fields(np.zeros((5, 8), np.float32)), "context_shape"),
    ({**tensors.token_fields(np.zeros((4, 8), np.float32)), "dim": 7}, "context_malformed"),
    ({**tensors.token_fields(np.zeros((4, 8), np.float32)), "dtype": "int8"}, "context_malformed")])
def test_context_tokens_of_another_width(fields, name):
    model = np.full(32, 7, np.uint8)
    message = wire.decode("ContextTokens", wire.encode(messages.new(
        "ContextTokens", header=wire.make_header(1), session="s", sequence=1, model_hash=model, instruction_hash=model,
        **fields)))
    mailbox = ContextMailbox(model.tobytes(), MailboxConfig((4, 8)))
    mailbox.set_instruction(model.tobytes())
    if name == "context_malformed":
        with pytest.raises(wire.Malformed, match="context tokens"):
            context_of(message)
    else:
        assert mailbox.offer(context_of(message), 1) is ContextReject.SHAPE and ContextReject.SHAPE.value == name


@pytest.mark.parametrize("width", [1, N - 1, N + 1])
def test_chunks_of_another_width(width):
    chunk = ActionChunk("s", 1, 0, 1, 0.01, (*LIMITS.names, "x")[:width], np.zeros((16, width)))
    assert ChunkGate(LIMITS, 0.01).check(chunk, 1, 1) is Reject.WIDTH and Reject.WIDTH.value == "chunk_width"
    message = messages.new("ActionChunk", horizon=16, joint_names=list(LIMITS.names), positions=np.zeros(16 * width))
    with pytest.raises(wire.Malformed, match=f"action chunk: {16 * width} values do not make 16 x {N}"):
        tensors.positions_of(message)
    with pytest.raises(TraceError, match=f"has {16 * width} numbers for 16 x {N}"):
        chunk_of(message)
