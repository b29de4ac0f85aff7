"""Tenants over real workers: no cached prompt is shared between two, and each gets its turn."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
from serving_rig import few
from serving_rig import rig as workers

sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
import grpc
from both_doors import Keys, both_doors
from grpc_rig import ask, until
from tiny_chat_tokenizer import prompt_of, tiny_tokenizer

from vla_cloud.gateway.chat import ServedModel

TEXT = "a question that is long enough for several blocks of sixteen tokens, asked again and again"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def sampling() -> dict[str, object]:
    return {"max_tokens": 3, "temperature": 0.0}


@pytest.mark.parametrize("colocated", [False, True])
def test_the_same_prompt_of_another_tenant_finds_nothing_cached(tokenizer, colocated):
    keys = Keys()
    for name, tenant in (("a", "one"), ("a2", "one"), ("b", "two")):
        keys.add(name, tenant=tenant)

    async def go():
        async with (
            workers(colocated=colocated) as pools,
            both_doors([ServedModel("tiny", tokenizer, pools.service)], keys) as it,
        ):
            found = []
            for name in ("a", "a2", "b", "b"):
                answer = await it.stub.Generate(ask(TEXT, sampling=sampling()), metadata=keys.metadata(name))
                found.append((answer.done.usage.cached_tokens, answer.text))
            over_http = await it.ask(TEXT, keys.header("a"), max_tokens=3, temperature=0)
            whole = len(prompt_of(("user", TEXT))) // 16 * 16
            assert [cached for cached, _ in found] == [0, whole, 0, whole] and len({text for _, text in found}) == 1
            assert over_http.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == whole
            await pools.baseline()

    asyncio.run(go())


def test_a_tenant_that_floods_keeps_nobody_out(tokenizer):
    keys = Keys()
    keys.add("flood")
    keys.add("calm")

    async def go():
        admission = few(max_active=1, max_queued=8, share={}, tenant_share=0.5)
        async with (
            workers(environment={"CHAIN_STEP_S": "0.05"}, admission=admission) as pools,
            both_doors([ServedModel("tiny", tokenizer, pools.service)], keys) as it,
        ):
            order: list[str] = []

            async def one(name: str, number: int, count: int = 3) -> None:
                request = ask(f"{name} {number}", sampling={"max_tokens": count, "temperature": 0.0})
                await it.stub.Generate(request, metadata=keys.metadata(name))
                order.append(name)

            plug = asyncio.create_task(one("flood", 0, 400))  # all others wait until it is taken away
            await until(lambda: pools.service.health()["active"] == 1)
            flood = [asyncio.create_task(one("flood", number)) for number in range(1, 12)]
            await until(lambda: sum(task.done() for task in flood) == 7 and pools.service.health()["queued"] == 4)
            calm = [asyncio.create_task(one("calm", number)) for number in range(2)]
            await until(lambda: pools.service.health()["queued"] == 6)
            assert not plug.done() and not order
            plug.cancel()
            ends = await asyncio.gather(*flood, *calm, return_exceptions=True)
            refused = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
            assert len(refused) == 7 and all("of this tenant wait" in end.details() for end in refused)
            assert order.count("calm") == 2 and order.count("flood") == 4
            last_of_flood = len(order) - 1 - order[::-1].index("flood")
            assert order.index("calm") < last_of_flood  # not behind all that the other has sent
            await pools.baseline()

    asyncio.run(go())
