"""The scheduler of one worker: chunks, batches, priorities, refusals, ends."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from scheduler_rig import Rig, expected_outputs, next_token, request

from vla_cloud.core.generate import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineFailed,
    FinishReason,
    InvalidRequest,
    Priority,
    QueueFull,
    TransferFailed,
)
from vla_cloud.core.step_plan import SchedulerConfig


def steps_until(rig, request_id, limit=500):
    for step in range(1, limit):
        rig.step()
        if request_id in rig.finished:
            return step
    raise AssertionError(f"{request_id} did not end in {limit} steps")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [64, 512])
def test_a_prompt_in_chunks_gives_the_tokens_of_a_prompt_at_once(length, chunk):
    rig = Rig(chunk_tokens=chunk)
    rig.add(request("a", length, new=20))
    rig.run()
    rig.check_outputs("a")
    assert rig.sequences["a"].num_outputs == 20
    rig.check_baseline()


def test_a_long_prompt_does_not_starve_short_ones():
    alone = Rig(blocks=400)
    alone.add(request("short", 40, new=4))
    alone_steps = steps_until(alone, "short")

    rig = Rig(blocks=400)
    rig.add(request("long", 4000, new=4))
    rig.step()
    rig.add(request("short", 40, new=4))
    assert steps_until(rig, "short") <= alone_steps + 2
    assert "long" not in rig.finished


def test_many_long_prompts_leave_a_slot_to_a_short_one():
    rig = Rig(blocks=1000, max_partial_prefills=4, max_long_prefills=2)
    for i in range(5):
        rig.add(request(f"long{i}", 2000, new=1))
    rig.step()
    rig.add(request("short", 16, new=1))
    # A quarter of 64 tokens at worst: one step after it comes in.
    assert steps_until(rig, "short") <= 2
    rig.run()
    rig.check_baseline()


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    rig = Rig(blocks=400, max_partial_prefills=4)
    rig.add(request("long", 1600, new=1))
    step = 0
    while "long" not in rig.finished:
        for i in range(4):
            rig.add(request(f"short{step}.{i}", 64, new=1))
        rig.step()
        step += 1
        assert step <= 1600 / 16 + 2, "the long prompt gets less than its quarter"
        if len(rig.scheduler._live.waiting()) > 100:
            for seq in rig.scheduler._live.waiting()[50:]:
                rig.scheduler.abort(seq.request_id)


def test_decode_rows_are_in_every_step_beside_a_long_prompt():
    rig = Rig(blocks=400)
    rig.add(request("talk", 10, new=50))
    rig.step()
    rig.add(request("long", 3000, new=1))
    for _ in range(30):
        before = rig.sequences["talk"].num_outputs
        rig.step()  # the rig also checks that no ready row is left out
        assert rig.sequences["talk"].num_outputs == before + 1


def test_more_sequences_than_rows_wait_for_a_row_with_their_blocks():
    rig = Rig(blocks=64, max_running=2, max_admitted=6, max_partial_prefills=4)
    for i in range(6):
        rig.add(request(f"r{i}", 8, new=10))
    rig.step()
    rig.step()
    rig.step()
    assert rig.scheduler.load().running == 6
    rig.run()
    for i in range(6):
        rig.check_outputs(f"r{i}")


def test_no_more_sequences_than_admitted_hold_blocks():
    rig = Rig(blocks=64, max_running=2, max_admitted=3)
    for i in range(6):
        rig.add(request(f"r{i}", 8, new=10))
    for _ in range(12):
        rig.step()
        assert rig.scheduler.load().running <= 3
    rig.run()


@pytest.mark.parametrize("first, second", [(Priority.LOW, Priority.NORMAL), (Priority.NORMAL, Priority.HIGH)])
def test_a_higher_priority_comes_in_before_an_earlier_lower_one(first, second):
    rig = Rig(max_running=1, max_admitted=1)
    rig.add(request("busy", 8, new=3, priority=Priority.HIGH))
    rig.step()
    rig.add(request("early", 8, new=2, priority=first))
    rig.add(request("late", 8, new=2, priority=second))
    rig.run()
    assert list(rig.finished) == ["busy", "late", "early"]


def test_a_robot_never_waits_behind_chat():
    rig = Rig(blocks=32, max_running=2, max_admitted=4, watermark_blocks=2)
    for i in range(8):
        rig.add(request(f"chat{i}", 100, new=50))
    for _ in range(10):
        rig.step()
    rig.add(request("robot", 60, new=0, priority=Priority.ROBOT))
    rig.step()
    assert rig.finished["robot"].reason is FinishReason.LENGTH
    rig.run()
    for i in range(8):
        rig.check_outputs(f"chat{i}")
    rig.check_baseline()


def test_a_robot_takes_blocks_from_chat_and_the_chat_resumes():
    rig = Rig(blocks=12)
    rig.add(request("chat", 150, new=20))
    for _ in range(4):
        rig.step()
    rig.add(request("robot", 60, new=0, priority=Priority.ROBOT))
    rig.step()
    assert "robot" in rig.finished and rig.sequences["chat"].preemptions == 1
    rig.run()
    rig.check_outputs("chat")


def test_robots_go_by_the_nearest_deadline():
    rig = Rig(chunk_tokens=64, max_partial_prefills=1, max_long_prefills=1)
    rig.add(request("later", 64, new=0, priority=Priority.ROBOT, deadline_ns=2_000))
    rig.add(request("sooner", 64, new=0, priority=Priority.ROBOT, deadline_ns=1_000))
    rig.step()
    rig.step()
    assert rig.finished["sooner"].reason is FinishReason.LENGTH
    rig.run()


def test_chat_cannot_fill_the_queue_of_robots():
    rig = Rig(max_waiting=3)
    for i in range(3):
        rig.add(request(f"chat{i}", 8))
    with pytest.raises(QueueFull):
        rig.add(request("chat3", 8))
    rig.add(request("robot", 8, priority=Priority.ROBOT))


def test_overload_is_refused_at_once_and_without_work():
    rig = Rig(max_waiting=4)
    for i in range(4):
        rig.add(request(f"r{i}", 8))
    for i in range(100):
        with pytest.raises(QueueFull, match="retry later"):
            rig.add(request(f"x{i}", 8))
    assert rig.scheduler.live == 4 and rig.pool.used == 0
    rig.run()
    rig.add(request("again", 8))


def test_an_over_long_prompt_is_refused_before_any_work():
    rig = Rig(blocks=8, max_model_len=100)
    with pytest.raises(InvalidRequest, match="1 to 99"):
        rig.add(request("a", 100))
    small = Rig(blocks=2, max_model_len=100)
    with pytest.raises(InvalidRequest, match="1 to 31"):
        small.add(request("a", 32))
    assert rig.scheduler.live == small.scheduler.live == 0
    small.add(request("a", 31, new=50))
    small.run()
    assert small.sequences["a"].num_outputs == 1 and small.finished["a"].reason is FinishReason.LENGTH


def test_a_request_of_64k_tokens_is_served():
    rig = Rig(blocks=4200, max_model_len=66_000, chunk_tokens=2048)
    rig.memory = [[0] * 16 for _ in range(4200)]
    rig._compute = lambda seq, start, count: 5  # the content check is quadratic; other tests have it
    rig.add(request("long", 65_536, new=4))
    rig.run()
    assert rig.sequences["long"].num_outputs == 4 and rig.steps <= 65_536 / 2048 + 6


def test_the_same_id_twice_is_refused_while_the_first_lives():
    rig = Rig()
    rig.add(request("a", 8))
    with pytest.raises(DuplicateRequest):
        rig.scheduler.add(request("a", 8))
    rig.run()
    rig.add(request("a", 8))
    rig.run()


def test_stop_tokens_end_a_request_and_are_its_last_output():
    probe = request("a", 20, new=12)
    outputs = expected_outputs(probe, 1000)
    stop = outputs[5]
    rig = Rig()
    rig.add(replace(probe, sampling=replace(probe.sampling, stop_token_ids=frozenset({stop, 999}))))
    rig.run()
    end = outputs.index(stop) + 1
    assert rig.sequences["a"].outputs == outputs[:end]
    assert rig.finished["a"].reason is FinishReason.STOP


def test_max_new_tokens_and_the_longest_context_end_a_request():
    rig = Rig(max_model_len=40)
    rig.add(request("few", 20, new=3))
    rig.add(request("many", 20, new=100))
    rig.run()
    assert rig.sequences["few"].num_outputs == 3 and rig.sequences["many"].num_outputs == 20
    assert {end.reason for end in rig.finished.values()} == {FinishReason.LENGTH}


def test_each_request_draws_by_its_own_seed_wherever_it_runs():
    prompt = list(range(30))
    one, two = Rig(), Rig(chunk_tokens=128)
    a = request("a", prompt, new=8)
    b = request("b", prompt, new=8)
    one.add(a)
    one.add(b)
    two.add(b)
    one.run()
    two.run()
    assert one.sequences["a"].outputs != one.sequences["b"].outputs
    assert one.sequences["b"].outputs == two.sequences["b"].outputs
    # And going on elsewhere after three tokens brings the same rest.
    rest = Rig()
    rest.add(request("b", [*prompt, *two.sequences["b"].outputs[:3]], new=5))
    rest.run()
    assert rest.sequences["b"].outputs == two.sequences["b"].outputs[3:]


def test_a_disconnect_stops_a_long_prompt_at_the_next_chunk():
    rig = Rig(blocks=300)
    rig.add(request("long", 4000))
    rig.step()
    rig.step(meanwhile=lambda plan: rig.scheduler.abort("long"))
    assert rig.finished["long"].reason is FinishReason.ABORTED
    assert rig.sequences["long"].computed <= 3 * 64
    plan = rig.scheduler.plan()
    assert plan.empty and rig.pool.free + rig.tree.evictable == 300


def test_an_abort_frees_at_once():
    rig = Rig()
    rig.add(request("a", 100))
    rig.step()
    assert rig.scheduler.abort("a")
    assert rig.pool.free + rig.tree.evictable == rig.pool.total  # before any further step
    assert not rig.scheduler.abort("a")
    rig.run()
    rig.check_baseline()


def test_an_abort_as_the_last_chunk_ends_frees_and_delivers_nothing_more():
    rig = Rig()
    rig.add(request("a", 30))
    result = rig.step(meanwhile=lambda plan: rig.scheduler.abort("a"))
    assert result.tokens == [] and result.finished[0].reason is FinishReason.ABORTED
    assert rig.sequences["a"].outputs == []
    rig.check_baseline()


def test_an_abort_with_a_cause_ends_in_that_error():
    rig = Rig()
    rig.add(request("a", 30))
    rig.scheduler.abort("a", TransferFailed("no peer"))
    rig.run()
    assert rig.finished["a"].reason is FinishReason.ERROR
    assert isinstance(rig.finished["a"].error, TransferFailed)


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_a_passed_deadline_ends_a_request_by_name_waiting_or_running(steps):
    rig = Rig(max_running=1, max_admitted=1)
    rig.add(request("first", 200, new=50, deadline_ns=10**9 if steps else None))
    for _ in range(steps):
        rig.step()
    rig.add(request("late", 20, deadline_ns=10**9))
    rig.clock.advance_ns(10**9 - 1)
    rig.step()
    assert not rig.finished
    rig.clock.advance_ns(1)
    rig.step()
    ended = {"first", "late"} if steps else {"late"}
    assert set(rig.finished) == ended
    assert all(isinstance(end.error, DeadlineExceeded) for end in rig.finished.values())
    rig.run()
    rig.check_baseline()


def test_a_plan_is_committed_once_and_before_the_next():
    rig = Rig()
    rig.add(request("a", 100))
    plan = rig.scheduler.plan()
    with pytest.raises(RuntimeError, match="still running"):
        rig.scheduler.plan()
    rig.scheduler.commit(plan, {})
    with pytest.raises(ValueError, match="once"):
        rig.scheduler.commit(plan, {})
    last = rig.scheduler.plan()
    with pytest.raises(ValueError, match="no token"):
        rig.scheduler.commit(last, {})
    rig.scheduler.commit(last, {"a": 3})
    assert rig.scheduler.commit(rig.scheduler.plan(), {"a": 4}).tokens[0][1] == 4


def test_an_idle_scheduler_has_no_work_and_an_empty_plan_may_be_committed():
    rig = Rig()
    assert not rig.scheduler.has_work
    plan = rig.scheduler.plan()
    assert plan.empty and rig.scheduler.commit(plan, {}).tokens == []
    rig.add(request("a", 8, new=1))
    assert rig.scheduler.has_work
    rig.run()
    assert not rig.scheduler.has_work


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_tokens": 63},
        {"max_running": 0},
        {"max_admitted": 31},
        {"max_long_prefills": 4},
        {"watermark_blocks": -1},
        {"host_blocks": 5},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ValueError):
        SchedulerConfig(**wrong)


def test_the_load_counts_every_state():
    rig = Rig(max_running=1, max_admitted=1)
    rig.add(request("a", 100))
    rig.add(request("b", 10))
    rig.step()
    load = rig.scheduler.load()
    assert (load.running, load.waiting, load.tokens_to_compute) == (1, 1, 36 + 10)
    assert load.free_blocks + load.cached_blocks + len(rig.sequences["a"].table) == load.total_blocks
    assert next_token(rig.sequences["a"].request, 1, 2) == next_token(rig.sequences["a"].request, 1, 2)


def test_a_failed_step_ends_its_requests_by_name_and_spares_the_others():
    rig = Rig(max_partial_prefills=1, max_long_prefills=1)
    rig.add(request("a", 30, new=8))
    rig.add(request("b", 30, new=8))
    rig.step()
    rig.step(fail=True)
    assert {type(end.error) for end in rig.finished.values()} == {EngineFailed}
    rig.add(request("c", list(rig.sequences["a"].request.tokens), new=8))
    rig.run()
    rig.check_outputs("c")
    rig.check_baseline()
