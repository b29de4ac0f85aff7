"""A tiny random backbone, its manifest, and observations as bytes, good and bad."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from vla_cloud.context.service import OBSERVATION
from vla_common import messages, wire
from vla_common.manifest import Camera, Context, Instruction, Manifest
from vla_common.topics import data_key
from vla_models.llama import LlamaConfig
from vla_models.text import SPECIALS
from vla_models.vit import VitConfig
from vla_models.vlm import Vlm, VlmConfig

JOINTS = ["joint1", "joint2", "gripper"]
VOCABULARY = [*SPECIALS, "touch", "pick", "the", "red", "blue", "cube"]
CAMERA = Camera("external", 24, 24)
MS = 1_000_000
MANIFEST = Manifest(
    name="tiny", joint_names=JOINTS, horizon=16, period_s=0.01, context=Context(3, 8), proprio_names=JOINTS,
    cameras=[CAMERA], instruction=Instruction(VOCABULARY, 8), files={}, licence="Apache-2.0", training_command="none",
)  # fmt: skip


def tiny_vlm() -> Vlm:
    torch.manual_seed(0)
    vit = VitConfig(24, 6, 16, 2, 2, 32, stem=((2, 8), (3, 16)))
    llama = LlamaConfig(len(VOCABULARY), 16, 2, 2, 1, 32, lm_head=False)
    vlm = Vlm(VlmConfig(vit, llama, num_readout=3, context_dim=8, text_length=8))
    for parameter in vlm.parameters():  # away from the small initial values, so that every input shows in the output
        parameter.data += 0.2 * torch.randn_like(parameter)
    return vlm.eval()


def jpeg(seed: int = 0, size: tuple[int, int] = (24, 24), image_format: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, image_format)
    return buffer.getvalue()


def observation(sequence: int = 0, stamp_ns: int = 123_456_789_012, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "header": wire.make_header(stamp_ns, "base"), "session": "s", "sequence": sequence,
        "instruction": "touch the red cube", "joint_names": JOINTS, "joint_positions": [0.1, 0.2, 0.0], "image": jpeg(),
        "camera": "external",
    } | changes  # fmt: skip
    image = messages.new("sensor_msgs/CompressedImage", header=wire.make_header(stamp_ns, str(fields.pop("camera"))),
                         format="jpeg", data=fields.pop("image"))
    return wire.encode(messages.new("Observation", images=[image], **fields))


def key(robot: str) -> str:
    return data_key(OBSERVATION.topic("R"), OBSERVATION.type_name).replace("/R/", f"/{robot}/", 1)


REFUSALS = {
    "unknown_word": {"instruction": "touch the green cube"},
    "instruction_too_long": {"instruction": "touch touch touch touch touch touch touch"},
    "wrong_joint_names": {"joint_names": ["joint2", "joint1", "gripper"]},
    "wrong_joint_positions": {"joint_positions": [0.1, float("nan"), 0.0]},
    "missing_image": {"camera": "wrist"},
    "wrong_image_size": {"image": jpeg(size=(24, 48))},
    "image_too_large": {"image": b"\0" * 8193},
    "malformed_image": {"image": jpeg()[:200]},
}
