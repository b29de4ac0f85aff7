"""Disturbances for data collection: short spells in which something else than the expert commands.

A policy trained on undisturbed demonstrations never sees what follows its own mistakes. Labels
are made later by asking the expert, so the disturbed commands themselves are never imitated.
"""

from __future__ import annotations

import numpy as np

from vla_sim.config import CONTROL_PERIOD_S
from vla_sim.expert import GRIPPER_PER_S, expert_step
from vla_sim.kinematics import forward, forward_and_jacobian, load_chain

BURSTS_PER_S = 0.7
BURST_MIN_S, BURST_MAX_S = 0.2, 0.6
KINDS = ("tool_velocity", "joint_velocity", "other_place", "gripper")
# Disturbances never press the fingers into the table.
MIN_TOOL_Z_M = 0.031


class Disturber:
    """Decides tick by tick whether a burst is on, and what it commands."""

    def __init__(self, rng: np.random.Generator, enabled: bool) -> None:
        self._rng = rng
        self._enabled = enabled
        self._left_ticks = 0
        self._kind = ""
        self._vector = np.zeros(7)
        self._gripper = 0.0

    def command(self, q_cmd: np.ndarray, expert: np.ndarray) -> np.ndarray:
        """The next command [8] given the present one and the expert's choice."""
        if not self._enabled:
            return expert
        if self._left_ticks == 0:
            if self._rng.random() >= BURSTS_PER_S * CONTROL_PERIOD_S:
                return expert
            self._begin()
        self._left_ticks -= 1
        wanted = self._disturbed(q_cmd, expert)
        chain = load_chain()
        wanted[:7] = np.clip(wanted[:7], chain.lower_rad, chain.upper_rad)
        too_low = forward(wanted[None, :7])[0][0, 2] < MIN_TOOL_Z_M
        if too_low and self._kind != "gripper":
            self._left_ticks = 0
            return expert
        return wanted

    def _begin(self) -> None:
        rng = self._rng
        self._left_ticks = int(rng.uniform(BURST_MIN_S, BURST_MAX_S) / CONTROL_PERIOD_S)
        self._kind = KINDS[int(rng.integers(len(KINDS)))]
        if self._kind == "tool_velocity":
            direction = rng.normal(size=3)
            speed = rng.uniform(0.05, 0.35)
            self._vector[:3] = speed * direction / np.linalg.norm(direction)
            self._vector[3:6] = rng.normal(0.0, 0.3, 3)
        elif self._kind == "joint_velocity":
            self._vector = rng.normal(0.0, 0.35, 7)
        elif self._kind == "other_place":
            self._vector[:3] = rng.uniform([0.36, -0.24, 0.02], [0.66, 0.24, 0.12])
        self._gripper = float(rng.random() < 0.5)

    def _disturbed(self, q_cmd: np.ndarray, expert: np.ndarray) -> np.ndarray:
        wanted = expert.copy()
        if self._kind == "tool_velocity":
            _, _, jac = forward_and_jacobian(q_cmd[None, :7])
            gram = jac[0] @ jac[0].T + 1e-3 * np.eye(6)
            qdot = jac[0].T @ np.linalg.solve(gram, self._vector[:6])
            wanted[:7] = q_cmd[:7] + CONTROL_PERIOD_S * qdot
        elif self._kind == "joint_velocity":
            wanted[:7] = q_cmd[:7] + CONTROL_PERIOD_S * self._vector
        elif self._kind == "other_place":
            elsewhere = expert_step(q_cmd[None], q_cmd[None, 7], self._vector[None, :3], np.zeros((1, 3)), np.zeros(1))[
                0
            ]
            wanted[:7] = elsewhere[:7]
        else:
            step = GRIPPER_PER_S * CONTROL_PERIOD_S
            wanted[7] = q_cmd[7] + np.clip(self._gripper - q_cmd[7], -step, step)
        return wanted
