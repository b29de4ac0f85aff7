"""Events of a run as JSON lines, written by several processes to one file and read by the view and the report."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from vla_common.clock import Clock


class EventLog:
    """Appends one short line per event; lines of several processes do not mix, since each is one write."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Without a path events are forgotten."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()

    def write(self, kind: str, **values: Any) -> None:
        """Append an event with the present instant and these values."""
        if self._path is None:
            return
        line = json.dumps({"kind": kind, "at_ns": self._clock.monotonic_ns(), **values}) + "\n"
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line)


class EventTail:
    """Reads events that were appended since the last call."""

    def __init__(self, path: Path) -> None:
        """The file need not exist yet."""
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """New events, oldest first; a line that is not yet whole waits for the next call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[:data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a finished run."""
    return EventTail(path).read()
