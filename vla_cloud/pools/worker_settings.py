"""What the gateway tells its worker processes on their command lines. Imports nothing of the engine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field

from vla_cloud.config import RetryRules, ServingConfig
from vla_cloud.pools.worker_child import WorkerSpec
from vla_common.tracing import TracingConfig


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told on its command line; see ``serving`` in config/cloud.yaml."""

    role: str
    model: str
    context_tokens: int | None
    transfer: str
    blocks: int
    chunk_tokens: int
    max_running: int
    max_waiting: int
    threads: int
    nice: int = 0
    host_swap_blocks: int = 0
    transfer_base_s: float = RetryRules.transfer_base_s
    tracing: TracingConfig = field(default_factory=TracingConfig)


def worker_specs(
    config: ServingConfig, module: str = "vla_cloud.pools.worker_main", tracing: TracingConfig | None = None
) -> list[WorkerSpec]:  # fmt: skip
    """The workers of a configuration; ``module`` is their program."""

    def spec(name: str, role: str) -> WorkerSpec:
        settings = WorkerSettings(
            role, config.model, config.context_tokens, config.transfer, config.blocks, config.chunk_tokens,
            config.max_running, config.max_waiting, config.threads, config.nice,
            host_swap_blocks=config.host_swap_blocks, transfer_base_s=config.retry.transfer_base_s,
            tracing=tracing or TracingConfig(),
        )  # fmt: skip
        text = json.dumps(asdict(settings))

        def command(address: str, worker_id: str) -> list[str]:
            return [sys.executable, "-m", module, "--connect", address, "--worker", worker_id, "--settings", text]

        threads = str(config.threads)
        return WorkerSpec(name, role, command, {"OMP_NUM_THREADS": threads, "UCX_TLS": "tcp,cma,self"})

    return [spec(name, role) for name, role in config.roles.items()]
