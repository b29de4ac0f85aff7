"""A robot's observation traced through io, cloud, policy and the motor's log: the real loops in one thread, on clocks that
the test moves. Each of them knows the others' span ids without a word."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "regression"))
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
sys.path.insert(0, str(Path(__file__).parent))
import test_cloud_process as cloud_process
from field_rig import MANIFEST, NS, ROBOT, TASK, Cloud, Edge
from free_port import free_endpoint

from vla_cli.trace_tree import Trace, traces_of
from vla_cloud.config import ContextConfig
from vla_cloud.context.context_trace import ContextTrace
from vla_cloud.context.runner import ContextRunner
from vla_cloud.context.service import ContextService
from vla_common import wire
from vla_common.span_file import read_spans
from vla_common.tracing import Span, Tracer, is_sampled, span_id, tick_trace
from vla_edge.io_main import IoLoop
from vla_edge.policy_main import PolicyLoop, make_planner


class Sink(list[Span]):
    def put(self, span: Span) -> None:
        self.append(span)


class TracedCloud(Cloud):
    def __init__(self, sink: Sink, sample: float) -> None:
        super().__init__()
        runner = ContextRunner(self.vlm, MANIFEST, prefix_cache_tokens=64, max_image_bytes=8192)
        trace = ContextTrace(Tracer(sink, sample), self.clock)
        self.service = ContextService(
            runner, MANIFEST, lambda _, payload: self._answers.append(payload), self.clock, ContextConfig(), trace
        )


class TracedEdge(Edge):
    """Spans of each process in a list of its own, as they would lie in files of their own."""

    def __init__(self, folder: Path, sample: float = 1.0, **config: object) -> None:
        self.of: dict[str, Sink] = {name: Sink() for name in ("io", "cloud", "policy")}
        self.sample = sample
        super().__init__(folder, TracedCloud(self.of["cloud"], sample), **config)
        self.planner = make_planner(self.child, MANIFEST, self.planner._denoiser, "q")
        tracer = Tracer(self.of["policy"], sample)
        self.policy = PolicyLoop(self.child, self.planner, "test", self.bus, self.link, tracer)
        # No image is taken at the very nanosecond of a tick, which a chunk without a context has for its stamp.
        self.robot_stamp = lambda now_ns: now_ns - 3_000_001

    def new_io(self) -> IoLoop:
        return IoLoop(self.child, ["front"], self.bus, self.link, Tracer(self.of["io"], self.sample))

    @property
    def spans(self) -> list[Span]:
        return [span for sink in self.of.values() for span in sink]

    def trace(self, observation: object) -> dict[str, list[Span]]:
        """By name, in order of begin within a process."""
        trace = tick_trace(ROBOT, wire.stamp_ns(observation.header))
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.trace == trace:
                found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture
def make(tmp_path: Path) -> Iterator[object]:
    made: list[TracedEdge] = []

    def edge(**config: object) -> TracedEdge:
        made.append(TracedEdge(tmp_path, **config))
        return made[-1]

    yield edge
    for one in made:
        one.close()


def test_an_observation_is_one_tree_from_its_image_to_the_first_command(make) -> None:
    edge = make().start().run(60)
    edge.io.flush()
    acted = [one for one in edge.observations if "command" in edge.trace(one)]
    assert len(acted) >= 5
    trace = edge.trace(acted[2])
    assert set(trace) == {
        "observation", "context", "queue", "encode and prefill", "publish", "context received", "chunk", "denoise",
        "hand over", "command",
    }  # fmt: skip
    by_id = {span.id: span for spans in trace.values() for span in spans}
    assert len(by_id) == sum(map(len, trace.values()))
    (root,), (context,) = trace["observation"], trace["context"]
    assert root.parent == b"" and root.begin_ns == wire.stamp_ns(acted[2].header)
    assert all(span.parent in by_id for span in by_id.values() if span is not root)
    for name in ("queue", "encode and prefill", "publish"):
        assert trace[name][0].parent == context.id
    # Two chunks a context: replanned every 5 ticks, a context every 10.
    assert len(trace["chunk"]) == len(trace["denoise"]) == len(trace["command"]) == 2
    assert [span.parent for span in trace["command"]] == [span.id for span in trace["chunk"]]
    assert not any(span.error for span in by_id.values())
    for chunk, command in zip(trace["chunk"], trace["command"], strict=True):
        assert command.begin_ns >= chunk.end_ns
        assert chunk.attributes["base_tick"] < command.attributes["tick"] <= chunk.attributes["base_tick"] + 2
        assert command.begin_ns == edge.stamps_ns[command.attributes["tick"] - edge.tick]


def test_standing_and_going_home_have_no_trace(make) -> None:
    edge = make()
    edge.upload = lambda _: []
    edge.run(5)
    edge.say(TASK)
    edge.run(20)
    edge.order("REARM")
    edge.run(30)
    assert edge.chunks and {span.name for span in edge.spans} == {"observation"}, "it stands until a context comes"
    edge.chunks.clear()
    edge.say("go home")
    edge.run(5)
    edge.order("REARM")
    edge.run(30)
    edge.io.flush()
    assert edge.chunks, "chunks are made"
    assert not {"chunk", "command"} & {span.name for span in edge.spans}


def test_a_chunk_that_the_motor_refuses_says_why(make) -> None:
    edge = make().start()
    edge.order("ESTOP")
    edge.run(30)
    edge.io.flush()
    verdicts = {span.error for span in edge.of["io"] if span.name == "command"}
    assert "" in verdicts and verdicts <= {"", "the robot does not act"}


def test_a_refused_context_says_why(make) -> None:
    edge = make().start()
    seen = len(edge.observations)
    edge.upload = lambda payload: [answer for answer in edge.cloud.answer(payload) for _ in range(2)]
    edge.run(12)
    trace = edge.trace(edge.observations[seen])
    assert sorted(span.error for span in trace["context received"]) == ["", "context_out_of_order"]


def test_all_processes_choose_the_same_observations(make) -> None:
    edge = make(sample=0.5).start().run(300)
    edge.io.flush()
    wanted = {tick_trace(ROBOT, wire.stamp_ns(one.header)) for one in edge.observations}
    wanted = {trace for trace in wanted if is_sampled(trace, 0.5)}
    assert 0.2 * len(edge.observations) < len(wanted) < 0.8 * len(edge.observations)
    for name, stage in (("io", "observation"), ("cloud", "context")):
        assert {span.trace for span in edge.of[name] if span.name == stage} == wanted
    assert {span.trace for span in edge.spans} == wanted
    chunks = {span.trace for span in edge.of["policy"] if span.name == "chunk"}
    assert chunks and chunks <= wanted


def test_a_restarted_io_process_goes_on(make) -> None:
    edge = make().start()
    edge.io = edge.new_io()
    edge.say(TASK)
    edge.run(40)
    edge.io.flush()
    last = [one for one in edge.observations if "command" in edge.trace(one)][-1]
    assert last.session == edge.io._session and len(edge.trace(last)["command"]) >= 1


def test_tracing_changes_no_command(make, tmp_path: Path) -> None:
    plain = Edge(tmp_path)
    try:
        traced = make(sample=1.0)
        plain.robot_stamp = traced.robot_stamp
        for edge in (plain, traced):
            edge.start().run(60)
        assert len(plain.commands) == len(traced.commands)
        assert all((a == b).all() for a, b in zip(plain.commands, traced.commands, strict=True))
    finally:
        plain.close()


STAGES = {"context", "queue", "lane", "encode and prefill", "publish"}


def answered_traces(robot: cloud_process.Robot, folder: Path) -> list[Trace | None]:
    """Of each context that came back; None while spans of it are not written yet."""
    traces = {trace.id: trace for trace in traces_of(read_spans([folder])[0])}
    found = [traces.get(tick_trace(robot.robot, wire.stamp_ns(one.header)).hex()) for one in robot.contexts]
    return [trace if trace is not None and {span.name for span in trace.spans} >= STAGES else None for trace in found]


def answered_once(robot: cloud_process.Robot, folder: Path) -> list[Trace]:
    """Those of one lane: a second one is asked, and has spans of its own, when the first takes long."""
    traces = answered_traces(robot, folder)
    return [trace for trace in traces if trace is not None and len(trace.spans) == len(STAGES)]


def test_a_real_cloud_and_its_lane_write_files_that_fit_together(tmp_path: Path) -> None:
    cloud_process.write_tiny_model(tmp_path / "model")
    endpoint, folder = free_endpoint(), tmp_path / "traces"
    settings = ["context.compute=lanes", "tracing.sample=1.0", f"tracing.folder={folder}"]
    settings.append("serving.supervisor.stop_s=60")  # how long the end may take on a busy machine
    arguments = [part for one in settings for part in ("--set", one)]
    cloud = cloud_process.Cloud(endpoint, tmp_path / "model", tmp_path / "log", *arguments)
    try:
        robot = cloud_process.Robot("alpha", endpoint, 1)
        try:
            robot.bus.wait_connected(60.0)
            cloud_process.drive([robot], lambda: len(robot.contexts) >= 3 and len(answered_once(robot, folder)) > 0)
            assert cloud_process.until(lambda: all(answered_traces(robot, folder)), 60.0), "each trace is written"
        finally:
            robot.bus.close()
        assert cloud.stop()[0] == 0, cloud.log.read_text()
    finally:
        cloud.process.kill()
    trace = answered_once(robot, folder)[-1]
    by_name = {span.name: span for span in trace.spans}
    assert set(by_name) == STAGES
    assert by_name["encode and prefill"].service == "vla-lane" and by_name["lane"].service == "vla-gateway"
    assert by_name["encode and prefill"].parent == by_name["lane"].id
    assert by_name["context"].parent == span_id(bytes.fromhex(trace.id), "observation").hex()


def test_the_ids_follow_from_the_messages_alone() -> None:
    trace = tick_trace("arm1", 1000 * NS)
    assert trace.hex() == tick_trace("arm1", 1000 * NS).hex() != tick_trace("arm2", 1000 * NS).hex()
    assert span_id(trace, "chunk", "p", 7) != span_id(trace, "chunk", "p", 8)
