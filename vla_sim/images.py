"""The one place where camera images become bytes, so training and run time see identical JPEGs."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

JPEG_QUALITY = 92


def encode_jpeg(rgb: np.ndarray) -> bytes:
    """uint8 [H, W, 3] RGB → JPEG bytes. 4:4:4, because chroma carries the colour of the cubes."""
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, format="JPEG", quality=JPEG_QUALITY, subsampling=0)
    return buffer.getvalue()


def decode_jpeg(data: bytes) -> np.ndarray:
    """JPEG bytes → uint8 [H, W, 3] RGB."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
