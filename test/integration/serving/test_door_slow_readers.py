"""Fifty clients at once that stop reading, at both doors of a gateway process: paused, then cut off, and nobody minds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("grpc", reason="grpc is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
pytest.importorskip("hpack", reason="hpack is not installed: pip install 'vla-runtime[dev]'")
import grpc.aio
from door_rig import MB, DoorRig, Peak, doors
from grpc_rig import ask
from http_rig import body, post
from raw_http2 import DATA, PING, RawConnection, call, frame, message, window_update

from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc
from vla_cloud.pools.live_request import MAX_EVENT_TOKENS

HTTP, RAW, GRPC = 25, 13, 12
STALL_S = 4.0
"""Longer than a busy machine may stop a process: who waits for that only is not cut off."""
KERNEL = {"receive_buffer": 4096}
ROOM = {"CHAIN_STEP_S": "0.05", "CHAIN_MAX_MODEL_LEN": "8192"}
"""Twenty tokens a second and client at most, far from what the gateway can: what gathers until a client is cut off has a
bound."""
PATIENT = {"http_head_timeout_s": 60.0}
"""The HTTP connection of the healthy client idles while its gRPC call waits."""
LONG_S = 300.0
WIDE = {"logprobs": True, "top_logprobs": 20, "max_tokens": 3000}  # some 1.5 kB a token
WRITE_BUFFER_BYTES = 65_536
EVENT_BYTES = MAX_EVENT_TOKENS * 2000


async def http_client(it: DoorRig, number: int) -> bytes:
    """Reads the first event and then nothing until the server has closed; what then came."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL["receive_buffer"])
        await loop.sock_connect(sock, ("127.0.0.1", it.http_port))
        await loop.sock_sendall(sock, post(body(f"http {number}", stream=True, **WIDE)))
        received = await loop.sock_recv(sock, 1024)
        evicted = it.evictions
        await evicted.wait()
        try:
            while part := await asyncio.wait_for(loop.sock_recv(sock, 65536), 60.0):
                received += part
        except ConnectionResetError:
            pass
        return received


async def raw_client(it: DoorRig, number: int) -> int:
    """Gives no window back after the first 64 kB, until it is too late; bytes that had come until then."""
    connection = await RawConnection.open(it.grpc_port, window=65_535)
    request = ask(f"raw {number}", sampling={"temperature": 0.0, **WIDE})
    connection.write(call(1, "GenerateStream", message(request.SerializeToString())))
    while await connection.read_frame() != DATA:
        assert not connection.has_gone and not connection.reply(1).has_ended
    await it.evictions.wait()
    connection.write(frame(PING, 0, 0, bytes(8)))  # its answer comes behind all that was sent before
    while not connection.pongs and not connection.has_gone:  # the server also asks
        await connection.read_frame()
    count = len(connection.reply(1).data)
    connection.write(window_update(0, 1 << 20) + window_update(1, 1 << 20))
    await asyncio.wait_for(connection.until_ended(1), 60.0)
    assert connection.reply(1).status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], connection.reply(1).headers
    assert "read faster" in connection.reply(1).told
    connection.close()
    return count


async def grpc_client(it: DoorRig, number: int) -> str:
    """Reads one message, and the others when it is too late; how its call ended."""
    small = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{it.grpc_port}", options=small) as channel:
        request = ask(f"grpc {number}", sampling={"temperature": 0.0, **WIDE})
        stream = pb_grpc.ChatStub(channel).GenerateStream(request)
        assert (await stream.read()).delta.text
        await it.evictions.wait()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        return f"{(await stream.code()).name}: {await stream.details()}"


async def wave(it: DoorRig) -> None:
    """All at once; each is to be cut off, by name."""
    before = await it.state()
    evicted, failed = before["connections"]["evicted"] + HTTP, before["failed"] + HTTP + RAW + GRPC
    it.evictions = asyncio.Event()
    tasks = [
        asyncio.create_task(client(it, number))
        for client, count in ((http_client, HTTP), (raw_client, RAW), (grpc_client, GRPC)) for number in range(count)
    ]  # fmt: skip
    await it.until(lambda found: found["connections"]["evicted"] == evicted and found["failed"] == failed, 240.0)
    it.evictions.set()
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 120.0)
    for answer in answers[:HTTP]:
        assert b"data: " in answer and b"[DONE]" not in answer
    for answer in answers[HTTP : HTTP + RAW]:
        assert 32_768 < answer <= 65_535, answer
    for answer in answers[HTTP + RAW :]:
        assert answer == f"RESOURCE_EXHAUSTED: the client has read nothing for {STALL_S:g} s: read faster"


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_clients_that_do_not_read_are_paused_and_cut_off(tmp_path: Path, again: bool) -> None:
    """Memory while fifty wait: for each, 64 KiB in the gateway's HTTP buffer (or gRPC's 64 KiB beyond the window), and
    the tokens that wait unread, 80 of some 4 kB: 0.4 MB. Without a bound the answers would take 4.5 MB each, 225 MB. ``again``:
    a second wave adds nothing but fragmentation, a few MB."""

    async def go() -> None:
        gateway, rules = PATIENT | {"http_stall_timeout_s": STALL_S}, {"slow_reader_s": STALL_S, "keepalive_s": 600.0}
        async with doors(tmp_path, gateway, rules, ROOM, blocks=2048, max_running=64, deadline_s=LONG_S) as it:
            idle, descriptors = it.memory, it.descriptors
            async with Peak(it) as peak:
                _, answers = await it.beside(wave(it))
            found = await it.state()
            assert WRITE_BUFFER_BYTES < peak.buffered < WRITE_BUFFER_BYTES + EVENT_BYTES, peak.buffered
            assert found["ends"]["http cancelled CANCELLED"] == HTTP and found["failed"] == HTTP + RAW + GRPC
            gc.collect()  # what is left of our own gRPC clients
            await it.settled(descriptors)
            memory = it.memory
            print(f"memory {idle / MB:.1f} MB, peak {peak.memory / MB:.1f}, then {memory / MB:.1f}; {answers} right answers "
                  f"beside; most buffered {peak.buffered}")  # fmt: skip
            assert peak.memory - idle < 50 * MB, peak.memory
            assert answers >= 2
            if again:
                await it.beside(wave(it))
                gc.collect()
                await it.settled(descriptors)
                print(f"then {it.memory / MB:.1f}")
                assert it.memory - memory < 10 * MB

    asyncio.run(go())


def test_clients_that_leave_while_they_are_paused_end_their_requests(tmp_path: Path) -> None:
    """That the connection is lost wakes the writer and cancels it at once: it must not go on for nobody (an answer
    takes more than a minute)."""

    quick = ROOM | {"CHAIN_STEP_S": "0.01"}  # six clients are few

    async def go() -> None:
        async with doors(tmp_path, {}, {}, quick, blocks=4096, max_running=16, deadline_s=LONG_S) as it:
            for _ in range(2):
                clients = [await asyncio.open_connection("127.0.0.1", it.http_port) for _ in range(6)]
                for number, (_, writer) in enumerate(clients):
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL["receive_buffer"])
                    writer.transport.pause_reading()
                    writer.write(post(body(f"q {number}", stream=True, **WIDE | {"max_tokens": 7000})))
                await it.until(lambda found: found["paused"] == 6, 60.0)
                for _, writer in clients:
                    writer.transport.abort()
                await it.until(lambda found: found["active"] == found["running"] == 0, 30.0)
            assert (await it.settled())["served"] == 2  # those of the rig

    asyncio.run(go())
