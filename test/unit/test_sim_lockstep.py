"""The lock-step loop: delays where they should be, equal runs, and the expert through the edge's core does the task."""

from pathlib import Path

import numpy as np
import pytest

from vla_edge.config import EdgeConfig, EnsembleConfig, load_limits
from vla_edge.core.denoiser import DenoiserError
from vla_sim.expert import rollout_chunk
from vla_sim.judge import RUNNING, SUCCESS
from vla_sim.lockstep import Delays, LockstepEdge, Policy, run_lockstep
from vla_sim.tasks import TaskSpec
from vla_sim.world import TabletopWorld

LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", 0.01)
TASK, SEED = TaskSpec("touch", 0, cube_count=2), 5


class NoCamera:
    """Contexts without an image: counts them."""

    def __init__(self):
        self.count = 0

    def reset(self, instruction):
        self.count = 0

    def tokens(self, world):
        self.count += 1
        return np.full((2, 4), self.count, np.float32)


class Expert:
    """The expert with the simulator's own state in the denoiser's place."""

    engine = "expert"

    def __init__(self, world, supports_prefix=False):
        self.world, self.supports_prefix, self.prefixes, self.asked = world, supports_prefix, [], []

    def encode_context(self, now, previous):
        return float(now[0, 0])

    def denoise(self, handle, proprio, age_s, gap_s, noise, prefix=None):
        self.prefixes.append(prefix)
        self.asked.append((handle, age_s))
        world, q = self.world, proprio.astype(np.float64)
        target = world.task.target
        chunk = rollout_chunk(q[None, :8], q[8:], world.cube_positions()[None, target],
                              world.cube_velocities()[None, target], np.array([world.task.task_id]))[0]
        return (chunk - q[:8]).astype(np.float32)


@pytest.fixture(scope="module")
def world():
    made = TabletopWorld()
    yield made
    made.close()


def run(world, rule="speed_ramp", delays=None, supports_prefix=False, **options):
    world.reset(SEED, TASK)
    expert, camera = Expert(world, supports_prefix), NoCamera()
    edge = LockstepEdge(EdgeConfig(ensemble=EnsembleConfig(rule=rule)), LIMITS, Policy(expert, (2, 4), 16),
                        "touch the red cube", delays or Delays(), world, camera)
    return run_lockstep(edge, world, **options), expert, camera


def worst(rows, order):
    limit = (LIMITS.velocity, LIMITS.acceleration, LIMITS.jerk)[order - 1]
    return (np.abs(np.diff(rows, order, axis=0)) / 0.01**order / limit).max()


@pytest.mark.parametrize("rule", ["speed_ramp", "ramp", "constant", "act", "replace", "prefix"])
def test_the_expert_touches_the_cube_under_every_rule_within_the_limits(world, rule):
    found, expert, _ = run(world, rule, supports_prefix=rule == "prefix")
    assert found.outcome == SUCCESS and found.rejects == 0
    assert all(worst(found.sent, order) <= 1.0 for order in (1, 2, 3))
    assert any(prefix is not None for prefix in expert.prefixes) == (rule == "prefix")
    assert len(found.sent) == len(found.desired) == len(found.state) == len(found.limited)
    assert not (found.state[3:] >= 2).any(), "the shield never had to stop"


def test_equal_inputs_give_equal_runs(world):
    first, second = run(world)[0], run(world)[0]
    assert (first.sent == second.sent).all()
    np.testing.assert_array_equal(first.desired, second.desired)
    other = run(world, delays=Delays(seed=1))[0]
    assert len(other.sent) != len(first.sent) or (other.sent != first.sent).any()


@pytest.mark.parametrize("delay", [0, 5, 20])
def test_contexts_reach_the_policy_after_their_delay(world, delay):
    found, expert, camera = run(world, delays=Delays(context=delay), last_tick=59)
    assert found.outcome == RUNNING and len(found.sent) == 60 and camera.count == 6
    # The image of tick 10 k is the (k + 1)th; plans are made every 5 ticks, the first one at tick 0 if there is a context.
    plans = [tick for tick in range(0, 60, 5) if tick >= delay]
    assert [handle for handle, _ in expert.asked] == [(tick - delay) // 10 + 1 for tick in plans]
    assert [age for _, age in expert.asked] == pytest.approx([0.01 * (delay + (tick - delay) % 10) for tick in plans])


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_chunk_is_seen_after_the_planning_delay(world, rows):
    found, _, _ = run(world, "replace", Delays(context=0, planning=(rows, rows)), last_tick=20)
    planned = np.isfinite(found.desired[:, 0])
    assert np.argmax(planned) == 1 + rows


def test_the_measured_delay_freezes_as_many_rows(world):
    for rows in (0, 1, 4):
        _, expert, _ = run(world, "prefix", Delays(context=0, planning=(rows, rows)), True, last_tick=60)
        frozen = [int((prefix.weights == 1.0).sum()) for prefix in expert.prefixes if prefix is not None]
        assert set(frozen) == {max(3, rows + 1)}


def test_a_prefix_needs_a_model_that_takes_one(world):
    with pytest.raises(DenoiserError, match="ensemble.rule"):
        run(world, "prefix")


def test_the_world_can_be_disturbed(world):
    def push(tick):
        if tick == 40:
            world.set_cube(0, world.cube_positions()[0] + np.array([0.0, 0.1, 0.0]), np.eye(3))

    still, moved = run(world, last_tick=80)[0], run(world, last_tick=80, before_tick=push)[0]
    assert (still.sent[:41] == moved.sent[:41]).all() and (still.sent[80] != moved.sent[80]).any()
