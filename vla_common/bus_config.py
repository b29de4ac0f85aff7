"""What a Zenoh session of ours is configured to do, as plain data, and which endpoints it may use."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Final, Literal

Role = Literal["router", "peer"]

LEASE_MS: Final = 400
"""A hung peer is noticed after about this long (7.8 s by default)."""

MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024
"""A router puts no larger message together from its fragments. Ours have 8 MiB at most, a raw 4K image of another node
on a robot 25 MB; Zenoh's own bound is 1 GiB, for each of the samples that wait to be read."""

_HOSTLESS_LINKS: Final = ("unixsock-stream", "unixpipe")
_ENCRYPTED_LINKS: Final = ("tls", "quic")


class BusError(Exception):
    """A session that could not be opened or used; the message names the likely cause and the remedy."""


def is_encrypted(endpoint: str) -> bool:
    """Whether a Zenoh endpoint is one of TLS."""
    return endpoint.partition("/")[0] in _ENCRYPTED_LINKS


def is_local(endpoint: str) -> bool:
    """Whether only this machine reaches a Zenoh endpoint. Of names, only localhost is taken to be local."""
    link, _, address = endpoint.partition("/")
    if link in _HOSTLESS_LINKS:
        return True
    host = address.partition("#")[0].partition("?")[0].rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def check_endpoint(endpoint: str, allow_remote: bool) -> None:
    """Refuse endpoints that are malformed, or leave this machine without leave and without encryption.

    Raises:
        BusError: with the remedy.
    """
    link, separator, address = endpoint.partition("/")
    if not separator or not link or not address:
        raise BusError(f"endpoint {endpoint!r} is not of the form link/address, such as tcp/127.0.0.1:7447")
    if allow_remote or is_encrypted(endpoint) or is_local(endpoint):
        return
    raise BusError(
        f"endpoint {endpoint!r} is reachable from other machines, and the link is neither encrypted nor "
        "authenticated; use tls/ with certificates (docs/security.md), 127.0.0.1, or set allow_remote where the "
        "network is trusted"
    )


def session_config(
    endpoint: str, role: Role, isolated: bool = False, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Zenoh configuration by key, for :func:`vla_common.zenoh_session.open_bus`; plain data so that a test can read it.

    Joining sessions are Zenoh *clients*: a Zenoh router passes samples between clients, but since 1.9 not between peers
    that do not listen; and two routers do not reliably find each other's subscribers again after one restarted
    (measured: 7 of 20 quick restarts left the link up and silent, clients 0 of 140). ``isolated`` makes it a peer,
    which for that reason hears the router's own process only. ``more`` is added, such as
    :func:`vla_common.link_security.join_settings`.
    """
    hosts = role == "router"
    limits = {"transport/link/rx/max_message_size": MAX_MESSAGE_BYTES} if hosts else {}
    return {
        "mode": "router" if hosts else "peer" if isolated else "client",
        "listen/endpoints": [endpoint] if hosts else [],
        "connect/endpoints": [] if hosts else [endpoint],
        "connect/timeout_ms": -1,
        "connect/exit_on_failure": False,
        # Whole, since a part of it is ignored.
        "connect/retry": {"period_init_ms": 50, "period_max_ms": 250, "period_increase_factor": 1.5},
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "scouting/delay": 0,
        "timestamping/enabled": False,
        "transport/shared_memory/enabled": False,
        "transport/link/tx/lease": LEASE_MS,
        "transport/unicast/open_timeout": 1000,
        **limits,
        **(more or {}),
    }
