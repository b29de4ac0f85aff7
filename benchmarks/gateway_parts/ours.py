"""Our gateway in a process of its own, over workers without a model; a load generator for what is behind its doors.

Prints the ports of its doors and the process ids of its workers. The orders of load.py drive the serving engine in this
process, without a door, a tokenizer or a client.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway_parts.load import obey
from gateway_parts.phases import SYSTEM, Phase, Questions, Took
from gateway_parts.stamps import WORDS, write_tokenizer
from vla_cloud.config import CloudConfig, GatewayConfig, ServingConfig
from vla_cloud.core.generate import GenerateRequest, SamplingParams
from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.gateway.doors import Doors
from vla_cloud.pools.events import TokenEvent
from vla_cloud.pools.service import ServingService
from vla_cloud.pools.serving_thread import ServingThread
from vla_cloud.pools.worker_child import WorkerSpec
from vla_cloud.pools.worker_settings import worker_specs
from vla_common.clock import SystemClock
from vla_common.process import end_with_parent

PROGRAM = Path(__file__).with_name("stamp_worker.py")
CONFIG = CloudConfig(
    serving=ServingConfig(model="bench", colocated=True, workers=2, max_running=64, nice=0),
    gateway=GatewayConfig(http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", model_name="bench", drain_s=0.0),
)


class DirectCrowd:
    """Clients that call the service in its own event loop."""

    def __init__(self, service: ServingService, tokenizer: ChatTokenizer) -> None:
        self._service, self._questions, self._number = service, Questions(), 0
        first = self._questions.next()
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": first}]
        self._prompt = tuple(tokenizer.chat(messages))

    async def open(self, phase: Phase) -> None:
        """Ask something once."""
        await self._ask(Phase(phase.clients, 1, phase.stream, 0, 0.0), Took())

    async def go(self, phase: Phase) -> Took:
        """The phase."""
        took = Took()
        await self._ask(phase, took)
        return took

    async def close(self) -> None:
        """Nothing is open."""

    async def _ask(self, phase: Phase, took: Took) -> None:
        took.begin(phase)
        await asyncio.gather(*(self._client(phase, took) for _ in range(phase.clients)))

    async def _client(self, phase: Phase, took: Took) -> None:
        while True:
            self._number += 1
            prompt = (*self._prompt[:-4], *((self._number >> 8 * i) % 256 + WORDS for i in range(4)))
            sampling = SamplingParams(max_new_tokens=phase.tokens, seed=phase.pace_ms)
            begin_ns, tokens = time.monotonic_ns(), 0
            async for event in self._service.generate(GenerateRequest(f"direct{begin_ns}", prompt, sampling)):
                if isinstance(event, TokenEvent):
                    tokens += len(event.tokens)
                    if phase.stream:
                        took.words(list(event.tokens), time.monotonic_ns())
            took.answered(begin_ns, tokens, phase)
            if took.is_over:
                return


def specs(config: ServingConfig) -> list[WorkerSpec]:
    """The configured workers with this benchmark's program."""

    def changed(index: int, spec: WorkerSpec) -> WorkerSpec:
        def command(address: str, worker_id: str) -> list[str]:
            return [sys.executable, str(PROGRAM), *spec.command(address, worker_id)[3:]]  # for python -m module

        own = {
            "BENCH_PHASE": str(index / len(config.roles)), "VLA_LOG": "warning", "PYTHONPATH": os.environ["PYTHONPATH"],
        }  # fmt: skip
        return replace(spec, command=command, environment={**spec.environment, **own})

    return [changed(index, spec) for index, spec in enumerate(worker_specs(config))]


def main() -> int:
    end_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the tokenizer")
    parser.add_argument("--profile", type=Path, help="write what cProfile sees of the event loop")
    args = parser.parse_args()
    write_tokenizer(args.folder)
    tokenizer, clock = ChatTokenizer(args.folder), SystemClock()
    thread = ServingThread(CONFIG.serving, clock, specs(CONFIG.serving))
    doors = Doors(CONFIG, tokenizer, thread.service, clock)
    thread.start()
    thread.call(doors.start())
    gc.freeze()  # as the cloud process does
    try:
        http, grpc = doors._doors
        ports: dict[str, Any] = {"http": http.address[1], "grpc": grpc.port}  # type: ignore[attr-defined]
        ports["workers"] = [info.pid for info in thread.supervisor.infos()]
        print(json.dumps(ports), flush=True)
        profiler = thread.call(_profile()) if args.profile else None
        thread.call(obey(lambda order: DirectCrowd(thread.service, tokenizer)))
        if profiler is not None:
            thread.call(_write(profiler, args.profile))
    finally:
        thread.call(doors.stop())
        thread.stop()
    return 0


async def _profile() -> Any:
    import cProfile

    profiler = cProfile.Profile()
    profiler.enable()
    return profiler


async def _write(profiler: Any, path: Path) -> None:
    profiler.disable()
    profiler.dump_stats(path)


if __name__ == "__main__":
    sys.exit(main())
