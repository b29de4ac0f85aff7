"""Robots beside chat, with real lane processes over the shipped model: contexts, killed and frozen lanes, chat load."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from serving_rig import BASE, ROOT, chain_specs, reference, rig

from vla_cloud.config import CloudConfig, ContextConfig, LaneConfig, WorkerRules
from vla_cloud.context.checks import CheckedObservation
from vla_cloud.context.lane_settings import lane_specs
from vla_cloud.context.pooled_service import PooledContextService
from vla_cloud.context.runner import ContextRunner
from vla_cloud.pools.supervisor import Supervisor
from vla_common import messages, tensors, wire
from vla_common.clock import SystemClock
from vla_common.manifest import load_manifest
from vla_common.topics import data_key, topic_spec
from vla_common.zenoh_session import Received
from vla_models.model_folder import load_vlm

MODEL = ROOT / "models" / "tabletop"
MANIFEST = load_manifest(MODEL)
CAMERA = MANIFEST.cameras[0]
WORDS = ["touch the red block", "pick up the blue block", "go to the green cube"]
# Bounds far above what is needed: these tests count and compare, a loaded machine must not fail them.
CONTEXT = ContextConfig(
    deadline_s=5.0, lanes=LaneConfig(hedge_s=0.06, answer_within_s=20.0, heartbeat_s=0.2, hang_s=60.0)
)  # fmt: skip
RULES = WorkerRules(start_s=120.0, stop_s=2.0, backoff_min_s=0.05, backoff_max_s=0.4)
OBSERVATION = topic_spec("observation")


def jpeg(seed: int, size: tuple[int, int] = (CAMERA.width, CAMERA.height)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


class Lanes:
    def __init__(self, service: PooledContextService, supervisor: Supervisor) -> None:
        self.service, self.supervisor = service, supervisor
        self.clock = SystemClock()
        self.published: dict[str, list[object]] = {}
        self.sequence = 0

    def publish(self, robot: str, payload: bytes) -> None:
        self.published.setdefault(robot, []).append(wire.decode("ContextTokens", payload))

    def send(self, robot: str, text: str = WORDS[0], image: bytes | None = None, **changes: object) -> int:
        """One observation; its sequence number."""
        self.sequence += 1
        header = wire.make_header(10**9 * self.sequence, "base")
        picture = messages.new("sensor_msgs/CompressedImage", header=wire.make_header(0, CAMERA.name), format="jpeg",
                               data=jpeg(self.sequence) if image is None else image)
        fields = {
            "header": header, "session": "s", "sequence": self.sequence, "instruction": text,
            "joint_names": MANIFEST.joint_names, "joint_positions": [0.0] * len(MANIFEST.joint_names), "images": [picture],
        } | changes  # fmt: skip
        key = data_key(OBSERVATION.topic("R"), OBSERVATION.type_name).replace("/R/", f"/{robot}/", 1)
        payload = wire.encode(messages.new("Observation", **fields))
        self.service.receive(Received(payload, None, self.clock.monotonic_ns(), key))
        return self.sequence

    def last(self, robot: str) -> int:
        """Sequence of the last context of a robot; 0 before the first."""
        contexts = self.published.get(robot, [])
        return contexts[-1].sequence if contexts else 0

    async def drive(self, robots: list[str], until: Callable[[], bool], limit: int = 2400) -> None:
        """Observations of all robots at 10 Hz until it is so."""
        for _ in range(limit):
            for robot in robots:
                self.send(robot)
            for _ in range(10):
                if until():
                    return
                await asyncio.sleep(0.01)
        raise AssertionError(self.service.report())

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(12_000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.service.report())

    def pid(self, name: str) -> int:
        return next(info.pid for info in self.supervisor.infos() if info.name == name)

    def state(self, name: str) -> str:
        return next(info.state for info in self.supervisor.infos() if info.name == name)

    def check_order(self) -> None:
        for contexts in self.published.values():
            sequences = [context.sequence for context in contexts]
            assert sequences == sorted(set(sequences)), "twice, or out of order"


@contextlib.asynccontextmanager
async def lanes(count: int = 1, context: ContextConfig = CONTEXT) -> AsyncIterator[Lanes]:
    context = replace(context, compute="lanes", lanes=replace(context.lanes, count=count))
    config = CloudConfig(model=MODEL, context=context, serving=replace(BASE, supervisor=RULES))
    outlet: list[Lanes] = []
    service = PooledContextService(
        MANIFEST, lambda robot, payload: outlet[0].publish(robot, payload), SystemClock(), context
    )
    specs = [
        replace(spec, environment={**spec.environment, "PYTHONPATH": str(ROOT), "VLA_LOG": "error"})
        for spec in lane_specs(config)
    ]
    supervisor = Supervisor(specs, config.lane_rules, SystemClock(), service)
    service.attach(supervisor)
    outlet.append(Lanes(service, supervisor))
    await supervisor.start()
    try:
        assert await supervisor.wait_ready(120.0), supervisor.infos()
        yield outlet[0]
    finally:
        service.close()
        await supervisor.stop()


def test_contexts_equal_those_of_one_process() -> None:
    vlm, _ = load_vlm(MODEL)
    direct = ContextRunner(vlm, MANIFEST, prefix_cache_tokens=64, max_image_bytes=1 << 18)

    async def go() -> None:
        async with lanes() as it:
            for i, text in enumerate(WORDS):
                it.send(f"robot{i}", text, jpeg(i))
                await it.until(lambda i=i: it.last(f"robot{i}") > 0)
            for i, text in enumerate(WORDS):
                (context,) = it.published[f"robot{i}"]
                expected = direct.run([direct.decode(CheckedObservation(direct.checks.tokenize(text), jpeg(i)))])[0]
                np.testing.assert_allclose(tensors.tokens_of(context), expected.tokens, atol=1e-6, rtol=0)
                assert context.model_hash.tobytes() == MANIFEST.model_hash
                assert np.array_equal(context.instruction_hash, wire.instruction_hash(text))
            # The same image under another instruction: not encoded again, and not mixed up.
            it.send("other", WORDS[1], jpeg(0))
            await it.until(lambda: it.last("other") > 0)
            expected = direct.run([direct.decode(CheckedObservation(direct.checks.tokenize(WORDS[1]), jpeg(0)))])[0]
            context = it.published["other"][0]
            np.testing.assert_allclose(tensors.tokens_of(context), expected.tokens, atol=1e-5, rtol=0)
            assert context.prefix_tokens_reused == MANIFEST.instruction.num_tokens
            assert it.service.statistics.images_reused == 1

    asyncio.run(go())


def test_refusals_of_a_lane_have_their_names() -> None:
    async def go() -> None:
        async with lanes() as it:
            it.send("torn", image=jpeg(0)[:300])
            it.send("wide", image=jpeg(0, (192, 96)))
            it.send("mute", joint_names=MANIFEST.joint_names[::-1])
            it.send("foreign", "touch the purple elephant")
            await it.drive(["good"], lambda: it.last("good") > 0)
            await it.until(lambda: it.service.statistics.refused.total() == 4)
            assert it.service.statistics.refused.snapshot() == {
                "malformed_image": 1, "wrong_image_size": 1, "wrong_joint_names": 1, "unknown_word": 1,
            }  # fmt: skip
            assert set(it.published) == {"good"}

    asyncio.run(go())


def test_a_killed_lane_costs_no_robot_its_contexts() -> None:
    async def go() -> None:
        async with lanes(2) as it:
            robots = ["x", "y", "z"]
            await it.drive(robots, lambda: all(it.last(robot) for robot in robots))
            for name in ("robots0", "robots1"):
                # A batch is on its way to the lane that dies: its observation must come back from the other one.
                os.kill(it.pid(name), signal.SIGSTOP)
                seen = {robot: it.last(robot) for robot in robots}
                asked = {robot: it.send(robot) for robot in robots}
                await asyncio.sleep(0.02)
                os.kill(it.pid(name), signal.SIGKILL)
                await it.until(lambda asked=asked: all(it.last(robot) == asked[robot] for robot in robots))
                for robot in robots:  # nothing was skipped: at most the newest observation was answered elsewhere
                    assert it.last(robot) > seen[robot]
                await it.until(lambda name=name: it.state(name) == "ready")
            await it.drive(robots, lambda: all(len(it.published[robot]) > 5 for robot in robots))
            it.check_order()
            assert it.service.dispatch.counts.lost_flights >= 1

    asyncio.run(go())


def test_a_frozen_lane_is_gone_round() -> None:
    async def go() -> None:
        async with lanes(2) as it:
            await it.drive(["x"], lambda: it.last("x") > 0)
            pids = [it.pid("robots0"), it.pid("robots1")]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
                try:
                    asked = it.send("x")
                    await it.until(lambda asked=asked: it.last("x") == asked)
                    before = len(it.published["x"])
                    await it.drive(["x"], lambda before=before: len(it.published["x"]) >= before + 3)
                finally:
                    os.kill(pid, signal.SIGCONT)
                await it.until(lambda: it.service.dispatch.next_wake_ns() is None)
                await it.drive(["x"], lambda: not any(flight for flight in it.service.dispatch._lanes.values()))
            assert it.service.dispatch.counts.hedged_flights >= 1
            it.check_order()

    asyncio.run(go())


def test_a_single_lane_that_dies_comes_back_and_nothing_stale_with_it() -> None:
    async def go() -> None:
        context = replace(CONTEXT, deadline_s=0.1, lanes=replace(CONTEXT.lanes, answer_within_s=5.0))
        async with lanes(1, context) as it:
            await it.drive(["x"], lambda: it.last("x") > 0)
            await it.until(lambda: it.service.dispatch.next_wake_ns() is None)
            os.kill(it.pid("robots0"), signal.SIGSTOP)
            lost = it.send("x")
            await asyncio.sleep(0.3)  # past its deadline: whoever comes back must not begin with it
            os.kill(it.pid("robots0"), signal.SIGKILL)
            await it.until(lambda: it.state("robots0") != "ready")
            await it.drive(["x"], lambda: it.last("x") > lost)
            assert lost not in [context.sequence for context in it.published["x"]]
            it.check_order()

    asyncio.run(go())


def test_contexts_come_beside_saturated_chat_and_chat_beside_them() -> None:
    async def go() -> None:
        slow = {"CHAIN_STEP_S": "0.02"}
        async with lanes(2) as it, rig(prefill_workers=2, environment=slow) as chat:
            stop = False
            answers = 0

            async def ask(i: int) -> None:
                nonlocal answers
                while not stop:
                    tokens = [i, *range(120)]
                    assert (await chat.ask(tokens, 10, f"r{i}"))[0] == reference(tokens, 10)
                    answers += 1

            tasks = [asyncio.create_task(ask(i)) for i in range(12)]
            robots = ["x", "y"]
            try:
                await it.drive(robots, lambda: all(len(it.published.get(robot, [])) >= 15 for robot in robots))
                chat.kill("p0")  # a chat worker's death is nothing to the robots
                await it.drive(robots, lambda: all(len(it.published[robot]) >= 30 for robot in robots))
                await it.until(lambda: answers >= 12)
            finally:
                stop = True
                await asyncio.gather(*tasks)
            it.check_order()
            assert it.service.dispatch.counts.lost_flights == 0
            assert not it.service.statistics.refused.total()

    asyncio.run(go())


def test_chat_workers_go_behind_robot_lanes() -> None:
    async def go() -> None:
        async with rig(nice=7) as chat:
            assert [os.getpriority(os.PRIO_PROCESS, chat.pid(name)) for name in ("p0", "d0")] == [min(19, 7 + _own())] * 2
        async with lanes() as it:
            assert os.getpriority(os.PRIO_PROCESS, it.pid("robots0")) == _own()

    asyncio.run(go())


def _own() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_a_lane_without_a_model_is_not_started_again(tmp_path: object) -> None:
    async def go() -> None:
        one = replace(CONTEXT, compute="lanes", lanes=replace(CONTEXT.lanes, count=1))
        config = CloudConfig(model=tmp_path / "none", context=one)
        specs = [
            replace(spec, environment={**spec.environment, "PYTHONPATH": str(ROOT), "VLA_LOG": "error"})
            for spec in lane_specs(config)
        ]
        service = PooledContextService(MANIFEST, lambda *_: None, SystemClock(), config.context)
        supervisor = Supervisor(specs, config.lane_rules, SystemClock(), service)
        service.attach(supervisor)
        await supervisor.start()
        try:
            assert not await supervisor.wait_ready(120.0)
            assert supervisor.infos()[0].state == "failed"
        finally:
            await supervisor.stop()

    asyncio.run(go())


def test_the_specs_of_chat_name_no_lane() -> None:
    assert {spec.role for spec in chain_specs(BASE)} == {"prefill", "decode"}
    assert sys.executable in lane_specs(CloudConfig(context=replace(CONTEXT, compute="lanes")))[0].command("unix:/x", "r.1")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
