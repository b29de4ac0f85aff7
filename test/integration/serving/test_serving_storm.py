"""Random aborts, disconnects, refusals and kills: every request ends, every block comes back, memory stays."""

from __future__ import annotations

import asyncio
import itertools
import random
import resource

import pytest
from serving_rig import Rig, few, reference, rig

from vla_cloud.core.generate import RequestError

NAMES = {"ok", "CANCELLED", "gone", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"}


async def one(it: Rig, rng: random.Random, number: int) -> str:
    """One request with a random fate."""
    tokens = [rng.randrange(997) for _ in range(rng.choice([1, 15, 16, 40, 100, 200, 300, 600]))]
    if rng.random() < 0.5:
        tokens = list(range(64)) + tokens  # shared beginnings
    count, name = rng.randint(1, 12), f"r{number}"
    fate = rng.choice(["ok", "ok", "abort", "disconnect", "deadline"])
    kwargs = {"deadline_ns": it.clock.monotonic_ns() + rng.randint(0, 60_000_000)} if fate == "deadline" else {}
    task = asyncio.create_task(it.ask(tokens, count, name, **kwargs))
    if fate in ("abort", "disconnect"):
        await asyncio.sleep(rng.random() * 0.06)
        if fate == "disconnect":
            task.cancel()
        else:
            it.service.abort(name)
    try:
        got, _ = await asyncio.wait_for(task, 125.0)
    except asyncio.CancelledError:
        return "gone"
    except RequestError as error:
        return error.code
    assert got == reference(tokens, count)[: len(got)] and (len(got) == count or len(tokens) + len(got) == 512)
    return "ok"


async def storm(it: Rig, total: int, seed: int, kills: int = 0, at_once: int = 16, served: int = 0) -> dict[str, int]:
    """``total`` requests, and more until ``served`` went well: refusals are quick, so their share depends on the machine."""
    rng = random.Random(seed)
    ends: dict[str, int] = {}
    todo = itertools.takewhile(lambda number: number < total or ends.get("ok", 0) < served, itertools.count())
    done = 0

    async def lane() -> None:
        nonlocal done
        for number in todo:
            end = await one(it, random.Random(seed * 1_000_003 + number), number)
            ends[end] = ends.get(end, 0) + 1
            done += 1

    async def killer() -> None:
        for number in range(kills):
            while done < total * (number + 1) / (kills + 1):
                await asyncio.sleep(0.02)
            name = rng.choice([info.name for info in it.supervisor.infos() if info.state == "ready"] or [""])
            if name:
                it.kill(name)

    await asyncio.gather(killer(), *(lane() for _ in range(at_once)))
    return ends


def check(it: Rig, ends: dict[str, int], total: int) -> None:
    assert sum(ends.values()) >= total and set(ends) <= NAMES, ends
    assert ends["ok"] > total / 10 and len(ends) >= 3, ends
    placement = it.service._placement
    assert not placement._placed and not it.service._by_id and not it.service._by_wire_id
    assert all(worker.load_tokens == 0 for worker in placement._workers.values())  # router#179
    assert it.service.health()["active"] == it.service.health()["queued"] == 0


@pytest.mark.parametrize("colocated", [False, True])
def test_blocks_are_back_after_random_aborts(colocated: bool) -> None:
    async def go() -> None:
        async with rig(colocated=colocated, workers=2, prefill_workers=2, blocks=64) as it:
            ends = await storm(it, 200, seed=1)
            await it.baseline()
            check(it, ends, 200)

    asyncio.run(go())


def test_blocks_are_back_after_random_aborts_and_kills() -> None:
    async def go() -> None:
        async with rig(prefill_workers=2, decode_workers=2, environment={"CHAIN_STEP_S": "0.001"}) as it:
            ends = await storm(it, 200, seed=2, kills=5)
            await it.until(lambda: all(info.state == "ready" for info in it.supervisor.infos()))
            await it.baseline()
            check(it, ends, 200)

    asyncio.run(go())


def test_overload_in_the_storm_is_refused_and_nothing_leaks() -> None:
    async def go() -> None:
        async with rig(admission=few(max_active=4, max_queued=4), max_waiting=2, max_running=2) as it:
            ends = await storm(it, 150, seed=3, served=16)
            await it.baseline()
            assert ends.get("RESOURCE_EXHAUSTED", 0) > 5
            check(it, ends, 150)

    asyncio.run(go())


def resident_bytes(pid: int | str) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_blocks_and_memory_are_back_after_thousands(transfer: str) -> None:
    async def go() -> None:
        async with rig(prefill_workers=2, decode_workers=2, transfer=transfer) as it:
            await storm(it, 1000, seed=4)
            before = resident_bytes("self")
            ends = await storm(it, 6000, seed=5, kills=25)
            await it.until(lambda: all(info.state == "ready" for info in it.supervisor.infos()))
            await it.baseline()
            check(it, ends, 6000)
            assert len(set(ends) - {"ok"}) >= 4, ends
            # Workers that live through the rest have seen a thousand requests before they are looked at.
            await storm(it, 1000, seed=6)
            pids = [info.pid for info in it.supervisor.infos()]
            workers = [resident_bytes(pid) for pid in pids]
            ends = await storm(it, 2000, seed=7)
            await it.baseline()
            check(it, ends, 2000)
            assert pids == [info.pid for info in it.supervisor.infos()]
            grown = [resident_bytes(pid) - was for pid, was in zip(pids, workers, strict=True)]
            assert max(grown) < 8_000_000, grown
            assert resident_bytes("self") - before < 20_000_000

    asyncio.run(go())
