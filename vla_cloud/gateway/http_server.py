"""The OpenAI-compatible HTTP door: uvicorn in the event loop of the serving engine, on a socket of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Final

import uvicorn

from vla_cloud.config import GatewayConfig
from vla_cloud.gateway.chat import Chat
from vla_cloud.gateway.door_tls import HandshakeLog, serve_tls, telling_context
from vla_cloud.gateway.http_app import HttpApp
from vla_cloud.gateway.http_exchange import ExchangeRules
from vla_cloud.gateway.http_protocol import ConnectionRules, guarded_by
from vla_cloud.gateway.metrics import GatewayMetrics
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import Clock
from vla_common.tls import ServerTls, TlsError

LOG = logging.getLogger(__name__)
_END_S: Final = 1.0
_BACKLOG: Final = 128


class HttpServer:
    """Start and stop it in the event loop in which ``chat`` runs."""

    def __init__(
        self, chat: Chat | None, config: GatewayConfig, clock: Clock, *, allow_remote: bool = False,
        metrics: GatewayMetrics | None = None, tls: ServerTls | None = None,
    ) -> None:  # fmt: skip
        """Nothing is open yet. ``metrics``: those of other doors to the same chat, for one page of all.

        Without a ``chat`` a subclass says what is served, and ``metrics`` are needed.

        Raises:
            GatewayError: the address is wrong, or reachable from other machines without ``tls`` and ``allow_remote``;
                or the certificates cannot be used.
        """
        is_secure = tls is not None and tls.is_on
        self._family, self.address, self._is_loopback = _resolve(config.http_listen, allow_remote or is_secure)
        try:
            told = HandshakeLog(f"https://{config.http_listen}", clock)
            self._tls = telling_context(tls, told.failed) if tls is not None and is_secure else None
        except TlsError as error:
            raise GatewayError(f"gateway.http_listen: {error}") from error
        if metrics is None:
            assert chat is not None
            metrics = GatewayMetrics(clock, chat.health, access_log=config.access_log)
        self.metrics = metrics
        self._chat, self._config = chat, config
        self._rules = ConnectionRules(config.http_max_connections, config.http_head_timeout_s)
        rules = ExchangeRules(config.http_max_body_bytes, config.http_body_timeout_s, config.http_stall_timeout_s)
        self._clock, self._exchange_rules = clock, rules
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            GatewayError: the address is taken, or not of this machine.
        """
        try:
            listener = socket.create_server(self.address, family=self._family, backlog=_BACKLOG)
        except OSError as error:
            told = f"gateway.http_listen {self.url}: {error}; choose another port, or end what has it"
            raise GatewayError(told) from error
        # Connections inherit it. asyncio sets it only where a socket's protocol number is that of TCP, and an accepted
        # one has its listener's, here 0: each small piece of an answer would wait for a delayed ACK (40 ms).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = listener.getsockname()[:2]
        app = self._make_app()
        self._server = _Server(
            uvicorn.Config(
                app, http=guarded_by(self._rules), ws="none", lifespan="off", log_config=None, log_level="error",
                access_log=False, server_header=False, proxy_headers=False,
                timeout_keep_alive=max(1, round(self._config.http_head_timeout_s)),
                timeout_graceful_shutdown=round(_END_S),
            ),
            self._tls,
        )  # fmt: skip
        self._tell_connections()
        self._serving = asyncio.ensure_future(self._server.serve([listener]))
        opened = asyncio.ensure_future(self._server.opened.wait())
        await asyncio.wait((self._serving, opened), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if self._serving.done():
            self._serving.result()
            raise GatewayError(f"gateway.http_listen {self.url}: the HTTP server ended as it started")
        what, scheme = "chat" if self._chat is not None else "status", "https" if self._tls else "http"
        LOG.info("%s on %s://%s", what, scheme, self.url)

    @property
    def url(self) -> str:
        """``host:port`` of :attr:`address`, as in a URL."""
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Close the door. Answers under way have a second to end; drain the chat before. Safe to call twice."""
        server, serving = self._server, self._serving
        if server is None or serving is None:
            return
        self._server = self._serving = None
        server.should_exit = True
        try:
            await serving
        finally:
            for connection in list(server.server_state.connections):
                connection.evict()  # type: ignore[union-attr]
            if server.server_state.tasks:
                await asyncio.wait(server.server_state.tasks, timeout=_END_S)
            told = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(told.set_result, None)
            await told  # by then the transports have told their protocols that they are closed

    def _make_app(self) -> HttpApp:
        assert self._chat is not None
        return HttpApp(self._chat, self.metrics, self._exchange_rules, self._clock, only_loopback=self._is_loopback)

    def _tell_connections(self) -> None:
        assert self._chat is not None
        self.metrics.connections = self._connections
        self.metrics.clients = self._chat.clients.counts

    def _connections(self) -> Mapping[str, int]:
        is_open = len(self._server.server_state.connections) if self._server is not None else 0
        return {"open": is_open, **self._rules.counts.snapshot()}


class _Server(uvicorn.Server):
    """Signals are the process's own business."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.opened = asyncio.Event()
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets if self._tls is None else [])
        if self._tls is not None:
            # uvicorn would give a client a minute for its handshake.
            self.servers += [await serve_tls(self, sock, self._tls, _BACKLOG) for sock in sockets or ()]
        self.opened.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _resolve(address: str, allow_remote: bool) -> tuple[socket.AddressFamily, tuple[str, int], bool]:
    """Family, host and port of an address, and whether only this machine reaches it."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise GatewayError(f"gateway.http_listen {address!r} is not host:port, such as 127.0.0.1:8000")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise GatewayError(f"gateway.http_listen {address!r}: {error}") from error
    is_loopback = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
    if not is_loopback and not allow_remote:
        raise GatewayError(
            f"gateway.http_listen {address!r} is reachable from other machines, and HTTP is neither encrypted nor "
            "authenticated; set tls.certificate and tls.key (docs/security.md), use 127.0.0.1, or set "
            "insecure_non_loopback where the network is trusted"
        )
    return family, (str(place[0]), int(place[1])), is_loopback
