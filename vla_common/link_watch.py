"""Tells once, in the log, why a link stays down. It never holds anything up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from vla_common.clock import NS_PER_S, Clock, sleep_s

LOG = logging.getLogger(__name__)

PATIENCE_S: Final = 5.0
_PERIOD_S: Final = 0.25


class Link(Protocol):
    """What is watched: a :class:`vla_common.zenoh_session.Bus`."""

    endpoint: str

    @property
    def closed(self) -> bool:
        """Closed by its owner: nothing is wrong."""
        ...

    def connected(self) -> bool:
        """Whether the other side is there."""
        ...


class LinkWatch:
    """Says once per outage what ``diagnose`` finds, after ``patience_s`` without a connection."""

    def __init__(self, link: Link, diagnose: Callable[[], str], clock: Clock, patience_s: float = PATIENCE_S) -> None:
        """Nothing is watched before :meth:`start`. ``diagnose`` may block; it runs in the watch's thread."""
        self._link, self._diagnose, self._clock = link, diagnose, clock
        self._patience_ns = round(patience_s * NS_PER_S)
        self._since_ns = clock.monotonic_ns()
        self._has_told = False

    def start(self) -> None:
        """In a daemon thread, until the link is closed."""
        threading.Thread(target=self._run, daemon=True, name="link-watch").start()

    def look(self) -> None:
        """One look; logs a warning if it is time."""
        now_ns = self._clock.monotonic_ns()
        if self._link.connected():
            if self._has_told:
                LOG.info("connected to %s", self._link.endpoint)
            self._since_ns, self._has_told = now_ns, False
        elif not self._has_told and now_ns - self._since_ns >= self._patience_ns:
            self._has_told = True
            seconds = (now_ns - self._since_ns) / NS_PER_S
            found = self._diagnose()
            if not self._link.closed and not self._link.connected():
                LOG.warning("not connected to %s for %.0f s: %s", self._link.endpoint, seconds, found)

    def _run(self) -> None:
        while not self._link.closed:
            self.look()
            sleep_s(self._clock, _PERIOD_S)
