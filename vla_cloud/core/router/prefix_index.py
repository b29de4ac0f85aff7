"""Which worker holds which block: the prefix trees of all workers in one, made of their KvEvents.

A block's name is the chained hash of itself and all before it, so the tree needs no edges: a node is one entry
``hash -> set of workers``, and a prompt's path is the list of its hashes. Sets are integers with one bit per worker.

The entries are spread over 256 tables by the first byte of the block's *own* chained hash. Sharding by a prompt's
first block would put everything on one shard, since most prompts begin with the same system prompt; this way that
block is one entry of one table, and what follows it is spread evenly, however prompts begin. Small tables bound the
longest pause: one of them grows, or is swept, at a time.

A worker that is gone (or has cleared its tree) loses its bit at once; its entries are swept a table at a time by the
calls that follow, and the bit is used again when all tables are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from vla_cloud.core.kv_events import KvChange
from vla_common.metrics import Counters

SHARDS: Final = 256
HASH_BYTES: Final = 32
_MAX_RETIRED: Final = 32


class KvRow(Protocol):
    """One change, as :class:`vla_cloud.core.kv_events.KvEvent` without its number."""

    @property
    def change(self) -> KvChange:
        """What happened."""
        ...

    @property
    def block_hash(self) -> bytes:
        """To which block."""
        ...


class _Slot:
    """One worker. ``pending``: expected blocks that were not reported, with the end of their time.

    ``batches`` are the prompts that they came with, oldest first; ``queued`` is the number of their blocks.
    """

    __slots__ = ("bit", "capacity", "held", "pending", "batches", "queued")

    def __init__(self, bit: int, capacity: int) -> None:
        self.bit, self.capacity, self.held = bit, capacity, 0
        self.pending: dict[bytes, int] = {}
        self.batches: deque[tuple[int, Sequence[bytes]]] = deque()
        self.queued = 0


class PrefixIndex:
    """Blocks of all workers: those reported, and those expected because a prompt was sent there.

    At most ``capacity`` reported and as many expected blocks per worker are kept; an entry that no worker has is freed.
    What is expected stands beside the tables, per worker: to note a prompt must not cost more than to look it up.
    """

    def __init__(self, counters: Counters | None = None) -> None:
        """Empty. Counts ``blocks_stored``, ``_removed``, ``_confirmed``, ``_unconfirmed``, ``_refused``."""
        self.counters = Counters() if counters is None else counters
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._slots: dict[str, _Slot] = {}
        self._names: dict[int, str] = {}
        self._live = 0  # bits of all workers
        self._free_bits: list[int] = []
        self._next_bit = 1
        self._retired: dict[int, int] = {}  # bit -> tables still to sweep
        self._sweep_at = 0

    def __len__(self) -> int:
        """Entries, with those still to be swept."""
        return sum(map(len, self._shards))

    def add(self, worker: str, capacity: int) -> None:
        """A worker that can hold ``capacity`` blocks; nothing changes if it is known."""
        if worker not in self._slots:
            self._slots[worker] = _Slot(self._take_bit(worker), capacity)

    def remove(self, worker: str) -> None:
        """It is gone, and all it held."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._retire(slot.bit)

    def blocks(self, worker: str) -> int:
        """Blocks it has reported and holds; 0 for an unknown worker."""
        return self._slots[worker].held if worker in self._slots else 0

    def expected(self, worker: str) -> int:
        """Blocks that are expected there and not reported."""
        return len(self._slots[worker].pending) if worker in self._slots else 0

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Worker to the length in blocks of the longest beginning that it has; workers without any are left out."""
        shards, mask, depth = self._shards, self._live, 0
        found: dict[str, int] = {}
        for value in hashes:
            there = mask & shards[value[0]].get(value, 0)
            if there != mask:
                if depth:
                    self._note(mask ^ there, depth, found)
                mask = there
                if not there:
                    break
            depth += 1
        if mask and depth:
            self._note(mask, depth, found)
        for worker, slot in self._slots.items():
            if slot.pending:
                self._add_expected(worker, slot, hashes, found)
        return found

    def apply(self, worker: str, rows: Iterable[KvRow]) -> None:
        """Changes of a known worker, in order. What cannot be true is left out and counted (``blocks_refused``)."""
        slot, shards = self._slots[worker], self._shards
        bit, pending, capacity, held = slot.bit, slot.pending, slot.capacity, slot.held
        stored, removed = KvChange.STORED, KvChange.REMOVED
        counts = dict.fromkeys(("stored", "removed", "confirmed", "refused"), 0)
        for row in rows:
            change, value = row.change, row.block_hash
            if change is not stored and change is not removed:
                slot.held = held
                self._clear(slot)
                bit, held = slot.bit, 0
                continue
            if len(value) != HASH_BYTES:
                counts["refused"] += 1
                continue
            table = shards[value[0]]
            mask = table.get(value, 0)
            if change is stored:
                if mask & bit:
                    continue
                if held >= capacity:
                    counts["refused"] += 1
                    continue
                table[value] = mask | bit if mask else bit
                held += 1
                counts["stored"] += 1
                if pending and pending.pop(value, None) is not None:
                    counts["confirmed"] += 1
            elif mask & bit:
                _unset(table, value, mask, bit)
                held -= 1
                counts["removed"] += 1
        slot.held = held
        for name, count in counts.items():
            self.counters.add(f"blocks_{name}", count)

    def expect(self, worker: str, hashes: Sequence[bytes], until_ns: int) -> None:
        """A prompt was sent there: it counts as held until reported, or until ``until_ns``, which rises per worker."""
        slot = self._slots.get(worker)
        if slot is None or not hashes:
            return
        batch = hashes[: slot.capacity]
        slot.pending.update(dict.fromkeys(batch, until_ns))
        slot.batches.append((until_ns, batch))
        slot.queued += len(batch)
        while len(slot.pending) > slot.capacity or slot.queued > 2 * slot.capacity:
            self._give_up(slot)

    def expire(self, now_ns: int) -> None:
        """Forget what was expected too long ago, and sweep a table if there is anything to sweep."""
        for slot in self._slots.values():
            while slot.batches and slot.batches[0][0] <= now_ns:
                self._give_up(slot)
        if self._retired:
            self.sweep(1)

    def sweep(self, tables: int = SHARDS) -> None:
        """Free entries of retired bits in the next ``tables`` tables."""
        for _ in range(min(tables, SHARDS) if self._retired else 0):
            at, dead = self._sweep_at, 0
            for bit in self._retired:
                dead |= bit
            table = self._shards[at]
            before = len(table)
            for value, mask in [entry for entry in table.items() if entry[1] & dead]:
                _unset(table, value, mask, dead)
            if len(table) < before // 2:
                self._shards[at] = dict(table)  # a dict keeps its size when entries go; a copy does not
            self._sweep_at = (at + 1) % SHARDS
            for bit in list(self._retired):
                self._retired[bit] -= 1
                if not self._retired[bit]:
                    del self._retired[bit]
                    self._free_bits.append(bit)
            if not self._retired:
                return

    def _note(self, bits: int, depth: int, found: dict[str, int]) -> None:
        while bits:
            low = bits & -bits
            found[self._names[low]] = depth
            bits ^= low

    def _take_bit(self, worker: str) -> int:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit, self._next_bit = self._next_bit, self._next_bit << 1
        self._names[bit] = worker
        self._live |= bit
        return bit

    def _retire(self, bit: int) -> None:
        del self._names[bit]
        self._live &= ~bit
        self._retired[bit] = SHARDS
        if len(self._retired) > _MAX_RETIRED:  # a worker that clears its tree all the time
            self.sweep()

    def _add_expected(self, worker: str, slot: _Slot, hashes: Sequence[bytes], found: dict[str, int]) -> None:
        """Go on from what a worker has reported, over what is expected there."""
        shards, bit, pending = self._shards, slot.bit, slot.pending
        begun = depth = found.get(worker, 0)
        count = len(hashes)
        while depth < count:
            value = hashes[depth]
            if value not in pending and not shards[value[0]].get(value, 0) & bit:
                break
            depth += 1
        if depth > begun:
            found[worker] = depth

    def _clear(self, slot: _Slot) -> None:
        """It holds nothing; what is expected of it remains so."""
        if slot.held:
            old, slot.held = slot.bit, 0
            slot.bit = self._take_bit(self._names[old])
            self._retire(old)

    def _give_up(self, slot: _Slot) -> None:
        """The oldest prompt that was expected: what was not reported of it, and not expected again since."""
        until_ns, batch = slot.batches.popleft()
        slot.queued -= len(batch)
        pending, before = slot.pending, len(slot.pending)
        for value in batch:
            if pending.get(value) == until_ns:
                del pending[value]
        self.counters.add("blocks_unconfirmed", before - len(pending))


def _unset(table: dict[bytes, int], value: bytes, mask: int, bits: int) -> None:
    left = mask & ~bits
    if left:
        table[value] = left
    else:
        del table[value]
