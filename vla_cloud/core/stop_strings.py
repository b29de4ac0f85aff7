"""Finds stop strings in text that grows piece by piece, wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Gives text out as soon as it cannot be the beginning of a stop string any more.

    Holds back less than the longest stop string; time per piece does not grow with the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """An empty string among ``stops`` would stop everything: ValueError."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now. After a match (:attr:`matched`) it ends before the match, and nothing follows.

        Of several matches the one that begins first counts, among those the longest.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            start, _, self.matched = min(found)
            certain, self._held = self._held[:start], ""
            return certain
        keep = max(self._beginning(stop) for stop in self._stops)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """What was held back, as the text has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
