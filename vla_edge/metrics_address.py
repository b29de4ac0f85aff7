"""Where the robot's metrics page may be: on loopback only, as it is for a collector on the robot."""

from __future__ import annotations

import ipaddress


def metrics_address(listen: str) -> tuple[str, int] | None:
    """Host and port of ``io.metrics_listen``; None if it is empty: no page.

    Raises:
        ValueError: no address, or one that other machines reach.
    """
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        is_loopback = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host).is_loopback
    except ValueError:
        host = ""
        is_loopback = False
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"metrics_listen {listen!r} is not host:port, such as 127.0.0.1:9107")
    if not is_loopback:
        raise ValueError(f"metrics_listen {listen!r} is not a loopback address: use 127.0.0.1 and a collector there")
    return ("127.0.0.1" if host == "localhost" else host), int(port)
