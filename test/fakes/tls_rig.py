"""Keys for tests, made when they run: those that fit, of another CA, expired."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path

from vla_cli.certificate_maker import Issued, issue, make_authority
from vla_cli.key_folder import KeyFolder
from vla_common.clock import SystemClock
from vla_common.link_security import CloudLink, RobotLink
from vla_common.tls import ServerTls


class Keys:
    """A key folder as ``vla keys`` makes it, with the robots arm1 and arm2, and beside it what is wrong."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = KeyFolder(root / "keys", SystemClock())
        self.folder.init([])
        for name in ("arm1", "arm2"):
            self.folder.robot(name)
        self.client = self.folder.client("alice")
        self.ca = self.folder.ca
        self.tls = ServerTls(self.folder.server, self.folder.server.with_suffix(".key"))
        self.mutual_tls = ServerTls(self.tls.certificate, self.tls.key, self.ca)
        self.robot_link = RobotLink(client_ca=self.ca, access=self.folder.access)
        now = datetime.now(timezone.utc)
        self.authority = Issued(self.ca.read_bytes(), (root / "keys" / "ca.key").read_bytes())
        self._valid = (now + timedelta(days=1), now)
        self._past = (now - timedelta(minutes=5), now - timedelta(hours=2))

    def link(self, robot: str, **changes: object) -> CloudLink:
        at = self.root / "keys" / "robots" / robot
        return CloudLink(**({"ca": at / "ca.pem", "certificate": at / "robot.pem", "key": at / "robot.key"} | changes))

    def login(self, robot: str) -> dict[str, object]:
        return {"user": robot, "password_file": self.root / "keys" / "robots" / robot / "password"}

    @cached_property
    def other_ca(self) -> Path:
        return self._write("other_ca", make_authority("another", *self._valid))[0]

    @cached_property
    def stranger(self) -> tuple[Path, Path]:
        """A client certificate for arm1, of another CA."""
        return self._write("stranger", issue(make_authority("another", *self._valid), "arm1", "client", *self._valid))

    @cached_property
    def expired(self) -> tuple[Path, Path]:
        return self._write("expired", issue(self.authority, "arm1", "client", *self._past))

    @cached_property
    def expired_server(self) -> ServerTls:
        made = issue(self.authority, "vla cloud", "server", *self._past, hosts=["localhost", "127.0.0.1"])
        return ServerTls(*self._write("expired_server", made))

    @cached_property
    def elsewhere(self) -> ServerTls:
        """A server's certificate for another host."""
        made = issue(self.authority, "vla cloud", "server", *self._valid, hosts=["elsewhere.example"])
        return ServerTls(*self._write("elsewhere", made))

    def _write(self, name: str, made: Issued) -> tuple[Path, Path]:
        certificate, key = self.root / f"{name}.pem", self.root / f"{name}.key"
        certificate.write_bytes(made.certificate)
        key.write_bytes(made.key)
        key.chmod(0o600)
        return certificate, key
