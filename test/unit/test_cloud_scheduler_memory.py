"""The scheduler's memory: preemption, host copies, the prefix cache."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from scheduler_rig import Rig, request

from vla_cloud.core.generate import FinishReason, ImageSpan, Priority
from vla_cloud.core.sequence import SequenceState
from vla_cloud.core.step_plan import Role


def test_out_of_blocks_the_lowest_priority_then_the_latest_arrival_gives_way():
    rig = Rig(blocks=9, watermark_blocks=0)
    rig.add(request("low", 30, new=40, priority=Priority.LOW))
    rig.add(request("early", 30, new=40))
    rig.add(request("late", 30, new=40))
    order = []
    while rig.scheduler.live:
        plan_seen = []
        rig.step(meanwhile=lambda plan, seen=plan_seen: seen.extend(plan.preempted))
        order += [seq.request_id for seq in plan_seen]
    assert order[0] == "low" and "early" not in order
    assert order.index("late") > 0
    for name in ("low", "early", "late"):
        rig.check_outputs(name)
    rig.check_baseline()


def test_out_of_blocks_while_decoding_nobody_is_parked_for_ever():
    rig = Rig(blocks=8, watermark_blocks=0, max_model_len=128)
    for i in range(6):
        rig.add(request(f"r{i}", 20, new=100))
    rig.run()
    assert all(rig.sequences[f"r{i}"].num_outputs == 100 for i in range(6))
    for i in range(6):
        rig.check_outputs(f"r{i}")
    rig.check_baseline()


def test_a_robot_that_gave_way_does_not_come_back_in_the_same_step():
    rig = Rig(blocks=7, watermark_blocks=0, chunk_tokens=128)
    for name in ("first", "second"):  # of one prompt: the second can share the first one's blocks when it resumes
        rig.add(request(name, [5] * 48, new=10, priority=Priority.ROBOT))
    rig.step()
    rig.step(meanwhile=lambda plan: [seq.request_id for seq in plan.preempted] == ["second"] or pytest.fail())
    assert rig.sequences["second"].state is SequenceState.PREEMPTED
    rig.step()
    assert rig.sequences["second"].state is SequenceState.RUNNING
    rig.run()
    rig.check_outputs("first")
    rig.check_outputs("second")
    rig.check_baseline()


def test_room_made_for_a_robot_is_not_taken_by_chat_in_the_same_step():
    rig = Rig(blocks=12)
    rig.add(request("chat", 150, new=20))
    for _ in range(4):
        rig.step()
    rig.add(request("robot", 60, new=0, priority=Priority.ROBOT))
    newcomer = rig.add(request("newcomer", 16, new=2, priority=Priority.HIGH))
    rig.step()
    assert "robot" in rig.finished and newcomer.state is SequenceState.WAITING
    rig.step()
    assert newcomer.state is SequenceState.RUNNING
    rig.run()


def test_chat_does_not_take_blocks_that_a_robot_waits_for():
    rig = Rig(blocks=8, role=Role.PREFILL, watermark_blocks=0)
    held = rig.add(request("held", 64))
    rig.step()
    rig.add(request("robot", 100, new=0, priority=Priority.ROBOT))
    chat = rig.add(request("chat", 10))
    rig.step()
    assert held.state is SequenceState.TO_PUSH and chat.state is SequenceState.WAITING
    rig.run()
    rig.check_baseline()


def test_robots_and_chat_share_one_budget():
    rig = Rig()
    rig.add(request("chat", 100))
    rig.add(request("robot", 40, new=0, priority=Priority.ROBOT))
    rig.step()  # the rig checks the sum
    assert "robot" in rig.finished and rig.sequences["chat"].computed == 16


def test_what_was_preempted_is_found_again_in_the_cache():
    rig = Rig(blocks=9, watermark_blocks=0)
    rig.add(request("a", 62, new=10))
    rig.add(request("b", 62, new=30))
    while not rig.sequences["b"].preemptions:
        rig.step()
    assert rig.sequences["b"].computed == 0
    chunks = []
    while rig.sequences["b"].state is SequenceState.PREEMPTED:
        rig.step(meanwhile=lambda plan: chunks.extend(c for c in plan.prefill if c.seq.request_id == "b"))
    assert rig.sequences["b"].computed >= 64, "outputs included"
    assert all(chunk.start >= 64 for chunk in chunks)
    rig.run()
    rig.check_outputs("b")


def test_newcomers_leave_some_blocks_for_the_growth_of_the_running():
    rig = Rig(blocks=10, watermark_blocks=3)
    rig.add(request("a", 60, new=30))
    rig.step()
    rig.add(request("b", 60, new=4))
    rig.add(request("c", 30, new=4))
    rig.step()
    assert rig.sequences["b"].state is SequenceState.WAITING, "4 of 6 blocks would leave 2"
    assert rig.sequences["c"].table, "2 of 6 blocks leave 4"
    rig.run()
    alone = Rig(blocks=4, watermark_blocks=3)
    alone.add(request("whole", 60, new=2))
    alone.run()
    assert rig.scheduler.load().preemptions == 0


def test_a_preempted_request_resumes_before_newcomers_start():
    rig = Rig(blocks=8, watermark_blocks=0)
    rig.add(request("a", 48, new=40))
    rig.add(request("b", 48, new=40))
    while not rig.sequences["b"].preemptions:
        rig.step()
    for i in range(3):
        rig.add(request(f"new{i}", 20, new=4))
    while rig.sequences["b"].state is SequenceState.PREEMPTED:
        rig.step()
        assert all(rig.sequences[f"new{i}"].state is SequenceState.WAITING for i in range(3)) or (
            rig.sequences["b"].state is SequenceState.RUNNING
        )
    rig.run()
    rig.check_outputs("b")


def test_one_that_does_not_fit_is_passed_by_a_bounded_number_of_later_ones():
    rig = Rig(blocks=20, watermark_blocks=0, max_bypass=5, max_running=4)
    rig.add(request("running", 100, new=60))
    rig.step()
    rig.step()
    rig.add(request("big", 250, new=1))
    for i in range(30):
        rig.add(request(f"small{i}", 10, new=8))
    passed = []
    while rig.sequences["big"].state is SequenceState.WAITING:
        passed.append(sum(rig.sequences[f"small{i}"].state is not SequenceState.WAITING for i in range(30)))
        rig.step()
    assert max(passed) == 5
    rig.run()
    rig.check_baseline()


SWAP = {"host_blocks": 64, "bytes_per_block": 1000, "host_bandwidth_bytes_s": 1e9, "prefill_tokens_s": 100.0}


@pytest.mark.parametrize(
    "changes, swaps",
    [
        ({}, True),
        ({"host_bandwidth_bytes_s": 1.0}, False),  # slower than computing again
        ({"prefill_tokens_s": 1e12}, False),
        ({"host_blocks": 1}, False),  # no room
        ({"host_blocks": 0}, False),
    ],
)
def test_the_cheaper_of_host_copy_and_recomputation_is_taken(changes, swaps):
    rig = Rig(blocks=8, watermark_blocks=0, **{**SWAP, **changes})
    for i in range(3):
        rig.add(request(f"r{i}", 30, new=60))
    outs = []
    while rig.scheduler.live:
        rig.step(meanwhile=lambda plan: outs.extend(plan.swap_out))
        rig.check()
    assert bool(outs) == swaps and rig.scheduler.load().preemptions > 0
    for i in range(3):
        rig.check_outputs(f"r{i}")
    rig.check_baseline()


def test_a_half_computed_prompt_that_comes_back_from_the_host_needs_a_slot_again():
    rig = Rig(blocks=14, watermark_blocks=0, max_partial_prefills=1, max_long_prefills=1, **SWAP)
    rig.add(request("half", 150, new=4))
    rig.step()
    rig.add(request("robot", 150, new=0, priority=Priority.ROBOT))
    rig.step()
    assert "half" in rig.host
    while "robot" not in rig.finished:
        rig.step()
    rig.add(request("urgent", 60, new=4, priority=Priority.HIGH))
    rig.run()  # the rig checks that no more than one prompt of chat is in progress
    rig.check_outputs("half")
    rig.check_baseline()


def test_a_host_copy_that_failed_to_come_back_is_not_kept_in_the_cache():
    rig = Rig(blocks=12, watermark_blocks=0, **SWAP)
    chat = rig.add(request("chat", 150, new=20))
    for _ in range(12):
        rig.step()
    tokens = list(chat.tokens)
    rig.add(request("robot", 150, new=0, priority=Priority.ROBOT))
    while "robot" not in rig.finished:
        rig.step()
    rig.tree.clear()
    rig.step(fail=True)
    assert rig.finished["chat"].reason is FinishReason.ERROR
    rig.add(request("again", tokens, new=2))
    rig.run()  # the rig checks that no KV of the failed copy is read
    assert rig.sequences["again"].cached_tokens == 0
    rig.check_outputs("again")


def test_a_swapped_request_that_is_aborted_gives_its_host_blocks_back():
    rig = Rig(blocks=8, watermark_blocks=0, **SWAP)
    for i in range(3):
        rig.add(request(f"r{i}", 30, new=60))
    while not rig.host:
        rig.step()
    victim = next(iter(rig.host))
    rig.scheduler.abort(victim)
    rig.run()
    assert rig.scheduler._planner.host_used == 0
    rig.check_baseline()


def test_a_second_request_computes_only_what_the_first_did_not():
    rig = Rig()
    prompt = list(range(40))
    rig.add(request("a", prompt, new=2))
    rig.run()
    rig.add(request("b", [*prompt, 3, 4, 5], new=2))
    rig.run()
    rig.check_outputs("b")
    assert rig.sequences["a"].cached_tokens == 0 and rig.sequences["b"].cached_tokens == 32


def test_the_next_turn_finds_the_answer_of_the_last_one_cached():
    rig = Rig()
    rig.add(request("a", 20, new=30))
    rig.run()
    first = rig.sequences["a"]
    rig.add(request("b", [*first.tokens, 1, 2, 3], new=2))
    rig.run()
    assert rig.sequences["b"].cached_tokens == 48  # 49 of the 50 tokens have KV
    rig.check_outputs("b")


def test_a_prompt_that_is_cached_whole_computes_its_last_block_only():
    rig = Rig()
    for name in ("a", "b"):
        rig.add(request(name, list(range(32)), new=2))
        rig.run()
        rig.check_outputs(name)
    assert rig.sequences["b"].cached_tokens == 16


@pytest.mark.parametrize("moved", [False, True])
def test_the_same_text_with_another_image_shares_nothing_from_the_image_on(moved):
    prompt = [7] * 64
    rig = Rig()
    rig.add(request("a", prompt, images=(ImageSpan(20, 30, b"a" * 32),)))
    rig.run()
    other = ImageSpan(21, 30, b"a" * 32) if moved else ImageSpan(20, 30, b"b" * 32)
    rig.add(request("b", prompt, images=(other,)))
    rig.add(request("c", prompt, images=(ImageSpan(20, 30, b"a" * 32),)))
    rig.run()
    assert rig.sequences["b"].cached_tokens == 16 and rig.sequences["c"].cached_tokens == 48
    rig.check_outputs("b")
    rig.check_outputs("c")


def test_tenants_share_no_prefix():
    rig = Rig()
    prompt = list(range(64))
    for salt in (b"one", b"two", b"one"):
        rig.add(request(f"r{salt.decode()}{rig.steps}", prompt, salt=salt))
        rig.run()
    assert [seq.cached_tokens for seq in rig.sequences.values()] == [0, 0, 48]


def test_without_prefix_cache_nothing_is_found_or_kept():
    rig = Rig(prefix_cache=False)
    for name in ("a", "b"):
        rig.add(request(name, list(range(64))))
        rig.run()
    assert rig.sequences["b"].cached_tokens == 0 and rig.pool.free == rig.pool.total
