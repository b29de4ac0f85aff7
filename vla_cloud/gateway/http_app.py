"""The paths of the HTTP door."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vla_cloud.core.client import Client, Unauthenticated
from vla_cloud.core.generate import RequestError
from vla_cloud.gateway.chat import Chat
from vla_cloud.gateway.clients import Clients
from vla_cloud.gateway.http_chat import CLIENT, DOOR, ChatEndpoint
from vla_cloud.gateway.http_errors import HttpError, http_error
from vla_cloud.gateway.http_exchange import Exchange, ExchangeRules, Receive, Scope, Send
from vla_cloud.gateway.http_status import STATUS_PATH, status_routes
from vla_cloud.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from vla_cloud.gateway.status import StatusSource
from vla_common.clock import NS_PER_S, Clock

LOG = logging.getLogger(__name__)
_CHAT, _HEALTH, _METRICS = "/v1/chat/completions", "/health", "/metrics"
_OPERATORS_PATHS = frozenset({_METRICS, STATUS_PATH})
_OPEN_PATHS = frozenset({_HEALTH, "/"})
"""Where there are keys: /health is for those that watch, and the page holds no data."""
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class HttpApp:
    """An ASGI application."""

    def __init__(
        self, chat: Chat, metrics: GatewayMetrics, rules: ExchangeRules, clock: Clock, *, only_loopback: bool
    ) -> None:
        """``only_loopback``: refuse requests that were meant for another host's name.

        A page of another site can point its own name at 127.0.0.1 and would then be of the same origin as this server.
        """
        self._chat, self._metrics, self._rules, self._only_loopback = chat, metrics, rules, only_loopback
        self._clients: Clients | None = chat.clients
        self._created_s = clock.wall_ns() // NS_PER_S
        self._app = Starlette(
            routes=[
                Route(_CHAT, ChatEndpoint(chat, metrics, rules, clock), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route(_HEALTH, self._health),
                Route(_METRICS, self._metrics_page),
                *status_routes(StatusSource(metrics, chat.health, clock, lambda: chat.is_serving)),
            ],
            exception_handlers={HTTPException: _not_here},
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # Where it ends is told in two ways; a proxy in front may have believed the other (RFC 9112, 6.1).
            told = "content-length and transfer-encoding exclude each other: send one"
            exchange = Exchange(scope, receive, send, self._rules)
            exchange.connection.rules.counts.add("malformed")
            await exchange.fail(HttpError(400, "invalid_request_error", told, closes=True))
            return
        if self._only_loopback:
            exchange = Exchange(scope, receive, send, self._rules)
            host = exchange.headers.get(b"host", b"").decode("latin-1")
            name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
            if name.lower() not in _LOOPBACK_NAMES:
                told = f"host {host!r} is not this server: ask 127.0.0.1 or localhost (a proxy must set the header so)"
                await exchange.fail(HttpError(421, "invalid_request_error", told))
                return
        if self._clients is not None and self._clients.has_keys:
            exchange = Exchange(scope, receive, send, self._rules)
            try:
                scope[CLIENT] = _client(self._clients, scope["path"], exchange)
            except RequestError as error:
                if scope["path"] == _CHAT:
                    self._metrics.ended(DOOR, "refused", error.code)
                await exchange.fail(http_error(error))
                return
        await self._app(scope, receive, send)

    async def _models(self, request: Request) -> Response:
        data = [self._entry(name) for name in self._names(request)]
        return _json({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._names(request):
            told = f"no model {name!r} is served; GET /v1/models lists them"
            return _error(HttpError(404, "invalid_request_error", told, name="model_not_found", param="model"))
        return _json(self._entry(name))

    async def _health(self, request: Request) -> Response:
        models = self._chat.health()
        client = request.scope.get(CLIENT)
        # What the workers do is for operators, where there are keys to tell them by.
        is_shown = not self._chat.clients.has_keys or (client is not None and client.is_operator)
        details = {"models": models} if is_shown else {}
        if self._chat.is_serving:
            return _json({"status": "serving", **details})
        draining = all(health["draining"] for health in models.values())
        return _json({"status": "draining" if draining else "no capacity", **details}, 503, {"retry-after": "1"})

    async def _metrics_page(self, request: Request) -> Response:
        return Response(await self._metrics.page(), headers={"content-type": CONTENT_TYPE})

    def _names(self, request: Request) -> list[str]:
        return self._chat.names_for(self._chat.clients.require(request.scope.get(CLIENT)))

    def _entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created_s, "owned_by": "vla-runtime"}


def _client(clients: Clients, path: str, exchange: Exchange) -> Client | None:
    """Who asks, before anything is read of what they ask.

    Raises:
        RequestError: nobody, or not an operator.
    """
    given = exchange.headers.get(b"authorization")
    if path in _OPEN_PATHS and given is None:
        return None
    try:
        client = clients.identify(None if given is None else given.decode("latin-1"))
    except Unauthenticated:
        if path in _OPEN_PATHS:
            return None
        raise
    if path in _OPERATORS_PATHS:
        clients.require_operator(client)
    return client


def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        told = f"{request.method} is not allowed on {request.url.path}"
    else:
        there_is = "/v1/chat/completions, /v1/models, /health, /metrics, /vla/status"
        told = f"there is no {request.url.path} here; see {there_is}"
    return _error(HttpError(error.status_code, "invalid_request_error", told), dict(error.headers or {}))


def _error(error: HttpError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error.body(), error.status, headers, "application/json")


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
