"""What was made of the images seen last, by the hash of their bytes: the same image is not encoded twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

Handle = TypeVar("Handle")


@dataclass
class ImageCacheCounts:
    """Totals since start, in images."""

    lookups: int = 0
    hits: int = 0
    evicted: int = 0


class ImageCache(Generic[Handle]):
    """Bounded; the least recently used goes first. Keys are SHA-256: equal keys mean equal images."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` images, at least 1."""
        if capacity < 1:
            raise ValueError(f"an image cache keeps at least one image, got {capacity}")
        self.capacity = capacity
        self._handles: OrderedDict[bytes, Handle] = OrderedDict()
        self.counts = ImageCacheCounts()

    def __len__(self) -> int:
        """Images held."""
        return len(self._handles)

    def get(self, key: bytes) -> Handle | None:
        """What is known of an image."""
        self.counts.lookups += 1
        handle = self._handles.get(key)
        if handle is not None:
            self._handles.move_to_end(key)
            self.counts.hits += 1
        return handle

    def put(self, key: bytes, handle: Handle) -> None:
        """Keep it, in the place of the one that was not used for longest."""
        self._handles[key] = handle
        self._handles.move_to_end(key)
        if len(self._handles) > self.capacity:
            self._handles.popitem(last=False)
            self.counts.evicted += 1
