"""What tracing costs: the same work with tracing off and with every request traced, in turns; CPU time of the process.

    python benchmarks/tracing_overhead.py [--rounds 20] [--json runs/bench/tracing_overhead.json]

Models that compute nothing stand in for the real ones, so that what is left is the runtime's own time, which tracing
is a part of: with a model the ratios are nearer to 1. Spans go to files, as they would, by a thread that counts too.

    decode  one worker's engine, 16 answers under way: microseconds of a step (messages, scheduler, commit, events)
    http    the HTTP door, the chat layer and the gateway's service, an answer of 64 tokens: milliseconds of a request
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_cloud.config import GatewayConfig, ServingConfig
from vla_cloud.core.generate import SamplingParams
from vla_cloud.core.step_plan import Role, SchedulerConfig
from vla_cloud.engine.runner import Batch, OnLayer, Sampled
from vla_cloud.engine.traced_engine import TracedEngine
from vla_cloud.engine.worker_engine import EngineConfig, WorkerEngine
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.http_server import HttpServer
from vla_cloud.kv_transfer.layout import KvLayout
from vla_cloud.pools import messages as wire
from vla_cloud.pools.codec import pack_tokens
from vla_cloud.pools.service import ServingService
from vla_cloud.pools.workers import WorkerInfo
from vla_common.clock import SystemClock
from vla_common.span_queue import tracing
from vla_common.tracing import Tracer, TracingConfig, trace_id

CLOCK = SystemClock()
ROWS, STEPS = 16, 200
LAYOUT = KvLayout("none", "none", layers=1, kv_heads=1, head_dim=4)
TOKENS, REQUESTS = 64, 20
BODY = json.dumps({
    "model": "none", "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS, "stream": True
}).encode()  # fmt: skip
HEAD = "\r\n".join([
    "POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json",
    f"content-length: {len(BODY)}", "", "",
]).encode()  # fmt: skip


class Nothing:
    """A ModelRunner that computes nothing."""

    layout, max_model_len, vocab_size = LAYOUT, 4096, 1000

    def __init__(self) -> None:
        self.kv = np.zeros((1, 1024, LAYOUT.piece_bytes), np.uint8)

    def run(self, batch: Batch, on_layer: OnLayer | None = None) -> list[Sampled]:
        return [Sampled(one.request_id, 1) for one in (*batch.prefill, *batch.decode) if one.sampling is not None]


def decode_us(tracer: Tracer | None) -> float:
    """Microseconds of a step with ROWS decode rows."""
    engine: Any = WorkerEngine(
        Nothing(), EngineConfig(SchedulerConfig(Role.BOTH, 4096, max_running=ROWS, chunk_tokens=512)), CLOCK
    )
    if tracer is not None:
        engine = TracedEngine(engine, tracer, CLOCK)
    sampling = SamplingParams(max_new_tokens=STEPS + 50, seed=1)
    for i in range(ROWS):
        trace = b"" if tracer is None else trace_id("bench", i, CLOCK.monotonic_ns())
        engine.handle(wire.Generate(f"r{i}", 0, wire.Work(pack_tokens([i + 2] * 20), sampling, 1000.0, trace=trace)))
    for _ in range(20):
        engine.step()
        engine.events()
    begin_s, rows = time.process_time(), 0
    for _ in range(STEPS):
        engine.step()
        rows += sum(len(event.rows) for event in engine.events() if isinstance(event, wire.Tokens))
    took_s = time.process_time() - begin_s
    assert rows > 0.9 * ROWS * STEPS / 2
    return took_s / (rows / ROWS) * 1e6


class Pool:
    """A worker that answers at once, a message for each token."""

    def __init__(self, service: ServingService) -> None:
        self.service = service
        service.attach(self)
        service.worker_ready("w0.1", wire.Ready(1, "w0.1", "both", 1, 7, "", LAYOUT, 1024, 4096, 1000, 64, 64))

    def send(self, worker_id: str, message: wire.ToWorker) -> bool:
        if isinstance(message, wire.Generate):
            asyncio.get_running_loop().call_soon(self._answer, message, len(message.work.prompt) // 4, 0)
        return True

    def _answer(self, message: wire.Generate, prompt: int, count: int) -> None:
        loop = asyncio.get_running_loop()
        if count < TOKENS:
            row = wire.TokenRow(message.request_id, 0, prompt + count, [5])
            self.service.worker_message("w0.1", wire.Tokens([row]))
            loop.call_soon(self._answer, message, prompt, count + 1)
        else:
            self.service.worker_message("w0.1", wire.Finished(message.request_id, 0, "length", TOKENS))

    def infos(self) -> list[WorkerInfo]:
        return []


class Words:
    """A tokenizer of one word."""

    eos_token_ids: frozenset[int] = frozenset()

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [3] * 20

    def decode(self, tokens: Sequence[int]) -> str:
        return "word " * len(tokens)

    def stream(self, prompt: Sequence[int] = ()) -> Any:
        return type("Stream", (), {"push": lambda _, token: "word ", "finish": lambda _: ""})()


@contextlib.contextmanager
def door(tracer: Tracer | None) -> Iterator[Callable[[], float]]:
    """A gateway; call it for the milliseconds of a request, the mean of REQUESTS on one connection."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def make() -> tuple[ServingService, Chat, HttpServer]:
        service = ServingService(ServingConfig(model="none"), CLOCK)
        Pool(service)
        chat = Chat([ServedModel("none", Words(), service)], CLOCK, tracer=tracer)
        server = HttpServer(chat, GatewayConfig(http_listen="127.0.0.1:0", drain_s=0.0), CLOCK)
        await server.start()
        return service, chat, server

    async def close() -> None:
        await server.stop()
        service.close()

    async def ask() -> float:
        # In the same loop: between threads of one process, each token would wait for the interpreter's lock.
        reader, writer = await asyncio.open_connection(*server.address)
        begin_s = time.process_time()
        for _ in range(REQUESTS):
            writer.write(HEAD + BODY)
            told = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert told.count(b"word") == TOKENS, told[-200:]
        took_s = time.process_time() - begin_s
        writer.close()
        await writer.wait_closed()
        return took_s / REQUESTS * 1e3

    service, chat, server = call(make())
    try:
        yield lambda: float(call(ask()))
    finally:
        call(close())
        chat.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def in_turns(rounds: int, off: Callable[[], float], on: Callable[[], float]) -> dict[str, float]:
    """Medians of both, and the median of the ratio within a round."""
    off(), on()
    pairs = []
    for number in range(rounds):
        if number % 2:
            second, first = on(), off()
        else:
            first, second = off(), on()
        pairs.append((first, second))
    ratio = statistics.median(after / before for before, after in pairs)
    return {"off": statistics.median(a for a, _ in pairs), "on": statistics.median(b for _, b in pairs), "ratio": ratio}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        config = TracingConfig(sample=1.0, folder=folder)
        with tracing(config, "vla-bench", "on", CLOCK) as tracer:
            found["decode, us a step of 16 rows"] = in_turns(
                options.rounds, lambda: decode_us(None), lambda: decode_us(tracer)
            )  # fmt: skip
            with door(None) as off, door(tracer) as on:
                found["http, ms a request of 64 tokens"] = in_turns(options.rounds, off, on)
    for name, row in found.items():
        print(f"{name:34} off {row['off']:9.3f}   sample 1.0 {row['on']:9.3f}   ratio {row['ratio']:.3f}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
