"""The engine of a worker: what a worker tells of itself.

Its runner's tokens depend on every byte of KV, and the test pumps its wire.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from engine_bench import (
    PROMPT,
    TRANSFER,
    WORK,
    Bench,
    all_at_baseline,
    at_baseline,
    d_of,
    expected,
    limits,
    make_prompt,
    make_work,
    pair,
)
from kv_chain_runner import KvChainRunner, chain_layout

from vla_cloud.core.generate import MAX_LOGPROBS, Priority
from vla_cloud.core.preemption import SwapCost
from vla_cloud.core.prefix_key import salt_hash
from vla_cloud.core.step_plan import Role
from vla_cloud.engine import first_token
from vla_cloud.engine.calibrate import with_host_swap
from vla_cloud.engine.worker_engine import EngineConfig
from vla_cloud.pools import messages
from vla_common.clock import ManualClock

# -- what a worker tells of itself -----------------------------------------------------------------------------------


def test_load_counts_every_way_of_coming_in_and_ends_at_nothing():
    bench = pair()
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "r", WORK)
    bench.generate("d", "s", make_work(make_prompt(2, 40), 100))
    bench.send("d", messages.Ping(1))
    bench.until(lambda: len(d_of(bench).of("s").tokens) > 3)
    bench.send("d", messages.Ping(2))
    bench.collect()
    pongs = [event for event in d_of(bench).other if isinstance(event, messages.Pong)]
    assert [pong.sequence for pong in pongs] == [1, 2]
    assert (pongs[0].load.waiting, pongs[0].load.running, pongs[0].load.active_tokens) == (2, 0, 140)
    assert (pongs[1].load.waiting, pongs[1].load.running) == (0, 2)
    assert pongs[1].load.active_tokens >= 43
    for key in ("r", "s"):
        bench.send("d", messages.Abort(key, 0))
    bench.settle()
    bench.send("d", messages.Ping(3))
    bench.collect()
    load = d_of(bench).other[-1].load
    assert (load.running, load.waiting, load.active_tokens, load.quarantined_blocks) == (0, 0, 0, 0)
    assert load.free_blocks == load.total_blocks


def test_kv_events_tell_the_prefix_tree_without_a_gap():
    bench = Bench()
    worker = bench.add("w", Role.BOTH, num_blocks=16)
    for i in range(6):
        bench.generate("w", f"r{i}", make_work(make_prompt(i, 60)))
        bench.settle()
    held: set[bytes] = set()
    at = 0
    for event in worker.other:
        if isinstance(event, messages.KvEvents):
            assert event.first_sequence == at
            at += len(event.rows)
            for row in event.rows:
                (held.add if row.change.value == "stored" else held.remove)(row.block_hash)
    assert len(held) == worker.engine.tree.size > 0


def test_a_worker_that_is_asked_lists_all_blocks_it_holds_also_when_idle():
    bench = Bench()
    worker = bench.add("w", Role.BOTH, num_blocks=16)
    for i in range(3):
        bench.generate("w", f"r{i}", make_work(make_prompt(i, 60)))
        bench.settle()
    told = len(worker.other)
    bench.send("w", messages.KvSnapshot())
    bench.settle()
    (events,) = worker.other[told:]
    last = [event for event in worker.other[:told] if isinstance(event, messages.KvEvents)][-1]
    assert events.first_sequence == last.first_sequence + len(last.rows)
    assert [row.change.value for row in events.rows] == ["cleared", *["stored"] * worker.engine.tree.size]
    known = set()
    for row in events.rows[1:]:  # parents first
        assert row.parent_hash == salt_hash(b"") or row.parent_hash in known
        known.add(row.block_hash)


def test_ready_tells_what_the_worker_takes():
    bench = pair()
    ready = d_of(bench).ready
    assert (ready.role, ready.total_blocks, ready.max_model_len, ready.vocab_size) == ("decode", 64, 256, 997)
    assert ready.layout == chain_layout() and ready.address == d_of(bench).end.address
    assert bench.workers["p"].ready.address == ""


def test_a_robot_goes_before_chat():
    bench = Bench()
    worker = bench.add("w", Role.BOTH)
    for i in range(8):
        bench.generate("w", f"chat{i}", make_work(make_prompt(i, 100)))
    bench.generate("w", "robot", make_work(make_prompt(99, 40), 1, priority=Priority.ROBOT))
    bench.until(lambda: worker.of("robot").final is not None)
    assert all(not worker.of(f"chat{i}").tokens for i in range(8))
    bench.settle()
    at_baseline(worker)


def test_tenants_do_not_share_a_prefix():
    bench = Bench()
    worker = bench.add("w", Role.BOTH)
    for salt in (b"a", b"b", b"a"):
        bench.generate("w", f"r{len(worker.told)}", make_work(PROMPT, salt=salt))
        bench.settle()
    assert [worker.of(f"r{i}").final.cached_tokens for i in range(3)] == [0, 0, 96]


def test_the_notice_holds_its_largest_content_within_its_bound():
    top = tuple((996, -1.5) for _ in range(MAX_LOGPROBS))
    first = first_token.FirstToken(2**61, 2**20, 996, 2**20, -1.0, top)
    assert first_token.decode(first_token.encode(first)) == first
    assert len(first_token.encode(first)) < 2048
    for bad in (b"", b"\x90", b"\xc0", first_token.encode(first) + b"\x00"):
        with pytest.raises(ValueError):
            first_token.decode(bad)


def test_transfer_settings_reach_the_engine():
    assert EngineConfig(transfer=TRANSFER).transfer.layerwise_tokens == 48


# -- the rates that choose between swap and recompute ----------------------------------------------------------------


class TimedRunner(KvChainRunner):
    """Copies and computations take set times on a manual clock."""

    def __init__(self, clock: ManualClock, copy_ns_per_block: int, token_ns: int) -> None:
        super().__init__(64, max_model_len=256)
        self.clock, self.copy_ns_per_block, self.token_ns = clock, copy_ns_per_block, token_ns

    def run(self, batch, on_layer=None):
        self.clock.advance_ns(batch.num_tokens * self.token_ns)
        return super().run(batch, on_layer)

    def copy_blocks_out(self, blocks):
        self.clock.advance_ns(len(blocks) * self.copy_ns_per_block)
        return super().copy_blocks_out(blocks)

    def copy_blocks_in(self, blocks, data):
        self.clock.advance_ns(len(blocks) * self.copy_ns_per_block)
        super().copy_blocks_in(blocks, data)


@pytest.mark.parametrize(("copy_ns", "swaps"), [(1_000, True), (1_000_000, False)])
def test_measured_rates_choose_the_faster_way_of_preemption(copy_ns, swaps):
    clock = ManualClock(1)
    runner = TimedRunner(clock, copy_ns, token_ns=10_000)  # 160 us for a block, against 2 or 2000 us for the way
    config = with_host_swap(runner, limits(Role.BOTH), 64, clock)
    assert config.host_blocks == 64 and config.bytes_per_block == 1024
    assert config.prefill_tokens_s == pytest.approx(1e5)
    assert config.host_bandwidth_bytes_s == pytest.approx(1024e9 / copy_ns)
    cost = SwapCost(64, config.bytes_per_block, config.host_bandwidth_bytes_s, config.prefill_tokens_s)
    assert cost.prefers_swap(160, 0) is swaps
    assert with_host_swap(runner, limits(Role.BOTH), 0, clock).host_blocks == 0


def test_a_message_that_breaks_the_engine_ends_the_worker_by_name_even_if_its_connector_will_not_close():
    bench = pair()
    bench.disaggregate("p", "d", "r", WORK)
    bench.step(0)

    def broken(*_):
        raise OSError("no descriptor")

    p = bench.workers["p"]
    p.end.abort = p.end.close = broken
    bench.send("p", messages.Abort("r", 0))
    assert not p.engine.step()
    bench.collect()
    assert p.of("r").final.code == "INTERNAL" and "no descriptor" in p.engine.failure
    assert p.other[-1].request_id == ""


def test_a_prompt_of_64k_tokens_is_served_and_a_longer_one_refused_before_any_work():
    bench = Bench()
    length = 65_536
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        changes = {"max_model_len": length + 4, "chunk_tokens": 8192}
        bench.add(name, role, runner=KvChainRunner(4100, max_model_len=length + 4), **changes)
    prompt = make_prompt(1, length)
    bench.disaggregate("p", "d", "r", make_work(prompt, 4))
    bench.disaggregate("p", "d", "too long", make_work([*prompt, 1, 2, 3, 4], 4))
    bench.settle()
    assert d_of(bench).of("too long").final.code == "INVALID_ARGUMENT"
    assert d_of(bench).of("r").tokens == expected(prompt, 4)
    assert bench.workers["p"].runner.computed == length
    all_at_baseline(bench)
