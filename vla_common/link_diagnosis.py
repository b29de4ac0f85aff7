"""Why a connection does not come about, found out by trying: Zenoh itself only reports a time-out."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Final

from vla_common.bus_config import is_encrypted
from vla_common.certificate_file import validity_problem
from vla_common.clock import SystemClock
from vla_common.link_security import CloudLink
from vla_common.tls import TlsError, client_context, client_failure

_CONNECT_S: Final = 3.0
_REFUSAL_S: Final = 1.0
"""With TLS 1.3 a server's refusal of the client's certificate comes after the handshake."""


def tls_problem(host: str, port: int, context: ssl.SSLContext, certificate: Path | None = None) -> str:
    """Shake hands with a TLS server, and hang up. ``certificate`` is the client's that ``context`` holds, if any.

    Returns:
        What is wrong and what to do about it; empty if client and server accept each other.
    """
    context.set_alpn_protocols(["h2", "http/1.1"])  # gRPC servers hang up without
    try:
        plain = socket.create_connection((host, port), _CONNECT_S)
    except OSError as error:
        return _silent(host, port, error)
    with plain:
        try:
            secure = context.wrap_socket(plain, server_hostname=host)
        except TimeoutError:
            return f"{host}:{port} takes connections but does not answer: does it speak TLS, and does it still run?"
        except OSError as error:
            return client_failure(error, host) or f"{host}:{port} hung up in the TLS handshake ({error})"
        with secure:
            secure.settimeout(_REFUSAL_S)
            try:
                if secure.recv(1):
                    return ""
            except TimeoutError:
                return ""
            except OSError as error:
                if told := client_failure(error, host):
                    return told
    # gRPC's servers, for one, do not say why.
    if certificate is None:
        return f"{host}:{port} hung up after the handshake: it probably demands a client certificate of its CA"
    return validity_problem(certificate, SystemClock().wall_ns(), soon_days=0.0) or (
        f"{host}:{port} hung up after the handshake: it probably does not know the CA of {certificate}"
    )


def link_problem(endpoint: str, link: CloudLink) -> str:
    """Why a Zenoh session does not reach the cloud, as far as can be told from here; never empty."""
    name, _, address = endpoint.partition("/")
    host, _, port = address.partition("#")[0].partition("?")[0].rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if name not in ("tcp", "tls") or not port.isdecimal():
        secrets = "certificates, user or password may be refused" if is_encrypted(endpoint) or link.user else ""
        return "; ".join(filter(None, ["is 'vla cloud' running there", secrets]))
    if name == "tls":
        try:
            problem = tls_problem(host, int(port), client_context(link.ca, link.certificate, link.key),
                                  link.certificate)  # fmt: skip
        except TlsError as error:
            problem = str(error)
        if problem:
            return problem
    else:
        try:
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        except OSError as error:
            return _silent(host, int(port), error)
    if link.user:
        return (
            f"it answers, but does not let user {link.user!r} in: are user and password those it knows, and does it "
            "ask for any (robot_link.users)?"
        )
    return "it answers, but does not let this session in: does it ask for a user and password (cloud_link.user)?"


def _silent(host: str, port: int, error: OSError) -> str:
    return f"nothing answers at {host}:{port} ({error.strerror or error}): is the server running, the address right?"
