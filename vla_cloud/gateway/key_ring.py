"""The API keys that are good now: looked up by hash, and read again when their file changes.

A key is looked up by its SHA-256 in a dictionary. That is safe without a comparison in constant time: how long a lookup
takes depends on the hash of what was sent, and nobody can choose keys whose hashes come closer to a stored one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vla_cloud.core.client import Client, Unauthenticated
from vla_cloud.gateway.api_key_file import KeyEntry, KeyFile, load_keys, token_hash
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import Clock
from vla_common.metrics import Counters

LOG = logging.getLogger(__name__)
LOOK_S: Final = 2.0
"""How often the file is looked at."""


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """What keeps the cached prompts of a tenant apart (32 bytes); without the secret nobody can make it."""
    return hmac.new(secret, b"vla tenant\x00" + tenant.encode(), hashlib.sha256).digest()


@dataclass(frozen=True)
class _Known:
    client: Client
    expires: str
    expires_wall_ns: int | None


class KeyRing:
    """Replaced as a whole by the thread that watches the file, and read in the event loop of the doors."""

    def __init__(self, file: KeyFile, secret: bytes, clock: Clock) -> None:
        """``secret``: of the server, for salts."""
        self._secret, self._clock = secret, clock
        self._known = self._clients(file)

    def __len__(self) -> int:
        """Keys, expired ones included."""
        return len(self._known)

    def replace(self, file: KeyFile) -> None:
        """Other keys from now on; requests under way go on."""
        self._known = self._clients(file)

    def find(self, token: str) -> Client:
        """Whose key this is.

        Raises:
            Unauthenticated: nobody's, or it has ended; only who holds it learns the latter.
        """
        digest = token_hash(token)
        if digest is None:
            told = "this is no API key of this server: they look like vla_ and 43 letters and digits"
            raise Unauthenticated(told, "malformed")
        known = self._known.get(digest)
        if known is None:
            raise Unauthenticated("the API key is not known: ask the operator for one (vla api-keys add)", "unknown")
        if known.expires_wall_ns is not None and self._clock.wall_ns() >= known.expires_wall_ns:
            raise Unauthenticated(f"the API key has expired ({known.expires}): ask for a new one", "expired")
        return known.client

    @property
    def names(self) -> frozenset[str]:
        """Of all keys."""
        return frozenset(known.client.name for known in self._known.values())

    def _clients(self, file: KeyFile) -> dict[str, _Known]:
        return {key.sha256: _Known(self._client(key), key.expires, key.expires_wall_ns) for key in file.keys}

    def _client(self, key: KeyEntry) -> Client:
        tenant = key.tenant or key.name
        return Client(
            key.name, tenant, tenant_salt(self._secret, tenant), key.rules, key.ceiling, key.ceiling,
            frozenset(key.models), key.operator,
        )  # fmt: skip


class KeyFileWatch:
    """Looks at the file in a thread of its own, so that no request waits for a disk or for YAML."""

    def __init__(self, path: Path, ring: KeyRing, period_s: float = LOOK_S) -> None:
        """``ring`` holds what the file said as it was read last."""
        self._path, self._ring, self._period_s = path, ring, period_s
        self._seen = _stamp(path)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.counts = Counters("reloaded", "reload_failed")

    def start(self) -> None:
        """Begin to look; once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="api-keys", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. Safe to call twice, and without a start."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Read the file if it has changed. One that is gone or wrong changes nothing, and is told once."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._ring.replace(load_keys(self._path))
        except GatewayError as error:
            self.counts.add("reload_failed")
            LOG.error("the API keys stay as they were: %s", error)
        else:
            self.counts.add("reloaded")
            LOG.info("%d API keys from %s", len(self._ring), self._path)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.look()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes when the file does; its mode counts, as chmod is one way to mend it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode
