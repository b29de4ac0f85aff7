"""A robot lane and the service over lanes, in one process: the tiny backbone, real messages, a clock the test moves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vla_cloud.config import CloudConfig, ContextConfig, ServingConfig
from vla_cloud.context.checks import CheckedObservation
from vla_cloud.context.lane import MAX_BROKEN_BATCHES, RobotLane
from vla_cloud.context.lane_settings import lane_specs
from vla_cloud.context.pooled_service import PooledContextService
from vla_cloud.context.runner import ContextRunner
from vla_cloud.core.image_cache import ImageCache
from vla_cloud.pools import messages as wire
from vla_cloud.pools.codec import decode_to_gateway, decode_to_worker, encode, pack_tokens
from vla_cloud.pools.workers import WorkerInfo
from vla_common import tensors
from vla_common import wire as robot_wire
from vla_common.clock import ManualClock
from vla_common.zenoh_session import Received

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from context_rig import MANIFEST, MS, REFUSALS, jpeg, key, observation, tiny_vlm


def runner(image_cache: int = 4) -> ContextRunner:
    return ContextRunner(
        tiny_vlm(), MANIFEST, prefix_cache_tokens=64, max_image_bytes=8192, image_cache=image_cache
    )  # fmt: skip


def row(one: ContextRunner, text: str = "touch the red cube", image: bytes | None = None) -> wire.ContextRow:
    return wire.ContextRow(pack_tokens(one.checks.tokenize(text)), jpeg() if image is None else image)


class Bench:
    """Lanes that answer when they are told to."""

    def __init__(self, lanes: int = 1, **config: object) -> None:
        self.clock = ManualClock(start_ns=10**12)
        self.sent: list[tuple[str, object]] = []
        self.service = PooledContextService(MANIFEST, self._publish, self.clock, ContextConfig(**config))
        self.service.attach(self)
        self.lanes = {f"robots{i}.1": RobotLane(runner(), MANIFEST, self.clock) for i in range(lanes)}
        for worker, lane in self.lanes.items():
            self.service.worker_ready(worker, lane.ready(worker))

    def _publish(self, robot: str, payload: bytes) -> None:
        self.sent.append((robot, robot_wire.decode("ContextTokens", payload)))

    def send(self, worker_id: str, message: wire.ToWorker) -> bool:
        if worker_id not in self.lanes:
            return False
        self.lanes[worker_id].handle(decode_to_worker(encode(message)))
        return True

    def infos(self) -> list[WorkerInfo]:
        return []

    async def receive(self, robot: str, payload: bytes) -> None:
        self.service.receive(Received(payload, None, self.clock.monotonic_ns(), key(robot)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def work(self, worker: str = "robots0.1") -> list[wire.ToGateway]:
        lane = self.lanes[worker]
        while lane.step():
            pass
        events = lane.events()
        for message in events:
            self.service.worker_message(worker, decode_to_gateway(encode(message)))
        return events

    @property
    def refused(self) -> dict[str, int]:
        return self.service.statistics.refused.snapshot()


def run(go: Callable[[], object]) -> None:
    asyncio.run(go())  # type: ignore[arg-type]


# --- the image cache ---


def test_the_same_image_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = runner()
    encoded: list[int] = []
    patches = one._vlm.patches
    monkeypatch.setattr(one._vlm, "patches", lambda images: encoded.append(len(images)) or patches(images))

    def contexts(*wanted: tuple[str, int]) -> list[object]:
        checked = [CheckedObservation(one.checks.tokenize(text), jpeg(seed)) for text, seed in wanted]
        return one.run([one.decode(each) for each in checked])

    first = contexts(("touch the red cube", 0), ("touch the blue cube", 0), ("touch the red cube", 1))
    assert encoded == [2] and [result.image_cached for result in first] == [False, True, False]
    again = contexts(("touch the blue cube", 0), ("pick the red cube", 1), ("touch the red cube", 2))
    assert encoded == [2, 1] and [result.image_cached for result in again] == [True, True, False]
    np.testing.assert_allclose(again[0].tokens, first[1].tokens, atol=1e-6)
    fresh = runner()
    ids = fresh.checks.tokenize("pick the red cube")
    alone = fresh.run([fresh.decode(CheckedObservation(ids, jpeg(1)))])[0]
    np.testing.assert_allclose(again[1].tokens, alone.tokens, atol=1e-5)
    assert not alone.image_cached


def test_an_image_cache_is_bounded_and_keeps_what_is_used() -> None:
    cache: ImageCache[int] = ImageCache(2)
    cache.put(b"a", 1)
    cache.put(b"b", 2)
    assert cache.get(b"a") == 1
    cache.put(b"c", 3)
    assert (cache.get(b"b"), cache.get(b"a"), cache.get(b"c"), len(cache)) == (None, 1, 3, 2)
    assert (cache.counts.lookups, cache.counts.hits, cache.counts.evicted) == (4, 3, 1)
    with pytest.raises(ValueError, match="at least one"):
        ImageCache(0)


# --- the lane ---


def test_a_lane_computes_what_the_runner_computes() -> None:
    lane, direct = RobotLane(runner(), MANIFEST, ManualClock()), runner()
    rows = [row(direct, image=jpeg(i)) for i in range(3)]
    lane.handle(wire.ContextBatch(7, rows))
    assert not lane.step()
    (contexts,) = lane.events()
    expected = direct.run([direct.decode(CheckedObservation(direct.checks.tokenize("touch the red cube"), one.jpeg))
                           for one in rows])  # fmt: skip
    assert contexts.number == 7
    for answer, result in zip(contexts.rows, expected, strict=True):
        assert answer.tokens == result.tokens.astype("<f4").tobytes()
        assert answer.prefix_tokens_reused == result.prefix_tokens_reused
    assert lane.ready("robots0.1").model_hash == MANIFEST.model_hash


def test_one_bad_row_costs_the_others_nothing() -> None:
    lane, direct = RobotLane(runner(), MANIFEST, ManualClock()), runner()
    bad = {
        "malformed_image": row(direct, image=b"\xff\xd8no jpeg"), "wrong_image_size": row(direct, image=jpeg(size=(24, 48))),
        "image_too_large": row(direct, image=b"\0" * 8193), "internal_error": wire.ContextRow(pack_tokens([1, 2]), jpeg()),
    }  # fmt: skip
    strange = wire.ContextRow(pack_tokens([10**6] * 8), jpeg())
    lane.handle(wire.ContextBatch(1, [*bad.values(), row(direct), strange]))
    lane.step()
    (contexts,) = lane.events()
    assert [answer.cause for answer in contexts.rows] == [*bad, "", "internal_error"]
    assert [bool(answer.tokens) for answer in contexts.rows] == [False] * 4 + [True, False]
    assert "24 x 48" in contexts.rows[1].message


def test_a_lane_outlives_broken_batches_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, direct = RobotLane(runner(), MANIFEST, ManualClock()), runner()
    monkeypatch.setattr(lane._runner._vlm, "readout_context", lambda *_: 1 / 0)
    for number in range(MAX_BROKEN_BATCHES):
        assert lane.failure is None
        lane.handle(wire.ContextBatch(number, [row(direct)]))
        lane.step()
    assert "division by zero" in str(lane.failure)
    events = lane.events()
    assert [type(event) for event in events] == [wire.Contexts] * MAX_BROKEN_BATCHES + [wire.Error]
    assert {event.rows[0].cause for event in events[:-1]} == {"internal_error"}


def test_a_lane_answers_pings_between_batches() -> None:
    lane = RobotLane(runner(), MANIFEST, ManualClock())
    lane.handle(wire.Ping(4))
    lane.handle(wire.Drain())
    lane.handle(wire.Abort("r", 0))
    assert [type(event) for event in lane.events()] == [wire.Pong, wire.Drained]
    assert not lane.step() and lane.wait_s() is None and not lane.wait_fds()


# --- the service over lanes ---


def test_a_context_comes_as_from_one_process() -> None:
    async def go() -> None:
        bench = Bench()
        await bench.receive("panda", observation(7, stamp_ns=5_000_000_123))
        bench.clock.advance_ns(20 * MS)
        bench.work()
        ((robot, context),) = bench.sent
        assert robot == "panda" and robot_wire.stamp_ns(context.header) == 5_000_000_123
        assert (context.session, context.sequence, context.model_id) == ("s", 7, "tiny")
        assert context.model_hash.tobytes() == MANIFEST.model_hash
        assert np.array_equal(context.instruction_hash, robot_wire.instruction_hash("touch the red cube"))
        assert context.compute_s == pytest.approx(0.02)
        direct = runner()
        checked = CheckedObservation(direct.checks.tokenize("touch the red cube"), jpeg())
        expected = direct.run([direct.decode(checked)])[0].tokens
        np.testing.assert_array_equal(tensors.tokens_of(context), expected)
        bench.clock.advance_ns(100 * MS)
        await bench.receive("panda", observation(8))
        bench.work()
        assert bench.sent[-1][1].prefix_tokens_reused == 8
        assert "images known 1" in bench.service.report() and "1 lanes" in bench.service.report()

    run(go)


@pytest.mark.parametrize("cause", REFUSALS)
def test_refusals_have_the_same_names(cause: str) -> None:
    async def go() -> None:
        bench = Bench(max_image_bytes=8192)
        await bench.receive("bad", observation(0, **REFUSALS[cause]))
        await bench.receive("good", observation(0))
        bench.work()
        bench.work()
        assert [robot for robot, _ in bench.sent] == ["good"]
        assert bench.refused == {cause: 1}

    run(go)


def test_robots_of_one_moment_go_together_and_newest_wins() -> None:
    async def go() -> None:
        bench = Bench()
        await bench.receive("first", observation(0))  # occupies the lane
        for robot in "abc":
            await bench.receive(robot, observation(0))
            await bench.receive(robot, observation(1))
        bench.work()
        bench.work()
        assert [(robot, context.sequence) for robot, context in bench.sent] == [("first", 0), ("a", 1), ("b", 1), ("c", 1)]
        assert bench.service.statistics.batches == 2

    run(go)


def test_a_lost_lane_costs_no_context_where_another_lives() -> None:
    async def go() -> None:
        bench = Bench(lanes=2)
        await bench.receive("panda", observation(0))
        del bench.lanes["robots0.1"]
        bench.service.worker_lost("robots0.1", "killed")
        bench.work("robots1.1")
        assert [context.sequence for _, context in bench.sent] == [0]

    run(go)


def test_a_lane_that_takes_no_message_is_passed_over() -> None:
    async def go() -> None:
        bench = Bench(lanes=2)
        del bench.lanes["robots0.1"]  # dead, but nobody was told yet
        await bench.receive("panda", observation(0))
        bench.service.pump()
        bench.work("robots1.1")
        assert [context.sequence for _, context in bench.sent] == [0]

    run(go)


def test_a_frozen_lane_is_hedged_and_its_late_answer_dropped() -> None:
    async def go() -> None:
        bench = Bench(lanes=2)
        await bench.receive("panda", observation(0))
        bench.clock.advance_ns(61 * MS)
        bench.service.pump()
        bench.work("robots1.1")
        bench.work("robots0.1")
        assert [context.sequence for _, context in bench.sent] == [0]
        assert "old 1" in bench.service.report() and "hedged 1" in bench.service.report()

    run(go)


def test_without_another_lane_contexts_resume_with_fresh_ones() -> None:
    async def go() -> None:
        bench = Bench()
        await bench.receive("panda", observation(0))
        bench.clock.advance_ns(500 * MS)
        await bench.receive("panda", observation(5))
        bench.work()  # the old batch, half a second late
        assert bench.sent == []
        bench.work()
        assert [context.sequence for _, context in bench.sent] == [5]

    run(go)


def test_a_lane_of_another_model_gets_no_work() -> None:
    async def go() -> None:
        bench = Bench()
        good = bench.lanes["robots0.1"].ready("robots9.1")
        for wrong in (
            wire.LaneReady(good.version, good.worker, 1, "tiny", b"other", good.num_tokens, good.dim),
            wire.LaneReady(good.version, good.worker, 1, "tiny", good.model_hash, good.num_tokens, good.dim + 1),
        ):
            bench.service.worker_ready("robots9.1", wrong)
            assert bench.service.dispatch.lanes == 1

    run(go)


@pytest.mark.parametrize("rows", [[wire.ContextAnswer(b"\0" * 4)], [wire.ContextAnswer(b"\0" * 96)] * 2])
def test_an_answer_of_another_shape_is_refused(rows: list[wire.ContextAnswer]) -> None:
    async def go() -> None:
        bench = Bench()
        await bench.receive("panda", observation(0))
        bench.service.worker_message("robots0.1", wire.Contexts(1, rows, 0.1))
        assert bench.sent == [] and bench.refused == {"internal_error": 1}

    run(go)


def test_context_that_is_not_finite_is_not_sent() -> None:
    async def go() -> None:
        bench = Bench()
        await bench.receive("panda", observation(0))
        nan = np.full((3, 8), np.nan, np.float32).tobytes()
        bench.service.worker_message("robots0.1", wire.Contexts(1, [wire.ContextAnswer(nan)], 0.1))
        assert bench.sent == [] and bench.refused == {"non_finite_context": 1}

    run(go)


# --- configuration ---


def test_contexts_are_computed_in_process_without_chat_and_in_lanes_with_it() -> None:
    chat = ServingConfig(model="smollm2", colocated=False, prefill_workers=2)
    assert CloudConfig().num_lanes == 0
    assert CloudConfig(serving=chat).num_lanes == 2
    assert CloudConfig(serving=chat, context=ContextConfig(compute="in_process")).num_lanes == 0
    assert CloudConfig(context=ContextConfig(compute="lanes")).num_lanes == 2
    lanes = CloudConfig(serving=chat)
    assert [spec.name for spec in lane_specs(lanes)] == ["robots0", "robots1"]
    assert lanes.lane_rules.hang_s < lanes.serving.supervisor.hang_s
    with pytest.raises(ValueError, match="1 MiB"):
        CloudConfig(serving=chat, context=ContextConfig(max_image_bytes=2 << 20))
    CloudConfig(context=ContextConfig(max_image_bytes=2 << 20))  # no message, no limit
