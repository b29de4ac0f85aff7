"""The file format of recorded frames: compressed npz, no pickle, one file a few thousand frames.

| array | type | meaning |
|---|---|---|
| episode, frame | int32[F] | episode id (unique in a dataset), 10 Hz frame index within it |
| jpeg_bytes, jpeg_offsets | uint8[*], int64[F+1] | image i = jpeg_bytes[jpeg_offsets[i]:jpeg_offsets[i+1]] |
| q_cmd, q_meas | float32[F,8] | commanded and measured joints at image time, rad and closure 0..1 |
| cube_pos, cube_vel | float32[F,4,3] | m, m/s; colour order red, green, blue, yellow |
| cube_present | bool[F,4] | rows of absent cubes mean nothing |
| cube_held | int8[F] | cube in the gripper, or -1 |
| target, task | int8[F] | what the expert was asked for: index into COLOURS, TASKS |
| moving | bool[F] | cubes drift in this episode |
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vla_sim.images import encode_jpeg
from vla_sim.world import TabletopWorld

Shard = Mapping[str, np.ndarray]

_DTYPES = {
    "episode": np.int32,
    "frame": np.int32,
    "q_cmd": np.float32,
    "q_meas": np.float32,
    "cube_pos": np.float32,
    "cube_vel": np.float32,
    "cube_present": np.bool_,
    "cube_held": np.int8,
    "target": np.int8,
    "task": np.int8,
    "moving": np.bool_,
}


class ShardWriter:
    """Collects frames and writes them to `<out>/shard_<name>_<number>.npz`."""

    def __init__(self, out: Path, name: str) -> None:
        self._out = out
        self._name = name
        self._number = 0
        self._rows: dict[str, list[object]] = {key: [] for key in _DTYPES}
        self._jpegs: list[bytes] = []

    def __len__(self) -> int:
        return len(self._jpegs)

    def add(
        self,
        world: TabletopWorld,
        episode: int,
        frame: int,
        q_cmd: np.ndarray,
        q_meas: np.ndarray | None = None,
        held: int | None = None,
    ) -> None:
        """Render and store the present instant. `q_meas` and `held` default to the world's own."""
        self._jpegs.append(encode_jpeg(world.render("front")))
        row = {
            "episode": episode,
            "frame": frame,
            "q_cmd": q_cmd.copy(),
            "q_meas": world.joint_positions() if q_meas is None else q_meas.copy(),
            "cube_pos": world.cube_positions(),
            "cube_vel": world.cube_velocities(),
            "cube_present": world.cubes_in_play(),
            "cube_held": world.held_cube() if held is None else held,
            "target": world.task.target,
            "task": world.task.task_id,
            "moving": world.task.moving,
        }
        for key, value in row.items():
            self._rows[key].append(value)

    def flush(self) -> Path | None:
        """Write what was collected; None when there is nothing."""
        if not self._jpegs:
            return None
        arrays: dict[str, np.ndarray] = {key: np.asarray(rows, _DTYPES[key]) for key, rows in self._rows.items()}
        offsets = np.cumsum([0, *(len(data) for data in self._jpegs)], dtype=np.int64)
        arrays["jpeg_bytes"] = np.frombuffer(b"".join(self._jpegs), np.uint8)
        arrays["jpeg_offsets"] = offsets
        path = self._out / f"shard_{self._name}_{self._number:04d}.npz"
        # A reader of the folder must never see half a file.
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)
        partial.rename(path)
        self._number += 1
        self._rows = {key: [] for key in _DTYPES}
        self._jpegs = []
        return path


def load_shard(path: Path) -> dict[str, np.ndarray]:
    """All arrays of one shard."""
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def jpeg_of(shard: Shard, index: int) -> bytes:
    """The JPEG bytes of frame `index`."""
    start, stop = shard["jpeg_offsets"][index : index + 2]
    return shard["jpeg_bytes"][start:stop].tobytes()


def episode_bounds(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """First and last row int64[F] of each frame's episode; an episode's rows are contiguous."""
    episode = shard["episode"]
    change = np.flatnonzero(np.diff(episode)) + 1
    starts = np.concatenate([[0], change])
    stops = np.concatenate([change, [len(episode)]]) - 1
    which = np.searchsorted(starts, np.arange(len(episode)), side="right") - 1
    return starts[which], stops[which]
