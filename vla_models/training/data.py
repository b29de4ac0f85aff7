"""Training data in memory: frames read from shards, phrases as token ids."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from ..text import tokenize


@dataclass(frozen=True)
class PhraseTable:
    """Every phrasing of every (task, colour): ids i64[tasks, colours, variants, T]."""

    ids: npt.NDArray[np.int64]

    @property
    def tasks(self) -> int:
        """Number of task kinds."""
        return int(self.ids.shape[0])

    @classmethod
    def build(cls, phrases: Sequence[Sequence[Sequence[str]]], vocabulary: Sequence[str], length: int) -> PhraseTable:
        """``phrases[task][colour]`` = texts; shorter lists are repeated to the longest."""
        most = max(len(texts) for row in phrases for texts in row)
        table = [
            [[tokenize(texts[i % len(texts)], vocabulary, length) for i in range(most)] for texts in row]
            for row in phrases
        ]
        return cls(np.asarray(table, dtype=np.int64))

    def sample(
        self, task: npt.NDArray[np.int64], colour: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """A random phrasing for each entry: i64[..., T]."""
        return self.ids[task, colour, rng.integers(0, self.ids.shape[2], task.shape)]


@dataclass(frozen=True)
class FrameSet:
    """Frames of all shards: images u8[N, H, W, 3], object_pos f32[N, C, 3] m, object_present bool[N, C]."""

    images: npt.NDArray[np.uint8]
    object_pos: npt.NDArray[np.float32]
    object_present: npt.NDArray[np.bool_]
    object_held: npt.NDArray[np.int64]  # [N], the object in the gripper or -1
    train_index: npt.NDArray[np.int64]
    test_index: npt.NDArray[np.int64]


def decode_images(blob: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """JPEG images concatenated in ``blob`` → u8[N, H, W, 3]."""
    raw = blob.tobytes()
    first = np.asarray(Image.open(io.BytesIO(raw[offsets[0] : offsets[1]])))
    out = np.empty((len(offsets) - 1, *first.shape), np.uint8)
    for i in range(len(offsets) - 1):
        out[i] = np.asarray(Image.open(io.BytesIO(raw[offsets[i] : offsets[i + 1]])))
    return out


def load_frames(
    arrays: Sequence[dict[str, npt.NDArray[np.generic]]], report: Callable[[str], None], test_share: float = 0.03
) -> FrameSet:
    """Shards as read by the composition root → FrameSet. Episodes are never split between train and test."""
    images, episode = [], []
    for i, shard in enumerate(arrays):
        images.append(decode_images(shard["jpeg_bytes"], shard["jpeg_offsets"]))
        episode.append(shard["episode"].astype(np.int64) + (i << 32))
        report(f"decoded shard {i + 1}/{len(arrays)} ({sum(map(len, images))} frames)")
    key = np.concatenate(episode)
    held_out = (key * 2654435761 >> 7) % 1000 < test_share * 1000
    return FrameSet(
        np.concatenate(images),
        np.concatenate([s["cube_pos"] for s in arrays]).astype(np.float32),
        np.concatenate([s["cube_present"] for s in arrays]).astype(bool),
        np.concatenate([s["cube_held"] for s in arrays]).astype(np.int64),
        np.flatnonzero(~held_out),
        np.flatnonzero(held_out),
    )


def read_shards(folder: Path) -> list[dict[str, npt.NDArray[np.generic]]]:
    """All ``shard_*.npz`` of ``folder`` in name order."""
    paths = sorted(folder.glob("shard_*.npz"))
    if not paths:
        raise FileNotFoundError(f"no shard_*.npz in {folder}: make data first (vla train --stage data)")
    shards = []
    for path in paths:
        with np.load(path, allow_pickle=False) as opened:
            shards.append({key: opened[key] for key in opened.files})
    return shards
