"""`TabletopWorld`: the arm, the table and the cubes, stepped at 500 Hz.

    world = TabletopWorld()
    world.reset(seed=7, task=TaskSpec("pick", 0, moving=True))
    world.step(command)          # one 10 ms control tick: 5 physics steps
    world.outcome                # "running", "success", "wrong_object" or "timeout"

Time is simulated time; nothing here reads a clock.
"""

from __future__ import annotations

import mujoco
import numpy as np

from vla_sim.config import (
    CONTROL_PERIOD_S,
    CUBE_SIDE_M,
    HOME,
    PHYSICS_STEPS_PER_CONTROL,
    SimConfig,
)
from vla_sim.judge import Judge
from vla_sim.layout import draw_drift, place_cubes, random_start
from vla_sim.scene import (
    CAMERAS,
    CUBE_MASS_KG,
    FLOOR_Z_M,
    PARKED_X_M,
    TABLE_FRICTION,
    build_model,
    jitter_appearance,
)
from vla_sim.tasks import COLOURS, TaskSpec

# Driver joint angle of the closed 2F-85; closure = angle / this.
CLOSED_DRIVER_RAD = 0.824033
GRIPPER_CTRL_MAX = 255.0
_CUBE_INERTIA = CUBE_MASS_KG * CUBE_SIDE_M**2 / 6
_FRICTION_N = TABLE_FRICTION * CUBE_MASS_KG * 9.81
# Above this height a cube is off the table and nothing drives it.
_ON_TABLE_MAX_Z_M = 0.026
_BOUNCE_Y_M = 0.24


class TabletopWorld:
    """One simulated cell. Not thread-safe; renderers are created on first use."""

    def __init__(self, config: SimConfig | None = None) -> None:
        self.config = config or SimConfig()
        self.model = build_model()
        self.data = mujoco.MjData(self.model)
        self._renderers: dict[str, mujoco.Renderer] = {}
        self._arm_q = np.array([self.model.joint(f"joint{i}").qposadr[0] for i in range(1, 8)])
        self._arm_v = np.array([self.model.joint(f"joint{i}").dofadr[0] for i in range(1, 8)])
        self._driver_q = int(self.model.joint("right_driver_joint").qposadr[0])
        self._driver_v = int(self.model.joint("right_driver_joint").dofadr[0])
        cubes = [self.model.joint(f"cube_{colour}") for colour in COLOURS]
        self._cube_q = np.array([joint.qposadr[0] for joint in cubes])
        self._cube_v = np.array([joint.dofadr[0] for joint in cubes])
        self._cube_body = np.array([self.model.body(f"cube_{colour}").id for colour in COLOURS])
        self._cube_geom = np.array([self.model.geom(f"cube_{colour}").id for colour in COLOURS])
        self._is_gripper_geom = self._find_gripper_geoms()
        self.present = np.zeros(4, dtype=bool)
        self.task = TaskSpec("touch", 0)
        self.judge = Judge(self.config, self.task, self.present)
        self._drift_vel = np.zeros((4, 2))
        self._spin = np.zeros(4)

    # ------------------------------------------------------------------ episode

    def reset(self, seed: int, task: TaskSpec, start: str = "home") -> None:
        """Start an episode. The scene depends on `seed` and `task` only.

        `start`: "home", or "random" for a pose drawn within the workspace.
        """
        rng = np.random.default_rng(seed)
        mujoco.mj_resetData(self.model, self.data)
        jitter_appearance(self.model, rng, self.config.jitter)
        self.task = task
        self._place(rng, task)
        command = np.array(HOME)
        if start == "random":
            command = random_start(rng)
        elif start != "home":
            raise ValueError(f"start must be 'home' or 'random', not {start!r}")
        self.set_robot(command)
        self.judge = Judge(self.config, task, self.present)

    def rearrange(self, seed: int, task: TaskSpec) -> None:
        """Put the cubes of another episode on the table; the arm keeps its pose, motion and command.

        The scene equals that of `reset` with the same arguments.
        """
        rng = np.random.default_rng(seed)
        jitter_appearance(self.model, rng, self.config.jitter)
        self.task = task
        self.stop_cubes()
        self.data.xfrc_applied[self._cube_body] = 0.0
        self._place(rng, task)
        mujoco.mj_forward(self.model, self.data)
        self.judge = Judge(self.config, task, self.present)

    def _place(self, rng: np.random.Generator, task: TaskSpec) -> None:
        count = task.cube_count or int(rng.integers(2, 5))
        others = [index for index in range(4) if index != task.target]
        chosen = [task.target, *rng.permutation(others)[: count - 1]]
        self.present[:] = False
        self.present[chosen] = True
        xy = place_cubes(rng, count, self.config, lanes=task.moving)
        yaw = rng.uniform(-1, 1, 4) * self.config.cube_yaw_abs_max_rad
        for cube in range(4):
            qpos = self.data.qpos[self._cube_q[cube] : self._cube_q[cube] + 7]
            if self.present[cube]:
                qpos[:3] = (*xy[chosen.index(cube)], CUBE_SIDE_M / 2)
            else:
                qpos[:3] = (PARKED_X_M - 0.3 * cube, 0.0, FLOOR_Z_M + CUBE_SIDE_M / 2)
            qpos[3:] = (np.cos(yaw[cube] / 2), 0, 0, np.sin(yaw[cube] / 2))
            self.model.geom_rgba[self._cube_geom[cube], 3] = float(self.present[cube])
        self._drift_vel, self._spin = draw_drift(rng, self.config, task.moving)
        for cube in np.flatnonzero(self.present):
            adr = self._cube_v[cube]
            self.data.qvel[adr : adr + 2] = self._drift_vel[cube]
            self.data.qvel[adr + 5] = self._spin[cube]

    def set_robot(self, q: np.ndarray) -> None:
        """Teleport the arm to q[8] at rest (7 joints rad, closure 0..1)."""
        self.data.qpos[self._arm_q] = q[:7]
        self.data.qvel[self._arm_v] = 0.0
        self.set_command(q)
        # The gripper is a closed loop of links: let its constraints settle with the arm held.
        self._settle_gripper(float(q[7]))

    def _settle_gripper(self, closure: float) -> None:
        angle = closure * CLOSED_DRIVER_RAD
        for side in ("left", "right"):
            self.data.qpos[self.model.joint(f"{side}_driver_joint").qposadr[0]] = angle
            self.data.qpos[self.model.joint(f"{side}_spring_link_joint").qposadr[0]] = angle
        # The parallel linkage keeps the pads upright: each follower undoes its spring link's turn.
        self.data.qpos[self.model.joint("left_follower").qposadr[0]] = angle
        self.data.qpos[self.model.joint("right_follower_joint").qposadr[0]] = angle
        mujoco.mj_forward(self.model, self.data)

    def set_cube(self, cube: int, centre_m: np.ndarray, rot: np.ndarray) -> None:
        """Teleport a cube: centre [3], orientation [3, 3]."""
        adr = self._cube_q[cube]
        self.data.qpos[adr : adr + 3] = centre_m
        mujoco.mju_mat2Quat(self.data.qpos[adr + 3 : adr + 7], np.ascontiguousarray(rot).ravel())
        mujoco.mj_forward(self.model, self.data)

    def stop_cubes(self) -> None:
        """End all drift and present motion of the cubes."""
        self._drift_vel, self._spin = np.zeros((4, 2)), np.zeros(4)
        for adr in self._cube_v:
            self.data.qvel[adr : adr + 6] = 0.0

    # ------------------------------------------------------------------ stepping

    def command(self) -> np.ndarray:
        """The position targets in force [8]."""
        return np.append(self.data.ctrl[:7], self.data.ctrl[7] / GRIPPER_CTRL_MAX)

    def set_command(self, command: np.ndarray) -> None:
        """Position targets: 7 joints [rad] and gripper closure [0..1]; held until the next call."""
        self.data.ctrl[:7] = command[:7]
        self.data.ctrl[7] = GRIPPER_CTRL_MAX * min(max(float(command[7]), 0.0), 1.0)

    def step(self, command: np.ndarray) -> None:
        """Advance one control tick (10 ms) under `command` [8] and judge it."""
        self.set_command(command)
        self._drive_cubes()
        mujoco.mj_step(self.model, self.data, PHYSICS_STEPS_PER_CONTROL)
        self.judge.update(
            CONTROL_PERIOD_S,
            self.touched_cubes(),
            self.data.xpos[self._cube_body, 2] - CUBE_SIDE_M / 2,
        )

    def _drive_cubes(self) -> None:
        """Pull the cubes on the table towards their wanted drift; a lifted cube is left alone."""
        for cube in np.flatnonzero(self.present):
            body, adr = self._cube_body[cube], self._cube_v[cube]
            wrench = self.data.xfrc_applied[body]
            wrench[:] = 0.0
            pos = self.data.qpos[self._cube_q[cube] : self._cube_q[cube] + 3]
            if not 0.0 < pos[2] < _ON_TABLE_MAX_Z_M:
                continue
            if abs(pos[1]) > _BOUNCE_Y_M:
                self._drift_vel[cube, 1] = -np.sign(pos[1]) * abs(self._drift_vel[cube, 1])
            vel = self.data.qvel[adr : adr + 6]
            gain = self.config.drift_gain_hz
            wrench[:2] = CUBE_MASS_KG * gain * (self._drift_vel[cube] - vel[:2])
            # Cancel the table's friction, or a cube would be slower than its wanted drift.
            wrench[1] += np.sign(self._drift_vel[cube, 1]) * _FRICTION_N
            wrench[5] = _CUBE_INERTIA * gain * (self._spin[cube] - vel[5])

    # ------------------------------------------------------------------ observation

    @property
    def time_s(self) -> float:
        """Simulated seconds since the last reset."""
        return float(self.data.time)

    @property
    def outcome(self) -> str:
        """The judge's verdict so far, see judge.py."""
        return self.judge.outcome

    def joint_positions(self) -> np.ndarray:
        """Measured float64[8]: 7 joints [rad], gripper closure [0..1]."""
        closure = np.clip(self.data.qpos[self._driver_q] / CLOSED_DRIVER_RAD, 0.0, 1.0)
        return np.append(self.data.qpos[self._arm_q], closure)

    def joint_velocities(self) -> np.ndarray:
        """Measured float64[8]: rad/s, closure/s."""
        return np.append(self.data.qvel[self._arm_v], self.data.qvel[self._driver_v] / CLOSED_DRIVER_RAD)

    def cube_positions(self) -> np.ndarray:
        """Centres float64[4, 3] m in colour order; rows of absent cubes are meaningless."""
        return self.data.xpos[self._cube_body].copy()

    def cube_velocities(self) -> np.ndarray:
        """Linear velocities float64[4, 3] m/s in the world frame."""
        return np.stack([self.data.qvel[adr : adr + 3] for adr in self._cube_v])

    def cubes_in_play(self) -> np.ndarray:
        """bool[4]: present and not pushed off the table."""
        return self.present & (self.data.xpos[self._cube_body, 2] > 0.0)

    def qpos(self) -> np.ndarray:
        """The whole configuration float64[nq], enough to draw the scene again."""
        return self.data.qpos.copy()

    def show(self, qpos: np.ndarray) -> None:
        """Take a recorded configuration (see `qpos`) to draw it; nothing moves."""
        self.data.qpos[:] = qpos
        mujoco.mj_forward(self.model, self.data)

    def touched_cubes(self) -> np.ndarray:
        """bool[4]: cubes that some gripper geom is in contact with now."""
        pairs = self.data.contact.geom
        touched = np.zeros(4, dtype=bool)
        if len(pairs) == 0:
            return touched
        gripper = self._is_gripper_geom[pairs]
        partner = np.where(gripper[:, 0], pairs[:, 1], pairs[:, 0])[gripper.any(axis=1)]
        return np.isin(self._cube_geom, partner)

    def held_cube(self) -> int:
        """Index of the cube off the table and in contact with the gripper, else -1."""
        lifted = self.data.xpos[self._cube_body, 2] > CUBE_SIDE_M / 2 + 0.008
        held = np.flatnonzero(self.touched_cubes() & lifted & self.present)
        return int(held[0]) if len(held) else -1

    def _find_gripper_geoms(self) -> np.ndarray:
        """bool[ngeom]: geoms of the gripper base and everything below it."""
        base = self.model.body("base").id
        below = np.zeros(self.model.nbody, dtype=bool)
        for body in range(self.model.nbody):
            parent = body
            while parent not in (0, base):
                parent = self.model.body_parentid[parent]
            below[body] = parent == base
        return below[self.model.geom_bodyid]

    # ------------------------------------------------------------------ images

    def render(self, camera: str = "front") -> np.ndarray:
        """uint8 [H, W, 3] RGB of one of scene.CAMERAS."""
        renderer = self._renderers.get(camera)
        if renderer is None:
            renderer = self._renderers[camera] = self._make_renderer(camera)
        renderer.update_scene(self.data, camera=camera)
        factor = CAMERAS[camera].supersample
        image = renderer.render()
        # Sum of the factor x factor sub-images: far faster than reducing over short axes.
        total = np.zeros((image.shape[0] // factor, image.shape[1] // factor, 3), np.uint16)
        for row in range(factor):
            for column in range(factor):
                total += image[row::factor, column::factor]
        return ((total + factor * factor // 2) // (factor * factor)).astype(np.uint8)

    def _make_renderer(self, camera: str) -> mujoco.Renderer:
        spec = CAMERAS[camera]
        width, height = spec.width_px * spec.supersample, spec.height_px * spec.supersample
        # The buffer's size is read when the GL context is made.
        self.model.vis.global_.offwidth = width
        self.model.vis.global_.offheight = height
        renderer = mujoco.Renderer(self.model, height=height, width=width)
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        return renderer

    def close(self) -> None:
        """Free the GL contexts."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
