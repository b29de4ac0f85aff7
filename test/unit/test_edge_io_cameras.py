"""io with two cameras, on the rules of ROS and of Zenoh, without either: what goes up together, and who is missing."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from io_rig import MS, NS, WALL_NS, Edge

from vla_common import messages, wire

TASK = messages.new("std_msgs/String", data="touch the red cube")


class Day(Edge):
    """Joint states all along, images as told."""

    def __init__(self, *overrides, cameras=("front", "wrist")):
        super().__init__(*overrides, cameras=cameras)
        self.arrives("instruction", TASK)
        self.joints(0)
        self.turn()

    def pass_by(self, seconds, *images, period_ms=100):
        """Images of (camera, stamp of the first or 0), and joint states."""
        for k in range(round(seconds * 200)):
            if k * 5 % period_ms == 0:
                for camera, stamp_ns in images:
                    self.image(stamp_ns and stamp_ns + k * 5 * MS, camera)
            self.joints(0)
            self.turn()

    @property
    def sent(self):
        return [wire.decode("Observation", payload) for payload in self.cloud.sent["observation"]]

    @property
    def state(self):
        return self.io.out.cameras


@pytest.fixture
def day():
    return Day()


def test_images_go_up_together_in_the_models_order(day):
    day.image(WALL_NS + 40 * MS, "wrist", b"w")
    day.turn()
    assert day.sent == []
    first_ns = day.clock.monotonic_ns() - 5 * MS
    day.image(WALL_NS, "front", b"f")
    day.turn()
    observation, = day.sent
    assert [(image.header.frame_id, bytes(image.data)) for image in observation.images] == [("front", b"f"), ("wrist", b"w")]
    # Instants of this host: as old as the older image, whose arrival was first although its stamp is later.
    assert wire.stamp_ns(observation.header) == wire.stamp_ns(observation.images[1].header) == first_ns


def test_the_image_that_belongs_to_the_others_is_chosen_not_the_newest(day):
    """The wrist camera's images arrive 200 ms late; those of one instant go up together all the same."""
    for k in range(200):
        day.joints(0)
        if k % 6 == 0:
            day.image(WALL_NS + k * 5 * MS, "front", str(k).encode())
            if k >= 42:
                day.image(WALL_NS + (k - 42) * 5 * MS, "wrist", str(k - 42).encode())
        day.turn()
    pairs = [tuple(int(bytes(image.data)) for image in observation.images) for observation in day.sent]
    assert len(pairs) >= 7 and all(abs(front - wrist) <= 10 for front, wrist in pairs), pairs
    assert all(after > before for one in zip(*pairs, strict=True) for before, after in zip(one, one[1:], strict=False))


@pytest.mark.parametrize("stamps", [(WALL_NS, WALL_NS), (0, 0), (WALL_NS, 0)])
@pytest.mark.parametrize("period_ms, low, high", [(35, 85, 101), (100, 95, 101), (200, 48, 50)])
def test_two_cameras_keep_the_rate(day, stamps, period_ms, low, high):
    day.pass_by(10, ("front", stamps[0]), ("wrist", stamps[1]), period_ms=period_ms)
    assert low <= len(day.sent) <= high and day.state == "" and day.io.rejects() == {}


def test_without_a_camera_nothing_goes_up_until_it_is_back(day, caplog):
    caplog.set_level(logging.INFO)
    day.pass_by(2, ("front", WALL_NS), ("wrist", WALL_NS))
    before = len(day.sent)
    assert before >= 18 and day.state == "" and caplog.messages == []
    day.pass_by(3, ("front", WALL_NS + 10 * NS))
    assert day.state == "camera_missing_wrist" and len(day.sent) - before <= 1
    assert day.io.cameras.startswith("camera_missing_wrist: no image that can be used for 3.1 s")
    before = len(day.sent)
    day.pass_by(2, ("front", WALL_NS + 20 * NS), ("wrist", WALL_NS + 20 * NS))
    assert day.state == "" and len(day.sent) - before >= 18
    told = [message for message in caplog.messages if "image" in message]
    assert len(told) == 2, "once per change"
    assert told[0].startswith("camera_missing_wrist: ") and told[0].endswith("no observations are sent")
    assert told[1] == "images of all cameras come again: front, wrist"


def test_cameras_that_are_apart_are_told_and_not_mixed(day):
    day.pass_by(3, ("front", WALL_NS), ("wrist", WALL_NS + 70 * MS), period_ms=200)
    assert day.state == "cameras_apart" and day.sent == []
    day.pass_by(3, ("front", WALL_NS + 10 * NS), ("wrist", 70 * NS))
    assert day.state == "camera_clocks_differ" and day.sent == []
    day = Day("io.camera_window_s=0.08")
    day.pass_by(3, ("front", WALL_NS), ("wrist", WALL_NS + 70 * MS), period_ms=200)
    assert day.state == "" and len(day.sent) >= 13


def test_images_that_cannot_be_used_make_a_camera_missing_and_are_named():
    day = Day("ros.image_transport=raw")
    good = {"height": 8, "width": 8, "encoding": "rgb8", "step": 24, "data": np.zeros(192, np.uint8)}
    for encoding in ("yuv422", "16UC1"):
        for _ in range(20):
            day.image(camera="front", **good)
            day.image(camera="wrist", **{**good, "encoding": encoding})
            day.turn(50 * MS)
    assert day.state == "camera_missing_wrist" and day.sent == []
    assert day.io.rejects() == {"image_encoding_yuv422": 20, "image_encoding_16UC1": 20}
    for _ in range(2):
        for camera in ("front", "wrist"):
            day.image(camera=camera, **good)
        day.turn(50 * MS)
    observation = day.sent[-1]
    assert [image.header.frame_id for image in observation.images] == ["front", "wrist"] and day.state == ""
    assert all(image.format == "jpeg" and bytes(image.data[:2]) == b"\xff\xd8" for image in observation.images)


def test_garbage_is_counted_and_nothing_falls_over(day):
    day.arrives("image front", b"\x00\x01\x00\x00garbage")
    day.turn()
    (name, count), = day.io.rejects().items()
    assert name in ("image_malformed", "image_truncated") and count == 1


def test_a_single_camera_needs_no_partner():
    day = Day(cameras=("front",))
    day.image(WALL_NS, "front", b"f")
    day.turn()
    assert len(day.sent) == 1
    day.pass_by(1)
    assert day.state == "camera_missing_front"


def test_on_zenoh_stamps_are_instants():
    """Of the robot's CLOCK_MONOTONIC; every set goes up, at whatever rate it comes."""
    day = Day("bus=tcp/127.0.0.1:7447")
    for k in range(50):
        now_ns = day.clock.monotonic_ns()
        day.joints(now_ns)
        day.image(now_ns - 20 * MS, "front")
        day.image(now_ns - 10 * MS if k < 40 else now_ns - 80 * MS, "wrist")
        day.turn(20 * MS)
    assert len(day.sent) == 40 + 9  # the last ones of one camera belong to earlier ones of the other
    assert not [name for name in day.io.rejects() if "image" in name] and day.state == ""
    stamps = [[wire.stamp_ns(image.header) for image in observation.images] for observation in day.sent]
    assert all(max(pair) - min(pair) <= 50 * MS for pair in stamps)
    assert [wire.stamp_ns(observation.header) for observation in day.sent] == [min(pair) for pair in stamps]


