"""Length-prefixed frames: u32 little-endian length, then that many bytes. Pure; sockets are in link.py."""

from __future__ import annotations

import struct
from typing import Final

HEADER_BYTES: Final = 4
_HEADER: Final = struct.Struct("<I")


class FrameError(ValueError):
    """The stream cannot be followed any further: close the link."""


def frame(payload: bytes) -> bytes:
    """Header and payload, which must not be empty."""
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder:
    """Cuts a byte stream into payloads, however it arrives in pieces."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: largest payload; a header that announces more is refused before its payload is stored."""
        self.max_bytes = max_bytes
        self._buffer = bytearray()
        self._start = 0

    def append(self, data: bytes) -> None:
        """More of the stream; call :meth:`next` until it gives None before more is appended."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def next(self) -> bytes | None:
        """The next complete payload, in order; None if there is none yet.

        Raises:
            FrameError: an empty or too large frame is announced; every later call raises again.
        """
        start = self._start + HEADER_BYTES
        if len(self._buffer) < start:
            return None
        (length,) = _HEADER.unpack_from(self._buffer, self._start)
        if not 1 <= length <= self.max_bytes:
            raise FrameError(f"a frame of {length} bytes was announced; 1 to {self.max_bytes} are taken")
        if len(self._buffer) < start + length:
            return None
        self._start = start + length
        with memoryview(self._buffer) as view:
            return bytes(view[start : self._start])
