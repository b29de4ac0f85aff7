"""A worker process as the serving engine starts it, pinned to one core, that also writes down what it did.

One JSON object a line in ``$BENCH_LOG``, times from CLOCK_MONOTONIC, which is the same in every process here:

    step     t_ns (end), ns, cpu_ns (of the engine's thread), prefill, decode (tokens, rows), push_ns, push_cpu_ns (in
             calls for finished layers, part of ns and cpu_ns), held, unused (KV slots of requests)
    pushed   t_ns, bytes, ns (from the first push to the last byte and the notice)
    arrived  t_ns, bytes, ns (from the grant, so with the computation)

The number in ``$BENCH_CONTROL``, if there is one, stands in for ``TransferConfig.layerwise_tokens``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

if core := os.environ.get("BENCH_CORE"):
    os.sched_setaffinity(0, {int(core)})  # before any thread is started: they inherit it

from vla_cloud.core.block_pool import BLOCK_TOKENS
from vla_cloud.core.transfer_plan import TransferConfig
from vla_cloud.engine import prefill_side
from vla_cloud.engine.worker_engine import WorkerEngine
from vla_cloud.kv_transfer.connector import Arrived, Pushed
from vla_cloud.pools import worker_main
from vla_cloud.pools.worker_main import Loaded, MakePool
from vla_cloud.pools.worker_settings import WorkerSettings

TINY = "tiny"
"""Model of random weights, for trying the benchmark itself."""


def load(settings: WorkerSettings, make_pool: MakePool) -> Loaded:
    """As in service, but no token ends an answer: its length is the benchmark's business."""
    if settings.model != TINY:
        loaded = worker_main.load_model(settings, make_pool)
        return Loaded(loaded.runner, loaded.memory, ())
    import torch

    from vla_cloud.engine.torch_runner import TorchRunner, chat_layout
    from vla_models.chat_model import ChatModel
    from vla_models.llama import Llama, LlamaConfig

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(512, 64, 2, 4, 2, 128, max_position_embeddings=8192)
    model = ChatModel(TINY, Path("."), Llama(config).eval(), "0" * 64)
    memory = make_pool(chat_layout(model))
    return Loaded(TorchRunner(model, kv=memory.array), memory, ())


class Recorder:
    """Hangs itself between an engine and what it calls."""

    def __init__(self, engine: WorkerEngine, runner: Any, out: TextIO) -> None:
        self._engine, self._out = engine, out
        self._run = runner.run
        runner.run = self.run
        if engine.prefill_side is not None:
            self._poll_through(engine.prefill_side.sender)
        if engine.decode_side is not None:
            self._poll_through(engine.decode_side.receiver)

    def write(self, kind: str, **values: object) -> None:
        self._out.write(json.dumps({"kind": kind, "t_ns": time.monotonic_ns(), **values}) + "\n")

    def run(self, batch: Any, on_layer: Callable[[int], None] | None = None) -> Any:
        push_ns = push_cpu_ns = 0

        def timed(layer: int) -> None:
            nonlocal push_ns, push_cpu_ns
            began_ns, began_cpu_ns = time.monotonic_ns(), time.thread_time_ns()
            on_layer(layer)
            push_ns += time.monotonic_ns() - began_ns
            push_cpu_ns += time.thread_time_ns() - began_cpu_ns

        began_ns, began_cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        sampled = self._run(batch, timed if on_layer is not None else None)
        took_ns, cpu_ns = time.monotonic_ns() - began_ns, time.thread_time_ns() - began_cpu_ns
        held, unused = self._slots()
        prefill = sum(len(chunk.token_ids) for chunk in batch.prefill)
        self.write(
            "step",
            ns=took_ns,
            cpu_ns=cpu_ns,
            prefill=prefill,
            decode=len(batch.decode),
            push_ns=push_ns,
            push_cpu_ns=push_cpu_ns,
            held=held,
            unused=unused,
        )
        return sampled

    def _slots(self) -> tuple[int, int]:
        """KV slots of requests, and those among them that no token of theirs has yet."""
        held = unused = 0
        for record in self._engine.ledger:
            slots = len(record.seq.table) * BLOCK_TOKENS
            held += slots
            unused += max(0, slots - len(record.seq.tokens))
        return held, unused

    def _poll_through(self, end: Any) -> None:
        poll = end.poll

        def recorded() -> list[Any]:
            events = poll()
            for event in events:
                if isinstance(event, Pushed | Arrived):
                    self.write(type(event).__name__.lower(), bytes=event.num_bytes, ns=event.elapsed_ns)
            return events

        end.poll = recorded


def controlled(choose: Callable[[TransferConfig, int], bool], path: Path) -> Callable[[TransferConfig, int], bool]:
    """The choice whether to push layer by layer, with the threshold in a file."""

    def chosen(config: TransferConfig, uncached_tokens: int) -> bool:
        text = path.read_text(encoding="ascii") if path.exists() else ""
        return choose(TransferConfig(layerwise_tokens=int(text)) if text else config, uncached_tokens)

    return chosen


def main() -> int:
    prefill_side.choose_layerwise = controlled(prefill_side.choose_layerwise, Path(os.environ["BENCH_CONTROL"]))
    build = worker_main.build_engine
    with open(os.environ["BENCH_LOG"], "a", buffering=1, encoding="ascii") as out:

        def recorded(loaded: Loaded, *rest: Any) -> WorkerEngine:
            engine = build(loaded, *rest)
            Recorder(engine, loaded.runner, out)
            return engine

        worker_main.build_engine = recorded
        return worker_main.main(load=load)


if __name__ == "__main__":
    sys.exit(main())
