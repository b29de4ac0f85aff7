"""The gRPC servers: vla.v1.Chat for clients, vla.v1.Control for operators, each with health and reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from vla_cloud.config import GatewayConfig
from vla_cloud.gateway.chat import Chat
from vla_cloud.gateway.grpc_chat import ChatServicer
from vla_cloud.gateway.grpc_control import ControlServicer
from vla_cloud.gateway.grpc_tls import HandshakeWatch, WatchingInterceptor, credentials
from vla_cloud.gateway.metrics import GatewayMetrics
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_cloud.gateway.settings import GatewayError, GrpcRules, check_listen
from vla_common.clock import Clock
from vla_common.tls import ServerTls

LOG = logging.getLogger(__name__)


def _is_fault(record: logging.LogRecord) -> bool:
    """False for what grpc.aio says, with a traceback, of each client that has gone or sends odd headers."""
    return not record.getMessage().startswith(("ExecuteBatchError raised in core", "Invalid encoding on "))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_fault)

CHAT: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["Chat"]
CONTROL: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["Control"]

_HEALTH_S = 0.2
_LAST_WORDS_S = 1.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """Both servers of a gateway, in the event loop that calls :meth:`start`."""

    def __init__(
        self, chat: Chat, config: GatewayConfig, clock: Clock, *, allow_remote: bool = False,
        tls: ServerTls | None = None, metrics: GatewayMetrics | None = None,
    ) -> None:  # fmt: skip
        """Nothing listens yet.

        ``tls`` is for chat clients; a Unix socket and the control door do without. ``metrics``: those of other doors to
        the same chat, for one page of all.

        Raises:
            GatewayError: an address that other machines reach, without ``tls`` and ``allow_remote``; or the
                certificates cannot be used.
        """
        self._tls = tls if tls is not None and tls.is_on and not config.grpc_listen.startswith("unix:") else None
        if config.grpc_listen:
            check_listen(config.grpc_listen, allow_remote or self._tls is not None, "gateway.grpc_listen")
        self._handshakes = HandshakeWatch(f"gRPC on {config.grpc_listen}", config.grpc.keepalive_timeout_s, clock)
        self._credentials = None if self._tls is None else credentials(self._tls, self._handshakes.begun)
        self._chat, self._config = chat, config
        if metrics is None:
            metrics = GatewayMetrics(clock, lambda: self._chat.health(), access_log=config.access_log)
        self.metrics = metrics
        self._chat_servicer = ChatServicer(chat, clock, config.grpc.slow_reader_s, metrics)
        self._servers: list[grpc.aio.Server] = []
        self._health = health.aio.HealthServicer()
        self._watch: asyncio.Task[None] | None = None
        self._drained: asyncio.Task[bool] | None = None
        self._draining = False
        self._ending = asyncio.Event()
        self.port = 0
        self.control_port = 0

    async def start(self) -> None:
        """Listen. ``port`` and ``control_port`` are then those that are used, 0 for a Unix socket or none.

        Raises:
            GatewayError: an address is in use or not of this machine.
        """
        config = self._config
        try:
            if config.grpc_listen:
                self.port = await self._listen(config.grpc_listen, CHAT, self._chat_servicer)
            if config.control_listen:
                control = ControlServicer(self._chat, self.drain)
                self.control_port = await self._listen(config.control_listen, CONTROL, control)
        except GatewayError:
            await self.stop()
            raise
        LOG.info("gRPC: chat on %s (port %d), control on %s", config.grpc_listen or "-", self.port,
                 config.control_listen or "-")  # fmt: skip
        await self._tell_health()
        self._watch = asyncio.create_task(self._watch_health())

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests (UNAVAILABLE, health says NOT_SERVING) and wait for those under way.

        Returns:
            True if all ended by themselves in time.
        """
        self._draining = True
        # A task of its own, so that it goes on when the caller has gone.
        self._drained = asyncio.create_task(self._chat.drain(timeout_s))
        await self._tell_health()
        return await asyncio.shield(self._drained)

    async def stop(self) -> None:
        """Close. Drain first: calls that are left are cancelled after a moment. Safe to call twice."""
        self._draining = True
        self._ending.set()
        if self._watch is not None:
            await self._watch
            self._watch = None
        await self._health.enter_graceful_shutdown()
        await asyncio.gather(*(server.stop(_LAST_WORDS_S) for server in self._servers))
        self._servers.clear()

    async def _listen(self, listen: str, service: ServiceDescriptor, servicer: object) -> int:
        rules = self._config.grpc
        secure = self._credentials if service is CHAT else None
        server = grpc.aio.server(
            options=_options(rules), maximum_concurrent_rpcs=rules.max_rpcs,
            interceptors=() if secure is None else (WatchingInterceptor(self._handshakes.called),),
        )  # fmt: skip
        handlers = _handlers(service, servicer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        server.add_registered_method_handlers(service.full_name, handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((service.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            port = server.add_insecure_port(listen) if secure is None else server.add_secure_port(listen, secure)
        except RuntimeError as error:
            raise GatewayError(f"cannot listen on {listen}: is the port in use, or the host not this one?") from error
        self._servers.append(server)
        await server.start()
        return 0 if listen.startswith("unix:") else int(port)

    async def _watch_health(self) -> None:
        while not self._ending.is_set():
            await self._tell_health()
            self._handshakes.look()
            try:
                await asyncio.wait_for(self._ending.wait(), _HEALTH_S)
            except asyncio.TimeoutError:
                pass

    async def _tell_health(self) -> None:
        status = _SERVING if self._chat.is_serving and not self._draining else _NOT_SERVING
        for name in ("", CHAT.full_name):
            await self._health.set(name, status)
        await self._health.set(CONTROL.full_name, _SERVING)


def _options(rules: GrpcRules) -> list[tuple[str, int]]:
    def ms(seconds: float) -> int:
        return max(1, round(seconds * 1000))

    return [
        ("grpc.so_reuseport", 0),  # two servers on one port would share its clients unnoticed
        ("grpc.max_receive_message_length", rules.max_message_bytes),
        ("grpc.max_send_message_length", rules.max_message_bytes),
        ("grpc.max_metadata_size", rules.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", rules.max_metadata_bytes),
        ("grpc.max_allowed_incoming_connections", rules.max_connections),
        ("grpc.max_concurrent_streams", rules.max_streams),
        ("grpc.keepalive_time_ms", ms(rules.keepalive_s)),
        ("grpc.keepalive_timeout_ms", ms(rules.keepalive_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", ms(rules.keepalive_timeout_s)),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.http2.min_ping_interval_without_data_ms", ms(rules.min_ping_s)),
        ("grpc.max_connection_age_ms", ms(rules.connection_age_s)),
        ("grpc.max_connection_age_grace_ms", ms(rules.connection_grace_s)),
    ]


def _handlers(service: ServiceDescriptor, servicer: object) -> Mapping[str, grpc.RpcMethodHandler]:
    """Handlers of a service by the descriptor: None for unreadable messages, and for none at all.

    They take a stream of messages of which the first is read: as unary ones, grpc.aio never ends a call whose client
    ends its half before a message is complete.
    """
    result: dict[str, Any] = {}
    for method in service.methods:
        streams = method.server_streaming
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        read, write = _reader(GetMessageClass(method.input_type)), GetMessageClass(method.output_type).SerializeToString
        answer = _with_first(getattr(servicer, method.name))
        result[method.name] = make(answer, request_deserializer=read, response_serializer=write)
    return result


def _with_first(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer_first(requests: AsyncIterator[Message | None], context: grpc.aio.ServicerContext) -> Any:
        async for request in requests:
            return await answer(request, context)
        return await answer(None, context)

    return answer_first


def _reader(message: type[Message]) -> Callable[[bytes], Message | None]:
    def read(data: bytes) -> Message | None:
        try:
            return message.FromString(data)
        except DecodeError:
            return None

    return read
