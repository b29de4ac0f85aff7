"""What is almost a message, a hundred thousand times, at both chat doors of a gateway process: an error by name each time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("grpc", reason="grpc is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
pytest.importorskip("hpack", reason="hpack is not installed: pip install 'vla-runtime[dev]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
import door_fuzz as fuzz
import grpc
from door_rig import MB, DoorRig, doors
from grpc_rig import ask
from http_rig import body, post
from raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    RawConnection,
    call_headers,
    frame,
    header_block,
    message,
    settings,
    window_update,
)

from vla_cloud.gateway.proto import vla_chat_pb2 as pb

SHORT = {"CHAIN_MAX_MODEL_LEN": "128"}
SMALL = {"http_max_body_bytes": 100_000}
BASE = body("hi", max_tokens=1)
LANES = 12
Ends = Counter[str]
Lane = Callable[[DoorRig, int, int, Ends], Awaitable[None]]
"""``lane(rig, seed, messages, ends)``: sends so many, and counts how they end."""


async def answer(reader: asyncio.StreamReader) -> str:
    """Takes one answer off a connection; its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if length is None:
        events = await reader.readuntil(b"0\r\n\r\n")
        assert events.rstrip(b"\r\n0").endswith((b"[DONE]", b"}")), events[-300:]
    else:
        await reader.readexactly(int(length[1]))
    return head[9:12].decode()


async def ask_for_structure(it: DoorRig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
    wanted = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"type": "integer"}}}
    writer.write(post(body("hi", max_tokens=1, response_format=wanted)))
    await asyncio.wait_for(answer(reader), 60.0)
    writer.close()


async def http_bodies(it: DoorRig, seed: int, count: int, ends: Ends) -> None:
    """Wrong bodies in right heads, one after the other on one connection, which stays."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
    for _ in range(count):
        writer.write(fuzz.request(fuzz.body(rng, BASE)))
        ends.update((await asyncio.wait_for(answer(reader), 60.0),))
    writer.close()


async def http_messages(it: DoorRig, seed: int, count: int, ends: Ends) -> None:
    """Anything, each on a connection of its own; those that are not complete are not waited for."""
    rng = random.Random(seed)
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
        writer.write(fuzz.http_message(rng, BASE))
        received = b""
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            while part := await asyncio.wait_for(reader.read(65536), 0.02):
                received += part
        statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", received)
        ends.update([status.decode() for status in statuses] or ["silent"])
        writer.close()


METHODS = ("Generate", "GenerateStream", "Abort", "ListModels", "Other", "", "Generate/../x")
REQUESTS = [
    ask("hi", sampling={"max_tokens": 1, "temperature": 0.0}),
    ask("hi", "mine", model="chain", priority=pb.PRIORITY_LOW, sampling={"max_tokens": 1, "stop": ["a"], "seed": 2**64 - 1}),
    pb.GenerateRequest(messages=[pb.Message(role="user", parts=[pb.Part(image=pb.Image(data=b"x", media_type="image/png"))])]),
    pb.GenerateRequest(messages=[pb.Message(role=role) for role in ("system", "user", "assistant", "tool", "x")]),
    ask("hi", sampling={"max_tokens": 1, "logprobs": True, "top_logprobs": 20, "top_p": float("nan"), "repetition_penalty": -0.0}),
]  # fmt: skip
CORPUS = [request.SerializeToString() for request in REQUESTS]


def grpc_data(rng: random.Random) -> bytes:
    """What one call sends: a message that is damaged, or its prefix is."""
    data = rng.choice(CORPUS)
    how = rng.randrange(8)
    if how < 5:
        data = fuzz.damaged(rng, data)
    elif how == 5:
        data = rng.randbytes(rng.randrange(200))
    sent = message(data)
    if rng.random() < 0.1:
        sent = rng.choice((b"", sent[:3], sent + sent, b"\1" + sent[1:], b"\7" + sent[1:], message(data, 0, len(data) + 9)))
    return sent


async def grpc_messages(it: DoorRig, seed: int, count: int, ends: Ends) -> None:
    """Right frames with wrong messages, fifty calls at a time on one connection, which stays."""
    rng, streams = random.Random(seed), itertools.count(1, 2)
    connection = await RawConnection.open(it.grpc_port)
    while count > 0:
        batch = [next(streams) for _ in range(min(50, count))]
        for stream in batch:
            method = "Generate" if rng.random() < 0.6 else rng.choice(METHODS)
            timeout = rng.choice((("grpc-timeout", "20S"), ("grpc-timeout", "20S"), ("grpc-timeout", rng.choice(TIMEOUTS))))
            connection.write(frame(HEADERS, END_HEADERS, stream, header_block(call_headers(method, timeout))))
            connection.write(frame(DATA, END_STREAM, stream, grpc_data(rng)))
        await asyncio.wait_for(connection.until_ended(*batch), 120.0)
        assert not connection.has_gone, connection.goaway
        for stream in batch:
            reply = connection.replies.pop(stream)
            ends.update((NAMES.get(reply.status, "none") if reply.headers else "reset",))
            if reply.status == grpc.StatusCode.UNKNOWN.value[0]:
                raise AssertionError(reply.told)  # what an exception in a handler would be
        count -= len(batch)
    connection.close()


NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
TIMEOUTS = ("1n", "0S", "99999999H", "1", "S", "-1S", "1.5S", "1u", "00000001S")
SESSION = [
    settings(window=1 << 20),
    window_update(0, 1 << 20),
    frame(HEADERS, END_HEADERS, 1, header_block(call_headers("GenerateStream"))),
    frame(DATA, END_STREAM, 1, message(CORPUS[0])),
    frame(HEADERS, 0, 3, header_block(call_headers("Generate"))[:40]),
    frame(9, END_HEADERS, 3, header_block(call_headers("Generate"))[40:]),
    frame(DATA, 0, 3, message(CORPUS[1])[:20]),
    frame(DATA, END_STREAM, 3, message(CORPUS[1])[20:]),
    frame(PRIORITY, 0, 1, bytes(5)),
    frame(PING, 0, 0, bytes(8)),
    frame(RST_STREAM, 0, 1, bytes(4)),
]  # fmt: skip


async def grpc_frames(it: DoorRig, seed: int, count: int, ends: Ends) -> None:
    """Frames that are not those of a session, some on each of many connections."""
    rng = random.Random(seed)
    while count > 0:
        sent = fuzz.frames(rng, SESSION, 16)
        count -= len(sent)
        reader, writer = await asyncio.open_connection("127.0.0.1", it.grpc_port)
        connection = RawConnection(reader, writer)
        connection.write((PREFACE if rng.random() < 0.95 else fuzz.damaged(rng, PREFACE)) + b"".join(sent))
        with contextlib.suppress(asyncio.TimeoutError):
            for _ in range(20):
                if await asyncio.wait_for(connection.read_frame(), 0.5) is None:
                    break
        outcome = "goaway" if connection.goaway else "closed" if connection.has_gone else "open"
        ends.update({outcome: len(sent)})
        connection.close(reset=rng.random() < 0.5)


# Messages of each kind in a hundred: the cheap ones are the most.
KINDS: tuple[tuple[Lane, int], ...] = ((http_bodies, 30), (http_messages, 15), (grpc_messages, 35), (grpc_frames, 20))


async def attack(it: DoorRig, total: int, seed: int) -> dict[str, Ends]:
    """``total`` messages of all kinds, one kind after the other, in LANES at a time."""
    result = {}
    for lane, share in KINDS:
        ends: Ends = Counter()
        each = total * share // 100 // LANES
        await asyncio.gather(*(lane(it, seed * 1000 + number, each, ends) for number in range(LANES)))
        result[lane.__name__] = ends
    return result


def check(ends: dict[str, Ends], total: int) -> None:
    """Nothing failed inside, and both what is refused and what is served was reached."""
    http = ends["http_bodies"] + ends["http_messages"]
    assert not [code for code in http if code[0] == "5"], http
    assert set(ends["http_bodies"]) <= {"200", "400", "404"} and ends["http_bodies"]["200"] > total // 100
    assert http["400"] > total // 10 and ends["http_messages"]["408"] + ends["http_messages"]["silent"] > 0
    served = ends["grpc_messages"]
    assert served["OK"] > total // 50 and served["INVALID_ARGUMENT"] > total // 20 and served["UNIMPLEMENTED"] > total // 100
    assert not {"UNKNOWN", "DATA_LOSS", "ABORTED"} & set(served), served
    assert ends["grpc_frames"]["goaway"] + ends["grpc_frames"]["closed"] > total // 50


@pytest.mark.parametrize("total", [2400, pytest.param(90_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_malformed_messages_break_nothing(tmp_path: Path, total: int) -> None:
    """Memory: what 2,400 messages add is kept for the next ones. The others may add some MB of fragmentation; 90,000 that
    left 1 kB each would add 90 MB. The log must tell of no fault (the rig looks), and must not grow by each message."""

    async def go() -> None:
        async with doors(tmp_path, SMALL, {}, SHORT) as it:
            await attack(it, 1200, 1)
            await ask_for_structure(it)  # the process that checks grammars is started by the first, whenever that comes
            await it.settled()
            memory, descriptors = it.memory, it.descriptors
            begun_s = asyncio.get_running_loop().time()
            ends, answers = await it.beside(attack(it, total, 2))
            took_s = asyncio.get_running_loop().time() - begun_s
            found = await it.settled(descriptors)
            print(*((name, dict(counts)) for name, counts in ends.items()), sep="\n")
            print(f"{took_s:.1f} s, {answers} right answers beside, memory {memory / MB:.1f} then {it.memory / MB:.1f} MB, {found}")
            check(ends, total)
            assert answers and it.memory - memory < 15 * MB
            assert it.log.stat().st_size < 100_000, it.log.read_text(errors="replace")[-3000:]

    asyncio.run(go())


SMUGGLED = b"GET /v1/models/smuggled HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
FRAMINGS = (
    b"Transfer-Encoding: chunked\r\nContent-Length: 3", b"Content-Length: 3\r\nTransfer-Encoding: chunked",
    b"Content-Length: 3\r\nContent-Length: 0", b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: identity",
)  # fmt: skip


def test_a_body_whose_end_is_told_in_two_ways_is_refused_with_all_that_follows(tmp_path: Path) -> None:
    async def go() -> None:
        async with doors(tmp_path) as it:
            for number, framing in enumerate(FRAMINGS):
                reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
                writer.write(post(b"").replace(b"Content-Length: 0", framing) + b"0\r\n\r\n" + SMUGGLED)
                received = await asyncio.wait_for(reader.read(), 60.0)
                writer.close()
                assert re.findall(rb"HTTP/1\.1 (\d+)", received) == [b"400"] and b"smuggled" not in received
                assert (await it.state())["connections"]["malformed"] == number + 1

    asyncio.run(go())


def test_a_call_without_a_complete_message_ends(tmp_path: Path) -> None:
    """Without a deadline, too."""

    async def go() -> None:
        async with doors(tmp_path) as it:
            connection, streams = await RawConnection.open(it.grpc_port), itertools.count(1, 2)
            right = message(CORPUS[0])
            for method in ("Generate", "GenerateStream"):
                for data in (b"", right[:3], right[:-2], message(CORPUS[0], length=999)):
                    stream = next(streams)
                    connection.write(frame(HEADERS, END_HEADERS, stream, header_block(call_headers(method))))
                    connection.write(frame(DATA, END_STREAM, stream, data))
                    await asyncio.wait_for(connection.until_ended(stream), 60.0)
                    reply = connection.reply(stream)
                    assert NAMES[reply.status] == "INVALID_ARGUMENT" and "vla.v1.GenerateRequest" in reply.told, reply
            connection.close()

    asyncio.run(go())
