import numpy as np
import pytest

from vla_sim.config import HOME
from vla_sim.dataset import expert_command
from vla_sim.expert import GRASP_DZ_M, HELD_CLOSURE, MAX_SPEED_M_S, TOUCH_DZ_M, expert_step, rollout_chunk
from vla_sim.judge import RUNNING, SUCCESS
from vla_sim.kinematics import forward
from vla_sim.layout import random_start, solve_pose
from vla_sim.tasks import PICK, TOUCH, TaskSpec
from vla_sim.world import TabletopWorld

CUBE = np.array([[0.5, 0.1, 0.02]])
STILL = np.zeros((1, 3))


@pytest.fixture(scope="module")
def world():
    made = TabletopWorld()
    yield made
    made.close()


def step(q, grip, task, target=CUBE, velocity=STILL):
    return expert_step(q[None], np.array([grip]), target, velocity, np.array([task]))[0]


def pose(dx=0.0, dy=0.0, dz=GRASP_DZ_M, closure=0.0):
    q = solve_pose(CUBE[0] + [dx, dy, dz])
    q[7] = closure
    return q


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("task", ["touch", "pick"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_expert_succeeds(world, task, moving, seed):
    world.reset(seed, TaskSpec(task, seed, moving), start="home" if seed else "random")
    q = world.command()
    while world.outcome == RUNNING:
        q = expert_command(world, q)
        world.step(q)
    assert world.outcome == SUCCESS and world.time_s < 4.0


def test_a_long_touch_does_not_drag_the_cube(world):
    world.reset(4, TaskSpec("touch", 1))
    before = world.cube_positions()[1]
    q = world.command()
    for _ in range(300):
        q = expert_command(world, q)
        world.step(q)
    assert world.touched_cubes()[1]
    assert np.linalg.norm(world.cube_positions()[1] - before) < 0.006


def test_a_batch_equals_its_rows():
    rng = np.random.default_rng(0)
    count = 16
    q = np.stack([random_start(rng) for _ in range(count)])
    target = rng.uniform([0.38, -0.22, 0.02], [0.64, 0.22, 0.02], (count, 3))
    velocity = rng.uniform(-0.08, 0.08, (count, 3)) * [0, 1, 0]
    task = rng.integers(2, size=count)
    chunk = rollout_chunk(q, q[:, 7], target, velocity, task)
    for i in range(count):
        row = slice(i, i + 1)
        alone = rollout_chunk(q[row], q[row, 7], target[row], velocity[row], task[row])
        np.testing.assert_allclose(alone[0], chunk[i], atol=1e-9)


def test_tool_speed_is_limited():
    before = np.array(HOME)
    after = step(before, 0.0, TOUCH)
    travelled_m = np.linalg.norm(forward(after[:7])[0] - forward(before[:7])[0])
    assert 0.8 * MAX_SPEED_M_S < travelled_m * 100 < 1.05 * MAX_SPEED_M_S


def test_gripper_rules():
    assert step(pose(), 0.0, PICK)[7] == pytest.approx(0.04), "close when near"
    assert step(pose(dx=0.02), 0.0, PICK)[7] == 0.0, "not when beside the cube"
    assert step(pose(dx=0.02, closure=0.6), 0.5, PICK)[7] == pytest.approx(0.64), "but finish a grasp"
    assert step(pose(closure=1.0), 1.0, PICK)[7] == pytest.approx(0.96), "reopen after a miss"
    assert step(pose(dx=0.1, closure=1.0), HELD_CLOSURE, PICK)[7] == pytest.approx(0.96), "drop what is not the target"
    assert step(pose(dx=0.1), 0.0, TOUCH)[7] == pytest.approx(0.04), "touch with a closed hand"


def test_a_held_cube_is_lifted_gently_and_kept():
    q = pose(closure=1.0)
    chunk = rollout_chunk(q[None], np.array([HELD_CLOSURE]), CUBE, STILL, np.array([PICK]), steps=40)[0]
    height = forward(chunk[:, :7])[0][:, 2]
    assert (np.diff(height) > 0).all() and height[0] - (CUBE[0, 2] + GRASP_DZ_M) < 0.0015
    assert (chunk[:, 7] == 1.0).all()


def test_rollout_predicts_the_simulation(world):
    """Labels are rollouts: they must be what the expert then really does."""
    world.reset(1, TaskSpec("pick", 1))
    q, states, commands = world.command(), [], []
    for _ in range(230):
        states.append((q, world.joint_positions()[7], world.cube_positions()[1], world.cube_velocities()[1]))
        q = expert_command(world, q)
        commands.append(q)
        world.step(q)
    for tick in range(0, 210, 7):
        q, grip, pos, vel = states[tick]
        chunk = rollout_chunk(q[None], np.array([grip]), pos[None], vel[None], np.array([PICK]))[0]
        np.testing.assert_allclose(chunk, commands[tick : tick + 16], atol=0.05)


def test_touch_ends_just_inside_the_top_of_the_cube():
    q = np.array(HOME)
    for _ in range(300):
        q = step(q, q[7], TOUCH)
    np.testing.assert_allclose(forward(q[:7])[0], CUBE[0] + [0, 0, TOUCH_DZ_M], atol=2e-3)
    assert q[7] == 1.0
