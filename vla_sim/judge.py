"""Decides by physics whether an episode succeeded. Pure: it is fed contacts and heights."""

from __future__ import annotations

import numpy as np

from vla_sim.config import SimConfig
from vla_sim.tasks import TaskSpec

RUNNING, SUCCESS, WRONG_OBJECT, TIMEOUT = "running", "success", "wrong_object", "timeout"


class Judge:
    """One episode's verdict; the first verdict other than `running` is final.

    touch: the gripper was in contact with the named cube for `touch_min_s` in total.
    pick: the named cube stayed above `pick_height_m` for `pick_hold_s` without a break.
    wrong object: another present cube was touched for longer than `touch_min_s` in total (touch),
    or lifted above `wrong_lift_m` (pick), before that.
    """

    def __init__(self, config: SimConfig, task: TaskSpec, present: np.ndarray) -> None:
        self._config = config
        self._task = task
        self._present = present.copy()
        self.elapsed_s = 0.0
        self.contact_s = np.zeros(4)
        self.held_s = 0.0
        self.outcome = RUNNING

    def update(self, dt_s: float, touched: np.ndarray, lift_m: np.ndarray) -> str:
        """Account for `dt_s` during which `touched` bool[4] held and cubes were `lift_m`[4] up."""
        if self.outcome != RUNNING:
            return self.outcome
        self.elapsed_s += dt_s
        self.contact_s += np.where(touched, dt_s, 0.0)
        raised = lift_m[self._task.target] > self._config.pick_height_m
        self.held_s = self.held_s + dt_s if raised else 0.0
        if self._is_wrong(lift_m):
            self.outcome = WRONG_OBJECT
        elif self._is_success():
            self.outcome = SUCCESS
        elif self.elapsed_s >= self._config.timeout_s - 1e-9:
            self.outcome = TIMEOUT
        return self.outcome

    def _is_wrong(self, lift_m: np.ndarray) -> bool:
        other = self._present.copy()
        other[self._task.target] = False
        if self._task.task == "touch":
            return bool((self.contact_s[other] > self._config.touch_min_s + 1e-9).any())
        return bool((lift_m[other] > self._config.wrong_lift_m).any())

    def _is_success(self) -> bool:
        if self._task.task == "touch":
            return bool(self.contact_s[self._task.target] >= self._config.touch_min_s - 1e-9)
        return self.held_s >= self._config.pick_hold_s - 1e-9
