"""Whether a model can drive this robot with these settings, told from its manifest before anything starts.

What the files hold is compared with the manifest where they are loaded; here the manifest is compared with the robot.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vla_common.manifest import Manifest, ModelMismatch
from vla_edge.core.joint_limits import JointLimits

Array = npt.NDArray[np.float64]

SPEED_MARGIN: Final = 3.0
"""A robot file may slow a robot down this much against the one that the model was trained on; the shield holds the
limits in any case. Wrong units (degrees, percent) are off by 57 and more."""

POSITION_MARGIN: Final = 0.02
"""Rad (closure): a joint may be *measured* this far outside its limits, as in the shield's ``outside_tolerance``."""


def check_horizon(manifest: Manifest, *, longest: int, replan_ticks: int, ramp_ticks: int = 0,
                  prefix_ticks: int = 0) -> None:
    """Compare the horizon with the settings that depend on it and with the graph's shape in the manifest.

    Args:
        manifest: of the model.
        longest: steps that gate and shared memory take.
        replan_ticks: ticks between two chunks.
        ramp_ticks: ticks over which two chunks are merged; 0: at once.
        prefix_ticks: rows of a chunk that are frozen at least; 0: none.

    Raises:
        ModelMismatch: names both numbers.
    """
    steps, joints = manifest.horizon, len(manifest.joint_names)
    model = f"model {manifest.name!r} plans {steps} steps, but"
    if steps > longest:
        raise ModelMismatch(f"{model} the edge takes {longest} at most: every chunk would be refused. Raise "
                            "gate.max_horizon (64 at most) or use a model with a shorter horizon")
    if replan_ticks >= steps:
        raise ModelMismatch(f"{model} policy.replan_ticks is {replan_ticks}: the robot would brake between any two "
                            f"chunks. Use less than {steps}")
    if ramp_ticks > steps:
        raise ModelMismatch(f"{model} ensemble.ramp_ticks is {ramp_ticks}: the ramp would never end; "
                            f"use {steps} at most")
    if prefix_ticks >= steps:
        raise ModelMismatch(f"{model} ensemble.prefix_ticks is {prefix_ticks}: every row would be frozen and no chunk "
                            f"could change the motion. Use less than {steps}")
    for file, shapes in manifest.shapes.items():
        shape = shapes.get("actions")
        if shape is not None and list(shape) != [1, steps, joints]:
            raise ModelMismatch(f"model {manifest.name!r}: {file} answers actions {list(shape)}, the manifest says "
                                f"{[1, steps, joints]}: export the model again with 'vla export'")


def check_normalisation(manifest: Manifest, limits: JointLimits) -> None:
    """Compare the statistics that the model was trained with with what the robot's joints can do.

    Only what the manifest holds is checked: ``action_std``, ``action_q01``, ``action_q99`` (deltas, rad or closure,
    [horizon][joints]), ``proprio_mean``, ``proprio_std``, ``proprio_q01``, ``proprio_q99`` (one per proprio name). The
    joint names must have been compared before.

    Raises:
        ModelMismatch: names the joint, the number and the remedy.
    """
    stats = manifest.normalisation
    horizon, joints = manifest.horizon, len(limits)
    # Nobody moves farther in k ticks than at full speed, so neither the root mean square nor a quantile can.
    reach = SPEED_MARGIN * limits.velocity * manifest.period_s * np.arange(1, horizon + 1).reshape(-1, 1)
    for name in ("action_std", "action_q01", "action_q99"):
        if name in stats:
            deltas = _numbers(manifest, name, (horizon, joints))
            if name == "action_std":
                _refuse(manifest, name, deltas, deltas <= 0.0, limits.names, "must be positive")
            _refuse(manifest, name, deltas, np.abs(deltas) > reach, limits.names,
                    f"is more than the joint moves in that time, even at {SPEED_MARGIN:g} times its velocity limit")
    names, lower, upper = _proprio_limits(manifest, limits)
    for name in ("proprio_mean", "proprio_q01", "proprio_q99"):
        if name in stats:
            values = _numbers(manifest, name, (len(names),))
            _refuse(manifest, name, values, (values < lower) | (values > upper), names,
                    "lies outside the joint's position limits")
    if "proprio_std" in stats:
        std = _numbers(manifest, "proprio_std", (len(names),))
        _refuse(manifest, "proprio_std", std, std <= 0.0, names, "must be positive")
        if "proprio_mean" in stats:
            mean = _numbers(manifest, "proprio_mean", (len(names),))
            # The largest deviation of anything that stays inside: Bhatia and Davis, "A better bound on the variance",
            # American Mathematical Monthly 107 (2000). Where there are no limits this is infinite.
            _refuse(manifest, "proprio_std", std, std * std > (upper - mean) * (mean - lower), names,
                    "is more than any motion inside the joint's position limits has around its mean")
    for prefix in ("action", "proprio"):
        if f"{prefix}_q01" in stats and f"{prefix}_q99" in stats:
            shape, owners = ((horizon, joints), limits.names) if prefix == "action" else ((len(names),), names)
            low, high = (_numbers(manifest, f"{prefix}_{q}", shape) for q in ("q01", "q99"))
            _refuse(manifest, f"{prefix}_q99", high, high < low, owners, f"is below {prefix}_q01")


def _proprio_limits(manifest: Manifest, limits: JointLimits) -> tuple[tuple[str, ...], Array, Array]:
    """Names of the inputs and their position limits; an input that is no joint of the robot has none."""
    names = tuple(manifest.proprio_names)
    lower, upper = np.full(len(names), -np.inf), np.full(len(names), np.inf)
    for index, name in enumerate(names):
        joint = name.rpartition(":")[2]  # "command:gripper", "measured:gripper"
        if joint in limits.names:
            at = limits.names.index(joint)
            lower[index] = limits.position_lower[at] - POSITION_MARGIN
            upper[index] = limits.position_upper[at] + POSITION_MARGIN
    return names, lower, upper


def _numbers(manifest: Manifest, name: str, shape: tuple[int, ...]) -> Array:
    try:
        values = np.asarray(manifest.normalisation[name], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ModelMismatch(_message(manifest, f"{name} is not numbers of shape {list(shape)} ({error})")) from error
    if values.shape != shape:
        raise ModelMismatch(_message(manifest, f"{name} has shape {list(values.shape)}, expected {list(shape)}"))
    if not np.isfinite(values).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise ModelMismatch(_message(manifest, f"{name}{list(at)} is {values[at]}, not a finite number"))
    return values


def _refuse(manifest: Manifest, name: str, values: Array, wrong: npt.NDArray[np.bool_], owners: tuple[str, ...],
            why: str) -> None:
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        step = f" at step {at[0]}" if len(at) > 1 else ""
        number = f"{float(values[at]):.6g}"
        raise ModelMismatch(_message(manifest, f"{name} of {owners[at[-1]]}{step} is {number}, which {why}"))


def _message(manifest: Manifest, what: Any) -> str:
    return (f"model {manifest.name!r}: normalisation {what}. The statistics are of another robot, in other units or "
            "broken: use a model trained for this robot, or export it again with statistics of its own data")
