"""Numbers of the simulated cell. `config/sim.yaml` overrides fields of `SimConfig` by name."""

from __future__ import annotations

from dataclasses import dataclass

PHYSICS_HZ = 500
CONTROL_HZ = 100
IMAGE_HZ = 10
CONTROL_PERIOD_S = 1.0 / CONTROL_HZ
PHYSICS_STEPS_PER_CONTROL = PHYSICS_HZ // CONTROL_HZ

JOINT_NAMES: tuple[str, ...] = tuple(f"panda_joint{i}" for i in range(1, 8)) + ("gripper",)
# Ready pose: tool 30 cm above the table centre, pointing down, fingers opening along y, gripper open.
HOME: tuple[float, ...] = (0.0, -0.1294, 0.0, -2.1575, 0.0, 2.0280, 0.0008, 0.0)
CUBE_SIDE_M = 0.04


@dataclass(frozen=True)
class SimConfig:
    """Parameters of the scene and of the judge."""

    # Where cubes are placed (the table itself is larger).
    cube_x_min_m: float = 0.38
    cube_x_max_m: float = 0.64
    cube_y_abs_max_m: float = 0.22
    cube_spacing_m: float = 0.085
    cube_yaw_abs_max_rad: float = 0.35
    # Moving variant. Each cube keeps to a lane, so that drifting cubes do not collide.
    lane_spacing_m: float = 0.065
    drift_min_m_s: float = 0.02
    drift_max_m_s: float = 0.08
    spin_abs_rad_s: float = 0.24
    drift_gain_hz: float = 30.0  # force = mass * gain * (wanted velocity - velocity)
    # Judgement.
    touch_min_s: float = 0.1
    pick_height_m: float = 0.08
    pick_hold_s: float = 0.3
    wrong_lift_m: float = 0.03
    timeout_s: float = 8.0
    # Domain jitter on colours, table and light; off gives the plain scene.
    jitter: bool = True
