"""Names of a prompt's blocks, equal to those in the workers' KvEvents, computed once per request and block."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from vla_cloud.core.block_pool import BLOCK_TOKENS
from vla_cloud.core.generate import ImageSpan
from vla_cloud.core.prefix_key import salt_hash

_BLOCK_BYTES: Final = 4 * BLOCK_TOKENS


class PromptHashes:
    """The chained hashes of ``prefix_key.block_hashes``, straight from packed tokens.

    One object serves all attempts of a request and both of its workers: only blocks that are new are hashed.
    """

    def __init__(self, salt: bytes, images: Sequence[ImageSpan] = ()) -> None:
        """``salt`` and ``images`` as in :class:`vla_cloud.core.prefix_key.PrefixKey`."""
        self._hashes: list[bytes] = []
        self._parent = salt_hash(salt)
        self._images: dict[int, bytes] = {}
        for image in images:
            index, start = divmod(image.start, BLOCK_TOKENS)
            row = struct.pack("<qq", start, image.length) + image.sha256
            self._images[index] = self._images.get(index, b"") + row

    def extend(self, prompt: bytes) -> list[bytes]:
        """Hashes of the whole blocks of ``prompt``, 32 bytes each; not to be changed.

        Args:
            prompt: i32 little-endian token ids; it goes on from the prompt of the call before.
        """
        known, count = len(self._hashes), len(prompt) // _BLOCK_BYTES
        if count > known:
            wide = _widen(prompt[known * _BLOCK_BYTES : count * _BLOCK_BYTES])
            images, sha256, parent, append = self._images, hashlib.sha256, self._parent, self._hashes.append
            for index in range(known, count):
                at = (index - known) * 2 * _BLOCK_BYTES
                data = parent + wide[at : at + 2 * _BLOCK_BYTES]
                if index in images:
                    data += images[index]
                parent = sha256(data).digest()
                append(parent)
            self._parent = parent
        return self._hashes if count >= len(self._hashes) else self._hashes[:count]


def _widen(tokens: bytes) -> bytes:
    """i32 to i64 (little-endian, not negative), as the hashes take them."""
    wide = bytearray(2 * len(tokens))
    for i in range(4):
        wide[i::8] = tokens[i::4]
    return bytes(wide)
