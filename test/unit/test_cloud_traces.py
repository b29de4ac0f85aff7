"""Spans of the cloud's parts, each alone: the life of a request, a worker's engine, a robot lane, the chat layer's end."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.importorskip("tokenizers")
from chat_service import ScriptedService, fail
from context_rig import MANIFEST, MS, jpeg, key, observation, tiny_vlm
from engine_bench import Bench, make_prompt, make_work
from tiny_chat_tokenizer import END, tiny_tokenizer

from vla_cloud.config import ContextConfig
from vla_cloud.context.context_trace import ContextTrace, lane_span
from vla_cloud.context.lane import RobotLane
from vla_cloud.context.pooled_service import PooledContextService
from vla_cloud.context.runner import ContextRunner
from vla_cloud.context.traced_lane import TracedLane
from vla_cloud.core import life_events as life
from vla_cloud.core.request_life import LifeConfig, RequestLife
from vla_cloud.core.request_trace import RequestTrace, attempt_span
from vla_cloud.core.step_plan import Role
from vla_cloud.engine.traced_engine import TracedEngine
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.chat_types import ChatRequest, Done, Message, TextPart
from vla_cloud.pools import messages as wire
from vla_cloud.pools.codec import MessageError, decode_to_worker, encode
from vla_cloud.pools.workers import WorkerInfo
from vla_common.clock import NS_PER_S, ManualClock
from vla_common.tracing import Span, Tracer, span_id, tick_trace
from vla_common.zenoh_session import Received

TRACE = bytes(range(16))


class Sink(list[Span]):
    def put(self, span: Span) -> None:
        self.append(span)

    @property
    def names(self) -> list[str]:
        return [span.name for span in self]

    def one(self, name: str) -> Span:
        (found,) = [span for span in self if span.name == name]
        return found


# --- the life of a request


class Life:
    """A request's life and its trace, as the service feeds them; each event 10 ns after the one before."""

    def __init__(self, deadline_ns: int = 10**12) -> None:
        self.sink, self.now_ns = Sink(), 0
        self.trace = RequestTrace(Tracer(self.sink, 1.0), TRACE, b"", 0, request_id="r")
        self.life = RequestLife(5, 4, [], deadline_ns, LifeConfig())
        self.trace.queued(0)

    def feed(self, event: life.Event) -> list[life.Action]:
        self.now_ns += 10
        actions = self.life.handle(event, self.now_ns)
        self.trace.saw(event, actions, self.now_ns)
        return actions


def test_a_smooth_life() -> None:
    it = Life()
    for event in (life.Tick(), life.Placed("p0.1", "d0.1"), life.Reserved("d0.1", 0), life.Prefilled("p0.1", 0, 2, 99),
                  life.TokensCame("d0.1", 0, 5, [1]), life.TokensCame("d0.1", 0, 6, [2, 3, 4]),
                  life.WorkerFinished("d0.1", 0, "length", 4, 2)):  # fmt: skip
        it.feed(event)
    it.trace.end(100)
    assert it.sink.names == ["queue", "attempt 1", "answer", "chat"]
    attempt, root = it.sink.one("attempt 1"), it.sink.one("chat")
    assert (attempt.begin_ns, attempt.end_ns, attempt.id) == (20, 70, attempt_span(TRACE, 0))
    assert attempt.attributes == {"prefill": "p0.1", "decode": "d0.1", "tokens": 4} and not attempt.error
    assert (root.begin_ns, root.end_ns, root.parent, root.error) == (0, 100, b"", "")
    assert root.attributes == {
        "request_id": "r", "attempts": 1, "reason": "length", "cached_tokens": 2, "first_token_s": pytest.approx(50e-9)
    }  # fmt: skip
    assert all(span.parent == root.id for span in it.sink[:-1])
    assert (it.sink.one("queue").end_ns, it.sink.one("answer").begin_ns) == (10, 50)


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (life.WorkerLost("d0.1"), "worker d0.1 died"),
        (life.Failed("d0.1", 0, "INTERNAL", "broke"), "d0.1: INTERNAL: broke"),
        (life.PushFailed("p0.1", 0, "UNAVAILABLE", "gone"), "p0.1: UNAVAILABLE: gone"),
        (life.Refused("d0.1", 0, "RESOURCE_EXHAUSTED", "full"), "d0.1 refused it: RESOURCE_EXHAUSTED: full"),
        (life.Aborted("d0.1", 0), "d0.1 gave the request up"),
        (life.TokensCame("d0.1", 0, 9, [1]), "d0.1 sent tokens that do not fit"),
    ],
)
def test_each_attempt_says_why_it_ended(event: life.Event, told: str) -> None:
    it = Life()
    for step in (life.Tick(), life.Placed("p0.1", "d0.1"), life.Reserved("d0.1", 0), event, life.NotPlaced("none")):
        it.feed(step)
    it.now_ns = it.life.next_wake_ns or 0
    for step in (life.Tick(), life.Placed(None, "w0.1")):
        it.feed(step)
    it.feed(life.Cancel())
    it.trace.end(it.now_ns)
    assert it.sink.names == ["queue", "attempt 1", "place", "attempt 2", "chat"]
    assert it.sink.one("attempt 1").error == told
    place, second = it.sink.one("place"), it.sink.one("attempt 2")
    assert place.attributes == {"tries": 2} and place.end_ns == second.begin_ns
    assert second.attributes == {"decode": "w0.1", "tokens": 0} and second.id == attempt_span(TRACE, 1)
    assert second.error == it.sink.one("chat").error == "CANCELLED: the client ended the request"


def test_a_request_that_waits_until_its_deadline() -> None:
    it = Life(deadline_ns=5)
    it.feed(life.Tick())
    it.trace.end(20)
    assert it.sink.names == ["queue", "chat"] and it.sink.one("chat").error.startswith("DEADLINE_EXCEEDED")


# --- workers


class Traced:
    """A P and a D worker and one that does both, each with its own sink; a step takes a microsecond."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.of: dict[str, Sink] = {}
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("w", Role.BOTH)):
            worker = self.bench.add(name, role)
            sink = self.of[name] = Sink()
            worker.engine = TracedEngine(worker.engine, Tracer(sink, 1.0), self.bench.clock)

    def settle(self) -> None:
        while self.bench.step():
            self.bench.advance(1e-6)


def work(prompt: list[int], count: int = 6, trace: bytes = TRACE) -> wire.Work:
    made = make_work(prompt, count)
    return wire.Work(made.prompt, made.sampling, made.time_left_s, trace=trace)


def test_p_and_d_tell_their_stages_under_one_attempt() -> None:
    it = Traced()
    it.bench.disaggregate("p", "d", "r", work(make_prompt(0, 100)), attempt=2)
    it.settle()
    p, d = it.of["p"], it.of["d"]
    assert p.names == ["queue", "chunk", "chunk", "chunk", "prefill", "kv transfer"] and d.names == ["reserve", "await kv", "decode"]
    assert {span.parent for span in (*p, *d) if span.name != "chunk"} == {attempt_span(TRACE, 2)}
    prefill, transfer = p.one("prefill"), p.one("kv transfer")
    chunks = [span for span in p if span.name == "chunk"]
    assert all(span.parent == prefill.id for span in chunks) and len({span.id for span in chunks}) == 3
    assert [span.attributes["start"] for span in chunks] == [0, 48, 96]
    assert sum(span.attributes["tokens"] for span in chunks) == prefill.attributes["tokens"] == 100
    assert p.one("queue").end_ns == prefill.begin_ns <= prefill.end_ns == transfer.begin_ns < transfer.end_ns
    assert transfer.attributes["bytes"] > 0
    assert d.one("reserve").end_ns == d.one("await kv").begin_ns < d.one("decode").begin_ns == d.one("await kv").end_ns
    assert d.one("decode").attributes == {"reason": "length", "preemptions": 0, "tokens": 6}
    # The same again: cached on D, which needs fewer blocks, and on P, which computes less.
    it.bench.disaggregate("p", "d", "s", work(make_prompt(0, 100), trace=TRACE[::-1]))
    it.settle()
    again = [span for span in (*p, *d) if span.trace == TRACE[::-1]]
    told = {span.name: span.attributes for span in again}
    assert told["prefill"]["cached_tokens"] == 96 == told["await kv"].get("cached_tokens", told["reserve"]["cached_tokens"])


def test_a_worker_that_does_both() -> None:
    it = Traced()
    it.bench.generate("w", "r", work(make_prompt(1, 60)))
    it.settle()
    assert it.of["w"].names == ["queue", "chunk", "chunk", "prefill", "decode"]
    assert it.of["w"].one("decode").attributes["tokens"] == 6


def test_what_is_not_traced_leaves_nothing() -> None:
    it = Traced()
    it.bench.disaggregate("p", "d", "r", work(make_prompt(0, 100), trace=b""))
    it.bench.generate("w", "s", work(make_prompt(1, 60), trace=b""))
    it.settle()
    assert not any(it.of.values()) and it.bench.workers["d"].of("r").final is not None


def test_stopped_refused_and_failed_work_is_told_as_that() -> None:
    it = Traced()
    it.bench.generate("w", "r", work(make_prompt(0, 60), 50))
    for _ in range(6):
        it.bench.step()
    it.bench.send("w", wire.Abort("r", 0))
    it.bench.generate("w", "long", work(make_prompt(1, 300), trace=TRACE[::-1]))
    it.bench.disaggregate("p", "d", "lost", work(make_prompt(2, 40)), lease_s=1.0)
    it.bench.prefills.clear()
    it.bench.hold_prefill = True
    it.settle()
    it.bench.advance(100.0)
    it.settle()
    (refused,) = [span for span in it.of["w"] if span.trace == TRACE[::-1]]
    assert refused.name == "queue" and "refused: INVALID_ARGUMENT" in refused.error
    decode = it.of["w"].one("decode")  # of the stopped one
    assert decode.attributes["stopped"] and not decode.error and decode.attributes["tokens"] > 0
    assert it.of["d"][-1].name == "await kv" and it.of["d"][-1].error
    assert not any(worker.engine._works for worker in it.bench.workers.values()), "nothing is kept of what has ended"


# --- the messages


def test_a_trace_travels_and_none_costs_no_byte() -> None:
    plain, traced = work([1, 2], trace=b""), work([1, 2])
    assert len(encode(wire.Generate("r", 0, traced))) == len(encode(wire.Generate("r", 0, plain))) + 6 + 2 + 16
    assert decode_to_worker(encode(wire.Generate("r", 0, traced))).work.trace == TRACE
    rows = [wire.ContextRow(b"\0" * 4, b"j")]
    batch = wire.ContextBatch(3, rows, [TRACE])
    assert decode_to_worker(encode(batch)) == batch
    assert b"traces" not in encode(wire.ContextBatch(3, rows))
    with pytest.raises(MessageError):
        decode_to_worker(encode(wire.ContextBatch(3, rows, [TRACE + b"x"])))


# --- robot lanes


class Lanes:
    """The service over lanes that answer when they are told to, all traced."""

    def __init__(self, lanes: int, sample: float = 1.0, **config: object) -> None:
        self.clock = ManualClock(start_ns=10**12)
        self.gateway, self.of = Sink(), {f"robots{i}.1": Sink() for i in range(lanes)}
        self.published: list[str] = []
        trace = ContextTrace(Tracer(self.gateway, sample), self.clock)
        self.service = PooledContextService(
            MANIFEST, lambda robot, _: self.published.append(robot), self.clock, ContextConfig(**config), trace
        )
        self.service.attach(self)
        runner = ContextRunner(tiny_vlm(), MANIFEST, prefix_cache_tokens=64, max_image_bytes=8192)
        self.lanes = {
            name: TracedLane(RobotLane(runner, MANIFEST, self.clock), Tracer(sink, 1.0), self.clock)
            for name, sink in self.of.items()
        }
        for name, lane in self.lanes.items():
            self.service.worker_ready(name, lane.ready(name))

    def send(self, worker_id: str, message: wire.ToWorker) -> bool:
        self.lanes[worker_id].handle(decode_to_worker(encode(message)))
        return True

    def infos(self) -> list[WorkerInfo]:
        return []

    async def receive(self, *robots: str, **changes: object) -> None:
        for robot in robots:
            payload = observation(**changes)
            self.service.receive(Received(payload, None, self.clock.monotonic_ns(), key(robot)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def work(self, name: str = "robots0.1") -> None:
        while True:
            busy = self.lanes[name].step()
            for message in self.lanes[name].events():
                self.service.worker_message(name, message)
            if not busy:
                return


STAMP_NS = 123_456_789_012


def test_a_context_is_traced_through_its_lane() -> None:
    async def go() -> None:
        it = Lanes(1)
        await it.receive("a", "b")
        it.clock.advance_ns(5 * MS)
        it.work()
        assert it.published == ["a", "b"]
        for robot in "ab":
            trace = tick_trace(robot, STAMP_NS)
            spans = {span.name: span for span in it.gateway if span.trace == trace}
            assert set(spans) == {"context", "queue", "lane", "publish"}
            assert spans["context"].parent == span_id(trace, "observation")
            assert spans["lane"].id == lane_span(trace, 1) and spans["lane"].attributes == {"lane": "robots0.1"}
            assert spans["lane"].end_ns - spans["lane"].begin_ns == 5 * MS == spans["context"].end_ns - spans["context"].begin_ns
            (compute,) = [span for span in it.of["robots0.1"] if span.trace == trace]
            assert compute.parent == spans["lane"].id and compute.name == "encode and prefill"
            assert compute.attributes["batch"] == 2 and not compute.error
        assert not it.lanes["robots0.1"]._todo and not it.lanes["robots0.1"]._done

    asyncio.run(go())


def test_a_hedged_observation_has_both_lanes_in_its_trace() -> None:
    async def go() -> None:
        it = Lanes(2)
        await it.receive("a")
        it.clock.advance_ns(70 * MS)  # above context.lanes.hedge_s
        it.service.pump()
        it.work("robots1.1")
        it.work("robots0.1")
        assert it.published == ["a"]
        contexts = [span for span in it.gateway if span.name == "context"]
        assert sorted(span.error for span in contexts) == ["", "too late, or answered by another lane"]
        assert {span.attributes["lane"] for span in it.gateway if span.name == "lane"} == {"robots0.1", "robots1.1"}
        assert len({span.id for span in (*it.gateway, *it.of["robots0.1"], *it.of["robots1.1"])}) == 9

    asyncio.run(go())


def test_a_refused_image_is_an_error_of_its_robots_trace_alone() -> None:
    async def go() -> None:
        it = Lanes(1)
        await it.receive("good")
        await it.receive("bad", image=jpeg()[:200])
        it.work()
        it.work()
        errors = {span.attributes["robot"]: span.error for span in it.gateway if span.name == "context"}
        assert errors == {"good": "", "bad": "malformed_image"}
        assert "publish" not in [span.name for span in it.gateway if span.trace == tick_trace("bad", STAMP_NS)]

    asyncio.run(go())


def test_lanes_are_told_of_traced_robots_only() -> None:
    async def go() -> None:
        it = Lanes(1, sample=0.0)
        await it.receive("a")
        it.work()
        assert it.published == ["a"] and not it.gateway and not it.of["robots0.1"]

    asyncio.run(go())


# --- the chat layer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def ask(tokenizer, script: list[object], read: int = 99, **fields: object) -> Sink:
    """The spans of one request whose client reads so many events."""
    sink, clock = Sink(), ManualClock(1)
    service = ScriptedService(lambda _: script)
    chat = Chat([ServedModel("tiny", tokenizer, service)], clock, tracer=Tracer(sink, 1.0))
    assert chat.tracing is not None

    async def go() -> None:
        request = ChatRequest("r", (Message("user", (TextPart("hi"),)),), **fields)
        request = chat.tracing.begin(request, "http", [], 1)
        clock.advance_ns(NS_PER_S)
        async with aclosing(chat.stream(request)) as answer:
            left = read
            async for event in answer:
                left -= 1
                if not left:
                    return
                assert not isinstance(event, Done) or left

    try:
        asyncio.run(go())
    except Exception as error:
        assert getattr(error, "code", ""), error
    finally:
        chat.close()
    return sink


def test_the_end_of_a_request_is_told_whatever_it_is(tokenizer) -> None:
    said = [[*b"Hel"], [*b"lo", END]]
    served = ask(tokenizer, said)
    assert served.names == ["receive", "tokenise", "chat"]
    root = served.one("chat")
    assert not root.error and root.attributes["reason"] == "stop" and root.attributes["tokens"] == 6
    assert (root.attributes["request_id"], root.attributes["door"]) == ("r", "http")
    assert root.end_ns - root.begin_ns == NS_PER_S
    assert ask(tokenizer, said, read=1).one("chat").error == "CANCELLED: the client left"
    assert ask(tokenizer, [[1], fail("UNAVAILABLE", "gone")]).one("chat").error == "UNAVAILABLE: gone"
    assert "INVALID_ARGUMENT" in ask(tokenizer, said, max_tokens=0).one("chat").error
    assert ask(tokenizer, said, model="other").one("chat").error.startswith("NOT_FOUND")
    assert ask(tokenizer, [RuntimeErrorWithCode()]).one("chat").error == "INTERNAL: RuntimeErrorWithCode"


class RuntimeErrorWithCode(RuntimeError):
    code = "a fault of the service itself"


def test_requests_of_one_id_have_traces_of_their_own(tokenizer) -> None:
    sink = Sink()
    chat = Chat([ServedModel("tiny", tokenizer, ScriptedService(lambda _: []))], ManualClock(), tracer=Tracer(sink, 1.0))
    other = Chat([ServedModel("tiny", tokenizer, ScriptedService(lambda _: []))], ManualClock(), tracer=Tracer(sink, 1.0))
    request = ChatRequest("r", ())
    traces = {one.tracing.begin(request, "grpc", []).trace.trace for one in (chat, chat, other)}
    assert len(traces) == 3
    assert replace(request, trace=chat.tracing.begin(request, "grpc", []).trace) == request, "no part of what is asked"
    none = Chat([ServedModel("tiny", tokenizer, ScriptedService(lambda _: []))], ManualClock(), tracer=Tracer(sink, 0.0))
    assert none.tracing.begin(request, "grpc", []) is request
    assert {bool(chat.tracing.begin(request, "grpc", headers).trace._parent) for headers in ([], ["x"] * 2)} == {False}
    for one in (chat, other, none):
        one.close()
