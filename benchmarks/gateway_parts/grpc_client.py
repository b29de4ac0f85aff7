"""The same questions over gRPC."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio

from gateway_parts.phases import SYSTEM, Phase, Questions, Took
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc

_OWN = [("grpc.use_local_subchannel_pool", 1)]


class GrpcCrowd:
    """All clients of a phase, each on a channel of its own."""

    def __init__(self, ports: list[int]) -> None:
        self._port, self._questions = ports[0], Questions()
        self._channels: list[grpc.aio.Channel] = []

    async def open(self, phase: Phase) -> None:
        """Connect, and ask something once."""
        for _ in range(phase.clients):
            self._channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options=_OWN))
        await self._ask(Phase(phase.clients, 1, phase.stream, 0, 0.0), Took())

    async def go(self, phase: Phase) -> Took:
        """The phase."""
        took = Took()
        await self._ask(phase, took)
        return took

    async def close(self) -> None:
        """Disconnect."""
        await asyncio.gather(*(channel.close() for channel in self._channels))
        self._channels.clear()

    async def _ask(self, phase: Phase, took: Took) -> None:
        took.begin(phase)
        await asyncio.gather(*(self._client(pb_grpc.ChatStub(channel), phase, took) for channel in self._channels))

    async def _client(self, stub: Any, phase: Phase, took: Took) -> None:
        while True:
            message = _question(self._questions.next(), phase)
            begin_ns, tokens = time.monotonic_ns(), 0
            if phase.stream:
                async for chunk in stub.GenerateStream(message):
                    if chunk.delta.tokens:
                        took.words(list(chunk.delta.tokens), time.monotonic_ns())
                        tokens += len(chunk.delta.tokens)
            else:
                tokens = len((await stub.Generate(message)).tokens)
            took.answered(begin_ns, tokens, phase)
            if took.is_over:
                return


def _question(text: str, phase: Phase) -> pb.GenerateRequest:
    messages = [
        pb.Message(role=role, parts=[pb.Part(text=said)]) for role, said in (("system", SYSTEM), ("user", text))
    ]
    sampling = pb.Sampling(max_tokens=phase.tokens, temperature=0.0, seed=phase.pace_ms)
    return pb.GenerateRequest(messages=messages, sampling=sampling)
