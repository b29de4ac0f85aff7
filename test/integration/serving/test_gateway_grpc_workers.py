"""gRPC clients of a gateway with real worker processes: answers, and blocks that come back however a call ends."""

import asyncio
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("tokenizers")
import grpc
from serving_rig import BASE, RULES, few, reference
from serving_rig import rig as workers

sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
from grpc_rig import ask, until
from grpc_rig import rig as gateway
from tiny_chat_tokenizer import END, VOCAB, prompt_of, tiny_tokenizer

from vla_cloud.core.admission import AdmissionConfig
from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_common.clock import NS_PER_S, SystemClock

CODE = grpc.StatusCode
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """No token of the model ends an answer: each has the length that was asked for."""
    folder = tmp_path_factory.mktemp("endless")
    tiny_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCAB}))
    return ChatTokenizer(folder)


@contextlib.asynccontextmanager
async def both(tokenizer, environment=None, rules=None, **changes):
    """Workers, and a gRPC gateway on them."""
    async with workers(environment=environment, **changes) as pools:
        async with gateway(tokenizer, pools.service, **(rules or {})) as it:
            yield it, pools


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call
    return info.value


def expected(text, count):
    """Tokens of the answer without the end token, and whether it ended by it."""
    tokens = reference(prompt_of(("user", text)), count, stop=(END,))
    return (tokens[:-1], True) if tokens[-1] == END else (tokens, False)


def test_answers_are_those_of_the_model_through_separate_pools(tokenizer):
    async def go():
        async with both(tokenizer) as (it, pools):
            for text in ("hi", "what is the sky made of?"):
                tokens, has_ended = expected(text, 40)
                answer = await it.stub.Generate(ask(text, sampling={"max_tokens": 40, **GREEDY}))
                assert list(answer.tokens) == tokens
                stream = tokenizer.stream(prompt_of(("user", text)))
                assert answer.text == "".join([*map(stream.push, tokens), stream.finish()])
                reason = pb.FINISH_REASON_STOP if has_ended else pb.FINISH_REASON_LENGTH
                assert answer.done.finish_reason == reason
                chunks = [chunk async for chunk in it.stub.GenerateStream(ask(text, sampling={"max_tokens": 40, **GREEDY}))]
                assert [token for chunk in chunks for token in chunk.delta.tokens] == tokens
                assert "".join(chunk.delta.text for chunk in chunks) == answer.text
                assert chunks[-1].done.usage.cached_tokens > 0
            (status,) = (await it.control.Status(pb.StatusRequest())).models
            assert status.is_serving and {worker.role for worker in status.workers} == {"prefill", "decode"}
            assert all(worker.total_blocks == 128 for worker in status.workers)
            await pools.baseline()

    asyncio.run(go())


def test_the_end_token_ends_an_answer_even_if_the_worker_knows_none(tokenizer):
    """The chain worker names no end tokens: the tokenizer's reach it with the request."""

    async def go():
        for number in range(400):
            text = f"question {number}"
            tokens, has_ended = expected(text, 24)
            if has_ended and tokens:
                break
        else:
            raise AssertionError("no such prompt")
        async with both(tokenizer) as (it, pools):
            answer = await it.stub.Generate(ask(text, sampling={"max_tokens": 24, **GREEDY}))
            assert list(answer.tokens) == tokens and answer.done.finish_reason == pb.FINISH_REASON_STOP
            assert answer.done.usage.completion_tokens == len(tokens) + 1 and "<|im_end|>" not in answer.text
            await pools.baseline()

    asyncio.run(go())


def test_a_stop_string_ends_the_request_in_the_workers(tokenizer):
    async def go():
        async with both(tokenizer, {"CHAIN_STEP_S": "0.05"}) as (it, pools):
            tokens, _ = expected("hi", 40)
            text = tokenizer.decode(tokens[:6])
            stop = text[-3:]
            answer = await it.stub.Generate(ask("hi", sampling={"max_tokens": 400, "stop": [stop], **GREEDY}))
            assert answer.done.finish_reason == pb.FINISH_REASON_STOP and answer.done.stop_string == stop
            assert stop not in answer.text and answer.done.usage.completion_tokens < 60
            await pools.baseline()

    asyncio.run(go())


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_cancelled_call_frees_its_blocks(endless, colocated, stage):
    async def go():
        environment = {"CHAIN_TOKEN_S": "0.02"} if stage == "prefill" else {"CHAIN_STEP_S": "0.05"}
        async with both(endless, environment, colocated=colocated, chunk_tokens=32) as (it, pools):
            call = it.stub.GenerateStream(ask("x" * 300, sampling={"max_tokens": 150, **GREEDY}))
            if stage == "decode":
                await call.read()
            else:
                await until(lambda: any(info.load and info.load.free_blocks < 128 for info in pools.supervisor.infos()))
            assert pools.service.health()["active"] == 1
            call.cancel()
            await until(lambda: pools.service.health()["active"] == 0)
            await pools.baseline()

    asyncio.run(go())


def test_a_deadline_ends_the_work(endless):
    async def go():
        async with both(endless, {"CHAIN_STEP_S": "0.02"}) as (it, pools):
            error = await error_of(it.stub.Generate(ask(sampling={"max_tokens": 400, **GREEDY}), timeout=0.5))
            assert error.code() is CODE.DEADLINE_EXCEEDED
            await until(lambda: pools.service.health()["active"] == 0)
            await pools.baseline()

    asyncio.run(go())


def teach(predictor, token_s):
    """What it would learn of a model that takes so long for each token of a prompt; it does not forget it for 10 min."""
    now_ns = SystemClock().monotonic_ns()
    for number in range(12):
        tokens = 30 + 100 * (number % 4)
        predictor.begin(f"taught {number}", tokens, now_ns)
        predictor.first_token(f"taught {number}", now_ns + round(tokens * token_s * NS_PER_S))
        predictor.end(f"taught {number}", 0, now_ns + 600 * NS_PER_S)


def test_a_deadline_that_cannot_be_met_is_refused_before_any_work(tokenizer):
    async def go():
        async with both(tokenizer, colocated=True, chunk_tokens=512) as (it, pools):
            short = {"max_tokens": 1, **GREEDY}
            (predictor,) = it.chat._predictors.values()
            teach(predictor, 0.1)
            error = await error_of(it.stub.Generate(ask("z" * 400, sampling=short), timeout=20.0))
            assert error.code() is CODE.DEADLINE_EXCEEDED and "expected after" in error.details()
            assert pools.service.health()["served"] == 0 and pools.service.health()["failed"] == 0
            for number in range(60):  # of real answers it learns that the model is quick
                await it.stub.Generate(ask(f"{number}" + "x" * 100 * (number % 4), sampling=short))
            await it.stub.Generate(ask("z" * 400, sampling=short), timeout=20.0)
            await pools.baseline()

    asyncio.run(go())


def test_saturation_is_refused_at_once_with_a_delay(endless):
    async def go():
        environment = {"CHAIN_STEP_S": "0.02"}
        async with both(endless, environment, admission=few(share={})) as (it, pools):
            calls = [it.stub.Generate(ask(f"q{i}", sampling={"max_tokens": 150, **GREEDY})) for i in range(10)]
            await until(lambda: sum(call.done() for call in calls) == 6)
            health = pools.service.health()
            assert (health["active"], health["queued"], health["served"]) == (2, 2, 0)
            errors = [await error_of(call) for call in calls if call.done()]
            assert all(error.code() is CODE.RESOURCE_EXHAUSTED for error in errors)
            assert all(int(dict(error.trailing_metadata())["retry-after-ms"]) >= 100 for error in errors)
            assert {worker.state for worker in (await it.control.Status(pb.StatusRequest())).models[0].workers} == {"ready"}
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(not isinstance(end, grpc.aio.AioRpcError) for end in ends) == 4
            await pools.baseline()

    asyncio.run(go())


def test_an_over_long_prompt_is_an_invalid_argument_before_any_work(tokenizer):
    async def go():
        async with both(tokenizer) as (it, pools):
            error = await error_of(it.stub.Generate(ask("x" * 600)))
            assert error.code() is CODE.INVALID_ARGUMENT and "shorten" in error.details()
            assert pools.service.health()["refused"] == 1

    asyncio.run(go())


def test_without_capacity_calls_end_with_unavailable(endless):
    async def go():
        away = replace(RULES, backoff_min_s=600.0, backoff_max_s=600.0)
        retry = replace(BASE.retry, capacity_wait_s=0.3)
        async with both(endless, {"CHAIN_STEP_S": "0.05"}, colocated=True, supervisor=away, retry=retry) as (it, pools):
            call = it.stub.GenerateStream(ask(sampling={"max_tokens": 300, **GREEDY}))
            await call.read()
            pools.kill("w0")
            with pytest.raises(grpc.aio.AioRpcError) as info:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert info.value.code() is CODE.UNAVAILABLE
            assert (await error_of(it.stub.Generate(ask()))).code() is CODE.UNAVAILABLE
            assert not (await it.stub.ListModels(pb.ListModelsRequest())).models[0].is_serving

    asyncio.run(go())


def test_a_killed_worker_is_not_noticed_in_the_answer(tokenizer):
    async def go():
        tokens, _ = expected("hi", 100)
        async with both(tokenizer, {"CHAIN_STEP_S": "0.05"}, decode_workers=2) as (it, pools):
            call = it.stub.GenerateStream(ask("hi", sampling={"max_tokens": 100, **GREEDY}))
            got, killed = [], False
            async for chunk in call:
                got += chunk.delta.tokens
                if not killed:
                    killed = True
                    (live,) = pools.service._by_id.values()
                    pools.kill(next(i.name for i in pools.supervisor.infos() if i.worker_id == live.life.decode))
            assert got == tokens

    asyncio.run(go())


def test_drain_finishes_what_is_under_way(tokenizer):
    async def go():
        async with both(tokenizer, {"CHAIN_STEP_S": "0.05"}) as (it, pools):
            call = it.stub.GenerateStream(ask("hi", sampling={"max_tokens": 40, **GREEDY}))
            first = await call.read()
            drain = it.control.Drain(pb.DrainRequest(timeout_s=60.0))
            await until(lambda: pools.service.health()["draining"])
            assert (await error_of(it.stub.Generate(ask()))).code() is CODE.UNAVAILABLE
            got = list(first.delta.tokens)
            while (chunk := await call.read()) is not grpc.aio.EOF:
                got += chunk.delta.tokens
            assert got == expected("hi", 40)[0] and (await drain).all_ended

    asyncio.run(go())


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_storm_of_disconnects_frees_all_blocks(endless, count):
    """Answers of 8 s, so that each client that has read something leaves in the middle."""

    async def go():
        many = AdmissionConfig(max_active=64, max_queued=2000, share={})
        room, slow = {"CHAIN_MAX_MODEL_LEN": "1024"}, {"d0": {"CHAIN_STEP_S": "0.02"}}
        async with both(endless, room, per_worker=slow, admission=many, blocks=1024) as (it, pools):

            async def one(number):
                async with it.connect() as channel:
                    stub = type(it.stub)(channel)
                    text = "x" * (1 + 37 * (number % 9)) + str(number)
                    call = stub.GenerateStream(ask(text, sampling={"max_tokens": 400, **GREEDY}))
                    if number % 3 == 0:
                        await call.read()
                    elif number % 3 == 1:
                        await asyncio.sleep(0.01 * (number % 5))
                    if number % 2:
                        call.cancel()

            for start in range(0, count, 25):
                await asyncio.gather(*(one(number) for number in range(start, start + 25)))
            await until(lambda: not pools.service.health()["active"] and not pools.service.health()["queued"])
            await pools.baseline()
            assert pools.service.health()["failed"] >= count // 3  # so many were ended in the middle
            tokens, _ = expected("hi", 20)
            assert list((await it.stub.Generate(ask(sampling={"max_tokens": 20, **GREEDY}))).tokens) == tokens
            assert not it.chat._running

    asyncio.run(go())
