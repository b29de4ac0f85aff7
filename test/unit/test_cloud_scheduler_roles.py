"""Prefill and decode workers: blocks held for a push, blocks lent to a writer, late signals, quarantine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from scheduler_rig import Rig, chain, expected_outputs, next_token, request

from vla_cloud.core.generate import DeadlineExceeded, FinishReason, QueueFull
from vla_cloud.core.sequence import SequenceState
from vla_cloud.core.step_plan import Role


def decode_rig(**more):
    return Rig(role=Role.DECODE, **{"blocks": 16, "watermark_blocks": 0, **more})


def test_a_prompt_is_held_for_the_push_and_its_blocks_go_to_the_cache_after_it():
    rig = Rig(role=Role.PREFILL)
    rig.add(request("a", 100, new=5))
    results = [rig.step(), rig.step()]
    seq = rig.sequences["a"]
    assert results[0].to_push == [] and results[1].to_push == [seq]
    assert results[1].tokens == [(seq, expected_outputs(seq.request, 1000)[0])]
    assert seq.state is SequenceState.TO_PUSH and seq.finish_reason is None and len(seq.table) == 7
    assert not rig.scheduler.has_work
    for _ in range(5):
        rig.step()  # held, however long the push takes
    rig.tree.clear()
    assert rig._rows(seq)[:100] == chain(seq.request, seq.tokens[:100])
    rig.push(seq)
    assert not rig.scheduler.pushed("a"), "a second signal is ignored"
    rig.run()
    assert rig.finished["a"].reason is FinishReason.PUSHED
    assert rig.pool.used == rig.tree.size == 6 and rig.tree.evictable == 6
    rig.check_baseline()


def test_an_abort_before_the_push_frees_at_once():
    rig = Rig(role=Role.PREFILL)
    rig.add(request("a", 100))
    rig.step()
    rig.step()
    rig.scheduler.abort("a")
    rig.run()
    assert rig.finished["a"].reason is FinishReason.ABORTED
    rig.check_baseline()


def test_a_held_prompt_outlives_its_deadline_until_the_engine_ends_the_push():
    rig = Rig(role=Role.PREFILL)
    rig.add(request("a", 30, deadline_ns=100))
    rig.step()
    rig.clock.advance_ns(1000)
    rig.step()
    assert rig.sequences["a"].state is SequenceState.TO_PUSH, "a sender may be reading these blocks"
    rig.scheduler.abort("a", DeadlineExceeded("push too late"))
    rig.run()
    assert isinstance(rig.finished["a"].error, DeadlineExceeded)


def test_a_prompt_whose_first_token_ends_it_says_so():
    outputs = expected_outputs(request("a", 20), 1000)
    rig = Rig(role=Role.PREFILL)
    rig.add(request("a", 20, stop=frozenset({outputs[0]})))
    rig.add(request("b", 20, new=1))
    rig.step()
    assert rig.sequences["a"].finish_reason is FinishReason.STOP
    assert rig.sequences["b"].finish_reason is FinishReason.LENGTH
    rig.run()


def test_a_worker_full_of_prompts_to_push_takes_no_more():
    rig = Rig(role=Role.PREFILL, max_running=2, max_admitted=2)
    for i in range(4):
        rig.add(request(f"r{i}", 20))
    for _ in range(5):
        rig.step()
    assert rig.scheduler.load().to_push == 2 and rig.scheduler.load().waiting == 2
    rig.run()
    rig.check_baseline()


def test_blocks_are_reserved_before_anything_is_computed_elsewhere_and_decoding_starts_on_arrival():
    rig = decode_rig()
    seq = rig.add(request("a", 32, new=6), writer="a/1")
    result = rig.step()
    assert result.tokens == [] and seq.state is SequenceState.RESERVED
    assert len(seq.table) == 3 and len(seq.lent_blocks) == 2  # one more for the first token's KV
    rig.step()
    assert seq.computed == 0 and seq.outputs == [], "nothing is read from lent blocks"
    assert rig.arrive(seq)
    assert seq.state is SequenceState.RUNNING and seq.num_outputs == 1
    rig.run()
    rig.check_outputs("a")
    rig.check_baseline()


def test_only_what_the_decode_worker_has_not_cached_is_lent():
    rig = decode_rig()
    rig.add(request("a", list(range(36)), new=2))
    rig.run()
    seq = rig.add(request("b", [*range(36), 9, 9], new=2))
    rig.step()
    assert seq.cached_tokens == 32 and seq.lent_blocks == seq.table[2:]
    rig.run()
    rig.check_outputs("b")


def test_reservations_queue_for_room_within_bounds():
    rig = decode_rig(blocks=8, max_waiting=2)
    rig.add(request("a", 80, new=2))
    rig.step()
    rig.add(request("b", 80, new=2))
    rig.step()
    rig.add(request("c", 80, new=2))
    with pytest.raises(QueueFull):
        rig.add(request("d", 80, new=2))
    assert rig.scheduler.load().reserved == 1 and rig.scheduler.load().waiting == 2
    rig.run()
    for name in "abc":
        rig.check_outputs(name)
    rig.check_baseline()


@pytest.mark.parametrize("by_deadline", [False, True])
def test_blocks_a_writer_may_still_write_are_quarantined_and_not_reused(by_deadline):
    rig = decode_rig(blocks=6)
    seq = rig.add(request("a", 40, new=6, deadline_ns=50 if by_deadline else None), writer="a/1")
    rig.step()
    lent = list(seq.table)
    if by_deadline:
        rig.clock.advance_ns(50)
    else:
        rig.scheduler.abort("a")
    rig.step()
    assert rig.finished["a"].quarantined_writer == "a/1" and rig.pool.quarantined == len(lent)
    other = rig.add(request("b", 40, new=4), writer="b/1")
    third = rig.add(request("c", 40, new=4), writer="c/1")
    rig.step()
    assert not set(other.table) & set(lent) and third.state is SequenceState.WAITING
    rig.arrive(other)
    rig.late_write("a/1", lent)
    assert rig.scheduler.acquit("a/1") == len(lent)
    rig.run()
    rig.check_outputs("b")
    rig.check_outputs("c")
    rig.check_baseline()


def test_a_late_signal_of_a_request_that_is_gone_is_ignored():
    rig = decode_rig()
    seq = rig.add(request("a", 20))
    rig.step()
    rig.scheduler.abort("a")
    assert not rig.scheduler.kv_arrived("a", 3) and seq.outputs == []
    assert not rig.scheduler.kv_arrived("unknown", 3)
    again = rig.add(request("b", 20))
    assert not rig.scheduler.kv_arrived("b", 3), "not reserved yet"
    rig.step()
    assert rig.arrive(again) and not rig.scheduler.kv_arrived("b", 3)
    rig.run()
    rig.check_outputs("b")


def test_a_first_token_that_ends_the_request_ends_it_without_a_step():
    rig = decode_rig()
    seq = rig.add(request("a", 20, new=1))
    rig.step()
    rig.arrive(seq)
    plan = rig.scheduler.plan()
    assert plan.empty and [end.reason for end in plan.finished] == [FinishReason.LENGTH]
    assert seq.outputs == [next_token(seq.request, chain(seq.request, seq.tokens[:20])[-1], 19)]


def test_a_decode_worker_out_of_blocks_recomputes_what_it_preempted():
    rig = decode_rig(blocks=8, max_model_len=120)
    for i in range(4):
        rig.add(request(f"r{i}", 20, new=60))
    rig.run()
    assert rig.scheduler.load().preemptions > 0
    for i in range(4):
        rig.check_outputs(f"r{i}")
        assert rig.sequences[f"r{i}"].num_outputs == 60
    rig.check_baseline()


def test_a_decode_worker_computes_a_prompt_itself_when_told_to():
    rig = decode_rig()
    seq = rig.add(request("a", 40, new=4), local=True)
    rig.step()
    assert seq.state is SequenceState.RUNNING and seq.num_outputs == 1
    assert not rig.scheduler.kv_arrived("a", 3)
    rig.run()
    rig.check_outputs("a")
    rig.check_baseline()


def test_running_sequences_wait_while_reservations_hold_the_blocks_and_then_go_on():
    rig = decode_rig(blocks=5)
    a = rig.add(request("a", 30, new=20))
    rig.step()
    rig.arrive(a)
    b = rig.add(request("b", 40, new=4))
    rig.step()
    assert b.state is SequenceState.RESERVED
    for _ in range(30):
        rig.step()
    assert a.state is SequenceState.PREEMPTED and b.state is SequenceState.RESERVED
    rig.arrive(b)
    rig.run()
    rig.check_outputs("a")
    rig.check_outputs("b")
