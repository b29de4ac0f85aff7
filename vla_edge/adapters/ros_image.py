"""Raw ROS images as JPEG, which is what goes up to the cloud."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
from PIL import Image

from vla_common.messages import new

ENCODINGS: Final = {"rgb8": 3, "bgr8": 3, "mono8": 1}
"""Encodings that are taken, and their bytes per pixel."""
_KNOWN: Final = frozenset({
    "rgba8", "bgra8", "rgb16", "bgr16", "rgba16", "bgra16", "mono16", "8UC1", "8UC3", "8UC4", "16UC1", "16SC1", "32FC1",
    "bayer_rggb8", "bayer_bggr8", "bayer_gbrg8", "bayer_grbg8", "yuv422", "yuv422_yuy2", "uyvy", "yuyv", "nv12"})
MAX_PIXELS: Final = 4096 * 4096


class ImageRefused(ValueError):
    """An image that cannot be made JPEG. ``cause`` is a stable short name for counters."""

    def __init__(self, cause: str) -> None:
        """``cause`` such as ``encoding_16UC1``."""
        super().__init__(cause)
        self.cause = cause


def check(message: Any) -> None:
    """Refuse an image that :func:`to_jpeg` could not convert.

    Args:
        message: ``sensor_msgs/Image``.

    Raises:
        ImageRefused: another encoding (depth images among them), or sizes that do not agree.
    """
    encoding, height, width, step = str(message.encoding), int(message.height), int(message.width), int(message.step)
    if encoding not in ENCODINGS:
        # Only names that ROS knows, so that counters stay few whatever a sender writes.
        raise ImageRefused(f"encoding_{encoding if encoding in _KNOWN else 'unknown'}")
    depth = ENCODINGS[encoding]
    if not (0 < height * width <= MAX_PIXELS) or step < width * depth or message.data.size != step * height:
        raise ImageRefused("size")


def to_jpeg(message: Any, quality: int) -> Any:
    """``sensor_msgs/CompressedImage`` of a ``sensor_msgs/Image``.

    Args:
        message: rgb8, bgr8 or mono8; rows may be padded (``step``). quality: JPEG quality, 1 .. 100. Colour is not
            subsampled: it tells objects apart.

    Raises:
        ImageRefused: see :func:`check`.
    """
    check(message)
    encoding, height, width, step = str(message.encoding), int(message.height), int(message.width), int(message.step)
    depth = ENCODINGS[encoding]
    rows = np.asarray(message.data, np.uint8).reshape(height, step)[:, :width * depth]
    pixels = rows if depth == 1 else rows.reshape(height, width, 3)[..., ::-1 if encoding == "bgr8" else 1]
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, format="JPEG", quality=quality, subsampling=0)
    return new("sensor_msgs/CompressedImage", header=message.header, format="jpeg", data=buffer.getvalue())
