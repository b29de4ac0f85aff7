"""The service over imitated workers: what it sends, what it refuses, what it forgets. No process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from vla_cloud.config import ServingConfig
from vla_cloud.core.generate import GenerateRequest, ImageSpan, RequestError, SamplingParams
from vla_cloud.core.kv_events import KvChange
from vla_cloud.core.prefix_key import PrefixKey, block_hashes
from vla_cloud.kv_transfer.layout import KvLayout
from vla_cloud.pools import messages as wire
from vla_cloud.pools.codec import pack_tokens, unpack_tokens
from vla_cloud.pools.events import Finished, TokenEvent
from vla_cloud.pools.limits import Limits
from vla_cloud.pools.service import ServingService
from vla_cloud.pools.workers import WorkerInfo
from vla_common.clock import SystemClock

LAYOUT = KvLayout("m", "ab", layers=2, kv_heads=1, head_dim=4)
CONFIG = ServingConfig(model="x", colocated=False, deadline_s=120.0)


class Pool:
    """Workers that say only what the test says."""

    def __init__(self, service: ServingService) -> None:
        self.service = service
        self.sent: list[tuple[str, wire.ToWorker]] = []
        service.attach(self)

    def send(self, worker_id: str, message: wire.ToWorker) -> bool:
        self.sent.append((worker_id, message))
        return True

    def infos(self) -> list[WorkerInfo]:
        return []

    def add(self, worker: str, role: wire.Role, layout: KvLayout = LAYOUT, **changes: int) -> None:
        sizes = {"total_blocks": 64, "max_model_len": 512, "vocab_size": 1000, "max_running": 8, "max_waiting": 8, **changes}
        ready = wire.Ready(1, worker, role, 1, 7, f"address of {worker}", layout, **sizes, eos_token_ids=[2])
        self.service.worker_ready(worker, ready)

    def take(self, kind: type) -> tuple[str, wire.ToWorker]:
        """The last message of a kind."""
        return next((worker, message) for worker, message in reversed(self.sent) if isinstance(message, kind))


def run(body: Callable[[ServingService, Pool], Awaitable[None]], **changes: object) -> None:
    async def go() -> None:
        service = ServingService(replace(CONFIG, **changes), SystemClock())
        try:
            await body(service, Pool(service))
        finally:
            service.close()

    asyncio.run(go())


async def collect(service: ServingService, request: GenerateRequest) -> list[TokenEvent | Finished]:
    return [event async for event in service.generate(request)]


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


REQUEST = GenerateRequest(
    "r", tuple(range(1, 41)), SamplingParams(temperature=0.5, max_new_tokens=3), images=(ImageSpan(0, 2, b"i" * 32),), salt=b"s"
)  # fmt: skip


def test_what_workers_are_sent_and_what_the_client_gets() -> None:
    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("p0.1", "prefill")
        pool.add("d0.1", "decode")
        task = asyncio.create_task(collect(service, REQUEST))
        await turn()
        worker, reserve = pool.take(wire.Reserve)
        assert (worker, reserve.writer, reserve.lease_s) == ("d0.1", "p0.1", 30.0)
        work = reserve.work
        assert unpack_tokens(work.prompt) == list(range(1, 41)) and (work.salt, work.streamed) == (b"s", 0)
        assert work.images == list(REQUEST.images) and 60.0 < work.time_left_s <= 120.0
        assert work.sampling.seed is not None and work.sampling.max_new_tokens == 3
        service.worker_message("d0.1", wire.Reserved(reserve.request_id, 0, "token", 1, [5, 6], 16))
        worker, prefill = pool.take(wire.Prefill)
        destination = prefill.destination
        assert worker == "p0.1" and prefill.work.prompt == work.prompt and prefill.work.sampling == work.sampling
        assert (destination.worker, destination.address, destination.token) == ("d0.1", "address of d0.1", "token")
        assert (destination.epoch, destination.first_block, destination.blocks) == (7, 1, [5, 6])
        assert destination.deadline_s == pytest.approx(CONFIG.retry.transfer_s(2 * LAYOUT.block_bytes))
        service.worker_message("p0.1", wire.Prefilled(reserve.request_id, 0, 32, 1000))
        service.worker_message("d0.1", wire.Tokens([wire.TokenRow(reserve.request_id, 0, 40, [9, 2])]))
        service.worker_message("d0.1", wire.Finished(reserve.request_id, 0, "stop", 2, 0))
        events = await task
        assert isinstance(events[-1], Finished) and events[-1].cached_tokens == 32
        assert [token for event in events[:-1] for token in event.tokens] == [9, 2]
        assert not service.health()["unsettled"]

    run(body)


def test_a_retry_sends_prompt_and_tokens_so_far_with_the_same_seed() -> None:
    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("w0.1", "both")
        pool.add("w1.1", "both")
        task = asyncio.create_task(collect(service, REQUEST))
        await turn()
        first_worker, first = pool.take(wire.Generate)
        service.worker_message(first_worker, wire.Tokens([wire.TokenRow(first.request_id, 0, 40, [9])]))
        service.worker_lost(first_worker, "died")
        worker, again = pool.take(wire.Generate)
        assert worker != first_worker and again.attempt == 1
        assert unpack_tokens(again.work.prompt) == [*range(1, 41), 9] and again.work.streamed == 1
        assert again.work.sampling == replace(first.work.sampling, max_new_tokens=2)
        service.worker_message(worker, wire.Tokens([wire.TokenRow(again.request_id, 1, 41, [8, 7])]))
        service.worker_message(worker, wire.Finished(again.request_id, 1, "length", 2, 0))
        assert (await task)[-1].attempts == 2

    run(body)


def test_leases_are_extended_for_reservations_only() -> None:
    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("p0.1", "prefill")
        pool.add("d0.1", "decode")
        task = asyncio.create_task(collect(service, REQUEST))
        await asyncio.sleep(0.05)
        worker, message = pool.take(wire.LeaseExtend)
        _, reserve = pool.take(wire.Reserve)
        assert worker == "d0.1" and message.leases == [wire.LeaseRow(reserve.request_id, 0)]
        assert message.lease_s == pytest.approx(1.0 - 0.02)
        service.worker_message("d0.1", wire.Reserved(reserve.request_id, 0, "t", 0, [1, 2, 3], 0))
        service.worker_message("d0.1", wire.Tokens([wire.TokenRow(reserve.request_id, 0, 40, [9])]))
        pool.sent.clear()
        await asyncio.sleep(0.05)
        assert not any(isinstance(message, wire.LeaseExtend) for _, message in pool.sent)
        task.cancel()

    run(body, lease_s=1.0, lease_extend_s=0.01)


def test_a_worker_with_another_kv_layout_gets_no_work() -> None:
    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("p0.1", "prefill")
        pool.add("d0.1", "decode", replace(LAYOUT, dtype="float16"))
        assert not service.health()["serving"]
        pool.add("d0.2", "decode")
        assert service.health()["serving"]

    run(body)


def test_words_of_unknown_requests_and_old_attempts_are_dropped() -> None:
    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("w0.1", "both")
        for message in (wire.Aborted("x", 0), wire.Tokens([wire.TokenRow("x", 0, 0, [1])]), wire.Finished("x", 0, "stop", 1)):
            service.worker_message("w0.1", message)
        service.worker_message("w0.1", wire.KvEvents(0, []))
        assert pool.sent == []

    run(body)


def test_events_and_loads_of_workers_reach_the_router_and_a_gap_asks_for_a_snapshot() -> None:
    def stored(*blocks: bytes) -> list[wire.KvEventRow]:
        return [wire.KvEventRow(KvChange.STORED, block) for block in blocks]

    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("w0.1", "both")
        pool.add("w1.1", "both")
        hashes = block_hashes(PrefixKey(b"s", REQUEST.tokens, REQUEST.images))
        service.worker_message("w1.1", wire.KvEvents(0, stored(*hashes)))
        service.worker_message("w0.1", wire.KvEvents(0, stored(b"h" * 32)))
        assert pool.sent == []
        service.worker_message("w0.1", wire.KvEvents(7, stored(b"i" * 32)))
        assert pool.sent == [("w0.1", wire.KvSnapshot())]
        service.worker_message("w0.1", wire.KvEvents(8, [wire.KvEventRow(KvChange.CLEARED), *stored(b"j" * 32)]))
        router = service.health()["router"]
        assert (router["index_blocks"], router["event_gaps"], router["snapshots_taken"]) == (4, 1, 1)  # one to be swept
        task = asyncio.create_task(collect(service, REQUEST))
        await turn()
        assert pool.take(wire.Generate)[0] == "w1.1"  # it has the prompt, with its tenant and image
        assert service.health()["router"]["decode_hits"] == 1
        service.worker_message("w1.1", wire.Pong(1, wire.Load(64, 60, 0, 900, 1, 0)))
        other = asyncio.create_task(collect(service, replace(REQUEST, request_id="t")))
        await turn()
        assert pool.take(wire.Generate)[0] == "w0.1"  # others load the first one
        service.worker_lost("w1.1", "died")
        assert pool.sent[-1][0] == "w0.1"
        for one in (task, other):
            one.cancel()

    run(body, placement=replace(CONFIG.placement, min_affinity_tokens=16))


@pytest.mark.parametrize("status, code", [("INVALID_ARGUMENT", "INVALID_ARGUMENT"), ("INTERNAL", "INTERNAL")])
def test_errors_of_workers_reach_the_client_by_name(status: wire.Code, code: str) -> None:
    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("w0.1", "both")
        task = asyncio.create_task(collect(service, REQUEST))
        await turn()
        _, generate = pool.take(wire.Generate)
        service.worker_message("w0.1", wire.Error(status, "because", generate.request_id, 0))
        with pytest.raises(RequestError, match="because") as caught:
            await task
        assert caught.value.code == code

    run(body, retry=replace(CONFIG.retry, max_failures=1))


def test_limits_are_the_smallest_of_all_workers() -> None:
    limits = Limits()
    with pytest.raises(RequestError, match="no worker") as caught:
        limits.check(REQUEST, False, False)
    assert caught.value.code == "UNAVAILABLE" and caught.value.retry_after_s > 0
    ready = wire.Ready(1, "w", "both", 1, 7, "", LAYOUT, 64, 512, 1000, 8, 8, [2])
    limits.add(ready)
    limits.add(wire.Ready(1, "v", "both", 1, 7, "", LAYOUT, 4, 2000, 1000, 8, 8, [2]))
    limits.add(ready)
    assert limits.check(REQUEST, False, False) == 3
    assert limits.check(replace(REQUEST, sampling=SamplingParams(max_new_tokens=100)), False, False) == 64 - 40
    for wrong, code in (
        (replace(REQUEST, tokens=tuple(range(1, 65))), "INVALID_ARGUMENT"),  # no room for a token in the pool
        (replace(REQUEST, tokens=(5,) * 512), "INVALID_ARGUMENT"),
        (replace(REQUEST, tokens=(1000,)), "INVALID_ARGUMENT"),
        (replace(REQUEST, tokens=()), "INVALID_ARGUMENT"),
        (replace(REQUEST, sampling=SamplingParams(max_new_tokens=0)), "INVALID_ARGUMENT"),
    ):
        with pytest.raises(RequestError) as caught:
            limits.check(wrong, False, False)
        assert caught.value.code == code
    for draining, here, code in ((True, False, "UNAVAILABLE"), (False, True, "ALREADY_EXISTS")):
        with pytest.raises(RequestError) as caught:
            limits.check(REQUEST, draining, here)
        assert caught.value.code == code


def test_affinity_tells_tenants_and_images_apart() -> None:
    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("w0.1", "both")
        affinities = set()
        for number, change in enumerate(({}, {"salt": b"t"}, {"images": (ImageSpan(0, 2, b"j" * 32),)}, {"images": ()})):
            request = replace(REQUEST, request_id=f"r{number}", **change)
            task = asyncio.create_task(collect(service, request))
            await turn()
            live = service._by_id[request.request_id]
            affinities.add(live.hashes.extend(live.prompt)[-1])
            task.cancel()
        assert len(affinities) == 4
        assert pack_tokens(REQUEST.tokens)

    run(body)


@pytest.mark.parametrize("stop_token_ids", [(), (2,)])
def test_an_answer_ends_at_the_stop_tokens_of_its_request_only_also_when_a_worker_dies(stop_token_ids: tuple[int, ...]) -> None:
    """Token 2 ends answers of this model: whether it ends this one is the front door's to say."""
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=frozenset(stop_token_ids))

    async def body(service: ServingService, pool: Pool) -> None:
        pool.add("w0.1", "both")
        pool.add("w1.1", "both")
        task = asyncio.create_task(collect(service, replace(REQUEST, sampling=sampling)))
        await turn()
        worker, first = pool.take(wire.Generate)
        service.worker_message(worker, wire.Tokens([wire.TokenRow(first.request_id, 0, 40, [2])]))
        service.worker_lost(worker, "died")
        if not stop_token_ids:
            worker, again = pool.take(wire.Generate)
            assert again.attempt == 1
            service.worker_message(worker, wire.Tokens([wire.TokenRow(again.request_id, 1, 41, [8, 7])]))
            service.worker_message(worker, wire.Finished(again.request_id, 1, "length", 2, 0))
        assert (await task)[-1].reason.value == ("stop" if stop_token_ids else "length")

    run(body)
