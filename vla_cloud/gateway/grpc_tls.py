"""TLS of the gRPC door for chat, and a count of connections that came to nothing, as gRPC tells no program why."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import NS_PER_S, Clock
from vla_common.tls import ServerTls, TlsError, readable, server_context

LOG = logging.getLogger(__name__)

QUIET_S: Final = 60.0
_MARGIN_S: Final = 1.0
_MAX_PENDING: Final = 4096
_MAX_PEERS: Final = 4096


def credentials(tls: ServerTls, begun: Callable[[], None]) -> grpc.ServerCredentials:
    """Of a server. ``begun`` is called at the beginning of each handshake, from a thread of gRPC's.

    Raises:
        GatewayError: the certificates cannot be used.
    """
    try:
        server_context(tls)  # it names what is wrong, gRPC does not
        assert tls.certificate is not None and tls.key is not None
        pair = readable(tls.key, "private key"), readable(tls.certificate, "certificate")
        client_ca = None if tls.client_ca is None else readable(tls.client_ca, "CA certificate")
    except TlsError as error:
        raise GatewayError(f"gateway.grpc_listen: {error}") from error

    def unchanged() -> None:
        begun()

    return grpc.dynamic_ssl_server_credentials(
        grpc.ssl_server_certificate_configuration([pair], client_ca), unchanged,
        require_client_authentication=client_ca is not None,
    )  # fmt: skip


class HandshakeWatch:
    """Matches handshakes that began with clients that made a call, and tells of those that made none."""

    def __init__(self, where: str, handshake_s: float, clock: Clock, quiet_s: float = QUIET_S) -> None:
        """``handshake_s``: a handshake takes no longer. ``where``: of the log line."""
        self._where, self._clock = where, clock
        self._patience_ns = round((handshake_s + _MARGIN_S) * NS_PER_S)
        self._quiet_ns = round(quiet_s * NS_PER_S)
        self._pending: deque[int] = deque(maxlen=_MAX_PENDING)
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._num_failed = 0
        self._told_ns: int | None = None

    def begun(self) -> None:
        """A handshake begins. From any thread."""
        self._pending.append(self._clock.monotonic_ns())

    def called(self, peer: str) -> None:
        """A call came from a client."""
        if peer in self._peers:
            self._peers.move_to_end(peer)
            return
        self._peers[peer] = None
        if len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
        if self._pending:
            self._pending.popleft()

    def look(self) -> None:
        """Tell, if it is time; call it every now and then."""
        now_ns = self._clock.monotonic_ns()
        while self._pending and now_ns - self._pending[0] > self._patience_ns:
            self._pending.popleft()
            self._num_failed += 1
        if self._num_failed and (self._told_ns is None or now_ns - self._told_ns >= self._quiet_ns):
            LOG.warning(
                "%s: %d connections brought no call: clients without a valid certificate of tls.client_ca, clients "
                "that do not trust this server's certificate, or idle ones; GRPC_VERBOSITY=INFO shows each",
                self._where, self._num_failed,
            )  # fmt: skip
            self._num_failed, self._told_ns = 0, now_ns


class WatchingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Tells ``called`` the address of each call's client."""

    def __init__(self, called: Callable[[str], None]) -> None:
        """For one server."""
        self._called = called

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        form = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        make = getattr(grpc, f"{form}_rpc_method_handler")
        return make(
            self._noting(getattr(handler, form)), request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )  # fmt: skip

    def _noting(self, behaviour: Any) -> Any:
        """Of the same kind as ``behaviour``: gRPC treats generators, coroutines and plain functions differently."""
        if inspect.isasyncgenfunction(behaviour):

            async def generator(request: Any, context: Any) -> Any:
                self._called(context.peer())
                async for response in behaviour(request, context):
                    yield response

            return generator
        if inspect.iscoroutinefunction(behaviour):

            async def coroutine(request: Any, context: Any) -> Any:
                self._called(context.peer())
                return await behaviour(request, context)

            return coroutine
        return behaviour
