import json

import numpy as np
import pytest

from vla_sim.config import HOME, SimConfig
from vla_sim.evaluate import (
    SHUFFLED,
    LoopConfig,
    OraclePolicy,
    PlanBlender,
    run_cell,
    run_episode,
    wilson_interval,
)
from vla_sim.judge import TIMEOUT, WRONG_OBJECT
from vla_sim.tasks import TaskSpec
from vla_sim.world import TabletopWorld


@pytest.fixture(scope="module")
def world():
    made = TabletopWorld()
    yield made
    made.close()


class RecordingPolicy:
    """Never plans; notes what it is shown."""

    def __init__(self):
        self.calls = []

    def reset(self, instruction):
        self.instruction = instruction

    def act(self, image_jpeg, stamp_s, q_cmd, grip_meas, now_s):
        self.calls.append((image_jpeg, stamp_s, now_s))
        return None


def test_wilson_interval():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(60, 60)
    assert 0.93 < low < 0.95 and high == pytest.approx(1.0)
    low, high = wilson_interval(5, 10)
    assert low == pytest.approx(0.2366, abs=1e-3) and high == pytest.approx(0.7634, abs=1e-3)


def test_the_oracle_succeeds_in_the_loop(world):
    cell = run_cell(world, OraclePolicy(world), "pick", True, range(2))
    row = cell.as_dict()
    assert row["success"] == row["episodes"] == 2
    json.dumps(row, allow_nan=False)


def test_a_shuffled_instruction_leads_to_another_cube(world):
    outcome, _ = run_episode(world, OraclePolicy(world), 1, TaskSpec("touch", 0), SHUFFLED)
    assert outcome == WRONG_OBJECT
    with pytest.raises(ValueError, match="loud"):
        run_episode(world, OraclePolicy(world), 1, TaskSpec("touch", 0), "loud")


def test_images_arrive_after_the_latency_and_time_runs_out():
    world = TabletopWorld(SimConfig(timeout_s=0.5))
    policy = RecordingPolicy()
    try:
        outcome, duration_s = run_episode(world, policy, 0, TaskSpec("touch", 0), loop=LoopConfig(latency_s=0.13))
    finally:
        world.close()
    assert outcome == TIMEOUT and duration_s == pytest.approx(0.5)
    shown = [(stamp_s, now_s) for image, stamp_s, now_s in policy.calls if image is not None]
    assert [round(stamp_s, 3) for stamp_s, _ in shown] == [0.0, 0.1, 0.2, 0.3]
    assert all(0.13 - 1e-9 <= now_s - stamp_s < 0.2 for stamp_s, now_s in shown)
    cell = run_cell(world, policy, "touch", False, range(0))
    assert cell.as_dict()["success_rate"] == 0.0 and cell.episodes == 0


def test_the_blend_starts_at_the_plan_in_force_and_ends_at_the_new_one():
    blender = PlanBlender(np.array(HOME), ramp_ticks=8)
    np.testing.assert_array_equal(blender.next(), HOME)
    goal = np.array(HOME) + 0.1
    blender.accept(np.repeat(goal[None], 16, axis=0))
    path = np.stack([blender.next() for _ in range(20)])
    assert np.abs(path[0] - HOME).max() < 0.003
    np.testing.assert_allclose(path[7:], np.repeat(goal[None], 13, axis=0))
    assert (np.diff(path, axis=0) >= -1e-12).all()
