"""Random draws of an episode: where cubes stand, how they drift, where the arm starts."""

from __future__ import annotations

import numpy as np

from vla_sim.config import HOME, SimConfig
from vla_sim.expert import orientation_error
from vla_sim.kinematics import forward_and_jacobian, load_chain

# Tool position box for random starts [m], and how far from its ready pose the wrist may turn.
START_LOW_M = np.array([0.36, -0.26, 0.055])
START_HIGH_M = np.array([0.66, 0.26, 0.36])


def place_cubes(rng: np.random.Generator, count: int, config: SimConfig, lanes: bool) -> np.ndarray:
    """xy float64[count, 2] m, pairwise at least `cube_spacing_m` apart.

    With `lanes` the x coordinates also differ by `lane_spacing_m`, so that cubes drifting along y
    pass each other.
    """
    low = np.array([config.cube_x_min_m, -config.cube_y_abs_max_m])
    high = np.array([config.cube_x_max_m, config.cube_y_abs_max_m])
    upper = np.triu_indices(count, 1)
    while True:
        xy = rng.uniform(low, high, (count, 2))
        if lanes:
            # Sorted gaps: stretch random numbers over the slack left by the mandatory spacing.
            slack = high[0] - low[0] - config.lane_spacing_m * (count - 1)
            x = low[0] + np.sort(rng.uniform(0, slack, count))
            xy[:, 0] = rng.permutation(x + config.lane_spacing_m * np.arange(count))
        gaps = np.linalg.norm(xy[:, None] - xy[None], axis=-1)[upper]
        if (gaps >= config.cube_spacing_m).all():
            return xy


def draw_drift(rng: np.random.Generator, config: SimConfig, moving: bool) -> tuple[np.ndarray, np.ndarray]:
    """Wanted velocities [4, 2] m/s (along y) and spins [4] rad/s; zeros for a still scene."""
    speed = rng.uniform(config.drift_min_m_s, config.drift_max_m_s, 4)
    sign = rng.choice([-1.0, 1.0], 4)
    spin = rng.uniform(-config.spin_abs_rad_s, config.spin_abs_rad_s, 4)
    if not moving:
        return np.zeros((4, 2)), np.zeros(4)
    return np.stack([np.zeros(4), sign * speed], axis=1), spin


def random_start(rng: np.random.Generator) -> np.ndarray:
    """A commanded pose [8] with the tool somewhere above the table, roughly pointing down."""
    goal = rng.uniform(START_LOW_M, START_HIGH_M)
    q = solve_pose(goal)
    q[:7] += rng.normal(0.0, 0.05, 7)
    chain = load_chain()
    q[:7] = np.clip(q[:7], chain.lower_rad + 0.02, chain.upper_rad - 0.02)
    q[7] = rng.choice([0.0, 1.0, rng.uniform()], p=[0.6, 0.3, 0.1])
    return q


def solve_pose(tool_m: np.ndarray, steps: int = 15) -> np.ndarray:
    """Inverse kinematics from the ready pose: q[8] with the tool at `tool_m`, pointing down, open."""
    q = np.array(HOME)[None]
    for _ in range(steps):
        pos, rot, jac = forward_and_jacobian(q[:, :7])
        turn = orientation_error(rot)
        error = np.concatenate([0.8 * (tool_m - pos), 0.8 * turn], axis=1)
        gram = jac @ jac.transpose(0, 2, 1) + 1e-4 * np.eye(6)
        q[:, :7] += (jac.transpose(0, 2, 1) @ np.linalg.solve(gram, error[..., None]))[..., 0]
    return q[0]
