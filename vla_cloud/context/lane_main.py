"""Composition root of a robot lane's process. Started by the supervisor; its priority stays ordinary."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import signal
import sys
from collections.abc import Sequence

import torch

from vla_cloud.context.lane import RobotLane
from vla_cloud.context.lane_settings import LaneSettings
from vla_cloud.context.runner import ContextRunner
from vla_cloud.context.traced_lane import TracedLane
from vla_cloud.pools.link import LinkClosed
from vla_cloud.pools.supervisor import EXIT_PERMANENT
from vla_cloud.pools.worker_process import connect, serve
from vla_common.clock import SystemClock
from vla_common.config import ConfigError, from_mapping
from vla_common.logging_setup import setup_logging
from vla_common.process import StopFlag, end_with_parent, stop_on_signals
from vla_common.span_queue import tracing
from vla_models.model_folder import load_vlm

LOG = logging.getLogger(__name__)

EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, EXIT_FAILED, or EXIT_PERMANENT (it would fail the same way again)."""
    stop = stop_on_signals()
    end_with_parent(signal_number=signal.SIGKILL)  # as a chat worker does
    parser = argparse.ArgumentParser(prog="vla cloud: robot lane", description="Started by 'vla cloud', not by hand.")
    for name in ("--connect", "--worker", "--settings"):
        parser.add_argument(name, required=True)
    options = parser.parse_args(argv)
    setup_logging(options.worker)
    try:
        settings = from_mapping(LaneSettings, json.loads(options.settings))
        _run(options.connect, options.worker, settings, stop)
    except (ConfigError, ValueError, ImportError, FileNotFoundError) as error:  # ManifestError is a ValueError
        LOG.error("%s", error)
        return EXIT_PERMANENT
    except (LinkClosed, OSError, RuntimeError) as error:
        LOG.error("%s: %s", type(error).__name__, error)
        return EXIT_FAILED
    return 0


def _run(address: str, worker: str, settings: LaneSettings, stop: StopFlag) -> None:
    torch.set_num_threads(settings.threads)
    vlm, manifest = load_vlm(settings.model)
    runner = ContextRunner(
        vlm, manifest, prefix_cache_tokens=settings.prefix_cache_tokens, max_image_bytes=settings.max_image_bytes,
        image_cache=settings.image_cache,
    )  # fmt: skip
    for batch_size in {1, settings.max_batch}:
        runner.warm_up(batch_size)
    clock = SystemClock()
    lane = RobotLane(runner, manifest, clock)
    gc.collect()
    gc.freeze()  # the model's objects stay: the collector need not walk them
    link = connect(address, worker)
    try:
        with tracing(settings.tracing, "vla-lane", worker, clock) as tracer:
            serve(link, lane if tracer is None else TracedLane(lane, tracer, clock), stop)
    finally:
        link.close()


if __name__ == "__main__":
    sys.exit(main())
