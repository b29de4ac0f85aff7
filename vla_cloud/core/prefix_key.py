"""What makes two prompt prefixes the same: tenant salt, tokens, and which image stands where.

Two prompts of equal text with different images have equal tokens (placeholders), hence the image hash with its offset.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from vla_cloud.core.block_pool import BLOCK_TOKENS
from vla_cloud.core.generate import ImageSpan

# (tokens of the block, images that begin in it as (start relative to the block, length, sha256)). Compared as a whole:
# a dictionary finds it by hash and then compares every token, so a collision cannot give foreign KV.
BlockKey = tuple[tuple[int, ...], tuple[tuple[int, int, bytes], ...]]


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """A prefix to look up or store; ``images`` may reach beyond ``tokens``, ``salt`` is the tenant's."""

    salt: bytes
    tokens: Sequence[int]
    images: Sequence[ImageSpan] = ()

    @property
    def num_blocks(self) -> int:
        """Whole blocks of the prefix; a rest of fewer than 16 tokens does not count."""
        return len(self.tokens) // BLOCK_TOKENS

    def block_key(self, index: int) -> BlockKey:
        """The key of the block of tokens [16 index, 16 index + 16)."""
        start = index * BLOCK_TOKENS
        end = start + BLOCK_TOKENS
        tokens = tuple(self.tokens[start:end])
        if not self.images:
            return tokens, ()
        # An image counts in the block where it begins: all its later blocks have that one before them.
        images = tuple(
            (image.start - start, image.length, image.sha256) for image in self.images if start <= image.start < end
        )
        return tokens, images


def salt_hash(salt: bytes) -> bytes:
    """The parent hash of a first block (32 bytes)."""
    return hashlib.sha256(b"salt" + salt).digest()


def chain_hash(parent: bytes, key: BlockKey) -> bytes:
    """SHA-256 of a block and all before it (32 bytes): a name for routers, never a proof of equality here."""
    tokens, images = key
    digest = hashlib.sha256(parent)
    digest.update(struct.pack(f"<{len(tokens)}q", *tokens))
    for start, length, sha256 in images:
        digest.update(struct.pack("<qq", start, length) + sha256)
    return digest.digest()


def block_hashes(key: PrefixKey) -> list[bytes]:
    """The chained hashes of the whole blocks of a prefix, as KvEvents name them."""
    hashes = []
    parent = salt_hash(key.salt)
    for index in range(key.num_blocks):
        parent = chain_hash(parent, key.block_key(index))
        hashes.append(parent)
    return hashes
