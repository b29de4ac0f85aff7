"""The metrics page: what its table says and nothing else, with labels that stay few."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'vla-runtime[gateway]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from observed_gateway import NS, Observed
from prometheus_client.parser import text_string_to_metric_families

from vla_cloud.core.generate import QueueFull, WorkerLost
from vla_cloud.core.robot_board import Shield
from vla_cloud.gateway.chat_types import ChatRequest, Done, TextDelta, Usage
from vla_cloud.gateway.metric_table import METRICS, Families
from vla_cloud.gateway.metrics import GatewayMetrics


@pytest.fixture(scope="module")
def observed() -> Observed:
    made = Observed()
    made.live_a_little()
    return made


def families(metrics: GatewayMetrics):
    return {one.name: one for one in text_string_to_metric_families(metrics.text().decode())}


def samples(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    return {(s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value for f in families(metrics).values() for s in f.samples}


def test_every_metric_of_the_table_is_on_the_page_with_its_labels_and_no_other(observed: Observed) -> None:
    page = {name: family for name, family in families(observed.metrics).items() if not name.startswith("process_")}
    assert set(page) == set(METRICS)
    for name, family in page.items():
        row = METRICS[name]
        assert family.type == row.kind and family.documentation == row.told
        assert family.samples, f"{name} has no sample although something of each kind has happened"
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(row.labels), sample


def test_without_robots_and_work_the_page_still_names_every_metric() -> None:
    empty = Observed()
    metrics = GatewayMetrics(empty.clock, dict)
    assert {name for name in families(metrics) if not name.startswith("process_")} == set(METRICS)


def test_a_metric_that_is_not_in_the_table_cannot_be_shown() -> None:
    with pytest.raises(KeyError):
        Families().add("vla_secret", 1.0)


def test_values_are_those_of_the_pools(observed: Observed) -> None:
    got = samples(observed.metrics)
    worker = ("model=small", "worker=d0")
    blocks = {state: got[("vla_kv_blocks", "model=small", f"state={state}", "worker=d0")] for state in ("free", "cached", "used", "quarantined")}
    assert blocks == {"free": 10, "cached": 30, "used": 57, "quarantined": 3} and sum(blocks.values()) == 100
    states = {state: got[("vla_worker_requests", "model=small", f"state={state}", "worker=d0")]
              for state in ("running", "reserved", "pushing", "waiting", "preempted")}
    assert states == {"running": 2, "reserved": 2, "pushing": 1, "waiting": 3, "preempted": 1}
    for name, value in (("vla_preemptions_total", 7), ("vla_kv_leases", 3), ("vla_kv_leases_expired_total", 1),
                        ("vla_kv_awaited_writers", 1), ("vla_transfers_total", 9), ("vla_transfer_bytes_total", 4096),
                        ("vla_transfer_seconds_total", 0.5), ("vla_worker_restarts_total", 1)):  # fmt: skip
        assert got[(name, *worker)] == value, name
    assert got[("vla_prefix_tokens_total", "kind=cached", *worker)] == 200
    assert got[("vla_transfer_failures_total", "cause=late", *worker)] == 2
    assert got[("vla_worker_role_switches_total", "model=small", "worker=p0")] == 1
    assert got[("vla_worker_up", "model=small", "role=decode", "worker=d1")] == 0
    assert ("vla_kv_leases", "model=small", "worker=d1") not in got, "nothing is known of a worker that only starts"
    assert got[("vla_retries_total", "cause=transfer_late", "model=small")] == 1
    assert got[("vla_reprefills_total", "model=small")] == 1
    assert got[("vla_queue_seconds_count", "model=small")] == 1
    assert got[("vla_queue_seconds_bucket", "le=0.2", "model=small")] == 1
    assert got[("vla_queue_seconds_bucket", "le=0.1", "model=small")] == 0


def test_values_are_those_of_the_robots(observed: Observed) -> None:
    got = samples(observed.metrics)
    assert got[("vla_robots",)] == 2
    assert got[("vla_robot_context_rate_hz", "robot=arm1")] == pytest.approx(10, abs=0.6)
    assert got[("vla_robot_context_rate_hz", "robot=arm2")] == pytest.approx(3.5, abs=0.6)
    assert got[("vla_robot_observation_rate_hz", "robot=arm2")] == pytest.approx(10, abs=0.6)
    assert got[("vla_robot_observations_replaced_total", "robot=arm2")] == 3
    assert got[("vla_robot_observations_refused_total", "robot=arm2")] == 1
    assert got[("vla_context_refusals_total", "cause=unknown_word")] == 1
    assert [got[("vla_robot_shield_state", f"robot={robot}", f"state={state}")] for robot, state in
            (("arm1", "NOMINAL"), ("arm1", "HOLDING"), ("arm2", "HOLDING"), ("arm2", "NOMINAL"))] == [1, 0, 1, 0]  # fmt: skip
    assert got[("vla_robot_missed_ticks_total", "robot=arm2")] == 4
    assert got[("vla_context_seconds_count",)] == 40
    assert (got[("vla_lane_up", "lane=robots0")], got[("vla_lane_up", "lane=robots1")]) == (1, 0)


def test_robots_are_bounded_and_gone_when_they_are_forgotten() -> None:
    observed = Observed(max_robots=4)
    for number in range(50):
        observed.clock.advance_ns(NS)
        observed.robots.board.observed(f"r{number}", observed.clock.monotonic_ns(), False)
    named = {key[1] for key in samples(observed.metrics) if key[0] == "vla_robot_observation_age_seconds"}
    assert named == {f"robot=r{number}" for number in range(46, 50)}
    observed.clock.advance_ns(round(60.5 * NS))
    assert {key for key in samples(observed.metrics) if key[0].startswith("vla_robot_")} == set()


def test_age_grows_while_contexts_fail_to_come() -> None:
    observed = Observed()
    board, clock = observed.robots.board, observed.clock
    board.observed("arm1", clock.monotonic_ns(), False)
    key = ("vla_robot_context_age_seconds", "robot=arm1")
    assert key not in samples(observed.metrics), "never answered is no age"
    board.answered("arm1", clock.monotonic_ns(), clock.monotonic_ns())
    for expected in (0.5, 1.0, 1.5):
        clock.advance_ns(NS // 2)
        board.observed("arm1", clock.monotonic_ns(), False)
        got = samples(observed.metrics)
        assert got[key] == expected and got[("vla_robot_observation_age_seconds", "robot=arm1")] == 0


def test_a_robot_that_only_tells_of_its_shield_gives_way_to_one_that_is_served() -> None:
    observed = Observed(max_robots=2)
    board, clock = observed.robots.board, observed.clock
    for name in ("a", "b", "c"):
        board.told(name, Shield("HOLDING", "", False, 0, 0, 0.0, clock.monotonic_ns()))
    assert [row["robot"] for row in board.rows(clock.monotonic_ns())] == ["a", "b"]
    board.observed("d", clock.monotonic_ns(), False)
    rows = board.rows(clock.monotonic_ns())
    assert len(rows) == 2 and rows[-1]["robot"] == "d"


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_time_per_token_is_that_of_a_whole_answer(door: str) -> None:
    observed = Observed()
    clock, metrics = observed.clock, observed.metrics

    async def answer(error: Exception | None) -> AsyncGenerator[TextDelta | Done, None]:
        for wait_s, tokens in ((0.3, 1), (0.04, 1), (0.16, 4)):
            clock.advance_ns(round(wait_s * NS))
            yield TextDelta("x", tuple(range(tokens)))
        if error is not None:
            raise error
        yield Done("length", Usage(10, 6, None))

    async def go() -> None:
        assert len([one async for one in metrics.observed(door, ChatRequest("a", ()), answer(None))]) == 4
        for error in (WorkerLost("x"), QueueFull("x")):
            with pytest.raises(type(error)):
                [one async for one in metrics.observed(door, ChatRequest("b", ()), answer(error))]

    asyncio.run(go())
    got = samples(metrics)
    assert got[("vla_time_per_output_token_seconds_count",)] == 1, "of served requests only"
    assert got[("vla_time_per_output_token_seconds_sum",)] == pytest.approx(0.2 / 5)
    assert got[("vla_time_between_tokens_seconds_count",)] == 15
    assert got[("vla_time_to_first_token_seconds_bucket", "le=0.5")] == 3
    assert got[("vla_request_seconds_sum",)] == pytest.approx(0.5)
    assert got[("vla_requests_total", "code=OK", f"door={door}", "outcome=served")] == 1
    assert got[("vla_requests_total", "code=RESOURCE_EXHAUSTED", f"door={door}", "outcome=failed")] == 1


def test_many_who_look_cost_no_more_than_one() -> None:
    observed = Observed()
    first = observed.source.status()
    observed.clock.advance_ns(NS // 10)
    assert observed.source.status() is first
    observed.clock.advance_ns(NS // 5)
    later = observed.source.status()
    assert later is not first and later["up_s"] == pytest.approx(0.3)
