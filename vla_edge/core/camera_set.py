"""Which images of several cameras belong together, and by name what is wrong if none do.

Images belong together if they were taken within a window of each other. Where every camera's images are stamped, their
stamps say so: cameras stamp with one clock, whichever that is, and only their stamps are compared, with each other and
never with a clock of this host. Where a camera's stamps are 0 the arrivals on this host stand for all of them. The age
of an image always counts from its instant, see :mod:`vla_edge.core.arrival`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

NS: Final = 1_000_000_000
DEPTH: Final = 8
"""Images held of each camera; at 30 Hz one camera may so lag 0.25 s behind another."""
CLOCKS_APART_NS: Final = NS
"""Images that arrive within half a second of each other and whose stamps differ by more were stamped by two clocks."""

MISSING: Final = "camera_missing_"
APART: Final = "cameras_apart"
CLOCKS: Final = "camera_clocks_differ"


class CameraSet:
    """The last few images of each camera. For one thread.

    Attributes:
        state: as of the last :meth:`look`: empty, ``camera_missing_<name>`` (several with commas between),
            ``cameras_apart`` or ``camera_clocks_differ``.
    """

    def __init__(self, cameras: Sequence[str], window_s: float, max_age_s: float, now_ns: int) -> None:
        """Nothing was seen yet.

        Args:
            cameras: their names. window_s: largest difference within a set.
            max_age_s: older images are forgotten, and a camera without a younger one is missing.
            now_ns: robot's CLOCK_MONOTONIC, from which silence counts.

        Raises:
            ValueError: a name twice.
        """
        if len(set(cameras)) != len(cameras):
            raise ValueError(f"cameras must have different names, got {list(cameras)}")
        self._names, self._index = tuple(cameras), {name: i for i, name in enumerate(cameras)}
        self._window_ns, self._max_age_ns = round(window_s * NS), round(max_age_s * NS)
        # Stamp, instant and image, both numbers ascending; and the newest ones, whatever became of the image.
        self._held: list[deque[tuple[int, int, Any]]] = [deque(maxlen=DEPTH) for _ in cameras]
        self._stamps, self._seen = [0] * len(cameras), [0] * len(cameras)
        self._at = [0] * len(cameras)
        self._begin_ns = now_ns
        self._together_ns = now_ns  # of the last set, or when a camera was missing last
        self.state = ""

    def add(self, camera: str, stamp_ns: int, instant_ns: int, image: Any) -> None:
        """An image that can be used.

        Args:
            camera: its name. stamp_ns: its own stamp by whatever clock; 0: none.
            instant_ns: from when its age counts, robot's CLOCK_MONOTONIC. image: given back by :meth:`take`.
        """
        i = self._index[camera]
        held = self._held[i]
        stamp_ns = max(0, stamp_ns)
        if held and not (self._goes_on(held[-1][0], stamp_ns) and instant_ns >= held[-1][1]):
            held.clear()
        held.append((stamp_ns, instant_ns, image))
        self._stamps[i], self._seen[i] = stamp_ns, instant_ns

    @staticmethod
    def _goes_on(before_ns: int, stamp_ns: int) -> bool:
        """False: a clock that was set back, or a camera that began or ceased to stamp. What it sent before is not
        comparable."""
        return stamp_ns > before_ns if before_ns and stamp_ns else before_ns == stamp_ns

    def take(self, now_ns: int) -> list[Any] | None:
        """The newest set: one image of each camera in the order of their names, within the window. No image is given
        twice, nor one older than a former set's of the same camera.

        Returns:
            None if there is no set.
        """
        for held in self._held:
            while held and now_ns - held[0][1] > self._max_age_ns:
                held.popleft()
        if not all(self._held) or not self._find(0 if all(self._stamps) else 1):
            return None
        images = []
        for held, at in zip(self._held, self._at, strict=True):
            images.append(held[at][2])
            for _ in range(at + 1):
                held.popleft()
        self._together_ns = now_ns
        return images

    def _find(self, key: int) -> bool:
        """Positions of the newest set by stamps (0) or instants (1); False if there is none. What lies more than the
        window after the oldest candidate is in no set, as that camera has nothing newer: step back until none does."""
        held, at = self._held, self._at
        for i, images in enumerate(held):
            at[i] = len(images) - 1
        while True:
            latest = min(images[k][key] for images, k in zip(held, at, strict=True)) + self._window_ns
            has_moved = False
            for i, images in enumerate(held):
                while images[at[i]][key] > latest:
                    if at[i] == 0:
                        return False
                    at[i] -= 1
                    has_moved = True
            if not has_moved:
                return True

    def look(self, now_ns: int, since_ns: int) -> bool:
        """Judge the cameras.

        Args:
            now_ns: robot's CLOCK_MONOTONIC. since_ns: since when a set is wanted; may be in the future.

        Returns:
            True if the state has changed.
        """
        before, self.state = self.state, self._judge(now_ns, max(since_ns, self._begin_ns))
        return self.state != before

    def _judge(self, now_ns: int, since_ns: int) -> str:
        if now_ns - max(since_ns, min(self._seen)) > self._max_age_ns:
            self._together_ns = now_ns
            return ", ".join(MISSING + name for name, seen in zip(self._names, self._seen, strict=True)
                             if now_ns - max(since_ns, seen) > self._max_age_ns)
        if len(self._names) == 1 or now_ns - max(since_ns, self._together_ns) <= self._max_age_ns:
            return ""
        return CLOCKS if all(self._stamps) and self._spread_ns() > CLOCKS_APART_NS else APART

    def _spread_ns(self) -> int:
        """Between the newest images, by what they are matched by."""
        newest = self._stamps if all(self._stamps) else self._seen
        return max(newest) - min(newest)

    def describe(self, now_ns: int) -> str:
        """The state in words, one line; empty if nothing is wrong."""
        if self.state.startswith(MISSING):
            silent = min(self._seen)
            since = f"for {(now_ns - silent) / NS:.1f} s" if silent else "yet"
            return f"{self.state}: no image that can be used {since}"
        spread_s, window_s = self._spread_ns() / NS, self._window_ns / NS
        if self.state == CLOCKS:
            return (f"{CLOCKS}: the stamps of {', '.join(self._names)} are {spread_s:.6g} s apart: let their drivers "
                    "stamp with one clock, or not at all")
        if self.state == APART:
            by = "stamps" if all(self._stamps) else "arrivals"
            return (f"{APART}: images of {', '.join(self._names)} do not come within {window_s:g} s of each other; by "
                    f"their {by} the newest are {spread_s:.3f} s apart: trigger the cameras together, or raise "
                    "io.camera_window_s")
        return ""
