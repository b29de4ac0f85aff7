"""The expert: a memoryless rule from (commanded pose, gripper, target) to the next commanded pose.

    x_des ──▶ v = 6 (x_des - FK(q_cmd)), at most 0.35 m/s, plus the target's velocity
          ──▶ damped least squares, tool pointing down, null-space pull home ──▶ q_next

It acts on what was *commanded*, not on what was measured: the same rule then labels any state a
policy may get itself into, and neither sensor noise nor the arm's own lag enters the labels.
Everything is batched; one call is one 10 ms tick for B independent arms.
"""

from __future__ import annotations

import numpy as np

from vla_sim.config import CONTROL_PERIOD_S, HOME
from vla_sim.kinematics import forward, forward_and_jacobian, load_chain
from vla_sim.tasks import PICK

# Tool orientation: z down, fingers open along world y.
DOWN = np.array([[0.0, -1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])

APPROACH_HZ = 6.0
MAX_SPEED_M_S = 0.35
TURN_HZ = 4.0
MAX_TURN_RAD_S = 1.5
DAMPING = 1e-4
NULL_HZ = 1.0
MAX_JOINT_RAD_S = 1.6
GRIPPER_PER_S = 4.0
# The arm follows a command with this lag (kv / kp of its servos): lead a moving target by it.
SERVO_LAG_S = 0.1

# Tool height above the cube's centre [m]. Closed fingertips reach 28.5 mm below the tool point, a
# cube's top is 20 mm above its centre: touch presses 1.5 mm "into" the top for a light contact.
TOUCH_DZ_M = 0.047
GRASP_DZ_M = 0.012
FUNNEL_SLOPE, FUNNEL_MAX_M = 1.5, 0.10
# How far off centre the tool may be at full depth: a touch must land well inside the cube's top.
FUNNEL_DEAD_PICK_M, FUNNEL_DEAD_TOUCH_M = 0.02, 0.012
# A touching finger must not rub: sideways motion fades out over the last millimetres of descent
# unless the finger is near the cube's edge. Otherwise it drags the cube and then chases it.
RUB_Z_M, RUB_XY_M = (0.0005, 0.003), (0.008, 0.008)
# Sideways motion fades out over this range (start, width) of the closing gripper's command.
CLOSING = (0.7, 0.2)
# Lifting starts gently and gets faster with height.
LIFT_Z_M = 0.20
LIFT_SLOW_M_S, LIFT_RAMP_HZ, LIFT_RAMP_FROM_Z_M = 0.08, 5.0, 0.03
WRONG_GRIPPER_RISE_M = 0.08

NEAR_XY_M, NEAR_Z_M = 0.010, 0.012
WIDE_XY_M, WIDE_Z_M = 0.030, 0.030
# While a cube is carried, the command leads it by speed times servo lag.
CARRY_XY_M, CARRY_DOWN_M, CARRY_UP_M = 0.045, 0.045, 0.085
HELD_MIN, HELD_MAX = 0.45, 0.75
# Measured closure of the gripper around a cube.
HELD_CLOSURE = 0.60


def gripper_goal(
    closure_cmd: np.ndarray, closure_meas: np.ndarray, offset: np.ndarray, task: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where the gripper should go and whether the cube is held.

    closure_cmd, closure_meas [B]; offset [B, 3] = tool minus grasp point [m]; task [B].
    → goal [B] (0 open, 1 closed), held bool[B].

    The commanded closure is the memory: past one half a wider tolerance applies, so a grasp that
    has begun is finished. A measured closure beyond the held band means the fingers met nothing.
    """
    dxy, dz = np.hypot(offset[:, 0], offset[:, 1]), offset[:, 2]
    near = (dxy < NEAR_XY_M) & (np.abs(dz) < NEAR_Z_M)
    wide = (dxy < WIDE_XY_M) & (np.abs(dz) < WIDE_Z_M)
    carry = (dxy < CARRY_XY_M) & (dz > -CARRY_DOWN_M) & (dz < CARRY_UP_M)
    missed = closure_meas > HELD_MAX
    grips = (closure_cmd > 0.99) & (closure_meas > HELD_MIN) & ~missed
    around = np.where(grips, carry, np.where(closure_cmd > 0.5, wide, near))
    is_pick = task == PICK
    goal = np.where(is_pick, around & ~missed, True).astype(closure_cmd.dtype)
    held = is_pick & grips & carry
    return goal, held


def expert_step(
    q_cmd: np.ndarray,
    grip_meas: np.ndarray,
    target_pos: np.ndarray,
    target_vel: np.ndarray,
    task: np.ndarray,
) -> np.ndarray:
    """One tick. q_cmd [B, 8] rad/closure, grip_meas [B], target_pos [B, 3] m, target_vel [B, 3]
    m/s, task int[B] (TOUCH or PICK) → next commanded pose [B, 8]."""
    pos, rot, jac = forward_and_jacobian(q_cmd[:, :7])
    closure = q_cmd[:, 7]
    is_pick = task == PICK
    lead = target_pos + SERVO_LAG_S * target_vel
    goal = lead.copy()
    goal[:, 2] = target_pos[:, 2] + np.where(is_pick, GRASP_DZ_M, TOUCH_DZ_M)
    grip, held = gripper_goal(closure, grip_meas, pos - goal, task)

    dxy = np.hypot(pos[:, 0] - goal[:, 0], pos[:, 1] - goal[:, 1])
    dead = np.where(is_pick, FUNNEL_DEAD_PICK_M, FUNNEL_DEAD_TOUCH_M)
    goal[:, 2] += np.clip(FUNNEL_SLOPE * (dxy - dead), 0.0, FUNNEL_MAX_M)
    # Stay above the cube until the fingers are as the task needs them.
    goal[:, 2] += WRONG_GRIPPER_RISE_M * np.abs(grip - closure) * ~(is_pick & (grip > 0.5))
    linear = _limit(APPROACH_HZ * (goal - pos), MAX_SPEED_M_S)
    linear[:, :2] += target_vel[:, :2]
    free = np.maximum(_ramp(pos[:, 2] - goal[:, 2], *RUB_Z_M), _ramp(dxy, *RUB_XY_M))
    # Closing fingers jolt the cube: do not follow the jolt.
    steady = np.where(grip > 0.5, 1.0 - _ramp(closure, *CLOSING), 1.0)
    linear[:, :2] *= np.where(is_pick, steady, free)[:, None]
    linear = np.where(held[:, None], _lift(pos), linear)
    turn = orientation_error(rot)
    twist = np.concatenate([linear, _limit(TURN_HZ * turn, MAX_TURN_RAD_S)], axis=1)
    q_next = np.empty_like(q_cmd)
    q_next[:, :7] = _integrate(q_cmd[:, :7], jac, twist)
    step = GRIPPER_PER_S * CONTROL_PERIOD_S
    q_next[:, 7] = closure + np.clip(grip - closure, -step, step)
    return q_next


def _ramp(value: np.ndarray, start: float, width: float) -> np.ndarray:
    """0 below `start`, rising linearly to 1 over `width`."""
    return np.clip((value - start) / width, 0.0, 1.0)


def _lift(pos: np.ndarray) -> np.ndarray:
    """Tool velocity [B, 3] m/s that raises a held cube straight up to LIFT_Z_M."""
    z = pos[:, 2]
    speed = LIFT_SLOW_M_S + LIFT_RAMP_HZ * np.maximum(z - LIFT_RAMP_FROM_Z_M, 0.0)
    velocity = np.zeros_like(pos)
    velocity[:, 2] = np.minimum(APPROACH_HZ * (LIFT_Z_M - z), np.minimum(speed, MAX_SPEED_M_S))
    return velocity


def orientation_error(rot: np.ndarray) -> np.ndarray:
    """Rotation vector [B, 3] (for small angles, rad) that turns tool frames [B, 3, 3] to DOWN.

    Half the sum of the cross products of matching axes = the antisymmetric part of DOWN rot'.
    """
    product = DOWN @ rot.transpose(0, 2, 1)
    return 0.5 * np.stack(
        [
            product[:, 2, 1] - product[:, 1, 2],
            product[:, 0, 2] - product[:, 2, 0],
            product[:, 1, 0] - product[:, 0, 1],
        ],
        axis=1,
    )


def _limit(vector: np.ndarray, most: float) -> np.ndarray:
    """Scale rows of [B, 3] down to the length `most`."""
    length = np.linalg.norm(vector, axis=1, keepdims=True)
    return vector * np.minimum(1.0, most / np.maximum(length, 1e-9))


def _integrate(q: np.ndarray, jac: np.ndarray, twist: np.ndarray) -> np.ndarray:
    """One tick of damped least squares with a null-space pull towards HOME; q [B, 7]."""
    chain = load_chain()
    pull = NULL_HZ * (np.asarray(HOME[:7]) - q)
    rest = twist - (jac @ pull[..., None])[..., 0]
    gram = jac @ jac.transpose(0, 2, 1)
    gram[:, range(6), range(6)] += DAMPING
    qdot = pull + (jac.transpose(0, 2, 1) @ np.linalg.solve(gram, rest[..., None]))[..., 0]
    peak = np.abs(qdot).max(axis=1, keepdims=True)
    qdot *= np.minimum(1.0, MAX_JOINT_RAD_S / np.maximum(peak, 1e-9))
    return np.clip(q + CONTROL_PERIOD_S * qdot, chain.lower_rad, chain.upper_rad)


def rollout_chunk(
    q_cmd: np.ndarray,
    grip_meas: np.ndarray,
    target_pos: np.ndarray,
    target_vel: np.ndarray,
    task: np.ndarray,
    steps: int = 16,
) -> np.ndarray:
    """The expert's next `steps` commands [B, steps, 8] in a small model of the world.

    The target advances by its velocity, or with the tool once it is held. The measured gripper
    follows its command with the servo's lag and stops at the cube's width when the cube is
    between the fingers.
    """
    q, grip, target = q_cmd, grip_meas.copy(), target_pos.copy()
    chunk = np.empty((q_cmd.shape[0], steps, 8))
    tool = forward(q[:, :7])[0]
    grips = (q[:, 7] > HELD_CLOSURE) & (grip > HELD_MIN) & (grip <= HELD_MAX)
    for k in range(steps):
        q = expert_step(q, grip, target, target_vel, task)
        chunk[:, k] = q
        tool, before = forward(q[:, :7])[0], tool
        blocked = _cube_between(tool - target, grips) & (q[:, 7] > HELD_CLOSURE)
        grip = grip + (q[:, 7] - grip) * (CONTROL_PERIOD_S / SERVO_LAG_S)
        grips = blocked & (grip >= HELD_CLOSURE - 0.05)
        grip = np.where(blocked, np.minimum(grip, HELD_CLOSURE), grip)
        move = np.where(grips[:, None], tool - before, CONTROL_PERIOD_S * target_vel)
        target = target + move
    return chunk


def _cube_between(offset: np.ndarray, grips: np.ndarray) -> np.ndarray:
    """bool[B]: closing fingers would meet the cube; offset [B, 3] = tool minus cube centre [m]."""
    dxy, dz = np.hypot(offset[:, 0], offset[:, 1]), offset[:, 2] - GRASP_DZ_M
    enters = (dxy < WIDE_XY_M) & (np.abs(dz) < WIDE_Z_M)
    carried = (dxy < CARRY_XY_M) & (dz > -CARRY_DOWN_M) & (dz < CARRY_UP_M)
    return np.where(grips, carried, enters)
