"""A chat request's trace over a real gateway and its workers: every stage in one tree, also after a worker was killed."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'vla-runtime[gateway]'")
import grpc.aio
from http_rig import GATEWAY, MODEL, HttpRig, body, write_tokenizer
from serving_rig import BASE, chain_specs, chosen

from vla_cli.trace_main import main as vla_trace
from vla_cli.trace_tree import Trace, of_request, traces_of
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.grpc_server import GrpcServer
from vla_cloud.gateway.http_server import HttpServer
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc
from vla_cloud.pools.serving_thread import ServingThread
from vla_common.clock import SystemClock
from vla_common.span_file import StoredSpan, read_spans
from vla_common.span_queue import tracing
from vla_common.tracing import TracingConfig

CLOCK = SystemClock()
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
QUESTION = "What is a robot, and what may it do while the cloud is away for a second or two?"
ON_P = {"queue", "prefill", "chunk", "kv transfer"}
ON_D = {"reserve", "await kv", "decode"}
IN_GATEWAY = {"chat", "receive", "tokenise", "answer", "queue", "attempt 1"}


def has_both_ends(trace: Trace) -> bool:
    return trace.has("decode") and trace.has("kv transfer")


def names_under_the_last(trace: Trace) -> set[str]:
    """What belongs to the last attempt."""
    attempts = [span for span in trace.spans if span.name.startswith("attempt")]
    last = max(attempts, key=lambda span: span.begin_ns, default=trace.root)
    return {span.name for span in trace.spans if span.parent == last.id}


class Traced(HttpRig):
    """The HTTP and gRPC doors over two P and two D workers, all of them traced to files."""

    folder: Path
    grpc_port: int

    def ask(self, question: str = QUESTION, *headers: tuple[str, str], **fields: object) -> str:
        """The answer's id."""
        connection = http.client.HTTPConnection(*self.server.address, timeout=120)
        sent = {"content-type": "application/json", **dict(headers)}
        connection.request("POST", "/v1/chat/completions", json.dumps(body(question, **fields)), sent)
        response = connection.getresponse()
        told = response.read()
        connection.close()
        assert response.status == 200, told
        return str(json.loads(told)["id"])

    def trace(self, request_id: str, complete: Callable[[Trace], bool] = has_both_ends) -> Trace:
        """Once it is written: the span of the request itself comes from the gateway, those of workers when they end."""
        found: list[Trace] = []

        def is_there() -> bool:
            found[:] = of_request(traces_of(read_spans([self.folder])[0]), request_id)
            return bool(found) and complete(found[0])

        self.until(is_there)
        return found[0]


@contextmanager
def traced(folder: Path, sample: float = 1.0, environment: dict[str, str] | None = None) -> Iterator[Traced]:
    traces = folder / "traces"
    settings = TracingConfig(sample=sample, folder=str(traces))
    config = replace(BASE, prefill_workers=2, decode_workers=2)
    tokenizer = write_tokenizer(folder)
    thread = ServingThread(config, CLOCK, chain_specs(config, environment, tracing=settings))
    with tracing(settings, "vla-gateway", "test", CLOCK) as tracer:
        chat = Chat([ServedModel(MODEL, tokenizer, thread.service)], CLOCK, tracer=tracer)
        server = HttpServer(chat, GATEWAY, CLOCK)
        grpc_server = GrpcServer(chat, replace(GATEWAY, grpc_listen="127.0.0.1:0"), CLOCK)
        thread.start()
        try:
            thread.call(server.start())
            thread.call(grpc_server.start())
            rig = Traced(thread, chat, server, tokenizer)
            rig.folder, rig.grpc_port = traces, grpc_server.port
            try:
                yield rig
            finally:
                thread.call(grpc_server.stop())
                thread.call(server.stop())
        finally:
            thread.stop()
            chat.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with traced(tmp_path_factory.mktemp("traced")) as it:
        yield it


def named(trace: Trace, name: str, service: str = "") -> list[StoredSpan]:
    return [span for span in trace.spans if span.name == name and span.service.endswith(service)]


def only(trace: Trace, name: str, service: str = "") -> StoredSpan:
    (found,) = named(trace, name, service)
    return found


def check_tree(trace: Trace, parent_of_root: str = "") -> None:
    """Every span hangs under another of the same trace, and begins no earlier than that one."""
    by_id = {span.id: span for span in trace.spans}
    assert len(by_id) == len(trace.spans)
    for span in trace.spans:
        if span is trace.root:
            assert span.parent == parent_of_root
        else:
            # One machine, but each process reads its own clocks: they agree to some microseconds. A chunk may come from
            # a worker that was killed before its prefill was over.
            if span.name == "chunk" and span.parent not in by_id:
                continue
            assert span.begin_ns >= by_id[span.parent].begin_ns - 1_000_000, span
        assert span.end_ns >= span.begin_ns


def test_a_request_is_one_tree_from_its_door_to_its_last_token(rig: Traced) -> None:
    trace = rig.trace(rig.ask())
    check_tree(trace)
    origins = {(span.service, span.instance.partition(".")[0][:1]) for span in trace.spans}
    assert origins == {("vla-gateway", "t"), ("vla-worker", "p"), ("vla-worker", "d")}
    of = {kind: {span.name for span in trace.spans if span.instance.startswith(kind)} for kind in "tpd"}
    assert of == {"t": IN_GATEWAY, "p": ON_P, "d": ON_D}
    attempt, prefill, transfer = only(trace, "attempt 1"), only(trace, "prefill"), only(trace, "kv transfer")
    decode, waited = only(trace, "decode"), only(trace, "await kv")
    assert (attempt.attributes["prefill"], attempt.attributes["decode"]) == (prefill.instance, decode.instance)
    chunks = named(trace, "chunk")
    prompt = rig.tokenizer.chat([{"role": "user", "content": QUESTION}])
    assert sum(int(chunk.attributes["tokens"]) for chunk in chunks) == len(prompt) == prefill.attributes["tokens"]
    assert len(chunks) >= 2 and all(chunk.parent == prefill.id for chunk in chunks)
    assert transfer.begin_ns >= prefill.end_ns
    assert transfer.attributes.get("bytes", 0) > 0 or transfer.attributes["stopped"]  # D may be done before P looks
    assert waited.end_ns == decode.begin_ns and decode.attributes["tokens"] == 8 == trace.root.attributes["tokens"]
    assert trace.root.attributes["attempts"] == 1 and not any(span.error for span in trace.spans)
    assert 0 < trace.root.attributes["first_token_s"] < (trace.root.end_ns - trace.root.begin_ns) * 1e-9
    assert rig.trace(rig.ask()).id != trace.id, "the same question again is another request"


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (f"00-{TRACE}-{CALLER}-01", True),
        (f"00-{TRACE[::-1]}-{CALLER}-00", True),  # the flag does not count
        (f"00-{'0' * 32}-{CALLER}-01", False),
        ("nonsense", False),
    ],
)
def test_a_well_formed_traceparent_is_gone_on_with(rig: Traced, header: str, kept: bool) -> None:
    trace = rig.trace(rig.ask(QUESTION, ("traceparent", header)))
    assert (trace.id == header[3:35]) is kept
    check_tree(trace, CALLER if kept else "")


def test_grpc_requests_are_traced_with_the_clients_id_and_parent(rig: Traced, capsys) -> None:
    async def ask() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.grpc_port}") as channel:
            message = pb.Message(role="user", parts=[pb.Part(text=QUESTION)])
            request = pb.GenerateRequest(request_id="mine", messages=[message], sampling=pb.Sampling(max_tokens=3))
            metadata = (("traceparent", f"00-{TRACE[1:]}1-{CALLER}-01"),)
            async for _ in pb_grpc.ChatStub(channel).GenerateStream(request, metadata=metadata):
                pass

    asyncio.run(ask())
    trace = rig.trace("mine")
    assert trace.id == f"{TRACE[1:]}1" and trace.root.attributes["door"] == "grpc"
    check_tree(trace, CALLER)
    assert {span.name for span in trace.spans} == (IN_GATEWAY | ON_P | ON_D) - {"receive"}
    assert vla_trace([str(rig.folder), "--request", "mine"]) == 0
    text = capsys.readouterr().out
    assert all(f" {span.name} " in text for span in trace.spans) and "chat mine over grpc" in text


def test_a_refused_request_has_a_trace_that_says_why(rig: Traced) -> None:
    connection = http.client.HTTPConnection(*rig.server.address, timeout=120)
    asked = json.dumps(body("x" * 4000, max_tokens=4))
    connection.request("POST", "/v1/chat/completions", asked, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 400
    response.read()
    request_id = response.headers["x-request-id"]
    connection.close()
    trace = rig.trace(request_id, lambda trace: True)
    assert "INVALID_ARGUMENT" in trace.root.error
    assert {span.name for span in trace.spans} == {"chat", "receive", "tokenise"}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_after_a_death_the_second_attempt_stands_beside_the_first(tmp_path: Path, kind: str) -> None:
    slow = {"CHAIN_TOKEN_S": "0.012"} if kind == "prefill" else {"CHAIN_STEP_S": "0.15"}
    with traced(tmp_path, environment=slow) as rig:
        ids: list[str] = []
        asking = threading.Thread(target=lambda: ids.append(rig.ask(QUESTION * 4, max_tokens=30)))
        asking.start()
        service = rig.thread.service

        def is_due() -> bool:
            lives = list(service._by_id.values())
            if kind == "prefill":
                chunks = [span for span in read_spans([rig.folder])[0] if span.name == "chunk"]
                return bool(lives) and bool(chunks)
            return bool(lives) and len(lives[0].life.outputs) > 5

        rig.until(is_due)
        victim = chosen(rig.thread, kind)

        def of_victim() -> set[str]:
            return {span.name for span in read_spans([rig.folder])[0] if span.instance == f"{victim}.1"}

        if kind == "decode":
            rig.until(lambda: of_victim() >= {"reserve", "await kv"})
        pids = {worker["name"]: worker["pid"] for worker in service.health()["workers"]}
        os.kill(pids[victim], signal.SIGKILL)
        asking.join(120.0)
        trace = rig.trace(ids[0], lambda trace: {"prefill", "kv transfer", "decode"} <= names_under_the_last(trace))
        check_tree(trace)
    attempts = [span for span in trace.spans if span.name.startswith("attempt")]
    first, last = attempts[0], attempts[-1]
    # The gateway hears of it from the D worker first, or sees it itself; in the former case it may try the dead one again.
    assert "died" in first.error and all(span.error for span in attempts[:-1])
    assert not last.error and not trace.root.error and len(attempts) == trace.root.attributes["attempts"] >= 2
    assert [span.name for span in attempts] == [f"attempt {number + 1}" for number in range(len(attempts))]
    assert all(after.begin_ns >= before.end_ns for before, after in itertools.pairwise(attempts))
    assert last.attributes[kind] != first.attributes[kind] == f"{victim}.1"
    assert trace.root.attributes["tokens"] == 30
    # What the killed worker had finished is here, too.
    done = {span.name for span in trace.spans if span.instance == f"{victim}.1"}
    assert done == ({"queue", "chunk"} if kind == "prefill" else {"reserve", "await kv"})
    if kind == "decode":
        assert first.error == f"worker {victim}.1 died" and first.attributes["tokens"] > 5


def test_without_sampling_nothing_is_written_and_nothing_travels(tmp_path: Path) -> None:
    with traced(tmp_path, sample=0.0) as rig:
        sent: list[bytes] = []
        send = rig.thread.supervisor.send

        def record(worker: str, message: object) -> bool:
            sent.append(getattr(getattr(message, "work", None), "trace", b""))
            return send(worker, message)

        rig.thread.supervisor.send = record
        rig.ask(QUESTION, ("traceparent", f"00-{TRACE}-{CALLER}-01"))
        assert rig.chat.tracing is None and len(sent) >= 2 and not any(sent)
    assert not (tmp_path / "traces").exists()
