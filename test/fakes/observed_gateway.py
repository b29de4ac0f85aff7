"""Everything that the metrics page and the status show, from the real classes, with something of each kind in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from vla_cloud.config import ContextConfig, ServingConfig
from vla_cloud.context.pooled_service import PooledContextService
from vla_cloud.core import life_events as life
from vla_cloud.core.robot_board import Shield
from vla_cloud.gateway.chat_types import ChatRequest, Done, TextDelta, Usage
from vla_cloud.gateway.metrics import GatewayMetrics
from vla_cloud.gateway.status import StatusSource
from vla_cloud.pools.messages import Load
from vla_cloud.pools.service import ServingService
from vla_cloud.pools.workers import WorkerInfo
from vla_common.clock import ManualClock
from vla_common.manifest import Camera, Context, Instruction, Manifest

NS, MS = 1_000_000_000, 1_000_000
MANIFEST = Manifest(
    name="tiny", joint_names=["j"], horizon=16, period_s=0.01, context=Context(3, 8), proprio_names=["j"],
    cameras=[Camera("external", 24, 24)], instruction=Instruction(["[pad]", "touch"], 8), files={}, licence="Apache-2.0",
    training_command="none",
)  # fmt: skip
NAUGHTY = '<img src=x onerror="document.title=1">\x1b[31m[bold]'
"""What a robot might say."""
LOAD = Load(
    total_blocks=100, free_blocks=40, quarantined_blocks=3, active_tokens=900, running=5, waiting=4, cached_blocks=30,
    reserved=2, to_push=1, preempted=1, leases=3, awaited_writers=1, preemptions=7, leases_expired=1, computed_tokens=600,
    cached_tokens=200, transfers=9, transfer_bytes=4096, transfer_s=0.5, transfer_failures={"late": 2, "checksum": 1},
)  # fmt: skip


class FixedWorkers:
    def __init__(self, *infos: WorkerInfo) -> None:
        self.rows = list(infos)

    def send(self, worker_id: str, message: object) -> bool:
        return False

    def infos(self) -> list[WorkerInfo]:
        return self.rows


class Observed:
    """``chat`` and ``robots`` are real services without processes; the clock is the test's."""

    def __init__(self, max_robots: int = 4) -> None:
        self.clock = ManualClock(100 * NS)
        self.chat = ServingService(ServingConfig(), self.clock)
        self.chat.attach(FixedWorkers(
            WorkerInfo("p0", "prefill", "ready", "p0.1", 11, 0, LOAD, role_switches=1),
            WorkerInfo("d0", "decode", "ready", "d0.2", 12, 1, LOAD),
            WorkerInfo("d1", "decode", "starting", "d1.1", 13, 0, None, "loading"),
        ))  # fmt: skip
        self.robots = PooledContextService(MANIFEST, lambda robot, payload: None, self.clock, ContextConfig(max_robots=max_robots))
        self.robots.attach(FixedWorkers(
            WorkerInfo("robots0", "robots", "ready", "robots0.1", 14, 0, None),
            WorkerInfo("robots1", "robots", "waiting", "robots1.3", 0, 2, None, "no answer"),
        ))  # fmt: skip
        self.metrics = GatewayMetrics(self.clock, lambda: {"small": self.chat.health()})
        self.metrics.robots = self.robots.status
        self.metrics.connections = lambda: {"open": 2, "opened": 5, "refused": 0}
        self.metrics.clients = lambda: {"unknown": 3, "tokens_per_minute": 1}
        self.source = StatusSource(self.metrics, lambda: {"small": self.chat.health()}, self.clock, lambda: True)

    def live_a_little(self) -> None:
        """Two robots, one of which stumbles, requests of every outcome, a retry and a refusal."""
        asyncio.run(self._ask())
        board = self.robots.board
        for step in range(30):
            self.clock.advance_ns(100 * MS)
            now_ns = self.clock.monotonic_ns()
            for name in ("arm1", "arm2"):
                board.observed(name, now_ns, replaced=name == "arm2" and step % 10 == 0)
                if name == "arm1" or step % 3 == 0:
                    board.answered(name, now_ns - 40 * MS, now_ns)
        board.told("arm1", Shield("NOMINAL", "following the policy", False, 0, 2, 0.0002, now_ns))
        board.told("arm2", Shield("HOLDING", NAUGHTY, True, 4, 0, 0.001, now_ns))
        self.robots._front.refuse("arm2", "unknown_word", "green")
        self.chat._meter.retried(life.Tick())
        self.chat._meter.placed(1)
        self.chat._meter.begun(0.2)
        self.metrics.ended("grpc", "refused", "RESOURCE_EXHAUSTED")
        self.metrics.ended("http", "failed", "UNAVAILABLE")

    async def _ask(self) -> None:
        async def answer(error: Exception | None = None) -> AsyncGenerator[TextDelta | Done, None]:
            self.clock.advance_ns(80 * MS)
            yield TextDelta("a", (1,))
            for _ in range(4):
                self.clock.advance_ns(20 * MS)
                yield TextDelta("b", (2,))
            if error is not None:
                raise error
            yield Done("stop", Usage(20, 5, 16))

        for number in range(3):
            events: Any = self.metrics.observed("http", ChatRequest(f"id{number}", ()), answer())
            assert len([event async for event in events]) == 6
