"""Frames and links: pieces, huge frames, strangers, peers that do not read."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_cloud.core.generate import SamplingParams
from vla_cloud.pools.codec import encode
from vla_cloud.pools.frames import FrameDecoder, FrameError, frame
from vla_cloud.pools.link import GatewayLink, LinkClosed, LinkServer, WorkerLink
from vla_cloud.pools.message_parts import Message
from vla_cloud.pools.messages import Aborted, Generate, Hello, Join, Ping, ToGateway, Work

SECRET = "0123456789abcdef"


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=20), st.lists(st.integers(1, 40), min_size=1))
def test_frames_come_out_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream, decoder, out, at, turn = b"".join(map(frame, payloads)), FrameDecoder(50), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        decoder.append(stream[at : at + size])
        at, turn = at + size, turn + 1
        while (payload := decoder.next()) is not None:
            out.append(payload)
    assert out == payloads


@pytest.mark.parametrize("header", [b"\0\0\0\0", b"\x33\0\0\0", b"\xff\xff\xff\xff"])
def test_an_impossible_frame_ends_the_stream(header: bytes) -> None:
    decoder = FrameDecoder(50)
    decoder.append(frame(b"good") + header)
    assert decoder.next() == b"good"
    for _ in range(2):
        with pytest.raises(FrameError, match="1 to 50"):
            decoder.next()


class Listener:
    def __init__(self, accept: bool = True) -> None:
        self.links: list[GatewayLink] = []
        self.messages: list[ToGateway] = []
        self.closed: list[str] = []
        self.accept = accept

    def link_opened(self, join: Join, link: GatewayLink) -> bool:
        self.links.append(link)
        return self.accept

    def link_message(self, link: GatewayLink, message: ToGateway) -> None:
        self.messages.append(message)

    def link_closed(self, link: GatewayLink, reason: str) -> None:
        self.closed.append(reason)


async def until(condition: object) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not in time")


def in_server(body: object, address: str, listener: Listener | None = None, **kwargs: object) -> None:
    async def go() -> None:
        there = Listener() if listener is None else listener
        server = LinkServer(there, SECRET, **kwargs)
        where = await server.listen(address)
        try:
            await body(there, server, where)
        finally:
            await server.close()
            for link in there.links:
                link.cut("the test ends")
            await asyncio.sleep(0.01)

    asyncio.run(go())


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/l" if request.param == "unix" else "tcp:127.0.0.1:0"


def test_messages_both_ways_up_to_the_largest(address: str) -> None:
    big = Generate("r", 0, Work(bytes(range(256)) * 16384, SamplingParams(), 1.0))  # 4 MiB

    async def body(there: Listener, server: LinkServer, where: str) -> None:
        got: list[Message] = []

        def worker() -> None:
            link = WorkerLink.connect(where, Join("w", SECRET, 1))
            while len(got) < 3:
                got.extend(link.poll(5.0))
            link.send(Aborted("r", 7))
            link.close()

        thread = threading.Thread(target=worker)
        thread.start()
        await until(lambda: there.links)
        for message in (Hello(1, "w"), big, Ping(1)):
            assert there.links[0].send(message)
        await until(lambda: there.messages and there.closed)
        thread.join()
        assert got == [Hello(1, "w"), big, Ping(1)]
        assert there.messages == [Aborted("r", 7)]
        assert not there.links[0].send(Ping(2))

    in_server(body, address)


def test_a_worker_that_does_not_read_is_cut_off_and_blocks_nobody(address: str) -> None:
    async def body(there: Listener, server: LinkServer, where: str) -> None:
        link = WorkerLink.connect(where, Join("w", SECRET, 1))
        await until(lambda: there.links)
        work = Work(bytes(4 * 65536), SamplingParams(), 1.0)
        sent = 0
        while there.links[0].send(Generate("r", 0, work)):
            sent += 1
            assert sent < 100
        await until(lambda: there.closed)
        assert "does not read" in there.closed[0]
        link.close()

    in_server(body, address, max_unsent_bytes=2_000_000)


def test_a_gateway_that_does_not_read_ends_the_worker() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        link = WorkerLink(ours, max_unsent_bytes=100_000)
        with pytest.raises(LinkClosed, match="does not read"):
            for i in range(100_000):
                link.send(Aborted("r" * 100, i))
        link.close()


def test_the_worker_notices_the_end_of_the_gateway_and_what_is_no_message() -> None:
    for data, text in ((b"", "closed"), (b"\0\0\0\0", "1 to"), (frame(b"\xc1"), "protocol"), (frame(encode(Aborted("r", 0))), "protocol")):  # fmt: skip
        ours, theirs = socket.socketpair()
        link = WorkerLink(ours)
        theirs.sendall(data)
        theirs.close()
        with pytest.raises(LinkClosed, match=text):
            for _ in range(3):
                link.poll(1.0)
        link.close()


@pytest.mark.parametrize(
    "first",
    [
        frame(encode(Join("w", "wrong secret here", 1))),
        frame(encode(Aborted("r", 0))),
        b"\xff" * 2000,
        b"\xff\xff\0\0",  # announces more than a stranger may send
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_strangers_are_shown_out(address: str, first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_cloud.pools.link.JOIN_TIMEOUT_S", 600.0)  # for what they said, not for their silence

    async def body(there: Listener, server: LinkServer, where: str) -> None:
        loop = asyncio.get_running_loop()
        kind, _, rest = where.partition(":")
        family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
        with socket.socket(family) as stranger:
            stranger.setblocking(False)
            host, _, port = rest.rpartition(":")
            await loop.sock_connect(stranger, rest if kind == "unix" else (host, int(port)))
            await loop.sock_sendall(stranger, first)
            try:
                assert await asyncio.wait_for(loop.sock_recv(stranger, 1), 60.0) == b""
            except ConnectionResetError:
                pass
        assert not there.links and not there.messages and not there.closed

    in_server(body, address)


def test_a_join_that_is_refused_and_a_second_join(address: str) -> None:
    async def body(there: Listener, server: LinkServer, where: str) -> None:
        link = WorkerLink.connect(where, Join("w", SECRET, 1))
        if there.accept:
            link.send(Join("w", SECRET, 1))
        await until(lambda: there.links)
        await asyncio.sleep(0.05)
        with pytest.raises(LinkClosed):
            link.poll(1.0)
        assert bool(there.closed) == there.accept
        link.close()

    in_server(body, address, Listener(accept=False))
    in_server(body, address, Listener(accept=True))


def test_addresses_that_are_refused() -> None:
    for address in ("tcp:0.0.0.0:1", "tcp:10.0.0.1:1", "tcp:example.org:1", "http://x", "unix:", "tcp:127.0.0.1:x"):
        with pytest.raises(ValueError, match="control link"):
            WorkerLink.connect(address, Join("w", SECRET, 1))
    with pytest.raises(LinkClosed, match="no gateway"):
        WorkerLink.connect("unix:/nowhere/at/all", Join("w", SECRET, 1))
    with pytest.raises(ValueError, match="16"):
        LinkServer(Listener(), "short")
