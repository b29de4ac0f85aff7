"""The engine of a worker: transfers that go wrong.

Its runner's tokens depend on every byte of KV, and the test pumps its wire.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from engine_bench import (
    WANTED,
    WORK,
    all_at_baseline,
    at_baseline,
    began_writing,
    d_of,
    expected,
    make_prompt,
    make_work,
    pair,
)

from vla_cloud.core.transfer_plan import TransferConfig
from vla_cloud.engine import first_token
from vla_cloud.kv_transfer.connector import Arrived, Broken, Cause, WriterGone
from vla_cloud.pools import messages

# -- transfers that go wrong -----------------------------------------------------------------------------------------


def test_no_token_from_unverified_kv():  # vllm#52234
    bench = pair()
    began_writing(bench)
    bench.workers["p"].end.corrupt = True
    bench.settle()
    told = d_of(bench).of("r")
    assert told.tokens == [] and isinstance(told.final, messages.Error)
    assert told.final.transfer and told.final.code == "UNAVAILABLE" and "checksum" in told.final.message
    all_at_baseline(bench)
    bench.disaggregate("p", "d", "r", WORK, attempt=1)  # and the damaged blocks are in nobody's cache
    bench.settle()
    assert d_of(bench).of("r", 1).tokens == WANTED


@pytest.mark.parametrize("fault", ["epoch", "payload", "prompt", "token", "reservation epoch"])
def test_a_notice_that_does_not_fit_gives_no_token(fault):
    bench = pair()
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "r", WORK)
    bench.settle()
    reserved = d_of(bench).of("r").reserved
    fields = {"epoch": d_of(bench).ready.epoch, "prompt_tokens": 100, "token": 3, "cached_tokens": 0}
    if fault == "epoch":
        fields["epoch"] += 1
    elif fault == "prompt":
        fields["prompt_tokens"] = 99
    elif fault == "token":
        fields["token"] = 997
    payload = b"\x93\x01" if fault == "payload" else first_token.encode(first_token.FirstToken(**fields))
    epoch = 2 if fault == "reservation epoch" else 1
    d_of(bench).end.inject(Arrived(reserved.token, epoch, payload, 7168, 1))
    bench.settle()
    told = d_of(bench).of("r")
    assert told.tokens == [] and told.final.transfer and told.final.code == "UNAVAILABLE"
    all_at_baseline(bench)


def test_a_destination_of_another_process_gives_no_token():
    """The epoch in P's order is that of a D process which is no more."""
    bench = pair()
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "r", WORK)
    bench.settle()
    bench.prefill(d_of(bench), d_of(bench).of("r").reserved, epoch=d_of(bench).ready.epoch + 1)
    bench.settle()
    assert d_of(bench).of("r").tokens == [] and d_of(bench).of("r").final.transfer
    all_at_baseline(bench)


def test_abort_on_d_keeps_its_blocks_from_others_while_p_still_writes():  # sglang#24527
    bench = pair(num_blocks=16)
    began_writing(bench)
    bench.workers["p"].end.frozen = True
    lent = set(d_of(bench).of("r").reserved.blocks)
    bench.send("d", messages.Abort("r", 0))
    bench.settle()
    engine = d_of(bench).engine
    assert d_of(bench).of("r").final == messages.Aborted("r", 0)
    assert all(engine.pool.is_quarantined(block) for block in lent)
    other = make_prompt(9, 80)
    bench.generate("d", "other", make_work(other))
    bench.settle()
    assert d_of(bench).of("other").tokens == expected(other)
    bench.send("d", messages.WriterDone("r", 0))  # a word is not enough while the connector knows better
    bench.settle()
    assert engine.pool.quarantined == len(lent) == 7
    bench.workers["p"].end.frozen = False
    bench.settle()
    assert isinstance(bench.workers["p"].of("r").final, messages.PushFailed)
    all_at_baseline(bench)


def test_abort_while_d_waits_then_p_dies_gives_the_blocks_back():  # vllm#46283
    bench = pair()
    began_writing(bench)
    bench.workers["p"].end.frozen = True
    bench.send("d", messages.Abort("r", 0))
    bench.settle()
    assert d_of(bench).engine.pool.quarantined
    bench.kill("p")
    bench.settle()
    all_at_baseline(bench)


def test_p_dead_in_the_middle_of_a_transfer_is_told_at_once_and_blocks_are_back():
    bench = pair()
    began_writing(bench)
    bench.kill("p")
    bench.settle()
    told = d_of(bench).of("r")
    assert told.tokens == [] and told.final.transfer
    all_at_baseline(bench)


def test_a_writer_that_never_comes_costs_no_more_than_the_lease():
    bench = pair()
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "r", WORK, lease_s=30.0)
    bench.settle()
    bench.advance(25.0)
    bench.send("d", messages.LeaseExtend([messages.LeaseRow("r", 0), messages.LeaseRow("unknown", 3)], 20.0))
    bench.send("d", messages.LeaseExtend([messages.LeaseRow("r", 0)], 1.0))  # never shortened
    bench.advance(19.0)
    bench.settle()
    assert d_of(bench).of("r").final is None
    assert d_of(bench).engine.wait_s() == pytest.approx(1.0)
    bench.advance(1.0)
    bench.settle()
    assert d_of(bench).of("r").final.transfer and "lease" in d_of(bench).of("r").final.message
    all_at_baseline(bench)


def test_the_lease_runs_while_a_reservation_waits_for_blocks():
    bench = pair(num_blocks=8)
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "first", WORK, lease_s=100.0)
    bench.disaggregate("p", "d", "second", WORK, lease_s=30.0)
    bench.settle()
    assert d_of(bench).of("second").reserved is None
    bench.advance(30.0)
    bench.settle()
    assert d_of(bench).of("second").final.transfer
    assert d_of(bench).of("first").final is None


def test_late_signals_are_ignored():
    bench = pair()
    bench.disaggregate("p", "d", "r", WORK)
    bench.settle()
    receiver = d_of(bench).end
    first = first_token.FirstToken(d_of(bench).ready.epoch, 100, 3, 0)
    token = d_of(bench).of("r").reserved.token
    for late in (token, "never heard of"):
        receiver.inject(Arrived(late, 1, first_token.encode(first), 1, 1))
        receiver.inject(Broken(late, Cause.PEER_DEAD, "", True))
        receiver.inject(Broken(late, Cause.ABORTED, "", False))
        receiver.inject(WriterGone(late))
    bench.send("d", messages.WriterDone("r", 0))
    bench.send("d", messages.WriterDone("unknown", 9))
    bench.settle()
    assert d_of(bench).engine.decode_side.late == 6
    assert d_of(bench).of("r").tokens == WANTED
    all_at_baseline(bench)


@pytest.mark.parametrize("length", [40, 100])
def test_p_lets_go_of_its_blocks_when_the_push_is_not_done_in_time(length):
    bench = pair()
    bench.disaggregate("p", "d", "r", make_work(make_prompt(2, length)))
    p = bench.workers["p"]
    bench.until(lambda: p.engine.scheduler.load().to_push == 1, operations=1)
    p.end.frozen = True
    bench.settle()
    assert p.of("r").final is None
    assert p.engine.wait_s() <= 5.0
    bench.advance(p.engine.wait_s())
    bench.settle()
    assert (type(p.of("r").final), p.of("r").final.code) == (messages.PushFailed, "DEADLINE_EXCEEDED")
    at_baseline(p)
    p.end.frozen = False
    bench.settle()
    assert d_of(bench).of("r").tokens == [] and d_of(bench).of("r").final.transfer
    all_at_baseline(bench)


def test_a_link_that_became_slow_gets_more_time_after_a_transfer_that_was_cut_off():
    bench = pair()
    p = bench.workers["p"]
    side = p.engine.prefill_side
    side._config = TransferConfig(layerwise_tokens=48, min_sample_bytes=1, base_s=0.5, margin=4.0)
    given_s = []
    for attempt in range(3):
        work = make_work(make_prompt(20 + attempt, 40), time_left_s=100.0)
        bench.disaggregate("p", "d", f"r{attempt}", work)
        bench.until(lambda: p.engine.scheduler.load().to_push == 1, operations=1)
        p.end.frozen = True
        bench.settle()
        given_s.append(p.engine.wait_s())
        bench.advance(p.engine.wait_s())
        bench.settle()
        assert p.of(f"r{attempt}").final.code == "DEADLINE_EXCEEDED"
        p.end.frozen = False
        bench.settle()
    assert given_s[0] < given_s[1] < given_s[2], given_s
    all_at_baseline(bench)


def test_d_gone_before_the_prompt_is_done_ends_the_prefill():
    bench = pair()
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "r", make_work(make_prompt(3, 200)))
    bench.settle()
    bench.prefill(d_of(bench), d_of(bench).of("r").reserved)
    bench.kill("d")
    bench.settle()
    p = bench.workers["p"]
    assert (type(p.of("r").final), p.of("r").final.code) == (messages.PushFailed, "UNAVAILABLE")
    assert p.runner.computed < 200
    at_baseline(p)


def test_rejection_on_d_frees_p_at_once():  # vllm#41269
    """D has given the reservation up when P asks for its grant: P does not hold KV until some timeout."""
    bench = pair()
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "r", WORK)
    bench.settle()
    reserved = d_of(bench).of("r").reserved
    bench.send("d", messages.Abort("r", 0))
    bench.settle()
    bench.prefill(d_of(bench), reserved)
    bench.settle()
    assert isinstance(bench.workers["p"].of("r").final, messages.PushFailed)
    all_at_baseline(bench)


def test_p_aborted_as_prefill_ends_frees_at_once():  # vllm#29906
    for frozen in (False, True):
        bench = pair()
        bench.disaggregate("p", "d", "r", WORK)
        p = bench.workers["p"]
        bench.until(lambda p=p: p.engine.scheduler.load().to_push == 1, operations=1)
        p.end.frozen = frozen
        writes = p.end.writes
        bench.send("p", messages.Abort("r", 0))
        bench.wire.pump()
        assert p.end.writes == writes, "written after the abort"
        p.engine.step()
        bench.collect()
        assert p.of("r").final == messages.Aborted("r", 0)
        at_baseline(p)
        p.end.frozen = False
        bench.settle()
        assert p.end.writes == writes, "written after Aborted"
        assert d_of(bench).of("r").final.transfer
        all_at_baseline(bench)


def test_a_prompt_stops_at_the_next_chunk_when_aborted():  # dynamo#13691
    bench = pair()
    bench.disaggregate("p", "d", "r", make_work(make_prompt(3, 240)))
    p = bench.workers["p"]
    bench.until(lambda: p.runner.computed > 0)
    assert p.runner.computed == 48
    bench.send("p", messages.Abort("r", 0))
    bench.settle()
    assert p.runner.computed == 48
    assert p.of("r").final == messages.Aborted("r", 0)
    assert d_of(bench).of("r").final.transfer
    all_at_baseline(bench)


def test_a_prompt_past_its_deadline_ends_and_nothing_more_is_written_for_it():
    bench = pair()
    bench.disaggregate("p", "d", "r", make_work(make_prompt(3, 240), time_left_s=3.0))
    p = bench.workers["p"]
    bench.until(lambda: p.runner.computed == 96, operations=0)
    bench.advance(3.0)
    p.engine.step()
    bench.wire.pump()
    assert p.end.writes == 0
    bench.settle()
    assert p.of("r").final.code == d_of(bench).of("r").final.code == "DEADLINE_EXCEEDED"
    all_at_baseline(bench)


def test_abort_between_the_halves_of_a_step_writes_nothing_more():
    bench = pair()
    bench.disaggregate("p", "d", "r", make_work(make_prompt(3, 240)))
    p = bench.workers["p"].engine
    bench.until(lambda: p.scheduler.load().running == 1, operations=1)
    bench.until(lambda: p._plan is not None or not p.step(), operations=1)
    p._plan = p._plan or p._look_and_plan()
    bench.send("p", messages.Abort("r", 0))
    writes = bench.workers["p"].end.writes
    bench.settle()
    assert bench.workers["p"].end.writes == writes
    assert bench.workers["p"].of("r").final == messages.Aborted("r", 0)
    all_at_baseline(bench)
