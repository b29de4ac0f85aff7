"""Composition root of the cloud: hosts the Zenoh router, serves context tokens, runs the workers of the chat engine."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_cloud.config import CloudConfig
from vla_cloud.context.context_trace import ContextTrace
from vla_cloud.context.front import Publish
from vla_cloud.context.shield_reports import ShieldReports
from vla_cloud.link_security import link_settings, warn_of_open_doors
from vla_cloud.pools.serving_thread import PoolThread, ServingError, ServingThread, StartInterrupted
from vla_cloud.pools.worker_settings import worker_specs
from vla_common.clock import SystemClock
from vla_common.config import ConfigError, load_config
from vla_common.logging_setup import add_log_argument, setup_logging
from vla_common.manifest import Manifest, ManifestError, load_manifest
from vla_common.process import StopFlag, end_with_parent, stop_on_signals
from vla_common.span_queue import tracing
from vla_common.topics import ANY_ROBOT
from vla_common.tracing import Tracer
from vla_common.zenoh_session import Bus, BusError, Publisher, open_bus

if TYPE_CHECKING:
    from vla_cloud.context.pooled_service import PooledContextService
    from vla_cloud.context.service import ContextService
    from vla_cloud.gateway.doors import Doors
    from vla_cloud.pools.service import ServingService

LOG = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_USAGE = 2
_GRACE_S = 2.0
_DOORS_S = 3.0  # to close, after the drain


def parser() -> argparse.ArgumentParser:
    """Arguments of ``vla cloud``."""
    result = argparse.ArgumentParser(prog="vla cloud", description=__doc__)
    result.add_argument("--config", type=Path, help="YAML file, such as config/cloud.yaml; default: built-in values")
    result.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one value")
    result.add_argument("--listen", help="Zenoh endpoint to host, such as tcp/127.0.0.1:7448")
    result.add_argument("--model", type=Path, help="model folder, such as models/tabletop")
    result.add_argument("--chat", metavar="MODEL", help="chat model: smollm2, a Hugging Face LLaMA folder or .gguf")
    result.add_argument("--colocated", action="store_true", default=None,
                        help="chat: prompts and answers in one pool; best for one or a few machines")
    result.add_argument("--http", metavar="HOST:PORT", help="chat: OpenAI's HTTP interface, such as 127.0.0.1:8000")
    result.add_argument("--grpc", metavar="HOST:PORT", help="chat: gRPC, such as 127.0.0.1:50051")
    result.add_argument("--threads", type=int, help="threads of torch")
    result.add_argument(
        "--insecure-non-loopback", "--allow-non-loopback",
        action="store_true",
        default=None,
        help="listen without encryption on an address that other machines reach (--allow-non-loopback is its old name)",
    )  # fmt: skip
    add_log_argument(result)
    return result


def read_config(arguments: argparse.Namespace) -> CloudConfig:
    """File, then ``--set``, then the other flags."""
    config = load_config(CloudConfig, arguments.config, arguments.set)
    given = vars(arguments)

    def changed(part: Any, **flags: str) -> Any:
        values = {name: given[flag] for name, flag in flags.items() if given[flag] is not None}
        return dataclasses.replace(part, **values)

    try:
        return changed(
            dataclasses.replace(
                config, serving=changed(config.serving, model="chat", colocated="colocated"),
                gateway=changed(config.gateway, http_listen="http", grpc_listen="grpc"),
            ),
            listen="listen", model="model", threads="threads",
            insecure_non_loopback="insecure_non_loopback",
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit status is 2 for a configuration that cannot serve."""
    end_with_parent()
    arguments = parser().parse_args(argv)
    try:
        setup_logging("cloud")
        config = read_config(arguments)
        link = link_settings(config)
        warn_of_open_doors(config, has_keys=bool(config.gateway.api_keys))
        # Before the slow part, so that an interrupted start ends cleanly too.
        pools = bool(config.serving.model) + bool(config.num_lanes)
        doors_s = config.gateway.drain_s + _DOORS_S if config.gateway.is_open else 0.0
        stop = stop_on_signals(_GRACE_S + doors_s + pools * config.serving.supervisor.stop_s)
        outlet = _Outlet()
        # Robots connect when all can serve: the bus comes last.
        with (
            tracing(config.tracing, "vla-gateway", config.listen.rpartition(":")[2], SystemClock()) as tracer,
            context_service(config, outlet.publish, stop, tracer) as (service, manifest),
            chat_pools(config, stop, tracer, service.status),
            open_bus(
                config.listen, "router", node="vla_cloud", domain=config.domain, allow_remote=config.may_be_insecure,
                settings=link,
            ) as bus,
        ):
            outlet.bus = bus
            serve(config, service, manifest, bus, stop)
    except StartInterrupted as error:
        LOG.info("%s", error)
    except (ConfigError, ManifestError, BusError, ServingError, ValueError) as error:
        print(f"vla cloud: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


@contextmanager
def chat_pools(
    config: CloudConfig, stop: StopFlag | None = None, tracer: Tracer | None = None,
    robots: Callable[[], Mapping[str, Any]] | None = None,
) -> Iterator[ServingThread | None]:  # fmt: skip
    """The worker processes of ``serving.model`` and the doors to them while the body runs; None without a model.

    Raises:
        ServingError: they do not start. ValueError: a door cannot be opened.
    """
    if not config.serving.model:
        with _status_page(config, robots):
            yield None
        return
    pools = ServingThread(config.serving, SystemClock(), worker_specs(config.serving, tracing=config.tracing))
    doors = _doors(config, pools.service, tracer, robots)
    pools.start(stop)
    try:
        if doors is not None:
            pools.call(doors.start())
        yield pools
    finally:
        if doors is not None:
            pools.call(doors.stop())
        pools.stop()


@contextmanager
def _status_page(config: CloudConfig, robots: Callable[[], Mapping[str, Any]] | None) -> Iterator[None]:
    """The state of a cloud without chat, if somebody wants to see it."""
    if not config.status_listen or robots is None:
        yield
        return
    try:
        from vla_cloud.gateway.status_server import status_page
    except ModuleNotFoundError as error:
        told = f"status_listen: {error.name} is not installed: pip install 'vla-runtime[gateway]'"
        raise ConfigError(told) from error
    with status_page(config, SystemClock(), robots):
        yield


def _doors(
    config: CloudConfig, service: ServingService, tracer: Tracer | None = None,
    robots: Callable[[], Mapping[str, Any]] | None = None,
) -> Doors | None:  # fmt: skip
    """What is wrong with them is found before the workers load their model."""
    if not config.gateway.is_open and not config.status_listen:
        return None
    from vla_cloud.engine.tokenizer import ChatTokenizer
    from vla_cloud.gateway.doors import Doors
    from vla_models.chat_model import chat_model_folder

    tokenizer = ChatTokenizer(chat_model_folder(config.serving.model))
    return Doors(config, tokenizer, service, SystemClock(), tracer, robots)


Serving = tuple["ContextService | PooledContextService", Manifest]


@contextmanager
def context_service(
    config: CloudConfig, publish: Publish, stop: StopFlag | None = None, tracer: Tracer | None = None
) -> Iterator[Serving]:  # fmt: skip
    """What serves robots while the body runs: a model in this process, or robot lanes.

    Raises:
        ManifestError: no such model. ServingError: the lanes do not start.
    """
    trace = None if tracer is None else ContextTrace(tracer, SystemClock())
    if not config.num_lanes:
        yield _in_process(config, publish, trace)
        return
    from vla_cloud.context.lane_settings import lane_specs
    from vla_cloud.context.pooled_service import PooledContextService

    manifest, clock = load_manifest(config.model), SystemClock()
    service = PooledContextService(manifest, publish, clock, config.context, trace)
    lanes = PoolThread(service, lane_specs(config), config.lane_rules, clock)
    lanes.start(stop)
    try:
        yield service, manifest
    finally:
        lanes.stop()


def _in_process(config: CloudConfig, publish: Publish, trace: ContextTrace | None) -> Serving:
    import torch  # only here: with lanes, the gateway holds no model

    from vla_cloud.context.runner import ContextRunner
    from vla_cloud.context.service import ContextService
    from vla_models.model_folder import load_vlm

    vlm, manifest = load_vlm(config.model)
    torch.set_num_threads(config.threads)
    context = config.context
    runner = ContextRunner(
        vlm, manifest, prefix_cache_tokens=context.prefix_cache_tokens, max_image_bytes=context.max_image_bytes,
        image_cache=context.image_cache,
    )  # fmt: skip
    runner.warm_up(1)
    return ContextService(runner, manifest, publish, SystemClock(), context, trace), manifest


def serve(
    config: CloudConfig, service: ContextService | PooledContextService, manifest: Manifest, bus: Bus, stop: StopFlag
) -> None:
    """Prints READY, and serves robots until ``stop``."""
    bus.listen("shield_report", ANY_ROBOT, ShieldReports(service.board).receive, capacity=64)
    source = bus.queue("observation", ANY_ROBOT, capacity=config.context.receive_queue)
    # What was imported and loaded stays: the collector need not walk it, now and above all at exit (0.4 s with torch).
    gc.freeze()
    print(f"READY {config.listen} model {manifest.name}", flush=True)
    service.run(source, stop, config.log_period_s)
    LOG.info("stopping; %s", service.report())


class _Outlet:
    """Context publishers by robot, on a bus that is opened later. For one thread."""

    def __init__(self) -> None:
        self.bus: Bus | None = None
        self._publishers: dict[str, Publisher] = {}

    def publish(self, robot: str, payload: bytes) -> None:
        """Raises BusError while there is no bus."""
        if self.bus is None:
            raise BusError("cannot publish: the bus is not open yet")
        if robot not in self._publishers:
            self._publishers[robot] = self.bus.publisher("context", robot)
        self._publishers[robot].put(payload)


if __name__ == "__main__":
    sys.exit(main())
