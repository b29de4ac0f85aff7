"""The router over real worker processes: what they report decides, without any guess of the gateway's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from serving_rig import BASE, PROMPT, prompt, reference, rig, sent

from vla_cloud.pools import messages as wire

ONLY_EVENTS = replace(BASE.placement, unconfirmed_s=0.0)


def test_a_prompt_goes_to_the_worker_that_says_it_has_it() -> None:
    async def go() -> None:
        async with rig(prefill_workers=3, decode_workers=2, placement=ONLY_EVENTS) as it:
            router = it.service._placement
            messages = sent(it)
            await it.ask(PROMPT, 4, "first")
            await it.until(lambda: any(router.index.blocks(name) >= 12 for name in router._workers if name.startswith("p")))
            (first,) = [message for message in messages if isinstance(message, wire.Prefill)]
            for i in range(3):
                turn = [*PROMPT, 5, 6, i]
                got, end = await it.ask(turn, 4, f"turn{i}")
                assert got == reference(turn, 4) and end.cached_tokens >= 192
            counts = it.service.health()["router"]
            assert (counts["prefill_hits"], counts["prefill_misses"]) == (3, 1) and counts["blocks_confirmed"] == 0
            loads = set()
            router.take_load = lambda worker, active_tokens: loads.add(worker)  # type: ignore[method-assign]
            await it.until(lambda: len(loads) == 5)
            assert counts["event_gaps"] == counts["events_ignored"] == 0 and first.attempt == 0
            await it.baseline()

    asyncio.run(go())


def test_after_lost_events_a_snapshot_comes_and_a_killed_worker_is_forgotten() -> None:
    async def go() -> None:
        async with rig(colocated=True, workers=2, placement=ONLY_EVENTS) as it:
            router = it.service._placement
            take, lost = router.take_events, []

            def lose(worker: str, first: int, rows: list[wire.KvEventRow]) -> bool:
                if not lost:
                    lost.append(rows)
                    return False
                return take(worker, first, rows)

            router.take_events = lose  # type: ignore[method-assign]
            await it.ask(PROMPT, 4, "first")
            await it.until(lambda: bool(lost))
            for i in range(4):  # until the worker that lost its events has more
                await it.ask(prompt(i), 4, f"r{i}")
            await it.until(lambda: router.counters["snapshots_taken"] == 1)
            held = {name: router.index.blocks(name) for name in router._workers}
            assert sum(held.values()) >= 12 + 4 * 6
            name = max(held, key=held.__getitem__)
            it.kill(name.partition(".")[0])
            await it.until(lambda: name not in router._workers)
            assert router.index.blocks(name) == 0
            assert (await it.ask(PROMPT, 4, "again"))[0] == reference(PROMPT, 4)

    asyncio.run(go())
