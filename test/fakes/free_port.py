"""Ports for processes that must be told one before they listen."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _COUNT = 20_000, 12_000  # below what Linux gives to those who ask for any port: nobody else takes it meanwhile
_numbers = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, another one at each call."""
    while True:
        port = _FIRST + next(_numbers) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_endpoint() -> str:
    """For Zenoh."""
    return f"tcp/127.0.0.1:{free_port()}"
