"""Which processes no longer go round their loop although they have not ended: stopped, hung, or waiting for a disk."""

from __future__ import annotations

from typing import Final

HUNG_AFTER_NS: Final = 1_000_000_000


class HeartbeatWatch:
    """Tells once when a heartbeat stops and once when it is back. Pure; the caller reads the heartbeats."""

    def __init__(self, hung_after_ns: int = HUNG_AFTER_NS) -> None:
        """``hung_after_ns``: a heartbeat older than this has stopped."""
        self._hung_after_ns = hung_after_ns
        self._hung: set[str] = set()

    def changed(self, name: str, beat_ns: int, started_ns: int, now_ns: int) -> bool | None:
        """Look at a process.

        Args:
            name: of the process. beat_ns: its newest heartbeat. started_ns: when it was started: an older heartbeat is
                its predecessor's, and one that has not beaten yet is still starting. now_ns: same clock.

        Returns:
            True when it has just stopped answering, False when it has just begun to answer again, else None.
        """
        if beat_ns < started_ns:
            self._hung.discard(name)
            return None
        hangs = now_ns - beat_ns > self._hung_after_ns
        if hangs == (name in self._hung):
            return None
        (self._hung.add if hangs else self._hung.discard)(name)
        return hangs
