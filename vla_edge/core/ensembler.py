"""Rules that merge a new chunk with the trajectory already queued.

One protocol serves all of them: a rule sees the whole part of the new chunk that can still be executed and, where both
exist, the queued rows of the same ticks. It never changes how far the trajectory reaches: that is the new chunk's last
row. A rule may own memory for former chunks, all of it reserved at construction; the queue resets it with the plan.
Limits stand behind every rule in any case.

| name | what is blended | first tick of the overlap | reacts |
|---|---|---|---|
| `speed_ramp` | speeds, along a ramp | the old trajectory's | over the ramp |
| `ramp` | positions, along a ramp | the old trajectory's | over the ramp |
| `constant` | positions, one weight | steps by 1 - alpha of the disagreement | in part at once, then later |
| `act` | positions of the last chunks, exponential weights | steps by the newest chunk's share | slowly |
| `replace` | nothing | steps by the whole disagreement | at once |
| `prefix` | nothing: the chunk itself was generated to agree with what is committed | as `replace` | at once |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

RuleName = Literal["speed_ramp", "ramp", "constant", "act", "replace", "prefix"]
CAPACITY = 256
"""Rows of the longest chunk ever merged."""


class MergeRule(Protocol):
    """How old and new are merged. Not thread-safe; owned by one queue, because a rule may remember chunks."""

    def merge(self, tick: int, old: Array, new: Array, out: Array) -> None:
        """Write the merged rows. Inputs stay as they are.

        Args:
            tick: motor tick of row 0 of all three.
            old: float64[m, n], what is queued from that tick on, no further than the new chunk reaches; m may be 0.
            new: float64[h, n], what the new chunk says from that tick on, h >= m, 1 <= h <= capacity.
            out: float64[h, n], overwritten; never shares memory with the inputs. Rows from m on become the new ones.
        """

    def reset(self) -> None:
        """Forget all chunks: the plan was dropped."""


class _Memoryless(ABC):
    """What rules share that only look at the overlap."""

    def merge(self, tick: int, old: Array, new: Array, out: Array) -> None:
        """See :class:`MergeRule`."""
        overlap = len(old)
        out[overlap:] = new[overlap:]
        if overlap:
            self._blend(old, new[:overlap], out[:overlap])

    def reset(self) -> None:
        """Nothing is remembered."""
        return

    @abstractmethod
    def _blend(self, old: Array, new: Array, out: Array) -> None:
        """All float64[m, n], m >= 1."""


class Replace(_Memoryless):
    """The new chunk from the next tick on: reacts at once, and steps by the full disagreement."""

    def _blend(self, old: Array, new: Array, out: Array) -> None:
        out[:] = new


class ConstantAlpha(_Memoryless):
    """``alpha old + (1 - alpha) new`` over the whole overlap: steps by ``1 - alpha`` of the disagreement.

    The old trajectory is itself a blend, so the weight of a chunk falls geometrically with the number of chunks that
    came after it: an exponential moving average in chunks, not in ticks.
    """

    def __init__(self, alpha: float) -> None:
        """``alpha`` is the weight of the old trajectory, 0 .. 1."""
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"ensemble alpha must be in 0 .. 1, got {alpha}")
        self._alpha = alpha

    def _blend(self, old: Array, new: Array, out: Array) -> None:
        np.subtract(new, old, out=out)
        out *= 1.0 - self._alpha
        out += old


class MinimumJerkRamp(_Memoryless):
    """``alpha[k] old[k] + (1 - alpha[k]) new[k]`` with alpha decaying from 1 to 0 within ``ticks`` ticks.

    ``alpha[k] = 1 - (10 x³ - 15 x⁴ + 6 x⁵)``, ``x = min(k / ticks, 1)``, k = 0 the next tick: the minimum-jerk curve
    (Flash and Hogan 1985). An exponential decay ``alpha0^(k+1)`` starts with a step of ``1 - alpha0`` of the
    disagreement, which is what makes a robot jerk, and never ends; this curve starts at exactly 1 with zero slope and
    curvature (the next tick is the old trajectory's), falls most steeply at half way and is exactly 0 from ``ticks``
    on. If the overlap is shorter, the ramp takes the overlap, so that the first row only the new chunk has is no step.
    """

    def __init__(self, ticks: int, capacity: int = CAPACITY) -> None:
        """``ticks`` >= 1; ``capacity`` is the longest overlap ever merged."""
        if not 1 <= ticks <= capacity:
            raise ValueError(f"ramp must take 1 .. {capacity} ticks, got {ticks}")
        self._ticks = ticks
        self._capacity = capacity
        # One table per possible length of the ramp, made now so that merging allocates nothing that grows.
        self._weights = [self._table(length) for length in range(ticks + 1)]

    def _table(self, length: int) -> Array:
        return 1.0 - _fade(np.arange(self._capacity, dtype=np.float64)[:, None] / max(length, 1))

    def _blend(self, old: Array, new: Array, out: Array) -> None:
        rows = len(old)
        np.subtract(new, old, out=out)
        out *= self._weights[min(self._ticks, rows)][:rows]
        out += old


class SpeedRamp(_Memoryless):
    """Ramps the *speed* from the old trajectory's to the new one's, then returns to the new positions.

    A ramp of positions makes up for the lag between both while it blends: where they differ in speed by ``d`` it passes
    that by up to 0.45 d, and a plan made meanwhile starts there. Here the distance to the new trajectory is
    ``e[k] = e[k-1] + alpha[k] (difference of speeds)`` with alpha the decay of :class:`MinimumJerkRamp` over ``ticks``:
    the speed passes monotonically from one to the other. From there on e is faded out until the overlap ends. With
    plans more frequent than that, and made from the newest command, the fading part is replaced before it is sent; it
    serves late chunks. An overlap too short for both parts (fewer than 4 rows) is merged by the ramp of positions.
    """

    def __init__(self, ticks: int, capacity: int = CAPACITY) -> None:
        """``ticks`` >= 1; ``capacity`` is the longest overlap ever merged."""
        self._ramp = MinimumJerkRamp(ticks, capacity)
        # Weights for every possible overlap, made now: merging happens in the motor process.
        self._weights = [_speed_ramp_weights(min(ticks, rows // 2), rows) for rows in range(capacity + 1)]

    def _blend(self, old: Array, new: Array, out: Array) -> None:
        weights = self._weights[len(old)]
        if weights is None:
            self._ramp._blend(old, new, out)
            return
        of_speed, of_distance = weights
        np.subtract(old, new, out=out)
        out[1:] = (out[1:] - out[:-1]) * of_speed
        np.cumsum(out, axis=0, out=out)
        out *= of_distance
        out += new


class TemporalEnsemble:
    """The mean of all chunks' predictions for a tick, weighted by ``exp(-decay i)``, i = 0 the oldest of them.

    Zhao et al. 2023, "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware" (ACT), algorithm 2. A small
    ``decay`` takes up new observations faster; at 0 all count alike, below 0 the newest counts most. As in the paper
    the rank i counts only chunks that say something about the tick.

    The last ``chunks`` chunks are kept (an older one is dropped whole). What a newer chunk cut off because it reached
    less far stays cut off, and a plan that ran out is not averaged with.
    """

    def __init__(self, decay: float, chunks: int, joints: int, capacity: int = CAPACITY) -> None:
        """Reserve all memory.

        Args:
            decay: per rank, -10 .. 10.
            chunks: most chunks averaged, 1 .. 64.
            joints: columns. capacity: rows of the longest chunk.
        """
        if not -10.0 <= decay <= 10.0:
            raise ValueError(f"act_decay must be in -10 .. 10, got {decay}")
        if not 1 <= chunks <= 64:
            raise ValueError(f"act_chunks must be 1 .. 64, got {chunks}")
        self._kept = np.zeros((chunks, capacity, joints))
        self._first, self._end = [0] * chunks, [0] * chunks  # ticks of a kept chunk: first .. end - 1
        self._weights = np.exp(-decay * np.arange(chunks, dtype=np.float64))
        self._rank = np.zeros(capacity, dtype=np.intp)
        self._total, self._share = np.zeros((capacity, 1)), np.zeros((capacity, 1))
        self._step = np.zeros((capacity, joints))
        self._newest, self._count = -1, 0

    def reset(self) -> None:
        """See :class:`MergeRule`."""
        self._newest, self._count = -1, 0

    def merge(self, tick: int, old: Array, new: Array, out: Array) -> None:
        """See :class:`MergeRule`."""
        overlap = len(old)
        if not overlap:
            self.reset()
        self._keep(tick, new)
        out[overlap:] = new[overlap:]
        out[:overlap] = 0.0
        self._rank[:overlap], self._total[:overlap] = 0, 0.0
        slots = len(self._first)
        for age in range(self._count - 1, -1, -1):
            slot = (self._newest - age) % slots
            first, end = max(self._first[slot], tick), min(self._end[slot], tick + overlap)
            if first < end:
                at = first - self._first[slot]
                self._add(self._kept[slot, at:at + end - first], slice(first - tick, end - tick), out)

    def _keep(self, tick: int, new: Array) -> None:
        slots, end = len(self._first), tick + len(new)
        for slot in range(slots):
            self._end[slot] = min(self._end[slot], end)
        self._newest = (self._newest + 1) % slots
        self._count = min(self._count + 1, slots)
        self._kept[self._newest, :len(new)] = new
        self._first[self._newest], self._end[self._newest] = tick, end

    def _add(self, said: Array, rows: slice, out: Array) -> None:
        """Move the running mean of some rows: exact where all chunks agree."""
        rank, total, share, step = self._rank[rows], self._total[rows], self._share[rows], self._step[rows]
        np.take(self._weights, rank, out=share[:, 0])
        total += share
        share /= total
        np.subtract(said, out[rows], out=step)
        step *= share
        out[rows] += step
        rank += 1


def _speed_ramp_weights(ticks: int, rows: int) -> tuple[Array, Array] | None:
    """Weights of the differences of speed [rows - 1, 1] and of the distance [rows, 1]; None if the overlap is short."""
    if ticks < 2:
        return None
    k = np.arange(rows, dtype=np.float64)[:, None]
    return _fade(k[1:] / ticks), _fade((k - ticks) / (rows - ticks))


def _fade(x: Array) -> Array:
    """From 1 at 0 to 0 at 1 along the minimum-jerk curve."""
    x = np.clip(x, 0.0, 1.0)
    # Not x**3: a power is rounded differently by different mathematics libraries, products are not.
    return np.asarray(1.0 - x * x * x * (10.0 - 15.0 * x + 6.0 * x * x))


def make_rule(name: str, joints: int, *, ramp_ticks: int = 5, alpha: float = 0.5, act_decay: float = 0.01,
              act_chunks: int = 8, capacity: int = CAPACITY) -> MergeRule:
    """Rule by its name in the configuration, see :data:`RuleName`; ``prefix`` is merged as ``replace``.

    Raises:
        ValueError: unknown name or a parameter of this rule out of range.
    """
    if name == "ramp":
        return MinimumJerkRamp(ramp_ticks, capacity)
    if name == "speed_ramp":
        return SpeedRamp(ramp_ticks, capacity)
    if name == "constant":
        return ConstantAlpha(alpha)
    if name == "act":
        return TemporalEnsemble(act_decay, act_chunks, joints, capacity)
    if name in ("replace", "prefix"):
        return Replace()
    raise ValueError(f"unknown ensemble rule {name!r}: use speed_ramp, ramp, constant, act, replace or prefix")
