"""Requests over real worker processes: what is refused, cut short, cached, or ended by its client or its deadline."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace

import pytest
from serving_rig import BASE, PROMPT, SLOW_STEP, few, prompt, reference, rig, sent, stage

from vla_cloud.core.generate import GenerateRequest, ImageSpan, Priority, RequestError, SamplingParams
from vla_cloud.pools import messages as wire


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp", "nixl"])
def test_disaggregated_tokens_are_those_of_a_plain_run(transfer: str) -> None:
    if transfer == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("nixl is not installed")

    async def go() -> None:
        async with rig(transfer=transfer) as it:
            for length in (1, 16, 17, 200):
                got, end = await it.ask(prompt(length, length), 20, f"r{length}")
                assert got == reference(prompt(length, length), 20)
                assert (end.prompt_tokens, end.generated_tokens, end.attempts) == (length, 20, 1)
            await it.baseline()

    asyncio.run(go())


def test_colocated_tokens_are_those_of_a_plain_run_and_control_may_be_tcp() -> None:
    async def go() -> None:
        async with rig(colocated=True, workers=2) as it:
            many = [it.ask(prompt(i, 10 + 13 * i), 10, f"r{i}") for i in range(12)]
            for i, (got, _) in enumerate(await asyncio.gather(*many)):
                assert got == reference(prompt(i, 10 + 13 * i), 10)
            await it.baseline()

    asyncio.run(go())


def test_a_disconnect_stops_the_prefill_at_the_next_chunk() -> None:  # dynamo#13691
    async def go() -> None:
        slow = {"p0": {"CHAIN_TOKEN_S": "0.1"}}  # 50 s for the prompt, 1.6 s a chunk
        async with rig(per_worker=slow, chunk_tokens=16) as it:
            task = asyncio.create_task(it.ask(prompt(1, 500), 4))
            await it.until(lambda: stage(it) == "prefilling")
            await asyncio.sleep(0.2)  # in the first chunk
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await it.until(lambda: not it.service.health()["unsettled"], 25.0)  # P has said that it stopped
            await asyncio.wait_for(it.ask([5], 2, "next"), 25.0)
            await it.baseline()

    asyncio.run(go())


def test_an_over_long_prompt_is_refused_before_any_work() -> None:  # sglang#30233
    async def go() -> None:
        async with rig() as it:
            messages = sent(it)
            with pytest.raises(RequestError, match="shorten") as caught:
                await it.ask(prompt(1, 512), 4)
            assert caught.value.code == "INVALID_ARGUMENT"
            assert messages == []
            got, end = await it.ask(prompt(1, 511), 4, "longest")
            assert len(got) == 1 and end.reason.value == "length"
            await it.baseline()

    asyncio.run(go())


def test_overload_is_refused_at_once_with_a_retry_delay() -> None:  # sglang#10110
    async def go() -> None:
        async with rig(environment=SLOW_STEP, admission=few()) as it:
            results = await asyncio.gather(*(it.ask(prompt(i), 10, f"r{i}") for i in range(30)), return_exceptions=True)
            refused = [result for result in results if isinstance(result, RequestError)]
            served = [result for result in results if not isinstance(result, Exception)]
            assert len(served) == 4 and len(refused) == 26
            assert {error.code for error in refused} == {"RESOURCE_EXHAUSTED"}
            assert all(error.retry_after_s > 0 for error in refused)
            assert await it.ask(prompt(1), 3, "later")
            await it.baseline()

    asyncio.run(go())


def test_high_priority_begins_before_those_that_waited() -> None:
    async def go() -> None:
        order: list[str] = []
        async with rig(environment=SLOW_STEP, admission=replace(few(max_active=1), max_queued=10)) as it:

            async def one(name: str, priority: Priority) -> None:
                await it.ask(prompt(len(order)), 3, name, priority=priority)
                order.append(name)

            low = [asyncio.create_task(one(f"low{i}", Priority.LOW)) for i in range(3)]
            await asyncio.sleep(0)
            high = asyncio.create_task(one("high", Priority.HIGH))
            await asyncio.gather(*low, high)
            assert order[:2] == ["low0", "high"]

    asyncio.run(go())


def test_cached_tokens_are_what_was_not_computed() -> None:  # router#193
    async def go() -> None:
        async with rig() as it:
            counts = [(await it.ask(PROMPT, 3, f"r{i}"))[1].cached_tokens for i in range(3)]
            assert counts == [0, 192, 192]
        async with rig(colocated=True) as it:
            counts = [(await it.ask(PROMPT, 3, f"r{i}"))[1].cached_tokens for i in range(2)]
            assert counts == [0, 192]

    asyncio.run(go())


def test_few_unseen_tokens_skip_the_transfer() -> None:
    async def go() -> None:
        async with rig(placement=replace(BASE.placement, skip_transfer_tokens=32)) as it:
            got, _ = await it.ask(PROMPT, 30, "first")
            messages = sent(it)
            turn = PROMPT + got + [5, 6, 7]
            assert (await it.ask(turn, 5, "second"))[0] == reference(turn, 5)
            assert any(isinstance(message, wire.Generate) for message in messages)
            assert not any(isinstance(message, wire.Prefill) for message in messages)
            await it.baseline()

    asyncio.run(go())


def test_draining_finishes_what_was_begun_and_refuses_the_rest() -> None:
    async def go() -> None:
        async with rig(environment=SLOW_STEP) as it:
            task = asyncio.create_task(it.ask(PROMPT, 20))
            await it.until(lambda: stage(it) == "decoding")
            drained = asyncio.create_task(it.service.drain(120.0))
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as caught:
                await it.ask([1], 1, "late")
            assert caught.value.code == "UNAVAILABLE" and not it.service.health()["serving"]
            assert (await task)[0] == reference(PROMPT, 20)
            assert await drained

    asyncio.run(go())


def test_a_drain_that_takes_too_long_ends_the_rest_by_name() -> None:
    async def go() -> None:
        async with rig(environment={"CHAIN_STEP_S": "0.2"}) as it:
            task = asyncio.create_task(it.ask(PROMPT, 100))
            await it.until(lambda: stage(it) == "decoding")
            assert not await it.service.drain(0.2)
            with pytest.raises(RequestError, match="server ends") as caught:
                await task
            assert caught.value.code == "UNAVAILABLE"

    asyncio.run(go())


def test_a_client_that_does_not_read_is_given_up() -> None:
    async def go() -> None:
        async with rig(max_unread_tokens=16) as it:
            stream = it.service.generate(GenerateRequest("r", tuple(PROMPT), SamplingParams(max_new_tokens=100)))
            await anext(stream)
            await it.until(lambda: not it.service.health()["active"])
            with pytest.raises(RequestError, match="unread") as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "RESOURCE_EXHAUSTED"
            await it.baseline()

    asyncio.run(go())


def test_an_id_can_be_used_again_at_once() -> None:
    async def go() -> None:
        async with rig(environment=SLOW_STEP) as it:
            for i in range(10):
                task = asyncio.create_task(it.ask(PROMPT, 200, "same"))
                await it.until(lambda: stage(it) in ("prefilling", "transferring", "decoding"))
                with pytest.raises(RequestError) as caught:
                    await it.ask([1], 1, "same")
                assert caught.value.code == "ALREADY_EXISTS"
                assert it.service.abort("same")
                with pytest.raises(RequestError) as caught:
                    await task
                assert caught.value.code == "CANCELLED"
                assert not it.service.abort("same")
                assert (await it.ask(prompt(i, 20), 3, "same"))[0] == reference(prompt(i, 20), 3)
            await it.baseline()

    asyncio.run(go())


def test_the_deadline_ends_a_request_wherever_it_is() -> None:
    async def go() -> None:
        async with rig(per_worker={"p0": {"CHAIN_TOKEN_S": "0.01"}}, deadline_s=0.5) as it:
            with pytest.raises(RequestError) as caught:
                await it.ask(PROMPT, 5)
            assert caught.value.code == "DEADLINE_EXCEEDED"
            await it.baseline()

    asyncio.run(go())


def test_another_image_or_tenant_finds_no_kv_on_any_worker() -> None:  # LMCache#4086, vllm#20261
    async def go() -> None:
        async with rig() as it:
            image = ImageSpan(48, 32, b"a" * 32)
            cached = []
            for number, (images, salt) in enumerate([
                ((image,), b""), ((image,), b""),
                ((replace(image, sha256=b"b" * 32),), b""), ((replace(image, start=64),), b""), ((), b""),
                ((image,), b"other tenant"), ((image,), b"other tenant"),
            ]):  # fmt: skip
                messages = sent(it)
                got, end = await it.ask(PROMPT, 3, f"r{number}", images=images, salt=salt)
                assert got == reference(PROMPT, 3)
                (first,) = (message.destination.first_block for message in messages if isinstance(message, wire.Prefill))
                cached.append((end.cached_tokens, first))  # on P, and blocks that D had
            # Without an image the text is that of the moved one up to token 64.
            assert cached == [(0, 0), (192, 12), (48, 3), (48, 3), (64, 4), (0, 0), (192, 12)]

    asyncio.run(go())
