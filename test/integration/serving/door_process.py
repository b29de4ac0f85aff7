"""A gateway process with all doors, as ``vla cloud`` opens them, over real workers with the hash-chain runner.

``python door_process.py SETTINGS``: a JSON object with ``folder`` (of the tokenizer), ``gateway``, ``grpc``, ``serving``
(changes of the rig's configurations), ``environment`` (of the workers) and ``zenoh`` (an endpoint, or ""). Prints the
ports, then answers each line on standard input with its state. Robots' contexts are zeros, from a lane of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from serving_rig import BASE, ROOT, Rig, rig

from vla_cloud.config import CloudConfig, ContextConfig, GatewayConfig
from vla_cloud.context.pooled_service import PooledContextService
from vla_cloud.core.admission import AdmissionConfig
from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.gateway.doors import Doors
from vla_cloud.gateway.settings import GrpcRules
from vla_cloud.pools import messages as wire
from vla_common import bus_config
from vla_common.clock import SystemClock
from vla_common.logging_setup import setup_logging
from vla_common.manifest import Manifest, load_manifest
from vla_common.process import end_with_parent, stop_on_signals
from vla_common.topics import ANY_ROBOT
from vla_common.zenoh_session import Publisher, open_bus


class ZeroLane:
    """The lane that a PooledContextService is told of: every context is zeros, at once."""

    def __init__(self, service: PooledContextService, manifest: Manifest) -> None:
        self._service, self._size = service, 4 * manifest.context.num_tokens * manifest.context.dim
        context = manifest.context
        ready = wire.LaneReady(
            version=wire.PROTOCOL_VERSION, worker="zero", pid=1, model=manifest.name, model_hash=manifest.model_hash,
            num_tokens=context.num_tokens, dim=context.dim,
        )  # fmt: skip
        service.attach(self)
        service.worker_ready("zero.1", ready)

    def send(self, worker_id: str, message: wire.ToWorker) -> bool:
        assert isinstance(message, wire.ContextBatch)
        rows = [wire.ContextAnswer(bytes(self._size)) for _ in message.rows]
        answer = wire.Contexts(message.number, rows, 0.0)
        asyncio.get_running_loop().call_soon(self._service.worker_message, worker_id, answer)
        return True

    def infos(self) -> list[Any]:
        return []


LEASE_MS = 30_000
"""On a busy machine this process may not run for the 400 ms after which a link counts as lost, with what is put on it."""


@contextlib.asynccontextmanager
async def robots(endpoint: str, stop: Any) -> Any:
    """The robots' side of the process; gives a function that tells its statistics."""
    if not endpoint:
        yield dict
        return
    manifest = load_manifest(ROOT / "models" / "tabletop")
    publishers: dict[str, Publisher] = {}
    config = ContextConfig(compute="lanes", deadline_s=5.0)
    bus_config.LEASE_MS = LEASE_MS
    with open_bus(endpoint, "router", node="vla_cloud") as bus:

        def publish(robot: str, payload: bytes) -> None:
            if robot not in publishers:
                publishers[robot] = bus.publisher("context", robot)
            publishers[robot].put(payload)

        service = PooledContextService(manifest, publish, SystemClock(), config)
        ZeroLane(service, manifest)
        source = bus.queue("observation", ANY_ROBOT, capacity=config.receive_queue)
        thread = threading.Thread(target=service.run, args=(source, stop, 3600.0))
        thread.start()

        def tell() -> dict[str, Any]:
            statistics = service.statistics
            return {
                "received": statistics.received, "published": statistics.published,
                "refused": statistics.refused.snapshot(),
            }  # fmt: skip

        try:
            yield tell
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)
            service.close()


def buffered(doors: Doors) -> int:
    """The most that is kept for one HTTP client."""
    connections = doors._doors[0]._server.server_state.connections
    return max((one.transport.get_write_buffer_size() for one in connections), default=0)


class Watch:
    """What is soon over and must not be missed, since the last time it was asked for.

    ``late_s``: how late the loop's callbacks came, the longest pause that something made. ``buffered``: the most that
    was kept for one HTTP client.
    """

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._late_s, self._buffered = 0.0, 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + 0.01
            await asyncio.sleep(0.01)
            self._late_s = max(self._late_s, loop.time() - due_s)
            self._buffered = max(self._buffered, buffered(self._doors))

    def take(self) -> dict[str, Any]:
        late_s, most = self._late_s, max(self._buffered, buffered(self._doors))
        self._late_s, self._buffered = 0.0, 0
        return {"late_s": late_s, "most_buffered": most}


def state(it: Rig, doors: Doors, watch: Watch, tell: Any) -> dict[str, Any]:
    """What a test compares."""
    health = it.service.health()
    http = doors._doors[0]
    connections = list(http._server.server_state.connections)
    metrics = http.metrics
    loads = [worker["load"] for worker in health["workers"] if worker["load"] is not None]
    return {
        **{name: health[name] for name in ("active", "queued", "unsettled", "served", "failed", "refused")},
        "running": len(doors.chat._running),
        "free": sum(load["free_blocks"] for load in loads),
        "total": sum(load["total_blocks"] for load in loads),
        "busy": sum(load["running"] + load["waiting"] + load["quarantined_blocks"] for load in loads),
        "connections": dict(metrics.connections()),
        "buffered": buffered(doors),
        "paused": sum(one.is_paused for one in connections),
        "ends": {" ".join(key): count for key, count in metrics._ends.items()},
        "tasks": len(asyncio.all_tasks()),
        **watch.take(),
        "pids": [worker["pid"] for worker in health["workers"]],
        "robots": tell(),
    }


async def go(settings: dict[str, Any]) -> None:
    stop, robots_stop = stop_on_signals(grace_s=15.0), threading.Event()
    admission = replace(AdmissionConfig(), **settings["serving"].pop("admission", {}))
    serving = replace(BASE, admission=admission, **settings["serving"])
    gateway = GatewayConfig(
        http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", control_listen="", drain_s=0.0,
        grpc=GrpcRules(**settings["grpc"]), **settings["gateway"],
    )  # fmt: skip
    async with rig(serving, settings["environment"]) as it, robots(settings["zenoh"], robots_stop) as tell:
        config = CloudConfig(serving=serving, gateway=gateway)
        doors = Doors(config, ChatTokenizer(Path(settings["folder"])), it.service, SystemClock())
        await doors.start()
        watch = Watch(doors)
        watching = asyncio.create_task(watch.run())
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print(json.dumps([doors._doors[0].address[1], doors._doors[1].port]), flush=True)
        while not stop.is_set() and await reader.readline():
            print(json.dumps(state(it, doors, watch, tell)), flush=True)
        watching.cancel()
        await doors.stop()


if __name__ == "__main__":
    end_with_parent()
    setup_logging("gateway", "warning")
    asyncio.run(go(json.loads(sys.argv[1])))
