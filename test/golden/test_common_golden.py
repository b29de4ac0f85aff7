"""Golden bytes: a change of the wire must be meant. After raising WIRE_VERSION run with VLA_UPDATE_GOLDEN=1."""

import os
import textwrap
from pathlib import Path

import numpy as np
import pytest

from vla_common import messages, wire
from vla_common.topics import TOPICS

FOLDER = Path(__file__).parent / "common"
STAMP_NS = 1_234_567_890_123
JOINTS = [*(f"panda_joint{number}" for number in range(1, 8)), "gripper"]


def sample(short: str):
    """A message with every field set to something that its neighbours are not."""
    header = wire.make_header(STAMP_NS, "base")
    eight = np.arange(8) / 7
    image = messages.new(
        "CompressedImage", header=wire.make_header(STAMP_NS, "external"), format="jpeg", data=bytes(range(5))
    )
    fields = (
        {
            "Observation": dict(
                session="s1",
                sequence=7,
                instruction="touch the red block",
                joint_names=JOINTS,
                joint_positions=eight,
                images=[image, image],
            ),
            "ContextTokens": dict(
                session="s1",
                sequence=7,
                model_id="demo",
                model_hash=np.arange(32),
                num_tokens=2,
                dim=3,
                dtype="float32",
                instruction_hash=wire.instruction_hash("touch the red block"),
                prefix_tokens_reused=8,
                compute_s=0.0125,
                data=np.arange(6, dtype="<f4").tobytes(),
            ),
            "ActionChunk": dict(
                session="s1",
                sequence=9,
                base_tick=-3,
                period_s=0.01,
                observation_stamp_ns=STAMP_NS,
                joint_names=JOINTS,
                horizon=2,
                positions=np.arange(16) / 16,
            ),
            "ShieldCommand": dict(command=2, sequence=11),
            "ShieldStatus": dict(
                state=2,
                reason="context too old",
                tick=99,
                rearm_ready=True,
                joint_names=JOINTS,
                position=eight,
                velocity=-eight,
                limit_interventions=1,
                missed_ticks=2,
                lateness_p50_s=1e-4,
                lateness_p99_s=1e-3,
                lateness_max_s=2e-3,
                chunks_accepted=20,
                chunks_rejected=3,
                scheduling="fifo 80",
            ),
            "MotorTicks": dict(
                joints=2,
                tick=[5, 6, 7],
                lateness_ns=[50, -1, 70],
                work_ns=[30, 31, 32],
                missed=[0, 0, 1],
                state=[0, 1, 2],
                reason=[0, 3, 4],
                segment=[1, 1, 2],
                chunk_sequence=[1, 1, 2],
                offered_sequence=[1, 0, 2],
                offered_verdict=[0, 0, 5],
                measured_stamp_ns=[10**10, 10**10, 10**10 + 5],
                rearms=[1, 1, 2],
                estops=[0, 0, 3],
                estop_presses=[0, 1, 4],
                estop_input=[0, 1, 2],
                command=np.arange(6) / 2,
            ),
            "PolicyStatus": dict(
                context_age_s=0.12,
                context_rate_hz=10.0,
                denoise_s=0.0024,
                denoise_p50_s=0.0023,
                denoise_p99_s=0.0034,
                chunks=21,
                reject_names=["stale", "wrong_hash"],
                reject_counts=[4, 5],
                engine="onnxruntime",
            ),
            "TaskStatus": dict(
                episode=3,
                episodes_total=20,
                seed=2**63,
                instruction="grüner Würfel",
                target="green_block",
                task="touch",
                phase="running",
                moving=True,
                elapsed_s=1.5,
                successes=2,
                failures=1,
                wrong_object=0,
            ),
            "SimState": dict(episode=3, scene='{"objects": []}', qpos=np.arange(3) / 3),
        }[short]
        if messages.full_type(short).startswith("vla_runtime")
        else {
            "JointState": dict(name=JOINTS, position=eight, velocity=-eight),
            "CompressedImage": dict(format="jpeg", data=bytes(range(5))),
            "String": dict(data="touch the red block"),
            "Bool": dict(data=True),
        }[short]
    )
    if short not in ("String", "Bool"):
        fields["header"] = header
    return messages.new(short, **fields)


SHORT_NAMES = sorted(name.rsplit("/", 1)[1] for name in messages.MAX_BYTES)


@pytest.mark.parametrize("short", SHORT_NAMES)
def test_payload_equals_golden_bytes(short):
    payload = wire.encode(sample(short))
    path = FOLDER / f"{short}.hex"
    if os.environ.get("VLA_UPDATE_GOLDEN"):
        path.write_text("\n".join(textwrap.wrap(payload.hex(), 96)) + "\n", encoding="ascii")
    assert payload == bytes.fromhex(path.read_text(encoding="ascii"))


@pytest.mark.parametrize("short", SHORT_NAMES)
def test_golden_bytes_decode_to_the_message(short):
    payload = bytes.fromhex((FOLDER / f"{short}.hex").read_text(encoding="ascii"))
    assert wire.encode(wire.decode(short, payload)) == payload


def test_type_hashes_equal_golden():
    """A robot on ROS finds a topic only under exactly this hash. The std and sensor ones are those of ROS 2 itself."""
    path = FOLDER / "type_hashes.txt"
    text = "".join(f"{name} {messages.type_hash(name)}\n" for name in sorted(messages.MAX_BYTES))
    if os.environ.get("VLA_UPDATE_GOLDEN"):
        path.write_text(text, encoding="ascii")
    assert text == path.read_text(encoding="ascii")
    assert "std_msgs/msg/String RIHS01_df668c740482bbd48fb39d76a70dfd4bd59db1288021743503259e948f6b1a18\n" in text


def test_every_topic_has_golden_bytes():
    assert {spec.type_name.rsplit("/", 1)[1] for spec in TOPICS.values()} == set(SHORT_NAMES)
