"""Both doors on port 0 in the test's event loop, over whatever service a test has, with keys and perhaps a vision model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import httpx

from vla_cloud.config import GatewayConfig
from vla_cloud.gateway.api_key_file import KeyEntry, KeyFile, new_token, token_hash
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.clients import Clients
from vla_cloud.gateway.grpc_server import GrpcServer
from vla_cloud.gateway.http_server import HttpServer
from vla_cloud.gateway.key_ring import KeyRing
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc
from vla_common.clock import Clock, SystemClock

CONFIG = GatewayConfig(http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", control_listen="127.0.0.1:0")


class Keys:
    """Keys by name; ``add`` as an operator would."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.tokens: dict[str, str] = {}
        self._entries: list[KeyEntry] = []
        self.ring = KeyRing(KeyFile(), b"s" * 32, clock or SystemClock())

    def add(self, name: str, **limits: Any) -> str:
        token = self.tokens[name] = new_token()
        self._entries.append(KeyEntry(name, token_hash(token) or "", **limits))
        self.ring.replace(KeyFile(tuple(self._entries)))
        return token

    def header(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[name]}"}

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        return tuple(self.header(name).items())


@dataclass
class Both:
    chat: Chat
    http_server: HttpServer
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    stub: Any
    control: Any

    async def ask(self, text: str = "hi", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """POST /v1/chat/completions."""
        body = {"model": "", "messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)


@asynccontextmanager
async def both_doors(
    models: list[ServedModel], keys: Keys | None = None, clock: Clock | None = None, **gateway: Any
) -> AsyncIterator[Both]:
    clock = clock or SystemClock()
    clients = Clients(clock, keys.ring if keys is not None else None)
    chat, config = Chat(models, clock, clients=clients), replace(CONFIG, **gateway)
    http_server, grpc_server = HttpServer(chat, config, clock), GrpcServer(chat, config, clock)
    await http_server.start()
    await grpc_server.start()
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://{http_server.url}", trust_env=False, timeout=30.0) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.control_port}") as control,
        ):
            yield Both(chat, http_server, http, channel, pb_grpc.ChatStub(channel), pb_grpc.ControlStub(control))
    finally:
        await grpc_server.stop()
        await http_server.stop()
        chat.close()
