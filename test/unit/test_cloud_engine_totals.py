"""What a worker counts since its start: tokens from its cache, transfers and their failures, leases."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import pytest
from engine_bench import WORK, Bench, began_writing, make_prompt, make_work, pair

from vla_cloud.core.step_plan import Role
from vla_cloud.kv_transfer.connector import Cause
from vla_cloud.pools import messages


def load(bench: Bench, name: str) -> messages.Load:
    bench.send(name, messages.Ping(1))
    bench.collect()
    return next(one.load for one in reversed(bench.workers[name].other) if isinstance(one, messages.Pong))


def test_prompt_tokens_are_cached_or_computed() -> None:
    bench = Bench()
    bench.add("w", Role.BOTH)
    prompt = make_prompt(1, 70)
    for number in range(3):
        bench.generate("w", f"r{number}", make_work(prompt))
        bench.settle()
    told = load(bench, "w")
    assert (told.computed_tokens, told.cached_tokens) == (70 + 2 * 6, 2 * 64)
    assert (told.transfers, told.transfer_bytes, told.transfer_failures, told.leases) == (0, 0, {}, 0)


def test_preempted_requests_count_no_second_hit() -> None:
    bench = Bench()
    bench.add("w", Role.BOTH, num_blocks=8)
    prompts = [make_prompt(number, 40) for number in range(3)]
    for number, prompt in enumerate(prompts):
        bench.generate("w", f"r{number}", make_work(prompt, 40))
    bench.settle()
    told = load(bench, "w")
    assert told.preemptions > 0 and told.cached_tokens == 0
    assert told.computed_tokens >= 120


def test_a_transfer_counts_on_both_sides() -> None:
    bench = pair()
    bench.disaggregate("p", "d", "r", WORK)
    bench.settle()
    pushed, arrived = load(bench, "p"), load(bench, "d")
    assert pushed.transfers == arrived.transfers == 1
    assert pushed.transfer_bytes == arrived.transfer_bytes > 0
    assert arrived.transfer_failures == pushed.transfer_failures == {}
    assert (arrived.leases, arrived.awaited_writers, arrived.leases_expired) == (0, 0, 0)


def test_a_reservation_is_a_lease_until_it_expires() -> None:
    bench = pair()
    bench.hold_prefill = True
    bench.disaggregate("p", "d", "r", WORK)
    bench.until(lambda: load(bench, "d").reserved == 1)
    held = load(bench, "d")
    assert (held.leases, held.leases_expired) == (1, 0) and held.running == 1
    bench.advance(1000.0)
    bench.settle()
    ended = load(bench, "d")
    assert (ended.leases, ended.leases_expired, ended.reserved) == (0, 1, 0)


@pytest.mark.parametrize(("killed", "left"), [("p", "d"), ("d", "p")])
def test_a_transfer_that_fails_is_named(killed: str, left: str) -> None:
    bench = pair()
    began_writing(bench)
    bench.kill(killed)
    bench.settle()
    told = load(bench, left)
    assert told.transfers == 0 and sum(told.transfer_failures.values()) == 1
    assert set(told.transfer_failures) <= {one.value for one in Cause}, told.transfer_failures


def test_a_push_that_is_not_done_in_time_is_late() -> None:
    bench = pair()
    began_writing(bench)
    bench.until(lambda: load(bench, "p").to_push == 1, operations=0)
    bench.advance(100.0)
    bench.step(operations=0)
    assert load(bench, "p").transfer_failures == {"late": 1}


def test_a_worker_logs_each_attempt_under_the_clients_id(caplog) -> None:
    caplog.set_level(logging.DEBUG, "vla_cloud.engine")
    bench = Bench()
    bench.add("w", Role.BOTH)
    bench.generate("w", "chatcmpl-1~7", make_work(make_prompt(1, 20), 3))
    bench.settle()
    (record,) = [one for one in caplog.records if hasattr(one, "request_id")]
    assert (record.request_id, record.outcome, record.prompt_tokens, record.completion_tokens) == ("chatcmpl-1", "length", 20, 3)
    assert "chatcmpl-1, attempt 0" in record.getMessage()
