"""Shifts the wall clock of a process under test; Python imports this at start when its folder is on PYTHONPATH.

``VLA_TEST_WALL_CLOCK`` names a file of one little-endian int64 per process (:data:`SLOTS`), nanoseconds added to
``time.time()`` and ``time.time_ns()``. It is mapped into memory, so a step takes effect at the next call. The monotonic
clock is left alone, as the kernel leaves it alone when the time of day is set.

Not covered: C and Rust code that reads the clock itself (Zenoh's sample time stamps, which nothing here reads).
"""

import mmap
import os
import struct
import time

VARIABLE = "VLA_TEST_WALL_CLOCK"
SLOTS = ("edge", "motor", "policy", "io", "recorder", "cloud", "link", "robot")
_REAL_NS = time.time_ns


def _slot():
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().split(b"\0")
    for word in reversed(words):
        name = os.path.basename(word.decode(errors="replace")).removesuffix(".py").split(".")[-1]
        for index, slot in enumerate(SLOTS):
            if name in (f"{slot}_main", f"{slot}_process"):
                return index
    return None


def _install(path):
    index = _slot()
    if index is None:
        return
    with open(path, "r+b") as file:
        shift = mmap.mmap(file.fileno(), 8 * len(SLOTS))

    def time_ns():
        return _REAL_NS() + struct.unpack_from("<q", shift, 8 * index)[0]

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9


if VARIABLE in os.environ:
    _install(os.environ[VARIABLE])
