"""TLS of the HTTP door: handshakes with a time limit, and failed ones told, but not once for every stranger."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from typing import Any, Final

import uvicorn

from vla_common.clock import NS_PER_S, Clock
from vla_common.metrics import Counters
from vla_common.tls import ServerTls, server_context, server_failure

LOG = logging.getLogger(__name__)

QUIET_S: Final = 60.0
_SHUTDOWN_S: Final = 1.0
_OF_CERTIFICATES: Final = ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")


class HandshakeLog:
    """A line for each kind of failure, at once, and at most one a minute for all that follow. For one thread."""

    def __init__(self, where: str, clock: Clock, quiet_s: float = QUIET_S) -> None:
        """``where``: of the log line."""
        self._where, self._clock = where, clock
        self._quiet_ns = round(quiet_s * NS_PER_S)
        self._told_ns: dict[str, int] = {}
        self._untold = Counters()

    def failed(self, what: str) -> None:
        """Count, and tell if nothing of the kind was told of late."""
        now_ns = self._clock.monotonic_ns()
        self._untold.add(what)
        last_ns = self._told_ns.get(what)
        if last_ns is None and len(self._told_ns) < 16 or last_ns is not None and now_ns - last_ns >= self._quiet_ns:
            self._told_ns[what] = now_ns
            count = self._untold[what]
            self._untold.add(what, -count)
            LOG.warning("%s: %s%s", self._where, what, f" ({count} times)" if count > 1 else "")


def telling_context(tls: ServerTls, tell: Callable[[str], None]) -> ssl.SSLContext:
    """A server's context that tells of failed handshakes, which asyncio keeps to itself.

    Raises:
        TlsError: see :func:`vla_common.tls.server_context`.
    """
    context = server_context(tls)

    class Telling(ssl.SSLObject):
        _failure: ssl.SSLError | None = None

        def do_handshake(self) -> None:
            if self._failure is not None:
                raise self._failure
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                tell(server_failure(error))
                if (error.reason or "") not in _OF_CERTIFICATES:
                    raise
                # asyncio would close without sending the alert that tells the client why; so it sends it, and waits for
                # the client to hang up, or for the end of the time for handshakes.
                self._failure = error
                raise ssl.SSLWantReadError from error

    context.sslobject_class = Telling
    return context


async def serve_tls(
    server: uvicorn.Server, listener: socket.socket, context: ssl.SSLContext, backlog: int
) -> asyncio.Server:
    """What uvicorn does with a socket, with limits on the beginning and the end of a connection."""
    config = server.config

    def connection(_loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Protocol:
        return config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=server.server_state, app_state=server.lifespan.state, _loop=_loop
        )  # fmt: skip

    limits: dict[str, Any] = {"ssl_handshake_timeout": float(config.timeout_keep_alive)}
    if sys.version_info >= (3, 11):
        limits["ssl_shutdown_timeout"] = _SHUTDOWN_S
    loop = asyncio.get_running_loop()
    return await loop.create_server(connection, sock=listener, ssl=context, backlog=backlog, **limits)
