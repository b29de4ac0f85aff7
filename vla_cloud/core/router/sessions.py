"""Where a conversation was served last: bounded, and forgotten after a time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from vla_common.clock import NS_PER_S

_Workers = tuple[str | None, str]


class Sessions:
    """Session to (P or None, D), least recently used first."""

    def __init__(self, keep_s: float, max_sessions: int) -> None:
        """``keep_s`` 0: nothing is remembered."""
        self._keep_ns, self._max_sessions = round(keep_s * NS_PER_S), max_sessions
        self._known: OrderedDict[bytes, tuple[int, _Workers]] = OrderedDict()

    def __len__(self) -> int:
        """Sessions remembered, with those whose time is over and that nobody has asked for."""
        return len(self._known)

    def find(self, key: bytes, now_ns: int) -> _Workers:
        """Its workers; (None, "") for an unknown session."""
        until_ns, workers = self._known.get(key, (0, (None, "")))
        return workers if now_ns < until_ns else (None, "")

    def note(self, key: bytes, prefill: str | None, decode: str, now_ns: int) -> None:
        """It is served there now. Without a P in this turn, the one of an earlier turn stays."""
        if not self._keep_ns:
            return
        if prefill is None:
            prefill = self.find(key, now_ns)[0]
        self._known[key] = (now_ns + self._keep_ns, (prefill, decode))
        self._known.move_to_end(key)
        while len(self._known) > self._max_sessions or next(iter(self._known.values()))[0] <= now_ns:
            self._known.popitem(last=False)


def session_key(salt: bytes, session: str) -> bytes:
    """The same name means another session for another tenant; empty for no session."""
    return hashlib.sha256(len(salt).to_bytes(8, "little") + salt + session.encode()).digest() if session else b""
