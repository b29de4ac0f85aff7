"""Builds the MuJoCo model: robot, table, four cubes (unused ones parked out of sight), cameras.

The model is compiled once per process. Domain jitter edits colours and lights of the compiled
model in place, because compiling takes longer than simulating an episode.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from vla_sim.config import CUBE_SIDE_M, PHYSICS_HZ
from vla_sim.kinematics import ASSETS
from vla_sim.tasks import COLOURS

CUBE_MASS_KG = 0.05
TABLE_FRICTION = 0.05
CUBE_RGBA = {
    "red": (0.82, 0.12, 0.10, 1.0),
    "green": (0.13, 0.60, 0.18, 1.0),
    "blue": (0.12, 0.25, 0.80, 1.0),
    "yellow": (0.92, 0.78, 0.10, 1.0),
}
TABLE_RGBA = (0.72, 0.68, 0.62, 1.0)
FLOOR_RGBA = (0.36, 0.38, 0.42, 1.0)
FLOOR_Z_M = -0.75
PARKED_X_M = -3.0


@dataclass(frozen=True)
class CameraSpec:
    """A fixed camera; `xyaxes` is MuJoCo's pair of image axes in the world."""

    pos_m: tuple[float, float, float]
    xyaxes: tuple[float, float, float, float, float, float]
    fovy_deg: float
    width_px: int
    height_px: int
    # Rendered this many times larger and averaged down: a cube is 8 pixels wide, its smooth edge
    # tells where it is. Cheaper than multisampling without a GPU (4 ms against 12 ms).
    supersample: int


CAMERAS: dict[str, CameraSpec] = {
    "front": CameraSpec((1.15, 0.0, 0.80), (0, 1, 0, -0.755, 0, 0.657), 36.0, 96, 96, 2),
    "overview": CameraSpec((1.42, 0.86, 0.78), (-0.658, 0.753, 0, -0.335, -0.293, 0.896), 38.0, 640, 480, 1),
}


def build_model() -> mujoco.MjModel:
    """Compile robot + table + cubes + cameras + lights; no asset is fetched from outside."""
    spec = mujoco.MjSpec.from_file(str(ASSETS / "panda_2f85" / "model.xml"))
    spec.modelname = "tabletop"
    spec.option.timestep = 1.0 / PHYSICS_HZ
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.option.impratio = 10.0
    # Shadows cost more than everything else at 96x96.
    spec.visual.quality.shadowsize = 0
    spec.visual.quality.offsamples = 0
    spec.visual.headlight.ambient = [0.35, 0.35, 0.35]
    spec.visual.headlight.diffuse = [0.35, 0.35, 0.35]
    spec.visual.headlight.specular = [0.1, 0.1, 0.1]
    _add_surroundings(spec)
    for index, colour in enumerate(COLOURS):
        _add_cube(spec, index, colour)
    for name, camera in CAMERAS.items():
        added = spec.worldbody.add_camera(name=name, pos=camera.pos_m, fovy=camera.fovy_deg)
        added.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
        added.alt.xyaxes = camera.xyaxes
    return spec.compile()


def _add_surroundings(spec: mujoco.MjSpec) -> None:
    world = spec.worldbody
    world.add_light(
        name="lamp",
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        pos=[0.8, 0.3, 2.0],
        dir=[-0.3, -0.2, -1.0],
        diffuse=[0.55, 0.55, 0.55],
        specular=[0.15, 0.15, 0.15],
        castshadow=False,
    )
    world.add_geom(
        name="floor",
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=[8, 8, 0.1],
        pos=[0, 0, FLOOR_Z_M],
        rgba=FLOOR_RGBA,
        contype=1,
        conaffinity=2,
    )
    # priority 1: the table's low friction decides, whatever touches it; cubes slide when pushed.
    world.add_geom(
        name="table",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=[0.55, 0.55, 0.02],
        pos=[0.35, 0, -0.02],
        rgba=TABLE_RGBA,
        friction=[TABLE_FRICTION, 0.005, 0.0001],
        priority=1,
        contype=1,
        conaffinity=3,
    )


def _add_cube(spec: mujoco.MjSpec, index: int, colour: str) -> None:
    body = spec.worldbody.add_body(
        name=f"cube_{colour}",
        pos=[PARKED_X_M - 0.3 * index, 0, FLOOR_Z_M + CUBE_SIDE_M / 2],
    )
    body.add_freejoint(name=f"cube_{colour}")
    body.add_geom(
        name=f"cube_{colour}",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=[CUBE_SIDE_M / 2] * 3,
        mass=CUBE_MASS_KG,
        rgba=CUBE_RGBA[colour],
        friction=[1.0, 0.01, 0.001],
        contype=1,
        conaffinity=3,
    )


def jitter_appearance(model: mujoco.MjModel, rng: np.random.Generator, enabled: bool) -> None:
    """Redraw colours and light of a compiled model; `enabled` False restores the plain look."""
    strength = 1.0 if enabled else 0.0
    for colour in COLOURS:
        rgb = np.array(CUBE_RGBA[colour][:3])
        rgb = rgb * (1 + strength * rng.uniform(-0.18, 0.18))
        rgb = rgb + strength * rng.uniform(-0.05, 0.05, 3)
        model.geom(f"cube_{colour}").rgba[:3] = np.clip(rgb, 0, 1)
    table = np.array(TABLE_RGBA[:3]) * (1 + strength * rng.uniform(-0.35, 0.25))
    table = table + strength * rng.uniform(-0.06, 0.06, 3)
    model.geom("table").rgba[:3] = np.clip(table, 0, 1)
    lamp = model.light("lamp")
    lamp.dir[:] = np.array([-0.3, -0.2, -1.0]) + strength * rng.uniform(-0.4, 0.4, 3) * [1, 1, 0.3]
    lamp.diffuse[:] = 0.55 + strength * rng.uniform(-0.2, 0.2)
    model.vis.headlight.ambient[:] = 0.35 + strength * rng.uniform(-0.1, 0.1)
    model.vis.headlight.diffuse[:] = 0.35 + strength * rng.uniform(-0.1, 0.1)
