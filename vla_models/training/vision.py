"""Stage 1: ground language in images. The backbone learns which coloured object an instruction names and where it is.

Losses: per-patch object class and position on the ViT (dense supervision makes grounding click early), the named
object's position and the kind of task on the mean of the context tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..flow_head import FlowHead
from ..vlm import Vlm
from .data import FrameSet, PhraseTable

HELD_SHARE = 0.25


@dataclass(frozen=True)
class CameraGeometry:
    """Pinhole camera in the base frame: position m, x and y axes (looks along -z, as in MuJoCo), vertical fov rad."""

    position: tuple[float, float, float]
    xyaxes: tuple[float, float, float, float, float, float]
    fovy_rad: float

    def project(self, points: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Points f32[..., 3] m → image coordinates f32[..., 2] in [0, 1] (column, row)."""
        x, y = np.asarray(self.xyaxes[:3]), np.asarray(self.xyaxes[3:])
        x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
        rotation = np.stack([x, y, np.cross(x, y)])
        local = (points - np.asarray(self.position)) @ rotation.T
        scale = 0.5 / np.tan(self.fovy_rad / 2)
        depth = np.maximum(-local[..., 2], 1e-3)
        return np.stack([0.5 + scale * local[..., 0] / depth, 0.5 - scale * local[..., 1] / depth], -1).astype(
            np.float32
        )


class AuxiliaryHeads(nn.Module):
    """Heads used in training only: patch class (0 = nothing, 1 + colour), patch position, task kind."""

    def __init__(self, vit_dim: int, context_dim: int, colours: int, tasks: int) -> None:
        super().__init__()
        self.patch = nn.Sequential(nn.LayerNorm(vit_dim), nn.Linear(vit_dim, 1 + colours + 3))
        self.task = nn.Linear(context_dim, tasks)


def patch_labels(
    pixels: npt.NDArray[np.float32], present: npt.NDArray[np.bool_], side: int, reach: float = 0.85
) -> npt.NDArray[np.int64]:
    """Image coordinates f32[B, C, 2] and presence bool[B, C] → class of each patch i64[B, side * side]."""
    centre = (np.arange(side) + 0.5) / side
    grid = np.stack(np.meshgrid(centre, centre, indexing="xy"), -1).reshape(1, 1, side * side, 2)
    distance = np.abs(grid - pixels[:, :, None]).max(-1)  # [B, C, P]
    distance[~present] = np.inf
    nearest = distance.argmin(1)
    return np.where(distance.min(1) < reach / side, nearest + 1, 0)


class VisionObjective:
    """Draws batches and computes the stage's losses; ``per_image`` instructions share one pass of the ViT."""

    def __init__(
        self,
        vlm: Vlm,
        head: FlowHead,
        aux: AuxiliaryHeads,
        frames: FrameSet,
        phrases: PhraseTable,
        camera: CameraGeometry,
        batch: int = 48,
        per_image: int = 2,
        seed: int = 0,
    ) -> None:
        self.vlm, self.head, self.aux, self.frames, self.phrases = vlm, head, aux, frames, phrases
        self.batch, self.per_image, self.seed = batch, per_image, seed
        self.side = vlm.config.vit.image_size // vlm.config.vit.patch_size
        held = frames.object_held[frames.train_index] >= 0
        self._held, self._free = frames.train_index[held], frames.train_index[~held]
        self.labels = patch_labels(camera.project(frames.object_pos), frames.object_present, self.side).astype(np.int8)

    def loss(self, step: int) -> Mapping[str, Tensor]:
        """Losses of one random batch; deterministic in (seed, step), so a resumed run sees the same batches."""
        rng = np.random.default_rng([self.seed, step])
        # Frames with an object in the gripper are rare, and in them its place is told by the gripper around it.
        count = rng.binomial(self.batch, HELD_SHARE) if len(self._held) else 0
        pick = np.concatenate([rng.choice(self._held, count), rng.choice(self._free, self.batch - count)])
        return self.compute(pick, rng)

    def compute(self, pick: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Tensor]:
        """Losses and error metrics on the frames ``pick``."""
        frames, colours = self.frames, self.frames.object_present.shape[1]
        images = torch.from_numpy(frames.images[pick])
        noise = rng.random((len(pick), self.per_image, colours)) * frames.object_present[pick][:, None]
        target = noise.argmax(-1)  # a random present object for each instruction
        held = frames.object_held[pick][:, None]
        target = np.where((held >= 0) & (rng.random(target.shape) < 0.5), held, target)
        task = rng.integers(0, self.phrases.tasks, target.shape)
        ids = torch.from_numpy(self.phrases.sample(task, target, rng)).flatten(0, 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            patches = self.vlm.patches(images)
            tokens = self.vlm.image_tokens(patches).repeat_interleave(self.per_image, 0)
            context = self.vlm.readout_context(self.vlm.encode_text(ids), tokens, self.vlm.text_lengths(ids)).float()
        patch = self.aux.patch(patches.float())
        label = torch.from_numpy(self.labels[pick].astype(np.int64))
        weight = torch.full((1 + colours,), 3.0)
        weight[0] = 1.0
        loss_class = F.cross_entropy(patch[..., : 1 + colours].flatten(0, 1), label.flatten(), weight=weight)
        positions = torch.from_numpy(frames.object_pos[pick])
        rows, cells = torch.nonzero(label, as_tuple=True)
        mean = self.head.keypoint_mean
        wanted = (positions[rows, label[rows, cells] - 1] - mean) / 0.1
        loss_position = F.smooth_l1_loss(patch[rows, cells, 1 + colours :], wanted, beta=0.1)
        goal = positions[torch.arange(len(pick))[:, None], torch.from_numpy(target)].flatten(0, 1)
        error = self.head.target_point(context) - goal
        loss_goal = F.smooth_l1_loss(error / 0.1, torch.zeros_like(error), beta=0.05)
        loss_task = F.cross_entropy(self.aux.task(context.mean(1)), torch.from_numpy(task).flatten())
        distance = error.norm(dim=-1)
        return {
            "loss": loss_class + 2 * loss_position + 8 * loss_goal + 0.1 * loss_task,
            "class": loss_class,
            "patch_xyz": loss_position,
            "goal_mm": distance.median() * 1e3,
            "goal_p95_mm": distance.quantile(0.95) * 1e3,
            "task": loss_task,
        }
