"""The pools that the serving benchmark compares, behind one supervisor; only those asked are at work at any time."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vla_cloud.config import RetryRules, ServingConfig, WorkerRules
from vla_cloud.pools import messages as wire
from vla_cloud.pools.service import ServingService
from vla_cloud.pools.supervisor import Supervisor
from vla_cloud.pools.worker_child import WorkerSpec
from vla_cloud.pools.worker_settings import worker_specs
from vla_common.clock import SystemClock

ROOT = Path(__file__).parents[2]
CORES = {"p0": 0, "d0": 1, "w0": 0, "w1": 1}
POOLS = {"disaggregated": ("p0", "d0"), "colocated x1": ("w0",), "colocated x2": ("w0", "w1")}
"""Workers of each pool. The colocated ones share w0: only one pool has work at any time."""

GATEWAY_CORE = {"disaggregated": 0, "colocated x1": 1, "colocated x2": 0}
"""Of this process, gateway and load generator. Beside P it does not touch the answers; the single worker has a core
to itself; with two workers there is no free core."""


class Fan:
    """Tells each pool of its own workers."""

    def __init__(self, services: dict[str, ServingService]) -> None:
        self._services = services

    def _of(self, worker_id: str) -> list[ServingService]:
        name = worker_id.partition(".")[0]
        return [self._services[pool] for pool, names in POOLS.items() if name in names]

    def worker_ready(self, worker_id: str, ready: wire.Ready | wire.LaneReady) -> None:
        for service in self._of(worker_id):
            service.worker_ready(worker_id, ready)

    def worker_message(self, worker_id: str, message: wire.ToGateway) -> None:
        for service in self._of(worker_id):
            service.worker_message(worker_id, message)

    def worker_draining(self, worker_id: str) -> None:
        for service in self._of(worker_id):
            service.worker_draining(worker_id)

    def worker_lost(self, worker_id: str, reason: str) -> None:
        for service in self._of(worker_id):
            service.worker_lost(worker_id, reason)

    def worker_dead(self, worker_id: str) -> None:
        for service in self._of(worker_id):
            service.worker_dead(worker_id)


@dataclass
class Rig:
    """Running pools."""

    services: dict[str, ServingService]
    supervisor: Supervisor
    folder: Path
    pinned: bool

    def use(self, pool: str) -> ServingService:
        """The pool's front door; this process moves to its core."""
        if self.pinned:
            os.sched_setaffinity(0, {GATEWAY_CORE[pool]})
        return self.services[pool]

    def layerwise_from(self, tokens: int | None) -> None:
        """P pushes layer by layer from so many tokens on; None: as configured."""
        path = self.folder / "layerwise"
        path.with_suffix(".new").write_text("" if tokens is None else str(tokens), encoding="ascii")
        path.with_suffix(".new").rename(path)

    def restarts(self) -> int:
        """Workers that died: a measurement with any is void."""
        return sum(info.restarts for info in self.supervisor.infos())


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the workers wrote, by worker; complete when they have ended."""
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text("ascii").splitlines()]
        for name in CORES if (folder / f"{name}.jsonl").exists()
    }  # fmt: skip


def _specs(config: ServingConfig, folder: Path, pinned: bool) -> list[WorkerSpec]:
    plain = worker_specs(replace(config, colocated=False)) + worker_specs(replace(config, colocated=True, workers=2))
    return [replace(spec, command=_command(spec), environment=_environment(spec, folder, pinned)) for spec in plain]


def _command(spec: WorkerSpec) -> Any:
    program = str(Path(__file__).with_name("worker.py"))

    def command(address: str, worker_id: str) -> Sequence[str]:
        return [sys.executable, program, *spec.command(address, worker_id)[3:]]  # in place of python -m module

    return command


def _environment(spec: WorkerSpec, folder: Path, pinned: bool) -> dict[str, str]:
    own = {
        "PYTHONPATH": str(ROOT), "BENCH_LOG": str(folder / f"{spec.name}.jsonl"), "VLA_LOG": "warning",
        "BENCH_CONTROL": str(folder / "layerwise"), "BENCH_CORE": str(CORES[spec.name]) if pinned else "",
    }  # fmt: skip
    return {**spec.environment, **own}


@asynccontextmanager
async def rig(model: str, transfer: str, chunk_tokens: int, blocks: int, folder: Path) -> AsyncIterator[Rig]:
    """All workers ready. Raises RuntimeError if one cannot be started."""
    config = ServingConfig(
        model=model, blocks=blocks, chunk_tokens=chunk_tokens, transfer=transfer, deadline_s=900.0, nice=0,
        retry=RetryRules(transfer_base_s=10.0), supervisor=WorkerRules(hang_s=120.0, stop_s=10.0, start_s=600.0),
    )  # fmt: skip
    pinned = {0, 1} <= os.sched_getaffinity(0)
    clock = SystemClock()
    services = {pool: ServingService(config, clock) for pool in POOLS}
    supervisor = Supervisor(_specs(config, folder, pinned), config.supervisor, clock, Fan(services))
    for service in services.values():
        service.attach(supervisor)
    await supervisor.start()
    try:
        if not await supervisor.wait_ready(config.supervisor.start_s):
            states = ", ".join(f"{info.name} {info.state} {info.detail}" for info in supervisor.infos())
            raise RuntimeError(f"not all workers are ready: {states}")
        yield Rig(services, supervisor, folder, pinned)
    finally:
        for service in services.values():
            service.close()
        await supervisor.stop()


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """For sockets, logs and the control file."""
    return tempfile.TemporaryDirectory(prefix="vla-bench-")
