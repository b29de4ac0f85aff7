"""What the gateway tells its robot lanes on their command lines. Imports no model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field

from vla_cloud.config import CloudConfig
from vla_cloud.pools.worker_child import WorkerSpec
from vla_common.tracing import TracingConfig


@dataclass(frozen=True)
class LaneSettings:
    """What a lane is told; see ``context`` in config/cloud.yaml."""

    model: str
    threads: int
    max_batch: int
    max_image_bytes: int
    prefix_cache_tokens: int
    image_cache: int
    tracing: TracingConfig = field(default_factory=TracingConfig)


def lane_specs(config: CloudConfig, module: str = "vla_cloud.context.lane_main") -> list[WorkerSpec]:
    """The lanes of a configuration; ``module`` is their program."""
    context = config.context
    settings = LaneSettings(
        str(config.model), config.threads, context.max_batch, context.max_image_bytes, context.prefix_cache_tokens,
        context.image_cache, config.tracing,
    )  # fmt: skip
    text = json.dumps(asdict(settings))

    def command(address: str, worker_id: str) -> list[str]:
        return [sys.executable, "-m", module, "--connect", address, "--worker", worker_id, "--settings", text]

    environment = {"OMP_NUM_THREADS": str(config.threads)}
    return [WorkerSpec(f"robots{i}", "robots", command, environment) for i in range(config.num_lanes)]
