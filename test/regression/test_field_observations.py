"""What goes up to the cloud, and in which order and colour: faults of other runtimes, each by its right behaviour."""

import numpy as np
import pytest
import torch
from field_rig import LIMITS, MANIFEST, NS, PIXELS, TASK, Cloud, picture

from vla_cloud.context.images import decode_jpeg
from vla_common import messages, wire
from vla_common.manifest import Camera
from vla_edge.core.shield import State
from vla_sim.images import encode_jpeg
from vla_sim.tasks import COLOURS, TaskSpec
from vla_sim.world import TabletopWorld


def sequences(messages_):
    return [message.sequence for message in messages_]


@pytest.mark.parametrize("change_rad", [0.0, 1e-4, 0.01])
def test_08_observations_are_never_filtered_as_similar(make_edge, change_rad):
    """lerobot#1557, #3204: observations closer than a tolerance of 1 (in rad!) to the last one were dropped, so the
    policy saw nothing of a slow motion, or of a scene that changed while the arm stood still."""
    edge = make_edge()
    answered = []
    answer = edge.cloud.answer

    def upload(observation):
        contexts = answer(observation)
        answered.extend(wire.decode("ContextTokens", context) for context in contexts)
        return contexts

    edge.upload = upload
    edge.position = LIMITS.ready.copy()
    edge.run(5)
    edge.say(TASK)
    for _ in range(20):
        edge.position = edge.position + change_rad * (np.arange(8) == 0)
        edge.run(10)
    assert sequences(edge.observations) == list(range(20))
    assert sequences(answered) == list(range(20))
    assert edge.refused_contexts() == {}, "and all of them are taken by the policy"
    seen = np.array([observation.joint_positions[0] for observation in edge.observations])
    np.testing.assert_allclose(np.diff(seen), change_rad, atol=1e-12)


def test_09_the_very_first_observation_is_served(make_edge):
    """lerobot#1500: the first observation was compared with itself, filtered as similar, and no action ever came."""
    edge = make_edge()
    edge.say(TASK)
    edge.run(1)  # the first joint state and the first image
    assert sequences(edge.observations) == [0]
    edge.camera_speaks = False  # there is no second one
    edge.run(1)
    assert edge.planner.ready(edge.clock.monotonic_ns()), edge.refused_contexts()
    edge.order("REARM")
    edge.run(5)
    assert edge.state is State.NOMINAL
    assert edge.chunks[0].observation_stamp_ns == wire.stamp_ns(edge.observations[0].header)


@pytest.mark.parametrize("names", [
    pytest.param(LIMITS.names[::-1], id="reversed"),
    pytest.param((LIMITS.names[1], LIMITS.names[0], *LIMITS.names[2:]), id="two exchanged"),
    pytest.param(sorted(LIMITS.names), id="alphabetical"),  # what joint_state_broadcaster may publish
    pytest.param(LIMITS.names[:7], id="one missing"),
])
def test_11_joint_states_in_another_order_are_refused_and_named(make_edge, names):
    """lerobot#4452: joints in another order were taken by position; the arm moved the wrong ones."""
    edge = make_edge()
    edge.joint_names = list(names)
    edge.position = LIMITS.ready[:len(names)]
    edge.say(TASK)
    edge.run(50)
    assert edge.refused_messages() == {"joint_states_names": 50}
    assert not edge.commands and not edge.observations, "nothing is sent to a robot that was not understood"
    edge.joint_names, edge.position = list(LIMITS.names), None
    edge.run(5)
    np.testing.assert_array_equal(edge.commands[-1], LIMITS.ready)


def test_11_a_robot_that_changes_its_order_is_stopped(make_edge):
    """As above, while it moves: without a measurement there are no chunks."""
    edge = make_edge().start()
    edge.joint_names = list(LIMITS.names[::-1])
    edge.run(120)
    assert edge.state is State.HOLDING and edge.refused_messages()["joint_states_names"] == 120


def test_11_the_cloud_refuses_another_order_too():
    """As above, on the cloud's side."""
    cloud = Cloud()
    image = messages.new("sensor_msgs/CompressedImage", header=wire.make_header(NS, "front"), format="jpeg",
                         data=picture(200))
    observation = messages.new("Observation", header=wire.make_header(NS), session="s", sequence=0, instruction=TASK,
                               joint_names=list(LIMITS.names[::-1]), joint_positions=LIMITS.ready, images=[image])
    assert cloud.answer(wire.encode(observation)) == []
    assert cloud.refused == {"wrong_joint_names": 1}


# ------------------------------------------------------------------ colour


@pytest.mark.parametrize("channel, colour", enumerate(("red", "green", "blue")))
def test_21_a_pure_colour_stays_that_colour_into_the_network(make_edge, channel, colour):
    """RGB taken for BGR (OpenCV's order) on the asynchronous path, as in lerobot#2475 for the size: no error, and a policy
    that goes for the blue cube instead of the red one. Camera JPEG → observation → decoded → channel of the tensor."""
    edge = make_edge()
    seen = []
    hook = edge.cloud.vlm.vit.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    edge.image = picture(**{colour: 255})
    edge.say(TASK)
    edge.run(1)
    hook.remove()
    assert seen[0].shape == (1, 3, PIXELS, PIXELS)
    bright = torch.zeros(3, PIXELS, PIXELS)
    bright[channel] = 1.0
    torch.testing.assert_close(seen[0][0], 2.0 * bright - 1.0, atol=0.03, rtol=0)  # normalised from 0 .. 1 to -1 .. 1


def test_21_the_simulators_colours_survive_render_and_jpeg():
    """As above, from the renderer on: the cube named "red" is red in the pixels that the cloud decodes, and so on."""
    world = TabletopWorld()
    try:
        for index, name in enumerate(COLOURS):
            world.reset(3, TaskSpec("touch", index))
            shown = world.render("front")
            world.set_cube(index, np.array([0.5, 0.0, -1.0]), np.eye(3))
            changed = np.abs(shown.astype(int) - world.render("front")).max(axis=2) > 60
            height, width = shown.shape[:2]
            decoded = decode_jpeg(encode_jpeg(shown), Camera("front", width, height), 1 << 20)
            red, green, blue = decoded[changed].reshape(-1, 3).mean(axis=0)
            assert changed.sum() >= 10
            strong = {"red": (red, max(green, blue)), "green": (green, max(red, blue)),
                      "blue": (blue, max(red, green)), "yellow": (min(red, green), blue)}[name]
            assert strong[0] > 1.5 * strong[1], (name, red, green, blue)
    finally:
        world.close()


def test_21_training_and_service_decode_the_same_pixels():
    """lerobot#2475: images were resized in another way at run time than in training. Here neither side resizes: another
    size is refused (see test_cloud_context_service), and both decoders give the same pixels."""
    from vla_models.training.data import decode_images
    from vla_sim.images import decode_jpeg as simulator_decode

    rng = np.random.default_rng(0)
    jpeg = encode_jpeg(rng.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8))
    service = decode_jpeg(jpeg, MANIFEST.cameras[0], 1 << 20)
    training = decode_images(np.frombuffer(jpeg, np.uint8), np.array([0, len(jpeg)]))[0]
    np.testing.assert_array_equal(service, training)
    np.testing.assert_array_equal(service, simulator_decode(jpeg))
