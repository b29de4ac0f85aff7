"""Starts door_process.py and looks at it from outside: memory, file descriptors, log, state, and right answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
from http_rig import NEVER, body, post, write_tokenizer
from serving_rig import HERE, ROOT, reference

sys.path.insert(0, str(ROOT / "test" / "fakes"))
from grpc_rig import ask

from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc

FAULT = re.compile(r"Traceback| (ERROR|CRITICAL) |^[EF]\d{4} |Fatal Python", re.MULTILINE)
"""Also what gRPC's own library logs, which is to be silent: a client can make it say something each time."""

MB = 1_000_000


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


class DoorRig:
    """The process, and what is known of it."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, tokenizer: ChatTokenizer) -> None:
        self.process, self.log, self.tokenizer = process, log, tokenizer
        self.http_port = self.grpc_port = 0
        self._asking = asyncio.Lock()
        self.evictions = asyncio.Event()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def memory(self) -> int:
        """Resident bytes of the gateway."""
        return resident_bytes(self.pid)

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def open_files(self) -> dict[str, int]:
        """Kinds of the descriptors and how many there are of each."""
        kinds: Counter[str] = Counter()
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                kinds[os.readlink(f"/proc/{self.pid}/fd/{name}").partition("[")[0]] += 1
        return dict(kinds)

    def faults(self) -> list[str]:
        """Lines of the log that tell of a fault, with what follows."""
        text = self.log.read_text(errors="replace")
        return [text[found.start() : found.start() + 2000] for found in FAULT.finditer(text)]

    async def line(self) -> Any:
        assert self.process.stdout is not None
        text = await asyncio.wait_for(self.process.stdout.readline(), 120.0)
        assert text, f"the gateway has ended: {self.log.read_text(errors='replace')[-4000:]}"
        return json.loads(text)

    async def state(self) -> dict[str, Any]:
        return await asyncio.shield(self._ask())  # who is cancelled leaves no answer behind for the next one

    async def _ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        async with self._asking:
            self.process.stdin.write(b"\n")
            return dict(await self.line())

    async def until(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0) -> dict[str, Any]:
        """The first state for which it is so."""
        for _ in range(round(timeout_s / 0.02)):
            found = await self.state()
            if condition(found):
                return found
            await asyncio.sleep(0.02)
        raise AssertionError(f"not within {timeout_s} s: {found}, descriptors {self.open_files()}")

    async def settled(self, descriptors: int | None = None) -> dict[str, Any]:
        """No request alive, all blocks free, no connection open, no descriptor more than there were."""

        def is_so(found: dict[str, Any]) -> bool:
            nothing = ("active", "queued", "unsettled", "running", "busy", "buffered")
            return (
                not any(found[name] for name in nothing) and found["free"] == found["total"] > 0
                and not found["connections"]["open"] and (descriptors is None or self.descriptors <= descriptors)
            )  # fmt: skip

        return await self.until(is_so)

    def expected(self, question: str, count: int) -> str:
        """The answer, computed without any server."""
        prompt = self.tokenizer.chat([{"role": "user", "content": question}])
        return self.tokenizer.decode(reference(prompt, count))

    async def answers_rightly(self) -> None:
        """At both doors."""
        async with HealthyClient(self) as client:
            await client.ask("are you well?")

    async def beside(self, work: Awaitable[Any], pause_s: float = 0.02) -> tuple[Any, int]:
        """What ``work`` gives, and how many right answers a healthy client got at each door meanwhile."""
        async with HealthyClient(self) as client:  # is in before the work can fill the doors
            task, number = asyncio.ensure_future(work), 0
            try:
                while not task.done():
                    await client.ask(f"healthy {number}")
                    number += 1
                    await asyncio.sleep(pause_s)
            finally:
                if not task.done():
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return task.result(), number


class HealthyClient:
    """Keeps a connection to each door, so that it has its place among those that are allowed."""

    def __init__(self, it: DoorRig) -> None:
        self._it = it

    async def __aenter__(self) -> HealthyClient:
        alone = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._it.grpc_port}", options=alone)
        self._stub = pb_grpc.ChatStub(self._channel)
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._it.http_port)
        await asyncio.wait_for(self._channel.channel_ready(), 120.0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.close()
        await self._channel.close()

    async def ask(self, question: str, count: int = 4) -> None:
        """AssertionError for anything but the right answer, at either door."""
        expected = self._it.expected(question, count)
        assert await asyncio.wait_for(self._http(question, count), 120.0) == expected
        request = ask(question, sampling={"max_tokens": count, "temperature": 0.0})
        assert (await self._stub.Generate(request, timeout=120.0)).text == expected

    async def _http(self, question: str, count: int) -> str:
        self._writer.write(post(body(question, max_tokens=count)))
        head = await self._reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        assert head.startswith(b"HTTP/1.1 200") and found, head
        answer = json.loads(await self._reader.readexactly(int(found[1])))
        return str(answer["choices"][0]["message"]["content"])


class Peak:
    """The most resident bytes of a process, and the most of what is buffered for one client, while it is entered."""

    def __init__(self, it: DoorRig) -> None:
        self._it = it
        self.memory = self.buffered = 0
        self.late_s = 0.0

    async def __aenter__(self) -> Peak:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        number = 0
        while True:
            self.memory = max(self.memory, self._it.memory)
            if number % 5 == 0:
                found = await self._it.state()
                self.buffered = max(self.buffered, found["most_buffered"])
                self.late_s = max(self.late_s, found["late_s"])
            number += 1
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def doors(
    folder: Path, gateway: dict[str, Any] | None = None, grpc_rules: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None, zenoh: str = "", **serving: Any,
) -> AsyncIterator[DoorRig]:  # fmt: skip
    """The process. At its end there must be nothing in its log that tells of a fault, and it must end by itself."""
    tokenizer, log = write_tokenizer(folder / "tokenizer", NEVER), folder / "log"
    settings = {
        "folder": str(folder / "tokenizer"), "gateway": gateway or {}, "grpc": grpc_rules or {}, "serving": serving,
        "environment": environment or {}, "zenoh": zenoh,
    }  # fmt: skip
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / "door_process.py"), json.dumps(settings), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=file, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    it = DoorRig(process, log, tokenizer)
    try:
        it.http_port, it.grpc_port = await it.line()
        await it.answers_rightly()
        yield it
        await it.answers_rightly()
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 60.0) == 0, log.read_text(errors="replace")[-4000:]
        assert not (faults := it.faults()), faults[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]
