"""Single frames of random scenes and arm poses: what the camera may ever see, without motion."""

from __future__ import annotations

import numpy as np

from vla_sim.config import CUBE_SIDE_M
from vla_sim.expert import GRASP_DZ_M, HELD_CLOSURE, TOUCH_DZ_M
from vla_sim.kinematics import forward
from vla_sim.layout import random_start, solve_pose
from vla_sim.shards import ShardWriter
from vla_sim.tasks import random_task
from vla_sim.world import TabletopWorld

IN_GRIPPER_SHARE = 0.12
NEAR_CUBE_SHARE = 0.5
JOINT_NOISE_RAD = 0.03
# Ids of grounding frames start here, so that they never equal an episode's.
FIRST_ID = 1_000_000_000


def record_grounding(world: TabletopWorld, writer: ShardWriter, seed: int, item: int) -> None:
    """Store one frame as an episode of length 1; it follows from (seed, item)."""
    rng = np.random.default_rng([seed, item, 1])
    task = random_task(rng)
    world.reset(int(rng.integers(2**31)), task)
    # Nothing moves between frames of an episode that has one frame.
    world.stop_cubes()
    choice = rng.random()
    if choice < IN_GRIPPER_SHARE:
        q, held = _with_cube(world, rng), task.target
    elif choice < IN_GRIPPER_SHARE + NEAR_CUBE_SHARE:
        q, held = _near_cube(world, rng), -1
    else:
        q, held = _clear_of_cubes(world, random_start(rng)), -1
    q_cmd = q.copy()
    if held >= 0:
        q_cmd[7] = 1.0
    writer.add(world, FIRST_ID + item, 0, q_cmd, q_meas=q, held=held)


def _near_cube(world: TabletopWorld, rng: np.random.Generator) -> np.ndarray:
    """The tool just above a random cube, often hiding part of it."""
    cube = int(rng.choice(np.flatnonzero(world.present)))
    place = world.cube_positions()[cube]
    spread_m = rng.choice([0.005, 0.03])
    tool = place + [*rng.normal(0.0, spread_m, 2), TOUCH_DZ_M + rng.exponential(0.04)]
    q = solve_pose(tool)
    q[:7] += rng.normal(0.0, JOINT_NOISE_RAD, 7)
    q[7] = rng.choice([0.0, 1.0, rng.uniform()])
    return _clear_of_cubes(world, q)


def _with_cube(world: TabletopWorld, rng: np.random.Generator) -> np.ndarray:
    """The target cube between the fingers, anywhere over the table."""
    q = solve_pose(rng.uniform([0.38, -0.22, 0.033], [0.64, 0.22, 0.24]))
    q[:7] += rng.normal(0.0, JOINT_NOISE_RAD, 7)
    q[7] = HELD_CLOSURE
    world.set_robot(q)
    pos, rot = forward(q[:7])
    centre = pos + rot @ [rng.normal(0.0, 0.002), rng.normal(0.0, 0.006), GRASP_DZ_M]
    world.set_cube(world.task.target, centre, rot @ np.diag([1.0, -1.0, -1.0]))
    return q


def _clear_of_cubes(world: TabletopWorld, q: np.ndarray) -> np.ndarray:
    """Put the arm at `q`, or higher when its fingers would be inside a cube."""
    tool = forward(q[:7])[0]
    gaps = np.linalg.norm(world.cube_positions()[world.present, :2] - tool[:2], axis=1)
    lowest = CUBE_SIDE_M / 2 + TOUCH_DZ_M if gaps.min() < 0.09 else 0.032
    if tool[2] < lowest:
        closure = q[7]
        q = solve_pose(np.array([tool[0], tool[1], lowest]))
        q[7] = closure
    world.set_robot(q)
    return q
