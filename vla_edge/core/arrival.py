"""How old a sample from the robot is, and whose joints it names: by the rules of the bus it came over.

On the Zenoh bus everyone stamps with the robot's CLOCK_MONOTONIC and names its joints in the robot file's order. ROS
drivers stamp with ROS time (the wall clock, a simulated clock, or nothing) and publish joints in an order of their own,
often with others among them. There a sample counts from the instant at which it arrived on this host; its own stamp
only tells an old sample from a new one of the same publisher, and is never compared with a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

NS: Final = 1_000_000_000
FUTURE_TOLERANCE_NS: Final = 5_000_000
STAMP_RESET_NS: Final = NS // 2
"""Stamps that are older than the last one but advance for so long are those of a clock that was set back."""
STALL_NS: Final = 100_000_000
"""A reader that did not run for longer may find samples that waited for it ..."""
SETTLE_NS: Final = 50_000_000
"""... and takes none of those that it finds within this time after."""

Array = npt.NDArray[np.float64]


class Arrivals(Protocol):
    """Judges the age of samples on receipt.

    Attributes:
        rejected: why the last one was refused, such as ``stale``.
    """

    rejected: str

    def turn(self, now_ns: int) -> None:
        """The reader begins another turn."""

    def instant_ns(self, source: str, stamp_ns: int, received_ns: int, now_ns: int, max_age_s: float) -> int | None:
        """The instant from which the sample's age counts, on the robot's CLOCK_MONOTONIC; None if it is refused.

        Args:
            source: name of the stream, such as ``joint_states``.
            stamp_ns: the message's own stamp. received_ns: when it arrived. now_ns: now.
            max_age_s: the largest age that is taken.
        """


class MonotonicStamps:
    """Stamps of the robot's CLOCK_MONOTONIC: the age is known whatever the sample waited for."""

    def __init__(self) -> None:
        """Keeps nothing between samples; order is the reader's to check."""
        self.rejected = ""

    def turn(self, now_ns: int) -> None:
        """Nothing to do."""

    def instant_ns(self, source: str, stamp_ns: int, received_ns: int, now_ns: int, max_age_s: float) -> int | None:
        """See :class:`Arrivals`."""
        age_ns = received_ns - stamp_ns
        self.rejected = "stale" if age_ns > max_age_s * NS else "future_stamp" if age_ns < -FUTURE_TOLERANCE_NS else ""
        return None if self.rejected else stamp_ns


class ReceiveInstants:
    """Samples count from their arrival; their stamps must advance, or be 0 throughout.

    A sample is refused if it waited unread for longer than its largest age, if it may have waited where its waiting
    cannot be seen (this process was stopped), and if its stamp is not newer than the last one's. A clock that was set
    back (a simulation that began again) is believed once its stamps have advanced for half a second.
    """

    def __init__(self) -> None:
        """Nothing was heard yet."""
        self.rejected = ""
        self._stamps: dict[str, int] = {}
        self._rewound: dict[str, tuple[int, int]] = {}
        self._turn_ns: int | None = None
        self._settled_ns = 0

    def turn(self, now_ns: int) -> None:
        """Notice that this process did not run."""
        if self._turn_ns is not None and now_ns - self._turn_ns > STALL_NS:
            self._settled_ns = now_ns + SETTLE_NS
        self._turn_ns = now_ns

    def instant_ns(self, source: str, stamp_ns: int, received_ns: int, now_ns: int, max_age_s: float) -> int | None:
        """See :class:`Arrivals`."""
        self.rejected = ""
        if now_ns - received_ns > max_age_s * NS or now_ns < self._settled_ns:
            self.rejected = "stale"
        elif stamp_ns != 0 and not self._advances(source, stamp_ns, received_ns):
            self.rejected = "out_of_order"
        return None if self.rejected else received_ns

    def _advances(self, source: str, stamp_ns: int, received_ns: int) -> bool:
        if stamp_ns <= self._stamps.get(source, 0):
            since_ns, last_ns = self._rewound.get(source, (received_ns, 0))
            if stamp_ns <= last_ns:
                return False
            self._rewound[source] = (since_ns, stamp_ns)
            if received_ns - since_ns < STAMP_RESET_NS:
                return False
        self._rewound.pop(source, None)
        self._stamps[source] = stamp_ns
        return True


class JointReader:
    """Positions and speeds of the robot's joints out of a joint state.

    Attributes:
        rejected: why the last one was refused: ``names``, ``missing_<joint>``, ``twice_<joint>``, ``position`` or
            ``velocity``.
    """

    def __init__(self, names: Sequence[str], by_name: bool) -> None:
        """Set up.

        Args:
            names: of the robot file.
            by_name: a joint state may hold other joints too and any order, as ROS drivers send it; else it must hold
                exactly these in this order.
        """
        self._names, self._by_name = list(names), by_name
        self._last: list[str] | None = None
        self._columns: list[int] = []
        self.rejected = ""

    def read(self, names: Sequence[str], position: Array, velocity: Array) -> tuple[Array, Array] | None:
        """Position (rad, closure) and speed (0 where the message has none) in the robot file's order, float64[n] each.

        Returns:
            None if it is refused: a joint is missing or named twice, there is not one position for each name, or one
            of the robot's own is not finite; speeds are there, but not one for each name.
        """
        self.rejected = self._find(list(names))
        if self.rejected:
            return None
        if position.size != len(names):
            self.rejected = "position"
            return None
        chosen = position[self._columns]
        if not np.isfinite(chosen).all():
            self.rejected = "position"
            return None
        if velocity.size not in (0, len(names)):
            self.rejected = "velocity"
            return None
        speed = velocity[self._columns] if velocity.size else np.zeros(len(chosen))
        return chosen, np.nan_to_num(speed, nan=0.0, posinf=0.0, neginf=0.0) if self._by_name else speed

    def _find(self, names: list[str]) -> str:
        """Fill the columns for these names; the reason if they are refused."""
        if names == self._last:
            return ""
        if not self._by_name:
            if names != self._names:
                return "names"
            self._columns = list(range(len(names)))
        else:
            for name in self._names:
                if names.count(name) != 1:
                    return f"missing_{name}" if name not in names else f"twice_{name}"
            self._columns = [names.index(name) for name in self._names]
        self._last = names
        return ""
