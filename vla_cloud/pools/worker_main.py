"""Composition root of one worker process: model, KV pool, connector, engine, link. Started by the supervisor."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vla_cloud.core.block_pool import BLOCK_TOKENS
from vla_cloud.core.step_plan import Role, SchedulerConfig
from vla_cloud.core.transfer_plan import TransferConfig
from vla_cloud.engine.calibrate import with_host_swap
from vla_cloud.engine.grammars import GrammarBackend
from vla_cloud.engine.runner import ModelRunner
from vla_cloud.engine.traced_engine import TracedEngine
from vla_cloud.engine.worker_engine import EngineConfig, WorkerEngine
from vla_cloud.kv_transfer.connector import KvReceiver, KvSender
from vla_cloud.kv_transfer.layout import KvLayout
from vla_cloud.kv_transfer.memory import KvMemory
from vla_cloud.pools.link import LinkClosed
from vla_cloud.pools.supervisor import EXIT_PERMANENT
from vla_cloud.pools.worker_process import connect, serve
from vla_cloud.pools.worker_settings import WorkerSettings
from vla_common.clock import Clock, SystemClock
from vla_common.config import ConfigError, from_mapping
from vla_common.logging_setup import setup_logging
from vla_common.process import StopFlag, end_with_parent, lower_priority, stop_on_signals
from vla_common.span_queue import tracing

LOG = logging.getLogger(__name__)

EXIT_FAILED: Final = 1
_MAX_PARTIAL_PREFILLS: Final = 4


@dataclass(frozen=True)
class Loaded:
    """A model over its pool."""

    runner: ModelRunner
    memory: KvMemory
    eos_token_ids: tuple[int, ...]
    grammars: GrammarBackend | None = None


MakePool = Callable[[KvLayout], KvMemory]
Load = Callable[[WorkerSettings, MakePool], Loaded]
"""Loads the model named in the settings over a pool made for its layout."""


def main(argv: Sequence[str] | None = None, load: Load | None = None) -> int:
    """Main function of a worker process.

    Returns:
        Exit code: 0, EXIT_FAILED, or EXIT_PERMANENT (it would fail the same way again).
    """
    stop = stop_on_signals()
    # Killed, not asked: nothing of a worker outlives its process, and one that is stopped or hung could not be asked.
    end_with_parent(signal_number=signal.SIGKILL)
    parser = argparse.ArgumentParser(prog="vla cloud: worker", description="Started by 'vla cloud', not by hand.")
    for name in ("--connect", "--worker", "--settings"):
        parser.add_argument(name, required=True)
    options = parser.parse_args(argv)
    setup_logging(options.worker)
    try:
        settings = from_mapping(WorkerSettings, json.loads(options.settings))
        lower_priority(settings.nice)  # before any library starts threads: a robot lane goes first
        _run(options.connect, options.worker, settings, load or load_model, stop)
    except (ConfigError, ValueError, ImportError, FileNotFoundError) as error:
        LOG.error("%s", error)
        return EXIT_PERMANENT
    except (LinkClosed, OSError, RuntimeError) as error:
        LOG.error("%s: %s", type(error).__name__, error)
        return EXIT_FAILED
    return 0


def _run(address: str, worker: str, settings: WorkerSettings, load: Load, stop: StopFlag) -> None:
    loaded = load(settings, lambda layout: KvMemory(layout, settings.blocks))
    clock = SystemClock()
    engine = build_engine(loaded, settings, clock)
    gc.collect()
    gc.freeze()  # the model's objects stay: the collector need not walk them
    try:
        link = connect(address, worker)
        try:
            with tracing(settings.tracing, "vla-worker", worker, clock) as tracer:
                serve(link, engine if tracer is None else TracedEngine(engine, tracer, clock), stop)
        finally:
            link.close()
    finally:
        engine.close()
        loaded.memory.close()


def build_engine(loaded: Loaded, settings: WorkerSettings, clock: Clock) -> WorkerEngine:
    """Scheduler, connector and engine of the role.

    Raises:
        ValueError: settings that do not fit together. OSError: the connector cannot listen.
    """
    runner, role = loaded.runner, Role(settings.role)
    partial = max(1, min(_MAX_PARTIAL_PREFILLS, settings.chunk_tokens // BLOCK_TOKENS))
    limits = SchedulerConfig(
        role=role, max_model_len=runner.max_model_len, chunk_tokens=settings.chunk_tokens,
        max_partial_prefills=partial, max_long_prefills=max(1, partial // 2), max_running=settings.max_running,
        max_admitted=max(64, 2 * settings.max_running), max_waiting=settings.max_waiting,
    )  # fmt: skip
    if role is not Role.PREFILL:  # P decodes nothing, and what it computed for a prompt lies in its cache
        limits = with_host_swap(runner, limits, settings.host_swap_blocks, clock)
    base_s = settings.transfer_base_s
    transfer = TransferConfig(base_s=base_s, max_s=max(base_s, TransferConfig.max_s))
    config = EngineConfig(scheduler=limits, transfer=transfer, eos_token_ids=loaded.eos_token_ids)
    sender = _sender(settings.transfer, loaded, clock) if role is Role.PREFILL else None
    receiver = _receiver(settings.transfer, loaded, clock) if role is Role.DECODE else None
    return WorkerEngine(runner, config, clock, sender, receiver, loaded.grammars)


def _sender(transfer: str, loaded: Loaded, clock: Clock) -> KvSender:
    layout, pool = loaded.runner.layout, loaded.memory.array
    if transfer == "shared_memory":
        from vla_cloud.kv_transfer.shared_memory import SharedMemorySender

        return SharedMemorySender(layout, pool, clock)
    if transfer == "tcp":
        from vla_cloud.kv_transfer.tcp import TcpSender

        return TcpSender(layout, pool, clock)
    from vla_cloud.kv_transfer.nixl import NixlSender

    return NixlSender(layout, pool, clock)


def _receiver(transfer: str, loaded: Loaded, clock: Clock) -> KvReceiver:
    layout, pool = loaded.runner.layout, loaded.memory.array
    if transfer == "shared_memory":
        from vla_cloud.kv_transfer.shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver(loaded.memory, clock)
    if transfer == "tcp":
        from vla_cloud.kv_transfer.tcp import TcpReceiver

        return TcpReceiver(layout, pool, clock)
    from vla_cloud.kv_transfer.nixl import NixlReceiver

    return NixlReceiver(layout, pool, clock)


def load_model(settings: WorkerSettings, make_pool: MakePool) -> Loaded:
    """The chat model on torch.

    Raises:
        vla_models.loaders.checkpoint.CheckpointError (a ValueError): not a model. OSError: no memory for the pool.
    """
    import torch

    from vla_cloud.engine.grammar_xgrammar import XGrammarBackend
    from vla_cloud.engine.torch_runner import TorchRunner, chat_layout
    from vla_models.chat_model import load_chat_model

    torch.set_num_threads(settings.threads)
    model = load_chat_model(settings.model, context_tokens=settings.context_tokens)
    memory = make_pool(chat_layout(model))
    runner = TorchRunner(model, kv=memory.array)
    runner.warm_up(settings.chunk_tokens, settings.max_running)
    eos = eos_token_ids(model.folder)
    return Loaded(runner, memory, eos, XGrammarBackend(model.folder, runner.vocab_size, eos))


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end an answer, of a Hugging Face folder: ``generation_config.json``, else ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


if __name__ == "__main__":
    sys.exit(main())
