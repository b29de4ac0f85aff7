"""One image: where it is, whether its bytes are in order, and its pixels. Blocking; see images.py for the threads."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from vla_cloud.core.image_header import MEDIA_TYPES, ImageError, ImageHeader, read_header
from vla_cloud.gateway.chat_types import ImagePart
from vla_cloud.gateway.image_settings import ImageRules

_DATA: Final = re.compile(r"data:(image/[a-z0-9.+-]{1,40});base64,")
_MODES: Final = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"))  # 8 bits per channel, or 1


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """``pixels`` RGB u8[height, width, 3], read-only; ``sha256`` (32 bytes) of the encoded bytes they are made from."""

    pixels: npt.NDArray[np.uint8]
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Encoded:
    """Bytes whose header is in order."""

    data: bytes
    header: ImageHeader

    @property
    def pixels(self) -> int:
        """Their number, when decoded."""
        return self.header.width * self.header.height


def given(part: ImagePart, rules: ImageRules) -> Encoded:
    """An image that came along, or lies on this machine.

    Raises:
        ImageError: it is refused.
    """
    if not part.url:
        return checked(part.data, part.media_type, rules)
    if part.url[:5].lower() == "data:":
        data, media_type = from_data_url(part.url, rules.max_bytes)
        return checked(data, media_type, rules)
    if part.url[:5].lower() == "file:":
        return checked(from_file(part.url, rules.allow_roots, rules.max_bytes), part.media_type, rules)
    raise ImageError("a URL must begin with data:, or https: where fetching is allowed")


def checked(data: bytes, media_type: str, rules: ImageRules) -> Encoded:
    """Bytes whose format, size and declared type are in order; nothing is decoded. ``media_type`` "": none declared.

    Raises:
        ImageError: they are not.
    """
    if not data:
        raise ImageError("there are no bytes")
    if len(data) > rules.max_bytes:
        raise ImageError(f"it has {len(data)} bytes, at most {rules.max_bytes} are taken")
    header = read_header(data)
    declared = media_type.strip().lower()
    if declared and declared not in MEDIA_TYPES:
        raise ImageError(f"{declared[:60]!r} is not taken: send a JPEG, PNG or WebP image")
    if declared and MEDIA_TYPES[declared] != header.format:
        raise ImageError(f"it is declared as {declared}, and its bytes are {header.format}")
    if header.is_animated:
        raise ImageError("it is animated: send one picture")
    if max(header.width, header.height) > rules.max_side:
        raise ImageError(f"it is {header.width} x {header.height}, a side may have {rules.max_side} pixels")
    if header.width * header.height > rules.max_pixels:
        raise ImageError(f"it is {header.width} x {header.height}, at most {rules.max_pixels} pixels are taken")
    return Encoded(data, header)


def from_data_url(url: str, max_bytes: int) -> tuple[bytes, str]:
    """Bytes and declared type of ``data:image/...;base64,...``; its length is checked before it is decoded.

    Raises:
        ImageError: it is anything else.
    """
    match = _DATA.match(url[:80])
    if match is None:
        raise ImageError("a data: URL must be of the form data:image/png;base64,...")
    if len(url) - match.end() > (max_bytes + 2) // 3 * 4:
        raise ImageError(f"it has more than {max_bytes} bytes")
    text = url[match.end() :]
    if len(text) % 4 or text.endswith("==="):  # of padding, the decoder takes any amount
        raise ImageError("its base64 is wrong: the length must be a multiple of 4, with at most two '='")
    try:
        return base64.b64decode(text.encode("ascii"), validate=True), match.group(1)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ImageError(f"its base64 is wrong: {error}") from error


def from_file(url: str, roots: Sequence[str], max_bytes: int) -> bytes:
    """A regular file below one of the roots, wherever links lead. ``max_bytes`` + 1 bytes are read at most.

    Raises:
        ImageError: it is elsewhere, or not such a file; the text does not tell strangers which.
    """
    if not roots:
        raise ImageError("files of the server are not read: send the image as a data: URL")
    parts = urlsplit(url)
    path = unquote(parts.path, errors="strict") if parts.netloc in ("", "localhost") else ""
    refused = ImageError("there is no such file below the folders that may be read")
    if not path.startswith("/") or "\x00" in path:
        raise refused
    try:
        handle = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise refused from error
    try:
        # What was opened is judged, not its name, which may mean another file by now.
        real = os.path.realpath(f"/proc/self/fd/{handle}")
        inside = any(os.path.commonpath((real, os.path.realpath(root))) == os.path.realpath(root) for root in roots)
        if not inside or not stat.S_ISREG(os.fstat(handle).st_mode):
            raise refused
        with open(handle, "rb", closefd=False) as file:
            return file.read(max_bytes + 1)
    finally:
        os.close(handle)


def decode(encoded: Encoded) -> DecodedImage:
    """Pixels, turned as EXIF says, on white where they were transparent.

    Raises:
        ImageError: the bytes are damaged, cut off, or not what their header says.
    """
    header = encoded.header
    try:
        with Image.open(io.BytesIO(encoded.data), formats=(header.format,)) as image:
            if image.size != (header.width, header.height) or image.format != header.format:
                raise ImageError(f"it is {image.format} {image.size}, and its header says otherwise")
            if getattr(image, "n_frames", 1) != 1:
                raise ImageError("it has more than one picture")
            if image.mode not in _MODES:
                raise ImageError(f"pixels of kind {image.mode} are not taken: send 8 bits per channel")
            image.load()
            pixels = np.asarray(_rgb(ImageOps.exif_transpose(image)), dtype=np.uint8)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # decoders raise many kinds for damaged bytes; all mean the same here
        raise ImageError(f"it is damaged ({type(error).__name__}: {str(error)[:100]})") from error
    pixels.flags.writeable = False
    return DecodedImage(pixels, hashlib.sha256(encoded.data).digest())


def _rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        return opaque.convert("RGB")
    return image.convert("RGB")
