"""Format and size of a JPEG, PNG or WebP by its first bytes, before anything is decompressed.

Read here and not by the decoder, because decoders make room for what a header claims (that of WebP as it opens a file).
The decoder must then find the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MEDIA_TYPES: Final = {"image/jpeg": "JPEG", "image/jpg": "JPEG", "image/png": "PNG", "image/webp": "WEBP"}
"""What may be declared, and the format it stands for."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_SOF: Final = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive: what decoders take
_OTHER_SOF: Final = frozenset((0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF))
_ALONE: Final = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a length
_MAX_SEGMENTS: Final = 512
_MAX_CHUNKS: Final = 16_384


class ImageError(ValueError):
    """Not an image that is taken; the text is for who sent it."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """``format`` is JPEG, PNG or WEBP; sides in pixels, at least 1; ``is_animated``: more than one picture."""

    format: str
    width: int
    height: int
    is_animated: bool = False


def read_header(data: bytes) -> ImageHeader:
    """What the bytes claim to be.

    Raises:
        ImageError: none of the three formats, or the header is damaged.
    """
    if data.startswith(_PNG):
        header = _png(data)
    elif data.startswith(b"\xff\xd8\xff"):
        header = _jpeg(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        header = _webp(data)
    else:
        raise ImageError("the bytes are no JPEG, PNG or WebP image")
    if header.width < 1 or header.height < 1:
        raise ImageError(f"the image is {header.width} x {header.height}")
    return header


def _png(data: bytes) -> ImageHeader:
    if len(data) < 33 or data[8:16] != b"\x00\x00\x00\x0dIHDR":
        raise ImageError("the PNG header is damaged")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    return ImageHeader("PNG", width, height, b"acTL" in _chunks(data))


def _chunks(data: bytes) -> set[bytes]:
    """Kinds of all chunks up to the end, which must be there: decoders take a PNG whose last bytes are missing."""
    kinds, at = set(), 8
    for _ in range(_MAX_CHUNKS):
        kind = data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        if at > len(data):
            raise ImageError("the PNG is cut off")
        kinds.add(kind)
        if kind == b"IEND":
            return kinds
    raise ImageError(f"the PNG has more than {_MAX_CHUNKS} chunks")


def _jpeg(data: bytes) -> ImageHeader:
    at = 2
    for _ in range(_MAX_SEGMENTS):
        while data[at : at + 2] == b"\xff\xff":  # fill bytes
            at += 1
        if len(data) < at + 4 or data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker in _ALONE:
            at += 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _SOF and length >= 8 and len(data) >= at + 9:
            return ImageHeader("JPEG", int.from_bytes(data[at + 7 : at + 9], "big"),
                               int.from_bytes(data[at + 5 : at + 7], "big"))  # fmt: skip
        if marker in _OTHER_SOF:
            raise ImageError("this kind of JPEG (lossless, arithmetic or hierarchical) is not taken")
        if marker in (0xDA, 0xD9) or length < 2:
            break
        at += 2 + length
    raise ImageError("the JPEG header is damaged")


def _webp(data: bytes) -> ImageHeader:
    if int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise ImageError("the WebP is cut off")
    kind, body = data[12:16], data[20:30]
    if len(body) == 10:
        if kind == b"VP8X":
            width, height = int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
            return ImageHeader("WEBP", width, height, bool(body[0] & 0x02))
        if kind == b"VP8L" and body[0] == 0x2F:
            bits = int.from_bytes(body[1:5], "little")
            return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
            width, height = int.from_bytes(body[6:8], "little"), int.from_bytes(body[8:10], "little")
            return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    raise ImageError("the WebP header is damaged")
