"""One transfer as its sender sees it: what is still to be written, in batches, and what was."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vla_cloud.kv_transfer.digest import MASK


@dataclass(frozen=True)
class Batch:
    """These layers of these blocks. ``positions`` are places in the reservation, ``local`` and ``remote`` ids."""

    layers: range
    positions: Sequence[int]
    mask: int
    """Bit p for each position p."""
    local: Sequence[int]
    remote: Sequence[int]


def runs(local: Sequence[int], remote: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """``(first local, first remote, count)`` of stretches that are neighbours on both sides."""
    start = 0
    for at in range(1, len(local) + 1):
        if at == len(local) or local[at] != local[at - 1] + 1 or remote[at] != remote[at - 1] + 1:
            yield local[start], remote[start], at - start
            start = at


class Misdirected(ValueError):
    """A push named blocks that D did not grant, or a piece for the second time."""


class Transfer:
    """One token. Local blocks are read, and remote ones written, only under ``lock`` while ``live``."""

    def __init__(self, token: str, deadline_ns: int, layers: int, piece_bytes: int, batch_bytes: int) -> None:
        """Not granted yet."""
        self.token = token
        self.deadline_ns = deadline_ns
        self.lock = threading.Lock()
        self.step = threading.Lock()
        """Held by the thread, the peer's or the engine's, that takes the transfer forward."""
        self.live = True
        self.idle = threading.Event()
        """Clear while bytes are written without the lock."""
        self.idle.set()
        self.opened = False
        self.noticed = False
        self.epoch = -1
        self.began_ns = 0
        self.num_bytes = 0
        self.payload: bytes | None = None
        self._digest = 0
        self._pushed_pieces = 0
        self._piece_bytes = piece_bytes
        self._step = max(1, batch_bytes // piece_bytes)
        self._positions: dict[int, int] | None = None
        self._written = [0] * layers
        self._pushes: deque[tuple[range, Sequence[int], Sequence[int]]] = deque()
        self._batches: Iterator[Batch] = iter(())
        self._next: Batch | None = None

    def grant(self, epoch: int, blocks: Sequence[int]) -> None:
        """D lets us write to these blocks."""
        self.epoch = epoch
        # Last: the other thread may go on as soon as it is there.
        self._positions = {block: position for position, block in enumerate(blocks)}

    @property
    def granted(self) -> bool:
        """Whether D has let us write."""
        return self._positions is not None

    def push(self, layers: range, local: Sequence[int], remote: Sequence[int]) -> None:
        """Queue; checked at the time of writing, as the grant may still be on its way."""
        self._pushed_pieces += len(layers) * len(local)
        self._pushes.append((layers, local, remote))

    def peek(self) -> Batch | None:
        """The batch to write next; None if there is nothing to write yet. Raises Misdirected."""
        while self._next is None and self.granted:
            self._next = next(self._batches, None)
            if self._next is None:
                if not self._pushes:
                    return None
                self._batches = self._cut(*self._pushes.popleft())
            elif any(self._written[layer] & self._next.mask for layer in self._next.layers):
                raise Misdirected(f"a piece of {self._next.layers} was pushed twice")
        return self._next

    @property
    def queued_bytes(self) -> int:
        """Pushed and not yet written."""
        return self._pushed_pieces * self._piece_bytes - self.num_bytes

    def _cut(self, layers: range, local: Sequence[int], remote: Sequence[int]) -> Iterator[Batch]:
        assert self._positions is not None
        try:
            positions = [self._positions[block] for block in remote]
        except KeyError as error:
            raise Misdirected(f"block {error} of the receiver is not in the reservation") from None
        if not positions:
            return
        together = max(1, self._step // len(positions))
        parts = []
        for at in range(0, len(positions), self._step):
            part = slice(at, at + self._step)
            mask = 0
            for position in positions[part]:
                if mask >> position & 1:
                    raise Misdirected(f"block {remote[at]} or a later one is named twice in one push")
                mask |= 1 << position
            parts.append((positions[part], mask, local[part], remote[part]))
        for first in range(0, len(layers), together):
            for part_of in parts:
                yield Batch(layers[first:first + together], *part_of)

    def done(self, batch: Batch, digest: int) -> None:
        """The batch was written, or is in line to be; ``digest`` is the sum of its pieces' hashes."""
        for layer in batch.layers:
            self._written[layer] |= batch.mask
        self._digest = (self._digest + digest) & MASK
        self.num_bytes += len(batch.layers) * len(batch.positions) * self._piece_bytes
        self._next = None

    @property
    def pieces(self) -> int:
        """Pieces written."""
        return self.num_bytes // self._piece_bytes

    @property
    def digest(self) -> str:
        """Checksum of them, as sent."""
        return f"{self._digest:016x}"
