"""Clients that vanish at any moment, at both doors of a gateway process: nothing of them is left."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("grpc", reason="grpc is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
pytest.importorskip("hpack", reason="hpack is not installed: pip install 'vla-runtime[dev]'")
from door_rig import MB, DoorRig, doors, resident_bytes
from grpc_rig import ask
from http_rig import body, post
from raw_http2 import DATA, PREFACE, RawConnection, call, message, settings

BOUND = 16
"""Connections of each door."""
IN_BOUNDS, BEYOND = 20, 60
"""Clients of a wave, half of them at each door; the first of five waves goes beyond the bounds."""
MOMENTS = ("connected", "head", "body", "asked", "first", "stream")
ENDINGS = ("reset", "fin", "half")
STEP = {"CHAIN_STEP_S": "0.002"}


def question(rng: random.Random) -> str:
    return "x" * rng.randrange(1, 200) + str(rng.random())


async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, how: str) -> None:
    """``half``: says that it will send nothing more, and waits for the server to close."""
    if how == "half":
        try:
            writer.write_eof()
            while await asyncio.wait_for(reader.read(65536), 20.0):
                pass
        except asyncio.TimeoutError:
            raise AssertionError("the server did not close a connection that its client had half closed") from None
        except OSError:  # refused, or already closed from there
            pass
    if how == "reset" and not writer.is_closing():
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    writer.close()


async def http_client(it: DoorRig, rng: random.Random, moment: str, how: str) -> str:
    """``gone`` once it has done what it was to do, ``refused`` if the server did not let it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
    data = post(body(question(rng), stream=True, max_tokens=rng.randrange(50, 300)))
    begin = data.index(b"\r\n\r\n") + 4
    size = {"connected": 0, "head": rng.randrange(1, begin), "body": rng.randrange(begin, len(data))}.get(moment, len(data))
    outcome = "gone"
    try:
        writer.write(data[:size])
        if moment in ("first", "stream"):
            received = b""
            events = 1 if moment == "first" else rng.randrange(2, 20)
            while received.count(b"\n\n") < events and b"[DONE]" not in received:
                if not (part := await reader.read(4096)):
                    break
                received += part
            outcome = "gone" if b"data: " in received else "refused"
        elif moment == "asked":
            await asyncio.sleep(rng.random() * 0.03)
    except OSError:
        outcome = "refused"
    await end(reader, writer, how)
    return outcome


async def grpc_client(it: DoorRig, rng: random.Random, moment: str, how: str) -> str:
    """As :func:`http_client`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.grpc_port)
    connection = RawConnection(reader, writer)
    hello = PREFACE + settings()
    request = ask(question(rng), sampling={"max_tokens": rng.randrange(50, 300), "temperature": 0.0})
    asked = message(request.SerializeToString())
    data = hello + call(1, "GenerateStream", asked)
    begin = len(data) - len(asked)
    size = {"connected": 0, "head": rng.randrange(1, begin), "body": rng.randrange(begin, len(data))}.get(moment, len(data))
    connection.write(data[:size])
    outcome = "gone"
    if moment in ("first", "stream"):
        frames = 1 if moment == "first" else rng.randrange(2, 20)
        while frames and not connection.has_gone and not connection.reply(1).has_ended:
            frames -= await connection.read_frame() == DATA
        outcome = "gone" if connection.reply(1).data else "refused"
    elif moment == "asked":
        await asyncio.sleep(rng.random() * 0.03)
    await end(reader, writer, how)
    return outcome


async def storm(it: DoorRig, total: int, seed: int) -> Counter[str]:
    """``total`` clients in waves; how many of each door, moment and ending had which outcome."""
    ends: Counter[str] = Counter()

    async def one(number: int) -> None:
        rng = random.Random(seed * 1_000_003 + number)
        door, client = (("http", http_client), ("grpc", grpc_client))[number % 2]
        moment, how = rng.choice(MOMENTS), rng.choice(ENDINGS)
        await asyncio.sleep(rng.random() * 0.02)
        try:
            outcome = await asyncio.wait_for(client(it, rng, moment, how), 60.0)
        except Exception as error:
            raise AssertionError(f"client {number}: {door}, {moment}, {how}") from error
        ends.update((door, moment, how, outcome))

    wave = begun = 0
    while begun < total:
        size = min(BEYOND if wave % 5 == 0 else IN_BOUNDS, total - begun)
        await asyncio.gather(*(one(number) for number in range(begun, begun + size)))
        begun, wave = begun + size, wave + 1
    return ends


@pytest.mark.parametrize("total", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_nothing_is_left_of_clients_that_vanish(tmp_path: Path, total: int) -> None:
    """Memory: the first storm fills what is kept for the next one (arenas of the allocators and of gRPC, threads,
    compiled patterns); a second one of the same size may add what chance makes of fragmentation, a few MB, but not the
    20 kB a client and more that a leaked connection or request takes (1,000 of them: 20 MB)."""

    async def go() -> None:
        bounds = {"http_max_connections": BOUND}
        async with doors(tmp_path, bounds, {"max_connections": BOUND}, STEP) as it:
            await storm(it, 60, 1)
            before = await it.settled()
            descriptors, tasks = it.descriptors, before["tasks"]
            ends, answers = await it.beside(storm(it, total, 2))
            first = await it.settled(descriptors)
            memory, workers = it.memory, [resident_bytes(pid) for pid in first["pids"]]
            again, more = await it.beside(storm(it, total, 3))
            last = await it.settled(descriptors)
            await it.until(lambda found: found["tasks"] <= tasks)
            grown = it.memory - memory
            print(ends, again, f"{answers} + {more} right answers beside; gateway {memory / MB:.1f} + {grown / MB:.1f} MB")
            for count in (ends, again):
                assert count["gone"] + count["refused"] == total and count["http"] == count["grpc"] == total // 2
                assert min(count[name] for name in (*MOMENTS, *ENDINGS)) > total // 20
                assert 0 < count["refused"] < total // 3, "waves beyond the bounds, and only those, meet refusals"
            assert answers >= 2 and more >= 2
            assert last["connections"]["refused"] > 0 and last["failed"] - before["failed"] > total // 8
            assert last["pids"] == before["pids"]
            assert grown < 8 * MB, grown
            assert max(resident_bytes(pid) - was for pid, was in zip(last["pids"], workers, strict=True)) < 8 * MB

    asyncio.run(go())


def test_a_question_that_is_not_complete_does_not_hold_up_the_end_of_the_server(tmp_path: Path) -> None:
    """The rig asserts that the process ends in time and that nothing in its log tells of a fault."""

    async def go() -> None:
        async with doors(tmp_path) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.http_port)
            writer.write(post(body())[:-5])
            await it.until(lambda found: found["connections"]["open"] == 1)
        with pytest.raises(ConnectionError):
            assert await reader.read() == b""
            raise ConnectionResetError  # closed, not reset: as good
        writer.close()

    asyncio.run(go())
