"""Clients that are slow, gone, rude or broken: the HTTP door stays up, and the pools get their blocks back."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
from dataclasses import replace

from http_rig import GATEWAY, NEVER, HttpRig, body, http_rig, post, read_all, read_until

from vla_cloud.gateway.http_server import HttpServer
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import SystemClock

LIMITS = {"http_max_connections": 12, "http_max_body_bytes": 20_000}
HASTY = {"http_head_timeout_s": 3.0, "http_body_timeout_s": 0.6, "http_stall_timeout_s": 0.5}
"""For tests that wait for the end of these times. Of a head that is to be answered, a part must come in time, from a
client on a busy machine."""
SLOW = {"CHAIN_STEP_S": "0.002", "CHAIN_MAX_MODEL_LEN": "8192"}
ENDLESS = {"stream": True, "max_tokens": 7000}


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """With the times of a user's gateway, which no test waits for."""
    with http_rig(tmp_path_factory.mktemp("tokenizer"), SLOW, LIMITS, blocks=1024, eos=NEVER) as it:
        yield it


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    with http_rig(tmp_path_factory.mktemp("tokenizer"), SLOW, LIMITS | HASTY, blocks=1024, eos=NEVER) as it:
        yield it


@pytest.fixture(autouse=True)
def healthy_after(request, caplog):
    """After whatever a test did: no request is left, all blocks are free, nothing was logged as a fault."""
    rigs = [request.getfixturevalue(name) for name in ("rig", "hasty") if name in request.fixturenames]
    caplog.set_level(logging.WARNING)
    yield
    for it in rigs:
        it.until(it.is_idle)
        it.until(lambda it=it: it.count("open") == 0)
        it.until(lambda it=it: is_served(it))  # the last ones may just be going
    assert [record.getMessage() for record in caplog.records] == []


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:80]
    return int(answer[9:12])


def is_served(rig: HttpRig) -> bool:
    """Whether a right question gets its answer; none comes if this client was slower than a head may be."""
    answer = rig.raw(post(body(), "Connection: close"))
    return bool(answer) and status(answer) == 200


def cancelled(rig: HttpRig) -> int:
    return rig.server.metrics._ends.get(("http", "cancelled", "CANCELLED"), 0)


def error_of(answer: bytes) -> dict[str, object]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


# What is left unfinished


def test_a_head_that_does_not_come_is_not_waited_for(hasty: HttpRig) -> None:
    starts = (b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nx: y")
    with ThreadPoolExecutor(len(starts)) as threads:
        nothing, *answers = threads.map(hasty.raw, starts)
    assert nothing == b"" and [status(answer) for answer in answers] == [408, 408]


def test_a_head_that_trickles_in_is_not_waited_for_either(hasty: HttpRig) -> None:
    timed_out = hasty.count("timed_out")
    with hasty.connect() as sock:
        sock.settimeout(0.05)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        received, number = b"", 0
        while not received and number < 1000:
            sock.sendall(f"x-{number}: y\r\n".encode())
            number += 1
            try:
                received = sock.recv(4096)
            except TimeoutError:
                pass
    assert status(received) == 408 and hasty.count("timed_out") == timed_out + 1


def test_the_second_head_of_a_connection_has_the_same_limit(hasty: HttpRig) -> None:
    with hasty.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert status(read_until(sock, b'"models"')) == 200
        sock.sendall(b"GET /hea")
        assert b"408" in read_all(sock)


def test_a_body_that_does_not_come_is_not_waited_for(hasty: HttpRig) -> None:
    whole = post(body())
    assert status(hasty.raw(whole[:-5])) == 408


def test_a_client_that_leaves_before_its_body_costs_nothing(rig: HttpRig) -> None:
    for _ in range(20):
        with rig.connect() as sock:
            sock.sendall(post(body())[:-5])


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_in_the_pools(rig: HttpRig, stream: bool) -> None:
    """dynamo#13691: what nobody waits for is not computed."""
    sock = rig.connect()
    sock.sendall(post(body(stream=stream, max_tokens=7000)))
    if stream:
        read_until(sock, b"data: ")
    else:
        rig.until(lambda: rig.active == 1)
    before = cancelled(rig)
    sock.close()
    rig.until(lambda: rig.active == 0)
    rig.until(lambda: cancelled(rig) == before + 1)


def test_a_client_that_leaves_while_it_is_queued_is_forgotten(rig: HttpRig) -> None:
    socks = [rig.connect() for _ in range(8)]
    for sock in socks:
        sock.sendall(post(body("long " * 300, **ENDLESS)))
    for sock in socks:
        sock.close()


def test_a_client_that_reads_nothing_is_paused_then_cut_off(hasty: HttpRig) -> None:
    evicted = hasty.count("evicted")
    with hasty.connect(receive_buffer=4096) as sock:
        sock.sendall(post(body(logprobs=True, top_logprobs=20, **ENDLESS)))
        read_until(sock, b"data: ")
        hasty.until(lambda: hasty.count("evicted") > evicted)
        assert b"[DONE]" not in read_all(sock)


def test_a_client_that_reads_slowly_gets_everything(rig: HttpRig) -> None:
    with rig.connect(receive_buffer=4096) as sock:
        sock.sendall(post(body(logprobs=True, top_logprobs=20, stream=True, max_tokens=600), "Connection: close"))
        rig.until(lambda: any(one.is_paused for one in list(rig.server._server.server_state.connections)))
        received = b""
        pause = threading.Event()
        while part := sock.recv(8192):
            received += part
            if len(received) < 200_000:
                pause.wait(0.004)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), received[-200:]


def test_pipelining_ends_the_connection(rig: HttpRig) -> None:
    with rig.connect() as sock:
        sock.sendall(post(body(**ENDLESS)))
        read_until(sock, b"data: ")
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"[DONE]" not in read_all(sock)
    with rig.connect() as sock:  # both at once: the second is answered after the first, and a client that leaves is seen
        sock.sendall(post(body()) + b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert read_all(sock).count(b"HTTP/1.1 200") == 2


# Too much


def test_more_connections_than_allowed_are_told_to_come_back(rig: HttpRig) -> None:
    socks = [rig.connect() for _ in range(12)]
    try:
        rig.until(lambda: rig.count("open") == 12)
        with rig.connect() as sock:
            answer = read_all(sock)
        assert status(answer) == 503 and b"retry-after: 1" in answer
    finally:
        for sock in socks:
            sock.close()


def test_a_body_that_is_too_large_is_refused_and_the_reason_arrives(rig: HttpRig, hasty: HttpRig) -> None:
    big = body("x" * 300_000)
    with rig.connect() as sock:
        sock.sendall(post(big))
        assert status(read_until(sock, b"}}")) == 413
        sock.sendall(post(body(), "Connection: close"))  # the connection is still good
        assert b"HTTP/1.1 200" in read_all(sock)
    head = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    with rig.connect() as sock:
        sock.sendall(head + chunk * 8)
        assert status(read_until(sock, b"}}")) == 413
    assert status(hasty.raw(post(b"").replace(b"Length: 0", b"Length: 99999999999999999"))) == 413  # and then closed


def test_too_many_messages_and_too_deep_json_are_refused(rig: HttpRig) -> None:
    empty = b'{"role":"user","content":""},' * 600
    deep = b'{"model":"chain","messages":[],"metadata":' + b"[" * 9000 + b"]" * 9000 + b"}"
    raw = b'{"model":"chain","messages":[],"tools":' + b"[" * 9000 + b"]" * 9000 + b"}"
    for data in (deep, raw, b"[" * 19_000):
        assert status(rig.raw(post(data, "Connection: close"))) == 400
    limit = rig.chat.limits
    rig.chat.limits = replace(limit, max_messages=500)
    try:
        answer = rig.raw(post(b'{"model":"chain","messages":[' + empty[:-1] + b"]}", "Connection: close"))
    finally:
        rig.chat.limits = limit
    assert status(answer) == 400 and error_of(answer)["param"] == "messages"


def test_a_head_that_is_too_large_is_refused(rig: HttpRig) -> None:
    assert status(rig.raw(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nx: " + b"y" * 100_000)) == 400


# Wrong


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\r\n\r\n\x00\x00\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
])  # fmt: skip
def test_what_is_not_http_is_refused_as_json(rig: HttpRig, data: bytes) -> None:
    answer = rig.raw(data)
    assert status(answer) == 400 and error_of(answer)["type"] == "invalid_request_error"


def test_nonsense_in_the_middle_of_a_body_ends_the_connection(rig: HttpRig) -> None:
    head = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert status(rig.raw(head + b"zz\r\nnonsense\r\n")) == 400


def test_pages_of_other_sites_get_nothing(rig: HttpRig) -> None:
    good = post(body(), "Connection: close")
    assert status(rig.raw(good.replace(b"Host: 127.0.0.1", b"Host: evil.example"))) == 421
    assert status(rig.raw(good.replace(b"application/json", b"text/plain"))) == 415
    assert status(rig.raw(good.replace(b"Host: 127.0.0.1", b"Host: localhost:8000"))) == 200
    assert status(rig.raw(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")) == 405


def test_an_address_that_others_reach_needs_leave(rig: HttpRig) -> None:
    for address, told in (("0.0.0.0:0", "insecure_non_loopback"), ("[::]:0", "insecure_non_loopback"), ("8000", "host:port"),
                          (rig.server.url, "in use"), ("127.0.0.1:99999", "host:port")):  # fmt: skip
        with pytest.raises(GatewayError, match=told):
            rig.thread.call(HttpServer(rig.chat, replace(GATEWAY, http_listen=address), SystemClock()).start())


def test_random_requests_break_nothing(tmp_path: Path, caplog) -> None:
    rng = random.Random(20)
    requests = [_mutated(rng) for _ in range(600)]
    hasty = {"http_max_body_bytes": 20_000, "http_head_timeout_s": 0.5, "http_body_timeout_s": 0.5}  # many requests are not complete
    with http_rig(tmp_path, None, hasty) as it:

        def send(data: bytes) -> int:
            with it.connect() as sock, contextlib.suppress(ConnectionError):
                sock.sendall(data)
                answer = read_all(sock)
                return status(answer) if answer else 0
            return 0

        with ThreadPoolExecutor(12) as threads:
            codes = Counter(threads.map(send, requests))
        it.until(it.is_idle)
        # The last connections may take a moment to be gone.
        it.until(lambda: is_served(it))
    assert not [code for code in codes if code >= 500], codes
    assert codes[200] > 100 and codes[400] > 300, codes  # both sides of the door were reached


_VALUES = (None, True, 0, 1, -1, 2**70, 1.5, 1e308, "", "x", "chain", "user", "\u0000", "日本", [], [1], {}, {"type": "text"}, [None])
_FIELDS = (
    "model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs",
    "top_logprobs", "n", "tools", "response_format", "metadata", "user", "logit_bias", "unknown", "max_completion_tokens",
)  # fmt: skip


def _mutated(rng: random.Random) -> bytes:
    """A request with something wrong in its fields, its JSON, its head, or anywhere."""
    fields = body("".join(chr(rng.randrange(32, 1000)) for _ in range(rng.randrange(12))), max_tokens=1, stream=rng.random() < 0.5)
    how = rng.randrange(6)  # 5: nothing is wrong
    if how <= 1:
        for _ in range(rng.randrange(1, 3)):
            fields[rng.choice(_FIELDS)] = rng.choice(_VALUES)
        if rng.random() < 0.3:
            fields["messages"] = [{rng.choice(("role", "content", "name", "x")): rng.choice(_VALUES) for _ in range(3)}]
    raw = json.dumps(fields).encode()
    if how == 2:
        raw = _damaged(rng, raw)
    data = post(raw, *(["Connection: close"] if rng.random() < 0.9 else []))
    if how == 3:
        head, _, rest = data.partition(b"\r\n\r\n")
        data = _damaged(rng, head) + b"\r\n\r\n" + rest
    elif how == 4:
        data = _damaged(rng, data) if rng.random() < 0.9 else rng.randbytes(rng.randrange(200))
    return data


def _damaged(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 1:
                del changed[at : at + rng.randrange(1, 20)]
            case 2:
                changed[at : at + 1] = rng.choice((b"\r\n", b"\x00", b"\xff", b"{", b"[", b'"', b":", b"9"))
            case _:
                changed[at:at] = changed[at : at + rng.randrange(1, 30)]
    return bytes(changed)
