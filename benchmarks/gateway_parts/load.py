"""The load generator: a process that reads orders, one JSON object a line, and answers each with one.

{"open": {"kind": "http", "ports": [8000]}, "phase": {...}}    connects                 -> {}
{"go": true}                                                   measures, disconnects    -> what came of it
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from gateway_parts.phases import Phase, Took


class Crowd(Protocol):
    """Clients of one kind of door."""

    async def open(self, phase: Phase) -> None: ...

    async def go(self, phase: Phase) -> Took: ...

    async def close(self) -> None: ...


async def obey(crowd_of: Callable[[dict[str, Any]], Crowd]) -> None:
    """Until standard input ends."""
    crowd: Crowd | None = None
    phase: Phase | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        try:
            if "open" in order:
                crowd, phase = crowd_of(order["open"]), Phase(**order["phase"])
                await crowd.open(phase)
                answer: dict[str, Any] = {}
            else:
                assert crowd is not None and phase is not None
                before_s = time.process_time()
                took = await crowd.go(phase)
                answer = {**took.plain(), "cpu_s": time.process_time() - before_s}
                await crowd.close()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            if crowd is not None:
                await crowd.close()
        print(json.dumps(answer), flush=True)


def crowd_of(order: dict[str, Any]) -> Crowd:
    if order["kind"] == "http":
        from gateway_parts.http_client import HttpCrowd

        return HttpCrowd(order["ports"])
    from gateway_parts.grpc_client import GrpcCrowd

    return GrpcCrowd(order["ports"])


if __name__ == "__main__":
    asyncio.run(obey(crowd_of))
