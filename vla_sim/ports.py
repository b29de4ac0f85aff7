"""Free ports for processes of one run."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now. Another program may take it before it is used; the owner then says so."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def with_free_port(endpoint: str) -> str:
    """Endpoint with port 0 replaced by a free one; others unchanged."""
    address, separator, port = endpoint.rpartition(":")
    if not separator or port != "0":
        return endpoint
    return f"{address}:{free_port(address.partition('/')[2])}"
