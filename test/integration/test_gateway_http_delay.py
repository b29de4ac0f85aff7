"""Small pieces of an answer leave at once: the HTTP door's connections do not wait for acknowledgements (TCP_NODELAY)."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("tokenizers")
from chat_service import ScriptedService
from tiny_chat_tokenizer import tiny_tokenizer

from vla_cloud.config import GatewayConfig
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.http_server import HttpServer
from vla_common.clock import SystemClock


def test_connections_send_small_pieces_at_once(tmp_path: Path) -> None:
    async def go() -> list[int]:
        clock = SystemClock()
        chat = Chat([ServedModel("tiny", tiny_tokenizer(tmp_path), ScriptedService(lambda _: []))], clock)
        server = HttpServer(chat, GatewayConfig(http_listen="127.0.0.1:0"), clock)
        await server.start()
        try:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            ends = [one.transport.get_extra_info("socket") for one in server._server.server_state.connections]
            options = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends]
            writer.close()
            await writer.wait_closed()
            return options
        finally:
            await server.stop()
            chat.close()

    (option,) = asyncio.run(go())
    assert option != 0
