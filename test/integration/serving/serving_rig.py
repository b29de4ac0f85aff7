"""A gateway with real worker processes over the hash-chain runner, in the test's event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from vla_cloud.config import RetryRules, ServingConfig, WorkerRules
from vla_cloud.core.admission import AdmissionConfig
from vla_cloud.core.generate import GenerateRequest, SamplingParams
from vla_cloud.pools import messages as wire
from vla_cloud.pools.events import Finished, TokenEvent
from vla_cloud.pools.service import ServingService
from vla_cloud.pools.supervisor import Supervisor
from vla_cloud.pools.worker_child import WorkerSpec
from vla_cloud.pools.worker_settings import worker_specs
from vla_common.clock import SystemClock
from vla_common.tracing import TracingConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "test" / "fakes"))
from kv_chain_runner import reference  # noqa: E402, F401

RULES = WorkerRules(heartbeat_s=0.1, hang_s=60.0, start_s=120.0, stop_s=2.0, backoff_min_s=0.05, backoff_max_s=0.4)
BASE = ServingConfig(
    model="chain", colocated=False, blocks=128, chunk_tokens=64, max_running=16, deadline_s=120.0, nice=0,
    retry=RetryRules(transfer_base_s=10.0, capacity_wait_s=60.0), supervisor=RULES,
)  # fmt: skip
SLOW_PREFILL = {"CHAIN_TOKEN_S": "0.008"}
SLOW_STEP = {"CHAIN_STEP_S": "0.05"}
SLOW = {"p0": SLOW_PREFILL, "p1": SLOW_PREFILL, "d0": SLOW_STEP, "d1": SLOW_STEP}
PROMPT = list(range(1, 201))


class Rig:
    def __init__(self, service: ServingService, supervisor: Supervisor) -> None:
        self.service, self.supervisor = service, supervisor
        self.clock = SystemClock()

    async def ask(
        self, tokens: list[int], count: int = 8, request_id: str = "r", on_event: Callable[[int], None] | None = None,
        **kwargs: object,
    ) -> tuple[list[int], Finished]:  # fmt: skip
        """All tokens and the end; ``on_event(tokens so far)`` after each event."""
        got: list[int] = []
        params = SamplingParams(max_new_tokens=count)
        async for event in self.service.generate(GenerateRequest(request_id, tuple(tokens), params, **kwargs)):
            if isinstance(event, TokenEvent):
                got.extend(event.tokens)
            if on_event is not None:
                on_event(len(got))
            if isinstance(event, Finished):
                return got, event
        raise AssertionError("a silent end")

    def pid(self, name: str) -> int:
        return next(info.pid for info in self.supervisor.infos() if info.name == name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    def state(self, name: str) -> str:
        return next(info.state for info in self.supervisor.infos() if info.name == name)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        for _ in range(round(timeout_s / 0.01)):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"not within {timeout_s} s; {self.service.health()}")

    async def baseline(self) -> None:
        """All blocks are back on every worker, and nothing is unsettled."""

        def is_back() -> bool:
            loads = [info.load for info in self.supervisor.infos()]
            return not self.service.health()["unsettled"] and all(
                load is not None and load.free_blocks == load.total_blocks and not load.quarantined_blocks
                and not load.running and not load.waiting
                for load in loads
            )  # fmt: skip

        await self.until(is_back)


def chain_specs(
    config: ServingConfig, environment: dict[str, str] | None = None, per_worker: dict[str, dict[str, str]] | None = None,
    tracing: TracingConfig | None = None,
) -> list[WorkerSpec]:
    """The workers of a configuration over the hash-chain runner."""
    return [
        replace(
            spec, command=_command(spec.command),
            environment={
                **spec.environment, "PYTHONPATH": str(ROOT), "VLA_LOG": "error", **(environment or {}),
                **(per_worker or {}).get(spec.name, {}),
            },
        )
        for spec in worker_specs(config, tracing=tracing)
    ]  # fmt: skip


@asynccontextmanager
async def rig(
    config: ServingConfig = BASE, environment: dict[str, str] | None = None, per_worker: dict[str, dict[str, str]] | None = None,
    wait: bool = True, **changes: object,
) -> AsyncIterator[Rig]:  # fmt: skip
    config = replace(config, **changes)
    clock = SystemClock()
    service = ServingService(config, clock)
    supervisor = Supervisor(chain_specs(config, environment, per_worker), config.supervisor, clock, service)
    service.attach(supervisor)
    await supervisor.start()
    try:
        if wait:
            assert await supervisor.wait_ready(120.0), supervisor.infos()
        yield Rig(service, supervisor)
    finally:
        service.close()
        await supervisor.stop()


def _command(command: Callable[[str, str], list[str]]) -> Callable[[str, str], list[str]]:
    """The test's program in place of ``-m module``."""
    return lambda address, worker: [sys.executable, str(HERE / "chain_worker.py"), *command(address, worker)[3:]]


def few(**changes: object) -> AdmissionConfig:
    return replace(AdmissionConfig(max_active=2, max_queued=2), **changes)


def prompt(seed: int, length: int = 100) -> list[int]:
    return [(seed * 7919 + i * 31) % 997 for i in range(length)]


def chosen(it: Rig, kind: str) -> str:
    """Name of the worker that has the only request."""
    work = next(iter(it.service._by_id.values())).life._work
    return (work.prefill if kind == "prefill" else work.decode).partition(".")[0]


def stage(it: Rig) -> str:
    """Of the only request."""
    lives = list(it.service._by_id.values())
    return lives[0].life.stage.value if lives else ""


def sent(it: Rig) -> list[wire.ToWorker]:
    """Record every later message to workers."""
    messages: list[wire.ToWorker] = []
    send = it.supervisor.send

    def record(worker: str, message: wire.ToWorker) -> bool:
        messages.append(message)
        return send(worker, message)

    it.supervisor.send = record  # type: ignore[method-assign]
    return messages
