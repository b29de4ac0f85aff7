"""Batched forward kinematics and Jacobian of the 7-joint arm, in plain numpy.

The chain is a list of numbers (`assets/panda_chain.json`) taken from the MuJoCo model, so that
the torch copy inside the denoiser and this one share a single source.

    world ── pos, quat ──▶ joint 1 (about z) ── pos, quat ──▶ joint 2 ... joint 7 ── tcp pos, quat ──▶ tcp
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

ASSETS = Path(__file__).parent / "assets"
CHAIN_FILE = ASSETS / "panda_chain.json"


@dataclass(frozen=True)
class Chain:
    """Constant transforms of the arm. Quaternions are wxyz. Joints turn about their own z axis."""

    joint_names: tuple[str, ...]
    pos_m: np.ndarray  # [7, 3] origin of joint i in the frame after joint i-1
    rot: np.ndarray  # [7, 3, 3] orientation of joint i at zero, same parent frame
    lower_rad: np.ndarray  # [7]
    upper_rad: np.ndarray  # [7]
    tcp_pos_m: np.ndarray  # [3] in the frame after joint 7
    tcp_rot: np.ndarray  # [3, 3]


def quat_to_matrix(quat: np.ndarray) -> np.ndarray:
    """wxyz[4] → rotation [3, 3]."""
    w, x, y, z = quat / np.linalg.norm(quat)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


@lru_cache(maxsize=1)
def load_chain() -> Chain:
    """The chain of the packaged robot."""
    raw = json.loads(CHAIN_FILE.read_text(encoding="utf-8"))
    joints = raw["joints"]
    if any(joint["axis"] != [0.0, 0.0, 1.0] for joint in joints):
        raise ValueError("the kinematics here assume joints that turn about their z axis")
    return Chain(
        joint_names=tuple(joint["name"] for joint in joints),
        pos_m=np.array([joint["pos_m"] for joint in joints]),
        rot=np.stack([quat_to_matrix(np.array(joint["quat_wxyz"])) for joint in joints]),
        lower_rad=np.array([joint["lower_rad"] for joint in joints]),
        upper_rad=np.array([joint["upper_rad"] for joint in joints]),
        tcp_pos_m=np.array(raw["tcp"]["pos_m"]),
        tcp_rot=quat_to_matrix(np.array(raw["tcp"]["quat_wxyz"])),
    )


def forward(q_rad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tool pose: q [..., 7] → position [..., 3] m, rotation [..., 3, 3]."""
    shape = q_rad.shape[:-1]
    _, _, pos, rot = _sweep(q_rad.reshape(-1, 7))
    return pos.reshape(*shape, 3), rot.reshape(*shape, 3, 3)


def forward_and_jacobian(q_rad: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [B, 7] → position [B, 3] m, rotation [B, 3, 3], Jacobian [B, 6, 7] (linear, angular)."""
    origins, axes, pos, rot = _sweep(q_rad)
    jac = np.empty((q_rad.shape[0], 6, 7), dtype=pos.dtype)
    arm = pos[:, None, :] - origins
    jac[:, 0] = axes[..., 1] * arm[..., 2] - axes[..., 2] * arm[..., 1]
    jac[:, 1] = axes[..., 2] * arm[..., 0] - axes[..., 0] * arm[..., 2]
    jac[:, 2] = axes[..., 0] * arm[..., 1] - axes[..., 1] * arm[..., 0]
    jac[:, 3:] = axes.transpose(0, 2, 1)
    return pos, rot, jac


def _sweep(q_rad: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Walk down the chain: joint origins [B, 7, 3], joint axes [B, 7, 3], tcp pos, tcp rot."""
    chain = load_chain()
    batch = q_rad.shape[0]
    cos, sin = np.cos(q_rad), np.sin(q_rad)
    pos = np.zeros((batch, 3))
    rot = np.broadcast_to(np.eye(3), (batch, 3, 3))
    origins = np.empty((batch, 7, 3))
    axes = np.empty((batch, 7, 3))
    for i in range(7):
        pos = pos + rot @ chain.pos_m[i]
        rot = rot @ chain.rot[i]
        origins[:, i] = pos
        axes[:, i] = rot[:, :, 2]
        # Multiplying by a rotation about z only mixes the first two columns.
        turned = np.empty_like(rot)
        c, s = cos[:, i, None], sin[:, i, None]
        turned[:, :, 0] = rot[:, :, 0] * c + rot[:, :, 1] * s
        turned[:, :, 1] = rot[:, :, 1] * c - rot[:, :, 0] * s
        turned[:, :, 2] = rot[:, :, 2]
        rot = turned
    pos = pos + rot @ chain.tcp_pos_m
    return origins, axes, pos, rot @ chain.tcp_rot
