"""A gRPC gateway on port 0 in the test's event loop, over whatever service a test has, and ways to call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio

from vla_cloud.config import GatewayConfig
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.chat_types import ChatLimits
from vla_cloud.gateway.grpc_server import GrpcServer
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc
from vla_common.clock import SystemClock

CONFIG = GatewayConfig(grpc_listen="127.0.0.1:0", control_listen="127.0.0.1:0")


@dataclass
class Rig:
    chat: Chat
    server: GrpcServer
    channel: grpc.aio.Channel
    stub: Any
    control_channel: grpc.aio.Channel
    control: Any

    def connect(self, *options: tuple[str, int]) -> grpc.aio.Channel:
        """A connection of its own."""
        alone = ("grpc.use_local_subchannel_pool", 1)
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}", options=[alone, *options])


@asynccontextmanager
async def rig(
    tokenizer: Any, service: Any, limits: ChatLimits | None = None, grammars: Any = None, **rules: object
) -> AsyncIterator[Rig]:  # fmt: skip
    clock = SystemClock()
    chat = Chat([ServedModel("tiny", tokenizer, service, grammars=grammars)], clock, limits)
    config = replace(CONFIG, grpc=replace(CONFIG.grpc, **rules))
    server = GrpcServer(chat, config, clock)
    await server.start()
    try:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.control_port}") as control,
        ):
            yield Rig(chat, server, channel, pb_grpc.ChatStub(channel), control, pb_grpc.ControlStub(control))
    finally:
        await server.stop()
        chat.close()


def ask(text: str = "hi", request_id: str = "", **kwargs: Any) -> pb.GenerateRequest:
    sampling = kwargs.pop("sampling", {})
    message = pb.Message(role="user", parts=[pb.Part(text=text)])
    return pb.GenerateRequest(request_id=request_id, messages=[message], sampling=pb.Sampling(**sampling), **kwargs)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    for _ in range(round(timeout_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within {timeout_s} s")
