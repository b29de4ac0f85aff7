"""How robots and the cloud prove to each other who they are on the cloud link: settings, and what Zenoh is told.

Only paths stand in settings, never secrets: settings are written into recordings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vla_common.bus_config import BusError, is_encrypted
from vla_common.tls import ServerTls, TlsError, client_context, readable, server_context

_TLS: Final = "transport/link/tls"
_LOGIN: Final = "transport/auth/usrpwd"
_GUIDE: Final = "docs/security.md"


@dataclass(frozen=True)
class CloudLink:
    """The robot's side: section ``cloud_link`` of edge.yaml. Files are PEM.

    Attributes:
        ca: the cloud's certificate must be of this CA; None: of one of the well-known public CAs.
        certificate, key: of this robot, where the cloud asks for them.
        user, password_file: where the cloud asks for a log-in; the file holds the password alone.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    user: str = ""
    password_file: Path | None = None


@dataclass(frozen=True)
class RobotLink:
    """The cloud's side: section ``robot_link`` of cloud.yaml. The server's certificate is that of ``tls``.

    Attributes:
        client_ca: robots must show a certificate of this CA.
        users: robots must log in; a file of lines ``user:password``.
        access: a Zenoh configuration file whose ``access_control`` says who may do what; none: everybody everything.
    """

    client_ca: Path | None = None
    users: Path | None = None
    access: Path | None = None

    @property
    def authenticates(self) -> bool:
        """Whether strangers are kept out."""
        return self.client_ca is not None or self.users is not None


def join_settings(endpoint: str, link: CloudLink) -> dict[str, Any]:
    """Zenoh settings of a session that connects to ``endpoint``, for :func:`vla_common.zenoh_session.open_bus`.

    Raises:
        BusError: a file cannot be used, or would have no effect.
    """
    if (link.certificate is None) != (link.key is None):
        raise BusError("cloud_link: certificate and key belong together, set both, or none")
    if bool(link.user) != (link.password_file is not None):
        raise BusError("cloud_link: user and password_file belong together, set both, or none")
    settings: dict[str, Any] = {}
    if is_encrypted(endpoint):
        settings[f"{_TLS}/verify_name_on_connect"] = True
        try:
            client_context(link.ca, link.certificate, link.key)
        except TlsError as error:
            raise BusError(f"cloud_link: {error}") from error
        if link.ca is not None:
            settings[f"{_TLS}/root_ca_certificate"] = str(link.ca)
        if link.certificate is not None:
            settings[f"{_TLS}/enable_mtls"] = True
            settings[f"{_TLS}/connect_certificate"] = str(link.certificate)
            settings[f"{_TLS}/connect_private_key"] = str(link.key)
    elif link.ca is not None or link.certificate is not None:
        raise BusError(f"cloud_link names certificates, but {endpoint!r} does not use them: connect to tls/HOST:PORT")
    if link.password_file is not None:
        settings[f"{_LOGIN}/user"] = link.user
        settings[f"{_LOGIN}/password"] = _password(link.password_file)
    return settings


def host_settings(endpoint: str, tls: ServerTls, link: RobotLink) -> dict[str, Any]:
    """Zenoh settings of the session that hosts ``endpoint``, without access control.

    Raises:
        BusError: a file cannot be used, or would have no effect.
    """
    settings: dict[str, Any] = {}
    if is_encrypted(endpoint):
        if not tls.is_on:
            raise BusError(f"to listen on {endpoint!r}, set tls.certificate and tls.key ({_GUIDE})")
        try:
            server_context(ServerTls(tls.certificate, tls.key, link.client_ca))
        except TlsError as error:
            raise BusError(f"cannot listen on {endpoint!r}: {error}") from error
        settings[f"{_TLS}/listen_certificate"] = str(tls.certificate)
        settings[f"{_TLS}/listen_private_key"] = str(tls.key)
        if link.client_ca is not None:
            settings[f"{_TLS}/enable_mtls"] = True
            settings[f"{_TLS}/root_ca_certificate"] = str(link.client_ca)
    elif link.client_ca is not None:
        raise BusError(f"robot_link.client_ca has no effect on {endpoint!r}: listen on tls/HOST:PORT")
    if link.users is not None:
        _check_users(link.users)
        settings[f"{_LOGIN}/dictionary_file"] = str(link.users)
    if link.access is not None and not link.authenticates:
        raise BusError("robot_link.access knows robots by certificate or user: set robot_link.client_ca or .users too")
    return settings


def _password(path: Path) -> str:
    try:
        text = readable(path, "password file").decode().strip()
    except (TlsError, UnicodeDecodeError) as error:
        raise BusError(f"cloud_link.password_file: {error}") from error
    if not text:
        raise BusError(f"cloud_link.password_file {path} is empty")
    return text


def _check_users(path: Path) -> None:
    try:
        lines = readable(path, "file of users").decode().splitlines()
    except (TlsError, UnicodeDecodeError) as error:
        raise BusError(f"robot_link.users: {error}") from error
    for number, line in enumerate(lines, 1):
        user, colon, password = line.partition(":")
        if line and not (user and colon and password):
            raise BusError(f"robot_link.users {path}, line {number}: it is not of the form user:password")
    if not any(lines):
        raise BusError(f"robot_link.users {path} names no user: no robot could connect")
