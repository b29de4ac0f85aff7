"""The bytes of a KV pool, where other processes can be let in without a name on any file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vla_cloud.kv_transfer.layout import KvLayout

LOG = logging.getLogger(__name__)

_MADV_POPULATE_WRITE: Final = 23  # linux/mman.h, since 5.14; not in Python's mmap module


class KvMemory:
    """A pool u8[layers, num_blocks, piece_bytes], zeroed, all pages present.

    A memfd, so it lives as long as a process has it open: nothing is left behind by a killed owner and there is no
    name to guess. It cannot be resized, so a peer can never be sent a SIGBUS by truncation.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        """Raises OSError (ENOMEM, ENOSPC) at once if the memory is not there, never later."""
        if num_blocks < 1:
            raise ValueError(f"a KV pool of {num_blocks} blocks; give it at least 1")
        self.layout = layout
        self.num_blocks = num_blocks
        size = num_blocks * layout.block_bytes
        self._fd = os.memfd_create("vla-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.array = map_pool(self._fd, layout, num_blocks, allocate=True)
        except OSError:
            os.close(self._fd)
            raise

    @property
    def fd(self) -> int:
        """Descriptor for another process to map; -1 after close."""
        return self._fd

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes when the last array over it does. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_pool(fd: int, layout: KvLayout, num_blocks: int, *, allocate: bool = False) -> NDArray[np.uint8]:
    """Map a pool's descriptor: u8[layers, num_blocks, piece_bytes], with its pages present in this process.

    Raises:
        ValueError: the descriptor holds another size.
        OSError: no memory.
    """
    size = num_blocks * layout.block_bytes
    found = os.fstat(fd).st_size
    if found != size:
        raise ValueError(f"a KV pool of {num_blocks} blocks takes {size} bytes, the peer's holds {found}")
    buffer = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        buffer.madvise(mmap.MADV_HUGEPAGE)  # taken where shmem_enabled is "advise"; before the pages exist
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if allocate:
        os.posix_fallocate(fd, 0, size)
    # A child of this process has no business in the pool, and would keep a dead writer's mapping alive.
    buffer.madvise(mmap.MADV_DONTFORK)
    try:
        # A page fault per 4 KiB would halve the speed of the first transfer into each block.
        buffer.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        LOG.info("pages of the KV pool are mapped at first use: %s", error)
    return np.frombuffer(buffer, np.uint8).reshape(layout.layers, num_blocks, layout.piece_bytes)


def base_address(array: NDArray[np.uint8]) -> int:
    """Address of the first byte."""
    return int(array.ctypes.data)


copy = ctypes.memmove
"""``copy(to, from, count)`` by addresses; lets other Python threads run meanwhile."""
