"""The parts of benchmarks/gateway.py: what is asked, read, timed and added up, without any process but a broken peer."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gateway_parts import mock_worker, phases, processes, stamps, tables
from gateway_parts.http_client import AnswerReader, Client, question

SHORT = phases.Phase(clients=1, tokens=3, stream=False, pace_ms=0, seconds=0.0)
STREAM = phases.Phase(clients=1, tokens=3, stream=True, pace_ms=0, seconds=0.0)
PACED = phases.Phase(clients=1, tokens=3, stream=True, pace_ms=20, seconds=0.0)


class Wire:
    """A transport."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.sent += b"closed"


class Steps:
    """An engine that makes its steps when it is told to."""

    def __init__(self) -> None:
        self.joined: list[tuple[mock_worker.Connection, float]] = []

    def join(self, connection: mock_worker.Connection, period_s: float) -> None:
        self.joined.append((connection, period_s))


def served(*asked: bytes) -> tuple[bytes, Steps]:
    """What the mock server says to these bytes."""
    wire, steps = Wire(), Steps()
    connection = mock_worker.Connection(steps)
    connection._transport = wire
    for data in asked:
        connection.data_received(data)
    return wire.sent, steps


ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab\n\r\nb\r\n\r\n3\r\nhello\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n!",
]
BODIES = [b"hello", b"ab\n\r\n3\r\nhello\n", b"!"]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200))
def test_answers_are_read_wherever_they_are_cut(sizes):
    reader, bodies = AnswerReader(), []
    for answer in ANSWERS:
        body, at, turn = b"", 0, 0
        while at < len(answer):
            size = sizes[turn % len(sizes)]
            part, is_complete = reader.feed(answer[at : at + size])
            body, at, turn = body + part, at + size, turn + 1
            assert is_complete == (at >= len(answer))
        bodies.append(body)
    assert bodies == BODIES


def test_a_refusal_is_an_error_not_an_answer():
    with pytest.raises(RuntimeError, match="503"):
        AnswerReader().feed(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy")


@pytest.mark.parametrize("phase", [SHORT, STREAM])
def test_client_and_mock_server_understand_each_other(phase):
    asked = question("how far?", phase)
    sent, steps = served(asked[:40], asked[40:])
    assert not steps.joined
    took, wire = phases.Took(), Wire()
    client = Client(phases.Questions(), Ended())
    client.transport = wire
    took.begin(phase)
    client.ask(phase, took)
    assert b'"stream": ' + (b"true" if phase.stream else b"false") in wire.sent
    for at in range(0, len(sent), 7):
        client.data_received(sent[at : at + 7])
    assert client.ended.result == "done" and (took.requests, took.tokens) == (1, 3)
    assert took.chunks == (3 if phase.stream else 0) and len(took.token_ms) == took.chunks
    assert all(0 <= value < 1310.72 for value in took.token_ms)


class Ended:
    """A future without an event loop."""

    result: object = None

    def done(self) -> bool:
        return self.result is not None

    def set_result(self, value: None) -> None:
        self.result = "done"

    def set_exception(self, error: Exception) -> None:
        self.result = error


def test_an_answer_of_another_length_does_not_count():
    sent, _ = served(question("how far?", phases.Phase(1, 2, False, 0, 0.0)))
    client, took = Client(phases.Questions(), Ended()), phases.Took()
    client.transport = Wire()
    took.begin(SHORT)
    client.ask(SHORT, took)
    client.data_received(sent)
    assert isinstance(client.ended.result, RuntimeError) and took.requests == 0


def test_a_paced_answer_comes_step_by_step():
    sent, steps = served(question("how far?", PACED))
    ((connection, period_s),) = steps.joined
    assert period_s == 0.02 and b'"content":" ' not in sent
    assert [connection.token() for _ in range(4)] == [True, True, False, False]
    assert connection._transport.sent.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_router_that_writes_the_request_anew_or_tries_another_protocol_is_understood():
    body = json.dumps({"max_completion_tokens": 2, "messages": []}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    sent, _ = served(head + body)
    assert b'"completion_tokens":2' in sent
    assert served(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")[0] == b"closed"


def test_a_word_tells_when_it_was_given():
    word = stamps.stamp()
    assert 0 <= word < stamps.WORDS
    assert stamps.since_ms(10, 12 * stamps.TICK_NS) == 0.04
    assert stamps.since_ms(stamps.WORDS - 1, (3 * stamps.WORDS + 1) * stamps.TICK_NS) == 0.04
    assert stamps.next_tick_s(0.02, 0.5, 100.0) == pytest.approx(0.01)
    assert stamps.next_tick_s(0.02, 0.0, 100.015) == pytest.approx(0.005)


def test_the_words_of_the_tokenizer_are_numbers(tmp_path):
    pytest.importorskip("tokenizers")
    from vla_cloud.engine.tokenizer import ChatTokenizer

    stamps.write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    prompt = tokenizer.chat([{"role": "user", "content": "Question 17?"}])
    assert len(prompt) == len("user: Question 17?\n") and min(prompt) >= stamps.WORDS
    stream = tokenizer.stream(prompt)
    assert [stream.push(token) for token in (0, 65_535, 300)] == [" 0", " 65535", " 300"]


def took(cpu_s: float | None, requests: int, tokens: int, chunks: int, ms: list[float]) -> dict[str, object]:
    return {
        "requests": requests, "tokens": tokens, "chunks": chunks, "seconds": 2.0, "request_ms": ms, "token_ms": ms,
        "cpu_s": 0.5, "gateway_cpu_s": cpu_s,
    }  # fmt: skip


def test_costs_are_per_request_and_token_and_latency_is_less_that_of_the_floor():
    results = {
        "through": {"paced 1": [took(0.003, 10, 100, 50, [2.0] * 9), took(0.001, 10, 100, 50, [4.0] * 11)]},
        "floor": {"paced 1": [took(None, 5, 50, 50, [1.5])]},
    }
    found = tables.report(results, {"through": "floor", "floor": None}, {"through": 0.002})
    through, floor = found["rows"]
    assert through["cpu_us_per_request"] == 200 and through["cpu_us_per_token"] == 20
    assert through["cpu_us_per_chunk"] == 40 and through["tokens_per_chunk"] == 2 and through["tokens_per_s"] == 50
    assert through["token_p50_ms"] == 4.0 and through["added_token_p50_ms"] == 2.5
    assert floor["added_token_p50_ms"] is None and floor["cpu_us_per_token"] is None
    shown = tables.text(found)
    assert "| through | 20.0 |" in shown and "idle, CPU ms per s: through 2.0" in shown and "| through | 2.50 | 2.50 |" in shown


def test_a_router_that_is_not_there_is_said(tmp_path):
    with pytest.raises(processes.PeerMissing, match="sglang and vllm"):
        processes.Router("other", Path("/nowhere"), [], tmp_path / "log")
    with pytest.raises(processes.PeerMissing, match="no Python at /nowhere"):
        processes.Router("sglang", Path("/nowhere"), [], tmp_path / "log")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(processes.PeerMissing, match="does not answer; see"):
        processes.Router("vllm", broken, ["http://127.0.0.1:1"], tmp_path / "log")
    assert "no such module" in (tmp_path / "log").read_text()


def test_processor_time_of_another_process_is_read():
    import os
    import time

    before_s = processes.cpu_s(os.getpid())
    while time.process_time() < before_s + 0.01:
        pass
    before_s, got_s = time.process_time(), processes.cpu_s(os.getpid())
    assert before_s <= got_s <= time.process_time()
