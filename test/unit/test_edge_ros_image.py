"""Raw images of a ROS camera become the JPEG that the cloud reads."""

import io

import numpy as np
import pytest
from PIL import Image

from vla_common import messages, wire
from vla_edge.adapters.ros_image import ImageRefused, check, to_jpeg

H, W = 32, 48


def picture():
    """Red left, green above right, blue below right."""
    rgb = np.zeros((H, W, 3), np.uint8)
    rgb[:, :16, 0], rgb[:16, 16:, 1], rgb[16:, 16:, 2] = 255, 255, 255
    return rgb


def message(encoding, pixels, padding=0, **changes):
    rows = pixels.reshape(pixels.shape[0], -1)
    rows = np.hstack([rows, np.full((rows.shape[0], padding), 77, np.uint8)])
    fields = {"header": wire.make_header(5, "cam"), "height": pixels.shape[0], "width": pixels.shape[1],
              "encoding": encoding, "step": rows.shape[1], "data": rows.reshape(-1), **changes}
    return messages.new("sensor_msgs/msg/Image", **fields)


def decoded(compressed):
    wire.decode("sensor_msgs/CompressedImage", wire.encode(compressed))
    return np.asarray(Image.open(io.BytesIO(bytes(compressed.data))))


@pytest.mark.parametrize("padding", [0, 1, 8])
@pytest.mark.parametrize("encoding", ["rgb8", "bgr8"])
def test_colours_come_out_right(encoding, padding):
    rgb = picture()
    made = to_jpeg(message(encoding, rgb if encoding == "rgb8" else rgb[..., ::-1], padding), 92)
    assert np.abs(decoded(made).astype(int) - rgb).max() <= 8
    assert made.format == "jpeg" and wire.stamp_ns(made.header) == 5


def test_grey():
    grey = np.tile(np.arange(0, 240, 5, dtype=np.uint8), (H, 1))
    assert np.abs(decoded(to_jpeg(message("mono8", grey, 3), 92)).astype(int) - grey).max() <= 8


@pytest.mark.parametrize("encoding, cause", [("16UC1", "encoding_16UC1"), ("32FC1", "encoding_32FC1"),
                                             ("bayer_rggb8", "encoding_bayer_rggb8"), ("yuv422", "encoding_yuv422"), ("x" * 1000, "encoding_unknown")])
def test_other_encodings_are_refused_by_name(encoding, cause):
    for act in (check, lambda image: to_jpeg(image, 92)):
        with pytest.raises(ImageRefused) as error:
            act(message(encoding, np.zeros((4, 4, 2), np.uint8)))
        assert error.value.cause == cause


@pytest.mark.parametrize("changes", [{"height": 31}, {"height": 0}, {"width": 49}, {"step": 143}, {"height": 2**31},
                                     {"data": np.zeros(5, np.uint8)}])
def test_sizes_that_do_not_agree(changes):
    with pytest.raises(ImageRefused, match="size"):
        to_jpeg(message("rgb8", picture(), **changes), 92)
