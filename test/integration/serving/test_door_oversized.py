"""More than is taken, at both doors of a gateway process: refused by name, early, and without room for it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("grpc", reason="grpc is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
pytest.importorskip("hpack", reason="hpack is not installed: pip install 'vla-runtime[dev]'")
from door_rig import MB, DoorRig, Peak, doors
from grpc_rig import ask
from http_rig import body, post
from raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME,
    SETTINGS,
    RawConnection,
    call,
    call_headers,
    frame,
    header_block,
    message,
)

from vla_cloud.gateway.proto import vla_chat_pb2 as pb

CLIENTS, PUSHED_BYTES = 20, 100_000_000
LIMIT = 1 << 20
"""Of a body and of a message."""
DROPPED_BYTES = 4 << 20
"""Read after a refusal over HTTP, so that the client reads it."""
KERNEL_BYTES = 12 << 20
"""Most that the socket buffers of both ends hold (net.ipv4.tcp_wmem and tcp_rmem: 4 and 6 MB), and what is cut from it."""
PIECE = bytes(65536)
LENGTH = post(b"").replace(b"Content-Length: 0", b"Content-Length: %d" % PUSHED_BYTES)
CHUNKED = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
Push = Callable[[DoorRig], Awaitable[tuple[int, str]]]
"""Pushes until it is cut off; how many bytes went out, and what it was told."""


def http(head: bytes, piece: bytes) -> Push:
    async def push(it: DoorRig) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
        answer = asyncio.create_task(reader.read(4096))
        sent = 0
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            while sent < PUSHED_BYTES:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
        writer.close()
        (told,) = await asyncio.gather(answer, return_exceptions=True)
        return sent, told[9:12].decode() if isinstance(told, bytes) and told else "cut"

    return push


def grpc(declared: int, obeys: bool = True) -> Push:
    """``declared``: length of the message. Without ``obeys``, flow control is ignored."""

    async def push(it: DoorRig) -> tuple[int, str]:
        connection = await RawConnection.open(it.grpc_port)
        connection.write(frame(HEADERS, END_HEADERS, 1, header_block(call_headers("Generate"))))
        connection.write(frame(DATA, 0, 1, message(b"", length=declared)))
        reading = asyncio.create_task(connection.until_ended(1))
        connection.window_of(1)
        sent, piece = 5, frame(DATA, 0, 1, bytes(MAX_FRAME))
        while sent < PUSHED_BYTES and not reading.done() and not connection.writer.is_closing():
            if obeys and connection.window_of(1) - 5 < MAX_FRAME:
                await asyncio.sleep(0.001)
                continue
            connection.write(piece)
            connection.windows[0] -= MAX_FRAME
            connection.windows[1] -= MAX_FRAME
            sent += MAX_FRAME
            with contextlib.suppress(ConnectionError):
                await connection.writer.drain()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reading, 30.0)
        connection.close()
        return sent, f"{connection.reply(1).status}" if connection.reply(1).headers else "cut"

    return push


async def metadata(it: DoorRig) -> tuple[int, str]:
    """Header fields without an end.

    From a client that has acknowledged the server's settings: before that, gRPC takes fields of any number to refuse them
    at their end (measured: 20 to 35 MB for each client that sends a hundred), and has no option against it.
    """
    connection = await RawConnection.open(it.grpc_port)
    while await connection.read_frame() != SETTINGS:
        pass
    connection.write(frame(HEADERS, 0, 1, header_block(call_headers("Generate"))))
    block = header_block([(f"x-{number}", "y" * 1000) for number in range(16)])
    sent, piece = 0, frame(CONTINUATION, 0, 1, block)
    with contextlib.suppress(ConnectionError):
        while sent < PUSHED_BYTES // 10 and not connection.writer.is_closing():
            connection.write(piece)
            sent += len(piece)
            await asyncio.wait_for(connection.writer.drain(), 60.0)
            await asyncio.sleep(0)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(connection.until_ended(1), 1.0)
    connection.close()
    return sent, f"{connection.reply(1).status}" if connection.reply(1).headers else "cut"


ROOM = CLIENTS * 2 * LIMIT + 10 * MB
"""Each may have what a message or body may be, twice while it is copied."""
RUDE_ROOM = CLIENTS * 10 * MB
"""gRPC takes from a socket what is there, some MB, before it sees that the client was not allowed to send it."""

# How it is pushed, what may be told, how much may go out, and how much memory all together may take.
PUSHES: dict[str, tuple[Push, set[str], int, int]] = {
    "length": (http(LENGTH, PIECE), {"413", "cut"}, DROPPED_BYTES + KERNEL_BYTES, ROOM),
    "chunked": (http(CHUNKED, b"10000\r\n" + PIECE + b"\r\n"), {"413", "cut"}, LIMIT + DROPPED_BYTES + KERNEL_BYTES, ROOM),
    "head": (http(b"GET / HTTP/1.1\r\nHost: localhost\r\nx: ", b"y" * 65536), {"400", "cut"}, KERNEL_BYTES, ROOM),
    "many heads": (http(b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"y: z\r\n" * 10_000), {"400", "cut"}, KERNEL_BYTES, ROOM),
    "message": (grpc(PUSHED_BYTES), {"8"}, LIMIT + KERNEL_BYTES, ROOM),
    "more than its length": (grpc(LIMIT // 2), {"3", "8", "13", "cut"}, LIMIT + KERNEL_BYTES, ROOM),
    "metadata": (metadata, {"8", "cut"}, PUSHED_BYTES + MAX_FRAME, ROOM),
    # gRPC reads and drops the frames of a stream that it has ended, whatever their number.
    "beyond the window": (grpc(PUSHED_BYTES, obeys=False), {"8", "cut"}, PUSHED_BYTES + MAX_FRAME, RUDE_ROOM),
}


async def round_of(it: DoorRig, name: str) -> str:
    """Twenty clients at once; what there is to say of them."""
    push, told, most, room = PUSHES[name]
    before, loop = it.memory, asyncio.get_running_loop()
    begun_s = loop.time()
    async with Peak(it) as peak:
        ends = await asyncio.wait_for(asyncio.gather(*(push(it) for _ in range(CLIENTS))), 240.0)
    assert {end for _, end in ends} <= told, Counter(end for _, end in ends)
    assert max(sent for sent, _ in ends) <= most, ends
    assert peak.memory - before < room, (name, before, peak.memory)
    return (
        f"{name}: most sent {max(sent for sent, _ in ends) / MB:.1f} MB, {dict(Counter(end for _, end in ends))}, "
        f"memory {before / MB:.1f}, peak {peak.memory / MB:.1f} MB, {loop.time() - begun_s:.1f} s, loop late {peak.late_s:.3f} s"
    )  # fmt: skip


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_clients_that_push_a_hundred_megabytes_are_cut_off(tmp_path: Path, again: bool) -> None:
    """Taken whole, one round would be 2 GB. ``again``: the second time, memory is what it was after the first: what was
    freed is used again (8 MB for fragmentation)."""

    async def go() -> None:
        async with doors(tmp_path, {"http_max_body_bytes": LIMIT}, {"max_message_bytes": LIMIT}) as it:

            async def rounds() -> list[str]:
                return [await round_of(it, name) for name in PUSHES]

            said, answers = await it.beside(rounds())
            found, memory = await it.settled(), it.memory
            print(*said, f"{answers} right answers beside, memory {memory / MB:.1f} MB", sep="\n")
            assert found["connections"]["oversized"] >= CLIENTS and found["connections"]["malformed"] >= CLIENTS
            assert found["ends"]["http refused INVALID_ARGUMENT"] == 2 * CLIENTS
            assert answers
            if again:
                said, _ = await it.beside(rounds())
                await it.settled()
                print(*said, f"then {it.memory / MB:.1f} MB", sep="\n")
                assert it.memory - memory < 8 * MB

    asyncio.run(go())


async def http_status(it: DoorRig, data: bytes) -> tuple[int, str]:
    """Status and message of the answer to a request on a connection of its own, also one that is then reset."""
    loop, answer = asyncio.get_running_loop(), b""
    with socket.socket() as sock, contextlib.suppress(ConnectionError):
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", it.http_port))
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(sock, data)
        while part := await asyncio.wait_for(loop.sock_recv(sock, 65536), 60.0):
            answer += part
    return int(answer[9:12]), json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def grpc_status(it: DoorRig, data: bytes, *headers: tuple[str, str]) -> tuple[int | None, str]:
    """Status and message of a call with these bytes, sent as flow control allows."""
    connection = await RawConnection.open(it.grpc_port)
    while await connection.read_frame() != SETTINGS:  # gRPC's limits of metadata hold from the acknowledgement on
        pass
    block = header_block(call_headers("Generate", *headers))
    connection.write(frame(HEADERS, END_HEADERS * (len(block) <= MAX_FRAME), 1, block[:MAX_FRAME]))
    for at in range(MAX_FRAME, len(block), MAX_FRAME):
        connection.write(frame(CONTINUATION, END_HEADERS * (at + MAX_FRAME >= len(block)), 1, block[at : at + MAX_FRAME]))
    while data and not connection.has_gone and not connection.reply(1).has_ended:
        count = min(MAX_FRAME, connection.window_of(1), len(data))
        if count <= 0:
            await asyncio.wait_for(connection.read_frame(), 60.0)
            continue
        connection.write(frame(DATA, END_STREAM * (count == len(data)), 1, data[:count]))
        connection.windows[0] -= count
        connection.windows[1] -= count
        data = data[count:]
    await asyncio.wait_for(connection.until_ended(1), 60.0)
    connection.close()
    return connection.reply(1).status, connection.reply(1).told


def picture(size: int) -> bytes:
    """A request with a data URL of so many bytes."""
    url = "data:image/jpeg;base64," + base64.b64encode(bytes(size)).decode()
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return post(body() | {"messages": [{"role": "user", "content": parts}]}, "Connection: close")


def test_what_is_too_large_is_refused_by_name(tmp_path: Path) -> None:
    async def go() -> None:
        async with doors(tmp_path, {"http_max_body_bytes": LIMIT}, {"max_message_bytes": 4 * LIMIT}) as it:
            parts = {"role": "user", "content": [{"type": "text", "text": ""}] * 5000}
            for data, status, told in (
                (picture(LIMIT // 2), 400, "not supported"),
                (picture(2 * LIMIT), 413, f"larger than {LIMIT} bytes"),
                (post(body() | {"messages": [parts]}, "Connection: close"), 400, "5000 parts, at most 4096"),
                (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20_000, 400, "Invalid HTTP"),
                (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "Invalid HTTP"),
            ):
                got = await http_status(it, data)
                assert got[0] == status and told in got[1], got
            image = pb.Message(role="user", parts=[pb.Part(image=pb.Image(data=bytes(LIMIT)))])
            empty = pb.GenerateRequest(messages=[pb.Message()] * 1_900_000)
            fine = message(ask().SerializeToString())
            for data, headers, code, told in (
                (message(pb.GenerateRequest(messages=[image]).SerializeToString()), (), 3, "vision"),
                (message(ask("x" * 5 * LIMIT).SerializeToString()), (), 8, "larger than max"),
                (message(ask("x" * 3 * LIMIT).SerializeToString()), (), 3, "characters"),
                (message(empty.SerializeToString()), (), 3, "1024 messages, got 1900000"),
                (message(pb.GenerateRequest(messages=[pb.Message(parts=[pb.Part()] * 9000)]).SerializeToString()), (), 3, "9000 parts"),
                # A hundred megabytes in a hundred kilobytes.
                (message(gzip.compress(ask("x" * 100_000_000).SerializeToString()), 1), (("grpc-encoding", "gzip"),), 8, "larger than max"),
                (fine, (("x-much", "y" * 20_000),), 8, "metadata"),
                (fine, (("x-much-more", "y" * 200_000),), 8, "metadata"),
                (fine, tuple((f"x-{i}", "y" * 100) for i in range(300)), 8, "metadata"),
            ):  # fmt: skip
                found = await grpc_status(it, data, *headers)
                assert found[0] == code and told in found[1], found
            await it.settled()

    asyncio.run(go())


def test_a_body_in_many_small_chunks_is_taken(tmp_path: Path) -> None:
    async def go() -> None:
        async with doors(tmp_path) as it:
            raw = json.dumps(body("hello" + " " * 30_000)).encode().replace(b" " * 30_000, b"") + b" " * 30_000
            chunks = b"".join(b"1\r\n" + raw[i : i + 1] + b"\r\n" for i in range(len(raw)))
            reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
            writer.write(CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunks + b"0\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 60.0)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer[:300]

    asyncio.run(go())


def test_gRPC_connections_beyond_the_bound_are_closed_and_others_served(tmp_path: Path) -> None:
    async def go() -> None:
        async with doors(tmp_path, {}, {"max_connections": 8}) as it:

            async def opened() -> RawConnection | None:
                """None if it was closed at once."""
                one = await RawConnection.open(it.grpc_port)
                if await asyncio.wait_for(one.read_frame(), 60.0) is not None:
                    return one
                one.close()
                return None

            served: list[RawConnection] = []
            while len(served) < 8:  # the place of the rig's own connection may not be free yet
                if (one := await opened()) is not None:
                    served.append(one)
            assert await asyncio.gather(*(opened() for _ in range(12))) == [None] * 12
            for one in served:
                one.write(call(1, "ListModels", message(b"")))
                await asyncio.wait_for(one.until_ended(1), 60.0)
                assert one.reply(1).status == 0
                one.close()

    asyncio.run(go())
