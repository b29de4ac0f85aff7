"""The server's state on an address of its own: page, status and metrics, with or without chat.

For people and collectors of an inner network while chat clients have another door, and for a cloud that serves robots
only, which has no other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from vla_cloud.gateway.clients import Clients
from vla_cloud.gateway.http_app import HttpApp
from vla_cloud.gateway.http_exchange import ExchangeRules
from vla_cloud.gateway.http_server import HttpServer
from vla_cloud.gateway.http_status import status_routes
from vla_cloud.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from vla_cloud.gateway.settings import GatewayError
from vla_cloud.gateway.status import StatusSource
from vla_common.clock import Clock

if TYPE_CHECKING:
    from vla_cloud.config import CloudConfig


class StatusApp(HttpApp):
    """The same rules for whom to answer as on the chat door, and none of its paths."""

    def __init__(
        self, metrics: GatewayMetrics, source: StatusSource, rules: ExchangeRules, only_loopback: bool,
        clients: Clients | None,
    ) -> None:  # fmt: skip
        """Serves what ``source`` and ``metrics`` tell, to operators alone where ``clients`` have keys."""
        self._clients = clients
        self._metrics, self._rules, self._only_loopback = metrics, rules, only_loopback

        async def page(request: Request) -> Response:
            return Response(await metrics.page(), headers={"content-type": CONTENT_TYPE})

        routes = [Route("/metrics", page), *status_routes(source)]
        self._app = Starlette(routes=routes, exception_handlers={HTTPException: _not_here})


class StatusServer(HttpServer):
    """Start and stop it in the event loop of the doors."""

    def __init__(
        self, config: CloudConfig, clock: Clock, metrics: GatewayMetrics, source: StatusSource,
        clients: Clients | None = None,
    ) -> None:  # fmt: skip
        """Nothing is open yet.

        Raises:
            GatewayError: the address is wrong, or reachable from other machines without leave.
        """
        gateway = replace(config.gateway, http_listen=config.status_listen)
        try:
            super().__init__(None, gateway, clock, allow_remote=config.may_be_insecure, metrics=metrics, tls=config.tls)
        except GatewayError as error:
            raise GatewayError(str(error).replace("gateway.http_listen", "status_listen")) from error
        self._source, self._clients = source, clients

    def _make_app(self) -> HttpApp:
        return StatusApp(self.metrics, self._source, self._exchange_rules, self._is_loopback, self._clients)

    def _tell_connections(self) -> None:
        """The page counts connections of chat clients only."""


@contextmanager
def status_page(config: CloudConfig, clock: Clock, robots: Callable[[], Mapping[str, Any]]) -> Iterator[StatusServer]:
    """Of a cloud without chat: in a thread with an event loop of its own while the body runs.

    Raises:
        GatewayError: the address cannot be used.
    """
    metrics = GatewayMetrics(clock, dict)
    metrics.robots = robots
    server = StatusServer(config, clock, metrics, StatusSource(metrics, dict, clock, lambda: True))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="status", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"there is no {request.url.path} here; see /, /metrics, /vla/status\n"
    return PlainTextResponse(told, error.status_code, error.headers)
