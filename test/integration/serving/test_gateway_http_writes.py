"""How answers leave the HTTP door: at once, in as few packets as they can, and only while somebody is there."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
from http_rig import NEVER, body, http_rig, post, read_until
from serving_rig import SLOW_STEP


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    with http_rig(tmp_path_factory.mktemp("tokenizer"), SLOW_STEP, eos=NEVER) as rig:
        yield rig


def test_a_part_of_an_answer_does_not_wait_for_the_acknowledgement_of_the_one_before(it):
    with it.connect() as sock:
        sock.sendall(post(body(max_tokens=1)))
        read_until(sock, b'"usage"')
        (connection,) = it.server._server.server_state.connections
        server_socket = connection.transport.get_extra_info("socket")
        assert server_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    it.until(lambda: it.count("open") == 0)


def test_head_and_body_and_the_end_of_a_stream_come_together(it):
    with it.connect() as sock:
        sock.sendall(post(body(max_tokens=1)))
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"}")
        sock.sendall(post(body(max_tokens=2, stream=True)))
        first = sock.recv(65536)
        assert first.startswith(b"HTTP/1.1 200") and b'"role":"assistant"' in first
        last = first
        while b"[DONE]" not in last:
            last = sock.recv(65536)
        assert last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")  # another kind of answer on the same connection
        assert b'"status":"serving"' in read_until(sock, b'"serving"')


def test_a_client_that_asked_in_many_pieces_and_leaves_is_noticed(it):
    with it.connect() as sock:
        data = post(body("x" * 200, max_tokens=200, stream=True, user="u" * 200_000))
        for at in range(0, len(data), 50_000):  # more than uvicorn reads ahead
            sock.sendall(data[at : at + 50_000])
        read_until(sock, b'"role":"assistant"')
        assert it.active == 1
    it.until(it.is_idle)


def test_a_connection_that_is_to_close_gives_the_whole_answer_first(it):
    answer = it.raw(post(body(max_tokens=3), "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"}") and b'"finish_reason":"' in answer


def test_a_stream_is_cut_to_chunks_only_for_clients_that_know_them(it):
    data = post(body(max_tokens=3, stream=True), "Connection: close")
    head, _, chunked = it.raw(data).partition(b"\r\n\r\n")
    assert b"chunked" in head.lower()
    events, rest = b"", chunked
    while size := int(rest.partition(b"\r\n")[0], 16):
        rest = rest.partition(b"\r\n")[2]
        assert rest[size : size + 2] == b"\r\n"
        events, rest = events + rest[:size], rest[size + 2 :]
    assert rest == b"0\r\n\r\n" and events.endswith(b"data: [DONE]\n\n")
    head, _, plain = it.raw(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert without_names(plain) == without_names(events)


def without_names(events: bytes) -> list[bytes]:
    """Of each event, what does not differ from call to call."""
    return [event.partition(b'"choices"')[2] for event in events.split(b"\n\n")]
