"""A folder with a development CA and what it issued: the only place that writes keys, all for their owner's eyes only.

::

    ca.pem ca.key                    the CA; ca.key never leaves this folder
    server.pem server.key            of vla cloud
    robots/NAME/                     ca.pem robot.pem robot.key password: to be copied to the robot
    clients/NAME/                    ca.pem client.pem client.key: to be given to a chat client
    zenoh/access.json5 users.txt     who may do what on the robots' link, and its log-ins
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from vla_cli.certificate_maker import Issued, is_issued_by, issue, make_authority
from vla_common.certificate_file import CertificateFacts, read_certificate, utc
from vla_common.clock import Clock
from vla_common.topics import ANY_ROBOT, topic_spec
from vla_common.zenoh_access import access_file

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
CLIENT_PREFIX: Final = "client:"
"""Of the common name of chat clients, so that none of them can pass for a robot."""
CA_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 365

_CLIENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,49}")
_MAX_ROBOT: Final = 50
_REMARKS: Final = (
    "Written by 'vla keys' for the robots in this folder, and again with each further one: keep rules of your own in a",
    "copy. For vla cloud (robot_link.access), or as a part of a zenohd configuration.",
)


class KeyFolderError(Exception):
    """Nothing was written; the message names the remedy."""


@dataclass(frozen=True)
class Entry:
    """A certificate in the folder. ``is_ours`` is False if its CA was replaced."""

    kind: str
    name: str
    path: Path
    facts: CertificateFacts
    is_ours: bool


def default_folder() -> Path:
    """``$XDG_CONFIG_HOME/vla-runtime/keys``, by default below ``~/.config``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "vla-runtime" / "keys"


class KeyFolder:
    """Makes and lists keys. Nothing that exists is overwritten without ``force``."""

    def __init__(self, root: Path, clock: Clock) -> None:
        """The folder need not exist."""
        self.root, self._clock = root, clock
        self.ca, self.server = root / "ca.pem", root / "server.pem"
        self.access, self.users = root / "zenoh" / "access.json5", root / "zenoh" / "users.txt"

    def init(self, hosts: Sequence[str], days: int = CERTIFICATE_DAYS, force: bool = False) -> None:
        """A new CA, and a server's certificate for ``hosts`` and this machine itself.

        Raises:
            KeyFolderError: one exists, or a host is none.
        """
        if not force and self.ca.exists():
            raise KeyFolderError(
                f"{self.ca} exists; --force makes another CA, after which everything issued so far is worthless. "
                "'vla keys server --force' renews the server's certificate alone"
            )
        since = self._now()
        until = since + timedelta(days=CA_DAYS)
        authority = make_authority(f"vla-runtime development CA {since:%Y-%m-%d}", until, since)
        server = self._server(authority, hosts, days)  # first, so that a wrong host leaves nothing behind
        self._write({"ca.pem": authority.certificate, "ca.key": authority.key}, force)
        self._write({"server.pem": server.certificate, "server.key": server.key}, force)
        self._write_zenoh()

    def renew_server(self, hosts: Sequence[str], days: int = CERTIFICATE_DAYS, force: bool = False) -> None:
        """A server's certificate from the CA that is there. Raises KeyFolderError."""
        made = self._server(self._authority(), hosts, days)
        self._write({"server.pem": made.certificate, "server.key": made.key}, force)

    def robot(self, name: str, days: int = CERTIFICATE_DAYS, force: bool = False) -> Path:
        """A robot's certificate, whose common name is its id, and its password; returns its folder.

        Raises:
            KeyFolderError: it has them, there is no CA, or the id is none.
        """
        try:
            topic_spec("observation").topic(name)
        except ValueError as error:
            raise KeyFolderError(str(error)) from error
        if name == ANY_ROBOT or len(name) > _MAX_ROBOT:
            raise KeyFolderError(f"robot id {name!r}: use letters, digits and _ only, at most {_MAX_ROBOT}")
        made = self._issue(name, days)
        password = secrets.token_urlsafe(24).encode() + b"\n"
        self._write_set(f"robots/{name}", "robot", made, force, {"password": password})
        self._write_zenoh()
        return self.root / "robots" / name

    def client(self, name: str, days: int = CERTIFICATE_DAYS, force: bool = False) -> Path:
        """A chat client's certificate; returns its folder. Raises KeyFolderError."""
        if not _CLIENT.fullmatch(name):
            raise KeyFolderError(f"client name {name!r}: use letters, digits and _ . @ - only, at most 50")
        made = self._issue(CLIENT_PREFIX + name, days)
        self._write_set(f"clients/{name}", "client", made, force, {})
        return self.root / "clients" / name

    def revoke(self, name: str) -> None:
        """Remove a robot: what is written for Zenoh no longer knows it. Raises KeyFolderError."""
        if name not in self.robots():
            raise KeyFolderError(f"no robot {name!r} in {self.root}; it has {', '.join(self.robots()) or 'none'}")
        shutil.rmtree(self.root / "robots" / name)
        self._write_zenoh()

    def entries(self) -> list[Entry]:
        """All certificates.

        Raises:
            KeyFolderError: there is no CA, or a file is no certificate.
        """
        paths = [("ca", "", self.ca), ("server", "", self.server)]
        for kind in ("robot", "client"):
            paths += [(kind, path.parent.name, path) for path in sorted(self.root.glob(f"{kind}s/*/{kind}.pem"))]
        authority = self._read(self.ca)
        result = []
        for kind, name, path in paths:
            if kind == "server" and not path.exists():
                continue
            try:
                facts = read_certificate(path)
            except ValueError as error:
                raise KeyFolderError(f"{path} is no certificate: {error}") from error
            assert facts is not None  # cryptography is there, or this module were not
            result.append(Entry(kind, name, path, facts, is_issued_by(self._read(path), authority)))
        return result

    def robots(self) -> list[str]:
        """Ids of the robots that have keys here."""
        return sorted(path.parent.name for path in self.root.glob("robots/*/robot.pem"))

    def _server(self, authority: Issued, hosts: Sequence[str], days: int) -> Issued:
        names = list(dict.fromkeys((*LOOPBACK, *hosts)))
        since = self._now()
        try:
            return issue(authority, "vla cloud", "server", since + timedelta(days=days), since, names)
        except ValueError as error:
            raise KeyFolderError(str(error)) from error

    def _issue(self, common_name: str, days: int) -> Issued:
        since = self._now()
        return issue(self._authority(), common_name, "client", since + timedelta(days=days), since)

    def _authority(self) -> Issued:
        return Issued(self._read(self.ca), self._read(self.root / "ca.key"))

    def _now(self) -> datetime:
        return utc(self._clock.wall_ns())

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise KeyFolderError(f"no {path}: 'vla keys init' makes a CA, --out names another folder") from error
        except OSError as error:
            raise KeyFolderError(f"cannot read {path}: {error.strerror}") from error

    def _write_set(self, folder: str, kind: str, made: Issued, force: bool, more: dict[str, bytes]) -> None:
        files = {"ca.pem": self._read(self.ca), f"{kind}.pem": made.certificate, f"{kind}.key": made.key, **more}
        self._write({f"{folder}/{name}": data for name, data in files.items()}, force)

    def _write(self, files: dict[str, bytes], force: bool) -> None:
        """All or nothing, as far as what exists is concerned."""
        taken = [name for name in files if (self.root / name).exists()]
        if taken and not force:
            raise KeyFolderError(f"{self.root / taken[0]} exists; --force replaces it; its copies must follow")
        for name, data in files.items():
            _write_private(self.root / name, data)

    def _write_zenoh(self) -> None:
        robots = self.robots()
        _write_private(self.access, access_file(robots, _REMARKS).encode())
        lines = [f"{name}:{self._read(self.root / 'robots' / name / 'password').decode().strip()}\n" for name in robots]
        _write_private(self.users, "".join(lines).encode())


def _write_private(path: Path, data: bytes) -> None:
    """Replace a file at once; nobody but its owner can read it at any time."""
    try:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise KeyFolderError(f"cannot write {path}: {error.strerror}") from error
