"""The engine as a worker process builds it from its settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from engine_bench import Bench, Worker, at_baseline, expected, make_prompt, make_work
from kv_chain_runner import KvChainRunner, chain_layout

from vla_cloud.kv_transfer.memory import KvMemory
from vla_cloud.pools.worker_main import Loaded, build_engine, eos_token_ids
from vla_cloud.pools.worker_settings import WorkerSettings
from vla_common.clock import ManualClock


class CountingRunner(KvChainRunner):
    """Counts blocks that went to the host; on a manual clock a copy takes no time and a token a microsecond."""

    def __init__(self, clock: ManualClock, memory: KvMemory) -> None:
        super().__init__(kv=memory.array, layout=memory.layout)
        self.clock, self.copied = clock, 0

    def run(self, batch, on_layer=None):
        self.clock.advance_ns(1000 * batch.num_tokens)
        return super().run(batch, on_layer)

    def copy_blocks_out(self, blocks):
        self.copied += len(blocks)
        return super().copy_blocks_out(blocks)


def settings(role: str, host_swap_blocks: int, **changes: float) -> WorkerSettings:
    return WorkerSettings(
        role=role, model="chain", context_tokens=None, transfer="shared_memory", blocks=20, chunk_tokens=64,
        max_running=8, max_waiting=8, threads=1, host_swap_blocks=host_swap_blocks, **changes,
    )  # fmt: skip


@pytest.fixture
def memory() -> Iterator[KvMemory]:
    it = KvMemory(chain_layout(), 20)
    yield it
    it.close()


@pytest.mark.parametrize("host_swap_blocks", [0, 32])
def test_preempted_requests_go_to_the_host_when_its_blocks_are_given(memory: KvMemory, host_swap_blocks: int) -> None:
    clock = ManualClock(1)
    runner = CountingRunner(clock, memory)
    engine = build_engine(Loaded(runner, memory, ()), settings("both", host_swap_blocks), clock)
    measured = runner.copied
    bench = Bench(clock)
    worker = bench.workers["w"] = Worker("w", engine, runner, engine.ready("w"))
    prompts = [make_prompt(i, 40 + i) for i in range(5)]
    for i, prompt in enumerate(prompts):
        bench.generate("w", f"r{i}", make_work(prompt, 60))
    bench.settle()
    for i, prompt in enumerate(prompts):
        assert worker.of(f"r{i}").tokens == expected(prompt, 60)
    assert sum(told.final.preemptions for told in worker.told.values()) > 0
    assert (runner.copied > measured) is (host_swap_blocks > 0)
    at_baseline(worker)
    engine.close()


def test_a_prefill_worker_measures_nothing_and_keeps_nothing_on_the_host(memory: KvMemory) -> None:
    clock = ManualClock(1)
    runner = CountingRunner(clock, memory)
    build_engine(Loaded(runner, memory, ()), settings("prefill", 32), clock).close()
    assert runner.batches == runner.copied == 0


@pytest.mark.parametrize(("base_s", "most_s"), [(0.5, 25.0), (40.0, 40.0)])
def test_a_transfer_may_take_as_long_as_the_configuration_says(memory: KvMemory, base_s: float, most_s: float) -> None:
    clock = ManualClock(1)
    told = settings("prefill", 0, transfer_base_s=base_s)
    engine = build_engine(Loaded(CountingRunner(clock, memory), memory, ()), told, clock)
    assert (engine._config.transfer.base_s, engine._config.transfer.max_s) == (base_s, most_s)
    engine.close()


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": None}}, (5,)),
    ],
)
def test_tokens_that_end_an_answer_are_those_of_the_folder(tmp_path: Path, files: dict, ids: tuple[int, ...]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == ids
