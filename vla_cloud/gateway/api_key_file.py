"""The file of API keys: who may use the gateway and how much. Made by ``vla api-keys``, readable by its owner only.

It holds hashes, not keys. One round of SHA-256 is enough: a slow hash protects passwords, which people choose and
others guess; a key is 256 random bits, which no number of guesses finds. It would only cost time at every request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from vla_cloud.core.client import ClientRules
from vla_cloud.core.generate import Priority
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import NS_PER_S
from vla_common.config import ConfigError, from_mapping

PREFIX: Final = "vla_"
_TOKEN: Final = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # no "@": see vla_cloud.core.client.Client.scoped
_MAX_BYTES: Final = 16_777_216
_MODE: Final = 0o600
_PRIORITIES: Final = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}


@dataclass(frozen=True)
class KeyEntry:
    """One key in the file; see ``vla_cloud.core.client`` for the limits.

    Attributes:
        sha256: of the key, hexadecimal.
        tenant: keys of one tenant share cached prompts; "" is a tenant of the key's name.
        priority: the most urgent one it may ask for, and the usual one.
        expires: UTC, such as "2031-05-01T00:00:00Z"; "" is never.
        models: it may use; none named is all.
        operator: may read /metrics and call vla.v1.Control.
    """

    name: str
    sha256: str
    tenant: str = ""
    priority: Literal["high", "normal", "low"] = "normal"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_tokens: int | None = None
    max_concurrent: int | None = None
    expires: str = ""
    models: tuple[str, ...] = ()
    operator: bool = False

    def __post_init__(self) -> None:
        """Refuse what would admit nobody, or not who is meant."""
        for name, value in (("name", self.name), ("tenant", self.tenant or self.name)):
            if not _NAME.fullmatch(value):
                raise ValueError(f"{name} {value!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 of key {self.name!r} must be 64 hexadecimal digits")
        _ = self.rules, self.expires_wall_ns

    @property
    def rules(self) -> ClientRules:
        """Its limits."""
        return ClientRules(
            self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.max_tokens, self.max_concurrent
        )

    @property
    def ceiling(self) -> Priority:
        """Its priority, as the engine has it."""
        return _PRIORITIES[self.priority]

    @property
    def expires_wall_ns(self) -> int | None:
        """When it ends, nanoseconds since 1970 UTC; None: never."""
        if not self.expires:
            return None
        try:
            at = datetime.datetime.fromisoformat(self.expires.replace("Z", "+00:00"))
        except ValueError:
            at = None
        if at is None or at.tzinfo is None:
            raise ValueError(f"expires {self.expires!r} of key {self.name!r} is not like 2031-05-01T00:00:00Z")
        return int(at.timestamp()) * NS_PER_S


@dataclass(frozen=True)
class KeyFile:
    """All keys."""

    keys: tuple[KeyEntry, ...] = ()

    def __post_init__(self) -> None:
        """Refuse two keys of one name, or one key twice."""
        for field in ("name", "sha256"):
            seen: set[str] = set()
            for entry in self.keys:
                value = getattr(entry, field)
                if value in seen:
                    raise ValueError(f"two keys have {field} {value!r}: give each its own")
                seen.add(value)


def new_token() -> str:
    """A key: recognisable by its prefix, 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def token_hash(token: str) -> str | None:
    """SHA-256 of a key, hexadecimal; None for what cannot be one."""
    return hashlib.sha256(token.encode()).hexdigest() if _TOKEN.fullmatch(token) else None


def load_keys(path: Path) -> KeyFile:
    """Read the file.

    Raises:
        GatewayError: it is missing, others may read or change it, or something in it is wrong or unknown.
    """
    try:
        data = yaml.safe_load(read_private(path, _MAX_BYTES))
        return from_mapping(KeyFile, {} if data is None else data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GatewayError(f"{path} is not YAML: {error}") from error
    except (ConfigError, RecursionError) as error:
        raise GatewayError(f"{path}: {error}") from error


def read_private(path: Path, max_bytes: int) -> bytes:
    """A file that nobody but its owner may read or write.

    Raises:
        GatewayError: it is not there, not a file, too large, or open to others.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise GatewayError(f"{path} is not a file")
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise GatewayError(f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):o}): chmod 600 {path}")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise GatewayError(f"cannot read {path}: {error.strerror}; 'vla api-keys add' makes a file of keys") from error
    if len(data) > max_bytes:
        raise GatewayError(f"{path} has more than {max_bytes} bytes")
    return data


@contextlib.contextmanager
def changed_keys(path: Path) -> Iterator[list[KeyEntry]]:
    """The keys, to be changed in the body and written when it ends well; a new file if there is none.

    The file is replaced as a whole, so that no reader finds half of it; two writers wait for each other.

    Raises:
        GatewayError: see :func:`load_keys`, or it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A file of its own: the keys' one is replaced, and a lock on the old one would hold nobody back.
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _MODE)
    except OSError as error:
        raise GatewayError(f"cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = list(load_keys(path).keys) if path.exists() else []
        yield keys
        _write(path, KeyFile(tuple(keys)))
    except OSError as error:
        raise GatewayError(f"cannot write {path}: {error.strerror}") from error
    finally:
        os.close(lock)


def _write(path: Path, file: KeyFile) -> None:
    text = yaml.safe_dump({"keys": [_plain(entry) for entry in file.keys]}, sort_keys=False)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as new:
            new.write("# Written by 'vla api-keys'. Hashes only: a key that is lost cannot be found again.\n" + text)
            new.flush()
            os.fsync(new.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _plain(entry: KeyEntry) -> dict[str, Any]:
    """Without what is as usual."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain
