"""The HTTP door over real worker processes with the hash-chain runner, and a tokenizer whose words are its tokens."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from serving_rig import BASE, chain_specs, reference

from vla_cloud.config import GatewayConfig
from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.grammar_checker import GrammarChecker
from vla_cloud.gateway.http_server import HttpServer
from vla_cloud.gateway.settings import GrammarRules
from vla_cloud.pools.serving_thread import ServingThread
from vla_common.clock import SystemClock
from vla_models.sampling import SamplingRule

MODEL = "chain"
VOCAB = 997
EOS = 0
NEVER = 10_000
"""In place of EOS: not one of the chain's tokens, so that answers have the length that was asked for."""
GATEWAY = GatewayConfig(http_listen="127.0.0.1:0", drain_s=0.0)
TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] + ': ' + m['content'] }}{% endfor %}<|start|>assistant:"


def write_tokenizer(folder: Path, eos: int = EOS) -> ChatTokenizer:
    """Bytes for what is asked, and a word of its own for every other token of the chain's vocabulary."""
    folder.mkdir(exist_ok=True)
    names = ["<|end|>", "<|start|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    names += [f"Ġw{index}" for index in range(len(names), VOCAB)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in names[:2]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    return ChatTokenizer(folder)


class HttpRig:
    def __init__(self, thread: ServingThread, chat: Chat, server: HttpServer, tokenizer: ChatTokenizer) -> None:
        self.thread, self.chat, self.server, self.tokenizer = thread, chat, server, tokenizer
        self.url = f"http://{server.url}"

    def expected(self, question: str, count: int, rule: SamplingRule | None = None) -> str:
        """The answer, computed without any server."""
        prompt = self.tokenizer.chat([{"role": "user", "content": question}])
        ends = tuple(self.tokenizer.eos_token_ids)
        tokens = reference(prompt, count, rule, stop=ends)
        return self.tokenizer.decode([token for token in tokens if token not in ends])

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        sock = socket.socket()
        sock.settimeout(60.0)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(self.server.address)
        return sock

    def raw(self, data: bytes) -> bytes:
        """All that the server sends until it closes."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_all(sock)

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.thread.service.health()
            time.sleep(0.01)

    def count(self, name: str) -> int:
        return self.server._connections()[name]

    @property
    def active(self) -> int:
        return self.thread.service.health()["active"]

    def is_idle(self) -> bool:
        """No request, all blocks free on every worker."""
        health = self.thread.service.health()
        loads = [worker["load"] for worker in health["workers"] if worker["state"] == "ready"]
        return not health["active"] and not health["unsettled"] and not self.chat._running and bool(loads) and all(
            load is not None and load["free_blocks"] == load["total_blocks"] and not load["quarantined_blocks"]
            and not load["running"] and not load["waiting"]
            for load in loads
        )  # fmt: skip


@contextmanager
def http_rig(
    folder: Path, environment: dict[str, str] | None = None, gateway: dict[str, Any] | None = None, structured: bool = False,
    eos: int = EOS, **serving: Any,
) -> Iterator[HttpRig]:  # fmt: skip
    config, clock = replace(BASE, **serving), SystemClock()
    tokenizer = write_tokenizer(folder, eos)
    if structured:
        environment = {**(environment or {}), "CHAIN_GRAMMARS": str(folder)}
    thread = ServingThread(config, clock, chain_specs(config, environment))
    checker = GrammarChecker(folder, tokenizer.eos_token_ids, GrammarRules(cpu_s=5.0)) if structured else None
    chat = Chat([ServedModel(MODEL, tokenizer, thread.service, grammars=checker)], clock)
    server = HttpServer(chat, replace(GATEWAY, **(gateway or {})), clock)
    thread.start()
    try:
        thread.call(server.start())
        try:
            yield HttpRig(thread, chat, server, tokenizer)
        finally:
            thread.call(server.stop())
            thread.call(server.stop())
    finally:
        thread.stop()
        chat.close()
        if checker is not None:
            checker.close()


def body(question: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0, **fields}


def post(data: dict[str, Any] | bytes, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """The bytes of a request."""
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    lines = [
        f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(raw)}", *headers
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + raw


def read_all(sock: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        part = sock.recv(4096)
        assert part, received
        received += part
    return received
