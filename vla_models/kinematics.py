"""Forward kinematics of a serial arm in torch, exportable to ONNX (sin, cos and matrix products only)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def _quat_to_matrix(quat_wxyz: Sequence[float]) -> Tensor:
    w, x, y, z = (float(v) for v in quat_wxyz)
    return torch.tensor(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ],
        dtype=torch.float64,
    )


class ForwardKinematics(nn.Module):
    """Tool pose of a chain of revolute joints.

    ``chain``: ``joints`` = list of ``{pos_m[3], quat_wxyz[4], axis[3]}`` (offset from the parent frame, then the
    rotation axis in the joint's own frame) and ``tcp`` = ``{pos_m, quat_wxyz}``. The numbers are the simulator's own.
    """

    def __init__(self, chain: Mapping[str, Any]) -> None:
        super().__init__()
        joints, tool = chain["joints"], chain["tcp"]
        offsets = [(_quat_to_matrix(j["quat_wxyz"]), torch.tensor(j["pos_m"], dtype=torch.float64)) for j in joints]
        axes = [torch.tensor(j["axis"], dtype=torch.float64) for j in joints]
        eye = torch.eye(3, dtype=torch.float64)
        # Rodrigues with constant axis: R(q) = outer + sin(q) * cross + cos(q) * (I - outer), folded with the offset.
        outer, cross, rest = [], [], []
        for (rotation, _), axis in zip(offsets, axes, strict=True):
            o = torch.outer(axis, axis)
            c = torch.zeros(3, 3, dtype=torch.float64)
            c[0, 1], c[0, 2], c[1, 2] = -axis[2], axis[1], -axis[0]
            c = c - c.T
            outer.append(rotation @ o)
            cross.append(rotation @ c)
            rest.append(rotation @ (eye - o))
        self.register_buffer("outer", torch.stack(outer).float())
        self.register_buffer("cross", torch.stack(cross).float())
        self.register_buffer("rest", torch.stack(rest).float())
        self.register_buffer("offset", torch.stack([p for _, p in offsets]).float())
        self.register_buffer("tool_rotation", _quat_to_matrix(tool["quat_wxyz"]).float())
        self.register_buffer("tool_offset", torch.tensor(tool["pos_m"], dtype=torch.float32))
        self.num_joints = len(joints)

    def forward(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """``q`` f32[B, J] rad → (tool position f32[B, 3] m, tool z axis f32[B, 3]) in the base frame."""
        q = q.float()
        sin, cos = torch.sin(q)[:, :, None, None], torch.cos(q)[:, :, None, None]
        local = self.outer + sin * self.cross + cos * self.rest
        rotation = local[:, 0]
        position = self.offset[0].expand(q.shape[0], 3)
        for i in range(1, self.num_joints):
            position = position + (rotation @ self.offset[i][:, None])[..., 0]
            rotation = rotation @ local[:, i]
        position = position + (rotation @ self.tool_offset[:, None])[..., 0]
        return position, (rotation @ self.tool_rotation[:, 2:3])[..., 0]
