"""The service vla.v1.Control: what the pools do, and an end without lost answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc.aio

from vla_cloud.core.generate import InvalidRequest, RequestError
from vla_cloud.gateway.chat import Chat
from vla_cloud.gateway.grpc_convert import model_status
from vla_cloud.gateway.grpc_errors import client_of, end_with
from vla_cloud.gateway.proto import vla_chat_pb2 as pb

_DEFAULT_DRAIN_S = 30.0
_MAX_DRAIN_S = 3600.0


class ControlServicer:
    """Methods have the names of the .proto file."""

    def __init__(self, chat: Chat, drain: Callable[[float], Awaitable[bool]]) -> None:
        """``drain(timeout_s)`` takes nothing new and waits; true if all requests ended by themselves."""
        self._chat, self._drain = chat, drain

    async def Status(self, request: pb.StatusRequest | None, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
        """All models and their workers."""
        await self._require_operator(context)
        return pb.StatusResponse(models=[model_status(name, health) for name, health in self._chat.health().items()])

    async def Drain(self, request: pb.DrainRequest | None, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        """Drain; the server goes on draining after the answer, also if the caller has gone."""
        await self._require_operator(context)
        timeout_s = _DEFAULT_DRAIN_S
        if request is not None and request.HasField("timeout_s"):
            timeout_s = request.timeout_s
        if not 0.0 <= timeout_s <= _MAX_DRAIN_S:
            await end_with(context, InvalidRequest(f"timeout_s must be 0 to {_MAX_DRAIN_S:g}, got {timeout_s}"))
        return pb.DrainResponse(all_ended=await self._drain(timeout_s))

    async def _require_operator(self, context: grpc.aio.ServicerContext) -> None:
        """Also on a loopback address: where keys are asked for, other users of the machine are strangers, too."""
        try:
            self._chat.clients.require_operator(client_of(context, self._chat))
        except RequestError as error:
            await end_with(context, error)
