"""Stage 2: the flow-matching head on contexts of the frozen backbone.

A *head sample* is a commanded pose some time after an image, and the chunk an expert would send from there. Contexts
are computed once for every (frame, object, task) that a sample uses and kept in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..flow_head import ContextKv, FlowHead
from ..normalisation import floored_scale
from ..vlm import Vlm
from .data import FrameSet, PhraseTable

FRAME_PERIOD_S = 0.1


@dataclass(frozen=True)
class HeadSamples:
    """N samples. ``frame`` i64[N] indexes the FrameSet, ``previous`` the earlier frame of the pair."""

    frame: npt.NDArray[np.int64]
    previous: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    task: npt.NDArray[np.int64]
    proprio: npt.NDArray[np.float32]  # [N, 9]
    age_s: npt.NDArray[np.float32]  # [N]
    dt_s: npt.NDArray[np.float32]  # [N]
    target_pos: npt.NDArray[np.float32]  # [N, 3] at the instant of the observation
    chunk: npt.NDArray[np.float32]  # [N, H, A]

    def take(self, index: npt.NDArray[np.int64]) -> HeadSamples:
        """The samples ``index``."""
        return HeadSamples(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})

    @classmethod
    def concatenate(cls, parts: list[HeadSamples]) -> HeadSamples:
        """All samples of ``parts`` in order."""
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__})


def previous_frames(
    frame: npt.NDArray[np.int64], frame_in_episode: npt.NDArray[np.int64], rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """An earlier frame of the same episode for each entry, usually 0.5 s back, else the frame itself with dt 0.5 s.

    ``frame_in_episode[i]`` counts frames since the start of the episode of frame i; frames of an episode are adjacent.
    """
    back = np.where(rng.random(len(frame)) < 0.6, 5, rng.integers(3, 8, len(frame)))
    known = frame_in_episode[frame]
    back = np.where((back > known) & (known >= 3), known, back)
    alone = (back > known) | (rng.random(len(frame)) < 0.04)
    dt_s = np.where(alone, 0.5, back * FRAME_PERIOD_S).astype(np.float32)
    return frame - np.where(alone, 0, back), dt_s


class ContextTable:
    """Contexts of all (frame, object, task) that some samples need; f16[M, K, D]."""

    def __init__(
        self,
        vlm: Vlm,
        frames: FrameSet,
        phrases: PhraseTable,
        samples: HeadSamples,
        report: Callable[[str], None],
        seed: int = 0,
    ) -> None:
        colours = frames.object_present.shape[1]
        self._code = lambda frame: (frame * colours + samples.target) * phrases.tasks + samples.task
        keys = np.unique(np.concatenate([self._code(samples.frame), self._code(samples.previous)]))
        self.now = np.searchsorted(keys, self._code(samples.frame))
        self.before = np.searchsorted(keys, self._code(samples.previous))
        frame, rest = np.divmod(keys, colours * phrases.tasks)
        target, task = np.divmod(rest, phrases.tasks)
        ids = phrases.sample(task, target, np.random.default_rng(seed))
        c = vlm.config
        self.values = torch.empty(len(keys), c.num_readout, c.context_dim, dtype=torch.float16)
        vlm.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            for start in range(0, len(keys), 256):
                part = slice(start, start + 256)
                images, inverse = np.unique(frame[part], return_inverse=True)
                tokens = vlm.image_tokens(vlm.patches(torch.from_numpy(frames.images[images])))
                text = torch.from_numpy(ids[part])
                context = vlm.readout_context(
                    vlm.encode_text(text), tokens[torch.from_numpy(inverse)], vlm.text_lengths(text)
                )
                self.values[part] = context.half()
                if start % (256 * 100) == 0:
                    report(f"contexts {start}/{len(keys)}")

    def pair(self, index: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Contexts f32[B, K, D] of the samples ``index``: (now, previous)."""
        return (
            self.values[torch.from_numpy(self.now[index])].float(),
            self.values[torch.from_numpy(self.before[index])].float(),
        )


class HeadObjective:
    """Flow-matching loss on random samples, plus the keypoint's own loss so that it stays a position."""

    def __init__(
        self,
        head: FlowHead,
        samples: HeadSamples,
        contexts: ContextTable,
        train: npt.NDArray[np.int64],
        batch: int = 512,
        seed: int = 0,
    ) -> None:
        self.head, self.samples, self.contexts, self.train = head, samples, contexts, train
        self.batch, self.seed = batch, seed

    def loss(self, step: int) -> Mapping[str, Tensor]:
        """Losses of one random batch; deterministic in (seed, step)."""
        rng = np.random.default_rng([self.seed, step])
        index = rng.choice(self.train, self.batch)
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
        batch = self.samples.take(index)
        chunk = torch.from_numpy(batch.chunk)
        noise = torch.randn(chunk.shape, generator=generator)
        # A quarter of the batch starts from zero noise, where deterministic inference starts.
        time = torch.rand(len(chunk), generator=generator)
        zero = torch.rand(len(chunk), generator=generator) < 0.25
        noise = noise * (~zero)[:, None, None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kv, goal = self._context(index, batch)
            flow = self.head.loss(
                kv,
                torch.from_numpy(batch.proprio),
                torch.from_numpy(batch.age_s)[:, None],
                torch.from_numpy(batch.dt_s)[:, None],
                chunk,
                noise,
                time,
            )
        goal_loss = torch.nn.functional.smooth_l1_loss(goal / 0.1, torch.zeros_like(goal), beta=0.05)
        return {"loss": flow.mean() + goal_loss, "flow": flow.mean(), "goal_mm": goal.norm(dim=-1).median() * 1e3}

    def _context(self, index: npt.NDArray[np.int64], batch: HeadSamples) -> tuple[ContextKv, Tensor]:
        kv = self.head.context_kv(*self.contexts.pair(index))
        return kv, kv.keypoint[:, :3].float() - torch.from_numpy(batch.target_pos)

    def evaluate(self, index: npt.NDArray[np.int64]) -> dict[str, float]:
        """Error of zero-noise chunks on held-out samples: RMS per joint and step in rad, gripper apart."""
        self.head.eval()
        with torch.no_grad():
            batch = self.samples.take(index)
            kv, goal = self._context(index, batch)
            got = self.head.denoise(
                kv,
                torch.from_numpy(batch.proprio),
                torch.from_numpy(batch.age_s)[:, None],
                torch.from_numpy(batch.dt_s)[:, None],
                torch.zeros(batch.chunk.shape),
            )
            error = got.numpy() - batch.chunk
        self.head.train()
        return {
            "joint_rms_mrad": float(np.sqrt((error[..., :7] ** 2).mean()) * 1e3),
            "joint_label_rms_mrad": float(np.sqrt((batch.chunk[..., :7] ** 2).mean()) * 1e3),
            "gripper_rms": float(np.sqrt((error[..., 7] ** 2).mean())),
            "goal_mm_median": float(goal.norm(dim=-1).median() * 1e3),
        }


def fit_normalisation(head: FlowHead, samples: HeadSamples) -> None:
    """Per-(step, joint) scale of the action deltas and mean / scale of the joint state, from the training samples.

    The floors are for joints that never moved in them: a label of 0.1 mrad, or a joint state 10 mrad off, becomes 1.

    Raises:
        NormalisationError: a sample is not finite.
    """
    with torch.no_grad():
        std = floored_scale("action_std", np.sqrt((samples.chunk.astype(np.float64) ** 2).mean(0)), 1e-4)
        head.action_std.copy_(torch.from_numpy(std.astype(np.float32)))
        head.proprio_mean.copy_(torch.from_numpy(samples.proprio.mean(0)))
        head.proprio_std.copy_(torch.from_numpy(floored_scale("proprio_std", samples.proprio.std(0), 1e-2)))
