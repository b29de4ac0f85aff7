import numpy as np
import pytest

from vla_sim.config import HOME, JOINT_NAMES, SimConfig
from vla_sim.images import decode_jpeg, encode_jpeg
from vla_sim.layout import place_cubes
from vla_sim.tasks import TaskSpec
from vla_sim.world import TabletopWorld


@pytest.fixture(scope="module")
def world():
    made = TabletopWorld()
    yield made
    made.close()


def state_after(world, seed, task, ticks):
    world.reset(seed, task, start="random")
    command = world.command()
    for _ in range(ticks):
        world.step(command)
    return world.qpos(), world.render("front")


@pytest.mark.parametrize("moving", [False, True])
def test_a_seed_determines_physics_and_pixels(world, moving):
    task = TaskSpec("pick", 2, moving)
    first = state_after(world, 5, task, 30)
    state_after(world, 6, task, 30)
    again = state_after(world, 5, task, 30)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])


def test_another_process_state_does_not_matter(world):
    task = TaskSpec("touch", 0)
    fresh = TabletopWorld()
    try:
        np.testing.assert_array_equal(state_after(fresh, 9, task, 10)[0], state_after(world, 9, task, 10)[0])
    finally:
        fresh.close()


def test_the_arm_stays_at_home_and_reports_in_the_order_of_the_names(world):
    assert len(JOINT_NAMES) == len(HOME) == 8
    world.reset(1, TaskSpec("touch", 1))
    for _ in range(50):
        world.step(np.array(HOME))
    np.testing.assert_allclose(world.joint_positions(), HOME, atol=0.01)
    np.testing.assert_allclose(world.joint_velocities(), 0.0, atol=0.05)


@pytest.mark.parametrize("closure", [0.0, 0.5, 1.0])
def test_the_gripper_starts_where_it_was_put_and_opens_again(world, closure):
    world.reset(1, TaskSpec("touch", 1))
    world.set_robot(np.append(HOME[:7], closure))
    world.step(world.command())
    assert world.joint_positions()[7] == pytest.approx(closure, abs=0.02)
    for _ in range(80):
        world.step(np.array(HOME))
    assert world.joint_positions()[7] < 0.03


def test_still_cubes_rest_and_moving_ones_drift_as_drawn(world):
    for moving, low, high in ((False, 0.0, 1e-3), (True, 0.018, 0.082)):
        world.reset(3, TaskSpec("touch", 0, moving))
        for _ in range(50):
            world.step(np.array(HOME))
        speed = np.linalg.norm(world.cube_velocities()[world.present, :2], axis=1)
        assert (speed >= low).all() and (speed <= high).all()
        np.testing.assert_allclose(world.cube_positions()[world.present, 2], 0.02, atol=1e-3)


@pytest.mark.parametrize("lanes", [False, True])
def test_cubes_keep_their_distance(lanes):
    config, rng = SimConfig(), np.random.default_rng(0)
    for count in (2, 3, 4):
        for _ in range(30):
            xy = place_cubes(rng, count, config, lanes)
            pairs = np.triu_indices(count, 1)
            assert np.linalg.norm(xy[:, None] - xy, axis=-1)[pairs].min() >= config.cube_spacing_m
            if lanes:
                assert np.abs(xy[:, None, 0] - xy[:, 0])[pairs].min() >= config.lane_spacing_m - 1e-9


def test_the_target_is_always_present(world):
    for seed in range(8):
        world.reset(seed, TaskSpec("touch", seed % 4))
        assert world.present[seed % 4] and 2 <= world.present.sum() <= 4


def test_cameras_have_their_sizes_and_show_the_cubes(world):
    world.reset(2, TaskSpec("touch", 0, cube_count=4))
    front, overview = world.render("front"), world.render("overview")
    assert front.shape == (96, 96, 3) and front.dtype == np.uint8
    assert overview.shape == (480, 640, 3)
    rgb = front.astype(int)
    assert ((rgb[..., 0] > 120) & (rgb[..., 1] < 80) & (rgb[..., 2] < 80)).sum() > 10, "no red cube in view"
    world.present[0] = False


def test_jpeg_keeps_an_image_close_and_is_reproducible(world):
    world.reset(2, TaskSpec("touch", 0))
    image = world.render("front")
    data = encode_jpeg(image)
    assert data == encode_jpeg(image)
    assert np.abs(decode_jpeg(data).astype(int) - image).mean() < 3.0


def test_an_unknown_start_is_refused(world):
    with pytest.raises(ValueError, match="upside-down"):
        world.reset(0, TaskSpec("touch", 0), start="upside-down")
