"""Composition root of the cloud: one process that hosts the Zenoh router and serves context tokens."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from vla_cloud.config import CloudConfig
from vla_cloud.context.runner import ContextRunner
from vla_cloud.context.service import ContextService, Publish
from vla_common.clock import SystemClock
from vla_common.config import ConfigError, load_config
from vla_common.logging_setup import setup_logging
from vla_common.manifest import Manifest, ManifestError
from vla_common.process import StopFlag, end_with_parent, stop_on_signals
from vla_common.topics import ANY_ROBOT
from vla_common.zenoh_session import Bus, BusError, Publisher, check_endpoint, open_bus
from vla_models.model_folder import load_vlm
from vla_models.vlm import Vlm

LOG = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_USAGE = 2


def parser() -> argparse.ArgumentParser:
    """Arguments of ``vla cloud``."""
    result = argparse.ArgumentParser(prog="vla cloud", description=__doc__)
    result.add_argument("--config", type=Path, help="YAML file, such as config/cloud.yaml; default: built-in values")
    result.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one value")
    result.add_argument("--listen", help="Zenoh endpoint to host, such as tcp/127.0.0.1:7448")
    result.add_argument("--model", type=Path, help="model folder, such as models/tabletop")
    result.add_argument("--threads", type=int, help="threads of torch")
    result.add_argument(
        "--allow-non-loopback",
        action="store_true",
        default=None,
        help="listen on an address that other machines reach; the link is neither encrypted nor authenticated",
    )
    return result


def read_config(arguments: argparse.Namespace) -> CloudConfig:
    """File, then ``--set``, then the other flags."""
    config = load_config(CloudConfig, arguments.config, arguments.set)
    flags = {name: getattr(arguments, name) for name in ("listen", "model", "threads", "allow_non_loopback")}
    try:
        return dataclasses.replace(config, **{name: value for name, value in flags.items() if value is not None})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit status is 2 for a configuration that cannot serve."""
    end_with_parent()
    arguments = parser().parse_args(argv)
    try:
        setup_logging("cloud")
        config = read_config(arguments)
        _check_listen(config)
        # Before the slow part, so that an interrupted start ends cleanly too.
        stop = stop_on_signals()
        vlm, manifest = load_vlm(config.model)
        with open_bus(
            config.listen, "router", node="vla_cloud", domain=config.domain, allow_remote=config.allow_non_loopback
        ) as bus:
            serve(config, vlm, manifest, bus, stop)
    except (ConfigError, ManifestError, BusError, ValueError) as error:
        print(f"vla cloud: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def serve(config: CloudConfig, vlm: Vlm, manifest: Manifest, bus: Bus, stop: StopFlag) -> None:
    """Wires runner, service and bus, prints READY, and serves until ``stop``."""
    torch.set_num_threads(config.threads)
    context = config.context
    runner = ContextRunner(
        vlm, manifest, prefix_cache_tokens=context.prefix_cache_tokens, max_image_bytes=context.max_image_bytes
    )
    runner.warm_up(1)
    service = ContextService(runner, manifest, _publisher(bus), SystemClock(), context)
    source = bus.queue("observation", ANY_ROBOT, capacity=context.receive_queue)
    # What was imported and loaded stays: the collector need not walk it, now and above all at exit (0.4 s with torch).
    gc.freeze()
    print(f"READY {config.listen} model {manifest.name}", flush=True)
    service.run(source, stop, config.log_period_s)
    LOG.info("stopping; %s", service.report())


def _publisher(bus: Bus) -> Publish:
    publishers: dict[str, Publisher] = {}

    def publish(robot: str, payload: bytes) -> None:
        if robot not in publishers:
            publishers[robot] = bus.publisher("context", robot)
        publishers[robot].put(payload)

    return publish


def _check_listen(config: CloudConfig) -> None:
    try:
        check_endpoint(config.listen, config.allow_non_loopback)
    except BusError as error:
        raise BusError(f"{error} (--allow-non-loopback)") from error


if __name__ == "__main__":
    sys.exit(main())
