"""Turns recorded frames into samples for the action head, labelled afresh by the expert.

For a frame, K instants up to 0.7 s after its image are drawn, each with a target, a task and a
commanded pose that may be off the recorded path; the label is what the expert would command from
there. The label follows the *later* truth: if the cube was moved or grasped in between, the
sample says so.
"""

from __future__ import annotations

import numpy as np

from vla_sim.config import IMAGE_HZ
from vla_sim.expert import rollout_chunk
from vla_sim.kinematics import load_chain
from vla_sim.shards import Shard, episode_bounds
from vla_sim.tasks import PICK

MAX_AGE_S = 0.7
OWN_TARGET_SHARE = 0.8
OWN_TASK_SHARE = 0.75
# Joint noise on the commanded pose: mostly on the path, sometimes well off it.
NOISE_RAD = (0.0, 0.01, 0.05)
NOISE_SHARES = (0.4, 0.35, 0.25)
RANDOM_GRIPPER_SHARE = 0.12
CHUNK_STEPS = 16


def sample_chunks(
    shard: Shard,
    rng: np.random.Generator,
    per_frame: int = 4,
    rows: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Draw `per_frame` samples for each frame (or each of `rows` int[R]); M = R * per_frame.

    row int64[M]: the frame, an index into the shard
    proprio float32[M, 9]: commanded 7 joints rad, commanded closure, measured closure
    age_s float32[M]: instant of the command minus image time
    target int64[M], task int64[M]: index into COLOURS and TASKS
    target_pos, target_vel float32[M, 3]: of the target at image time, m and m/s
    actions float32[M, 16, 8]: expert chunk minus proprio[:8]
    """
    frames = np.arange(len(shard["episode"])) if rows is None else np.asarray(rows)
    row = np.repeat(frames, per_frame)
    age_s = rng.uniform(0.0, MAX_AGE_S, len(row))
    later = _Later(shard, row, age_s)
    held = later.held()
    task = np.where(
        rng.random(len(row)) < OWN_TASK_SHARE,
        shard["task"][row],
        rng.integers(2, size=len(row)),
    ).astype(np.int64)
    target = _draw_target(shard, row, rng)
    target = np.where((held >= 0) & (task == PICK), held, target)
    proprio = _draw_proprio(later, rng)
    pos = later.value("cube_pos")[np.arange(len(row)), target]
    vel = later.value("cube_vel")[np.arange(len(row)), target]
    pos = pos + vel * later.beyond_s[:, None]
    chunk = rollout_chunk(proprio[:, :8], proprio[:, 8], pos, vel, task, CHUNK_STEPS)
    return {
        "row": row.astype(np.int64),
        "proprio": proprio.astype(np.float32),
        "age_s": age_s.astype(np.float32),
        "target": target.astype(np.int64),
        "task": task,
        "target_pos": shard["cube_pos"][row, target],
        "target_vel": shard["cube_vel"][row, target],
        "actions": (chunk - proprio[:, None, :8]).astype(np.float32),
    }


class _Later:
    """Values of a shard at image time + age, interpolated between frames of the same episode."""

    def __init__(self, shard: Shard, row: np.ndarray, age_s: np.ndarray) -> None:
        _, last = episode_bounds(shard)
        self._shard = shard
        at = row + age_s * IMAGE_HZ
        inside = np.minimum(at, last[row])
        # Past the episode's end nothing is recorded: positions are carried on by the velocity.
        self.beyond_s = (at - inside) / IMAGE_HZ
        self._low = np.floor(inside).astype(np.int64)
        self._high = np.minimum(self._low + 1, last[row])
        self._part = inside - self._low

    def value(self, key: str) -> np.ndarray:
        values = self._shard[key]
        part = self._part.reshape(-1, *([1] * (values.ndim - 1)))
        return (values[self._low] * (1.0 - part) + values[self._high] * part).astype(np.float64)

    def held(self) -> np.ndarray:
        nearest = np.where(self._part < 0.5, self._low, self._high)
        return self._shard["cube_held"][nearest].astype(np.int64)


def _draw_target(shard: Shard, row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The episode's target, or now and then any cube that is there."""
    present = shard["cube_present"][row]
    any_present = np.where(present, rng.random(present.shape), -1.0).argmax(axis=1)
    own = rng.random(len(row)) < OWN_TARGET_SHARE
    return np.where(own, shard["target"][row].astype(np.int64), any_present)


def _draw_proprio(later: _Later, rng: np.random.Generator) -> np.ndarray:
    """float64[M, 9]: the recorded command at the later time plus noise of mixed scale."""
    q_cmd = later.value("q_cmd")
    measured = later.value("q_meas")[:, 7]
    count = len(q_cmd)
    scale = rng.choice(NOISE_RAD, size=count, p=NOISE_SHARES)
    chain = load_chain()
    noisy = q_cmd[:, :7] + scale[:, None] * rng.normal(size=(count, 7))
    q_cmd[:, :7] = np.clip(noisy, chain.lower_rad, chain.upper_rad)
    random_gripper = rng.random(count) < RANDOM_GRIPPER_SHARE
    ends = rng.choice([0.0, 1.0], size=count)
    closure = np.where(rng.random(count) < 0.5, ends, rng.random(count))
    q_cmd[:, 7] = np.where(random_gripper, closure, q_cmd[:, 7])
    nearby = np.clip(closure + rng.normal(0.0, 0.15, count), 0.0, 1.0)
    measured = np.where(random_gripper, nearby, measured)
    return np.concatenate([q_cmd, measured[:, None]], axis=1)
