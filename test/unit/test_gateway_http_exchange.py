"""An exchange whose client leaves: the work ends at once, whatever it waits for."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("uvicorn")
from vla_cloud.gateway.http_exchange import ClientGone, Exchange, ExchangeRules
from vla_cloud.gateway.http_protocol import CONNECTION

RULES = ExchangeRules(max_body_bytes=1000, body_timeout_s=5.0, stall_timeout_s=5.0)


class Flow:
    def __init__(self) -> None:
        self.writable, self.resumed, self.waiting = asyncio.Event(), 0, False

    async def drain(self) -> None:
        self.waiting = True
        await self.writable.wait()

    def resume_reading(self) -> None:
        self.resumed += 1


class Connection:
    """What an exchange needs of GuardedProtocol."""

    def __init__(self) -> None:
        self.flow, self.on_gone = Flow(), None
        self.is_paused = self.is_gone = False

    def hold(self) -> None:
        pass

    def release(self) -> None:
        pass

    def lose(self) -> None:
        """In the order of uvicorn and ours."""
        self.is_gone = True
        self.flow.writable.set()
        if self.on_gone is not None:
            self.on_gone()


async def send(message):
    pass


def exchange() -> tuple[Exchange, Connection]:
    connection = Connection()
    scope = {"headers": [], "state": {CONNECTION: connection}}
    return Exchange(scope, send, send, RULES), connection


def test_a_client_that_leaves_ends_the_work():
    async def go():
        it, connection = exchange()
        ended = []

        async def work():
            asyncio.get_running_loop().call_soon(connection.lose)
            try:
                await asyncio.sleep(60.0)
            finally:
                await asyncio.sleep(0)
                ended.append(True)

        with pytest.raises(ClientGone):
            await it.while_connected(work())
        assert ended and connection.on_gone is None and connection.flow.resumed
        await asyncio.sleep(0)  # nobody is cancelled afterwards
        return True

    assert asyncio.run(go())


def test_a_client_that_does_not_read_and_leaves_ends_the_work():
    async def go():
        it, connection = exchange()
        connection.is_paused = True
        went_on = []

        async def work():
            await it.write(b"more")
            went_on.append(True)
            await asyncio.sleep(60.0)

        task = asyncio.ensure_future(it.while_connected(work()))
        while not connection.flow.waiting:
            await asyncio.sleep(0)
        connection.lose()
        done, _ = await asyncio.wait((task,), timeout=5.0)
        assert done and not went_on
        with pytest.raises(ClientGone):
            task.result()

    asyncio.run(go())


def test_a_client_that_has_left_before_gets_no_work():
    async def go():
        it, connection = exchange()
        connection.lose()

        async def work():
            raise AssertionError("begun")

        with pytest.raises(ClientGone):
            await it.while_connected(work())

    asyncio.run(go())


def test_the_work_ends_as_it_does_and_a_cancellation_of_ours_is_one():
    async def go():
        it, connection = exchange()

        async def fails():
            raise ValueError("so")

        with pytest.raises(ValueError, match="so"):
            await it.while_connected(fails())
        assert connection.on_gone is None
        task = asyncio.ensure_future(it.while_connected(asyncio.sleep(60.0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
