"""JPEG in, pixels out, with limits that hold before anything is decompressed."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from vla_cloud.core.validation import ImageTooLarge, MalformedImage, WrongImageSize
from vla_common.manifest import Camera


def decode_jpeg(data: bytes, camera: Camera, max_bytes: int) -> npt.NDArray[np.uint8]:
    """JPEG -> RGB u8[height, width, 3] of the camera's size.

    The size is checked in the header: an image that claims others is refused before its pixels take any memory.
    """
    if len(data) > max_bytes:
        raise ImageTooLarge(f"image of camera {camera.name!r}: {len(data)} bytes, limit {max_bytes}")
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            if image.size != (camera.width, camera.height):
                found, expected = f"{image.width} x {image.height}", f"{camera.width} x {camera.height}"
                raise WrongImageSize(f"camera {camera.name!r}: {found}, the policy takes {expected}")
            return np.asarray(image.convert("RGB"), dtype=np.uint8)
    except (WrongImageSize, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise many kinds for damaged bytes; all mean the same here
        raise MalformedImage(f"image of camera {camera.name!r}: {type(error).__name__}: {error}") from error
