"""API keys at both doors: who gets in, what they may use, and that every end of a request settles its budget."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
import grpc
from both_doors import Both, Keys, both_doors
from chat_service import ScriptedService, fail
from grpc_rig import ask, until
from tiny_chat_tokenizer import END, prompt_of, tiny_tokenizer

from vla_cli import api_keys_main, chat_main
from vla_cloud.config import CloudConfig, GatewayConfig, ServingConfig
from vla_cloud.core.generate import Priority
from vla_cloud.gateway.api_key_file import KeyFile
from vla_cloud.gateway.chat import ServedModel
from vla_cloud.gateway.doors import Doors
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import NS_PER_S, ManualClock, SystemClock

CODE = grpc.StatusCode
HELLO = [[*b"Hel"], [*b"lo", END]]
PROMPT = len(prompt_of(("user", "hi")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def serve(tokenizer, test, keys=None, script=HELLO, gate=False, names=("tiny",), clock=None, **gateway):
    """Run ``test(both, service)``."""

    async def go():
        service = ScriptedService(script if callable(script) else lambda _: script)
        service.gate = asyncio.Event() if gate else None
        models = [ServedModel(name, tokenizer, service) for name in names]
        async with both_doors(models, keys, clock, **gateway) as it:
            await test(it, service)
        assert not service.running and not it.chat._running

    asyncio.run(go())


async def grpc_error(call):
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call
    return info.value


def test_without_keys_nothing_is_asked_for(tokenizer):
    async def test(it: Both, service):
        assert (await it.ask()).json()["choices"][0]["message"]["content"] == "Hello"
        assert (await it.stub.Generate(ask())).text == "Hello"
        assert (await it.http.get("/metrics")).status_code == 200
        assert "models" in (await it.http.get("/health")).json()
        assert len((await it.control.Status(pb.StatusRequest())).models) == 1
        assert [request.salt for request in service.requests] == [b"", b""]

    serve(tokenizer, test)


def test_who_has_no_good_key_gets_nothing_but_health(tokenizer):
    keys = Keys()
    good = keys.add("a")
    keys.add("old", expires="2020-01-01T00:00:00Z")
    wrong = {
        "missing": {}, "unknown": {"authorization": f"Bearer {good[:-2]}AA"}, "scheme": {"authorization": f"Basic {good}"},
        "expired": keys.header("old"),
    }  # fmt: skip

    async def test(it: Both, service):
        for name, headers in wrong.items():
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/tiny"),
                                 ("GET", "/metrics"), ("GET", "/vla/status"), ("GET", "/nowhere"), ("DELETE", "/v1/models")):  # fmt: skip
                answer = await it.http.request(method, path, headers=headers)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
                challenge = answer.headers["www-authenticate"]
                assert challenge == ('Bearer realm="vla"' if name == "missing" else 'Bearer realm="vla", error="invalid_token"')
                assert ("expired" in error["message"]) == (name == "expired")
            health = await it.http.get("/health", headers=headers)
            assert health.status_code == 200 and health.json() == {"status": "serving"}
            metadata = tuple(headers.items())
            for call in (it.stub.Generate(ask(), metadata=metadata), it.stub.GenerateStream(ask(), metadata=metadata).read(),
                         it.stub.Abort(pb.AbortRequest(), metadata=metadata),
                         it.stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
                         it.control.Status(pb.StatusRequest(), metadata=metadata),
                         it.control.Drain(pb.DrainRequest(), metadata=metadata)):  # fmt: skip
                error = await grpc_error(call)
                assert error.code() is CODE.UNAUTHENTICATED and ("expired" in error.details()) == (name == "expired")
        twice = (("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}"))
        assert (await grpc_error(it.stub.Generate(ask(), metadata=twice))).code() is CODE.UNAUTHENTICATED
        assert not service.requests and not service.draining
        assert it.http_server.metrics._ends[("http", "refused", "UNAUTHENTICATED")] == 4

    serve(tokenizer, test, keys)


def test_a_key_opens_both_doors_and_control_is_for_operators(tokenizer):
    keys = Keys()
    keys.add("a")
    keys.add("op", operator=True)

    async def test(it: Both, service):
        assert (await it.ask(headers=keys.header("a"))).json()["choices"][0]["message"]["content"] == "Hello"
        assert (await it.stub.Generate(ask(), metadata=keys.metadata("a"))).text == "Hello"
        for path in ("/metrics", "/vla/status"):
            denied = await it.http.get(path, headers=keys.header("a"))
            assert (denied.status_code, denied.json()["error"]["code"]) == (403, "permission_denied")
        assert (await it.http.get("/vla/status", headers=keys.header("op"))).status_code == 200
        assert (await it.http.get("/")).status_code == 200  # the page brings no data
        page = (await it.http.get("/metrics", headers=keys.header("op"))).text
        assert 'vla_client_events_total{event="refused_not_operator"} 2.0' in page
        error = await grpc_error(it.control.Drain(pb.DrainRequest(), metadata=keys.metadata("a")))
        assert error.code() is CODE.PERMISSION_DENIED and not service.draining
        assert len((await it.control.Status(pb.StatusRequest(), metadata=keys.metadata("op"))).models) == 1
        assert "models" in (await it.http.get("/health", headers=keys.header("op"))).json()
        assert "models" not in (await it.http.get("/health", headers=keys.header("a"))).json()

    serve(tokenizer, test, keys)


def test_the_official_client_sees_an_authentication_error(tokenizer):
    openai = pytest.importorskip("openai")
    keys = Keys()
    token = keys.add("a", requests_per_minute=1)

    async def test(it: Both, service):
        url = f"http://{it.http_server.url}/v1"
        question = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        async with openai.AsyncOpenAI(base_url=url, api_key="vla_wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.chat.completions.create(**question)
            assert caught.value.code == "invalid_api_key"
        async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as client:
            assert (await client.chat.completions.create(**question)).choices[0].message.content == "Hello"
            with pytest.raises(openai.RateLimitError, match="requests_per_minute: 1") as limited:
                await client.chat.completions.create(**question)
            assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60

    serve(tokenizer, test, keys)


def test_a_key_knows_only_its_models(tokenizer):
    keys = Keys()
    keys.add("b", models=("two",))
    keys.add("none", models=("gone",))

    async def test(it: Both, service):
        listed = (await it.http.get("/v1/models", headers=keys.header("b"))).json()["data"]
        assert [model["id"] for model in listed] == ["two"]
        assert (await it.http.get("/v1/models/one", headers=keys.header("b"))).status_code == 404
        names = (await it.stub.ListModels(pb.ListModelsRequest(), metadata=keys.metadata("b"))).models
        assert [model.name for model in names] == ["two"]
        answer = await it.ask(headers=keys.header("b"))  # names none: the first that it may use
        assert answer.json()["model"] == "two"
        for name in ("one", "three"):  # the same answer for what there is and what there is not
            answer = await it.ask(headers=keys.header("b"), model=name)
            assert answer.status_code == 404 and answer.json()["error"]["message"] == f"no model '{name}' is served; there is two"
            error = await grpc_error(it.stub.Generate(ask(model=name), metadata=keys.metadata("b")))
            assert error.code() is CODE.NOT_FOUND
        assert (await it.ask(headers=keys.header("none"))).status_code == 404

    serve(tokenizer, test, keys, names=("one", "two"))


def test_caps_and_ceilings_reach_the_pools(tokenizer):
    keys = Keys()
    keys.add("low", priority="low", max_tokens=5)
    keys.add("high", priority="high")

    async def test(it: Both, service):
        for name, priority, max_tokens, expected in (
            ("low", pb.PRIORITY_HIGH, 900, (Priority.LOW, 5)), ("low", pb.PRIORITY_UNSPECIFIED, 3, (Priority.LOW, 3)),
            ("high", pb.PRIORITY_HIGH, 900, (Priority.HIGH, 900)), ("high", pb.PRIORITY_LOW, 9, (Priority.LOW, 9)),
            ("high", pb.PRIORITY_UNSPECIFIED, 9, (Priority.HIGH, 9)),
        ):  # fmt: skip
            request = ask(priority=priority, sampling={"max_tokens": max_tokens})
            await it.stub.Generate(request, metadata=keys.metadata(name))
            sent = service.requests[-1]
            assert (sent.priority, sent.sampling.max_new_tokens) == expected
        await it.ask(headers=keys.header("low"))
        assert (service.requests[-1].priority, service.requests[-1].sampling.max_new_tokens) == (Priority.LOW, 5)

    serve(tokenizer, test, keys)


def test_ids_and_salts_belong_to_the_tenant_and_no_client_sets_them(tokenizer):
    keys = Keys()
    for name, tenant in (("a", "one"), ("a2", "one"), ("b", "two")):
        keys.add(name, tenant=tenant)

    async def test(it: Both, service):
        calls = [it.stub.Generate(ask("hi", "mine"), metadata=keys.metadata(name)) for name in ("a", "b")]
        await until(lambda: len(service.running) == 2)  # the same id, two tenants
        assert service.running == {"mine@one", "mine@two"}
        for again in (it.stub.Generate(ask("hi", "mine"), metadata=keys.metadata("a2")),):
            assert (await grpc_error(again)).code() is CODE.ALREADY_EXISTS
        for header in ("idempotency-key", "x-request-id"):
            answer = await it.ask(headers={**keys.header("b"), header: "mine"})
            assert answer.status_code == 409 and answer.headers["x-request-id"] == "mine"
        third = asyncio.create_task(it.ask(headers={**keys.header("b"), "idempotency-key": "other", "x-request-id": "mine"}))
        await until(lambda: "other@two" in service.running)
        # Whoever guesses an id of another tenant ends nothing.
        keys.add("c")
        for name, was_running in (("c", False), ("b", True)):
            abort = it.stub.Abort(pb.AbortRequest(request_id="mine"), metadata=keys.metadata(name))
            assert (await abort).was_running is was_running
        assert service.aborted == {"mine@two"}
        service.gate.set()
        assert (await calls[0]).done.request_id == "mine" and (await third).json()["id"] == "other"
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await calls[1]
        await it.stub.Generate(ask(), metadata=keys.metadata("a2"))
        salts = {request.request_id: request.salt for request in service.requests}
        assert len(salts.pop("mine@one")) == 32 and len(set(salts.values())) == 2
        bad = await it.ask(headers={**keys.header("b"), "x-request-id": "a b"})
        assert bad.status_code == 400 and "request_id" in bad.json()["error"]["message"]
        for field in ("salt", "cache_salt", "tenant", "priority", "client"):
            answer = await it.ask(headers=keys.header("b"), **{field: "x"})
            assert answer.status_code == 400 and field in answer.json()["error"]["message"]

    serve(tokenizer, test, keys, gate=True)


def test_tokens_are_reserved_and_settled_with_what_was_used(tokenizer):
    keys, clock = Keys(), ManualClock()
    keys.add("a", tokens_per_minute=100, requests_per_minute=50)
    assert PROMPT < 40

    async def test(it: Both, service):
        limits = it.chat.clients.limits_of(keys.ring.find(keys.tokens["a"]))

        def left():
            return limits.level("tokens_per_minute", clock.monotonic_ns())

        call = it.stub.Generate(ask(sampling={"max_tokens": 60}), metadata=keys.metadata("a"))
        await until(lambda: service.running)
        assert left() == 100 - PROMPT - 60
        error = await grpc_error(it.stub.Generate(ask(sampling={"max_tokens": 60}), metadata=keys.metadata("a")))
        trailers = dict(error.trailing_metadata())
        assert error.code() is CODE.RESOURCE_EXHAUSTED and "tokens_per_minute: 100" in error.details()
        missing = 61 - left()  # told before the prompt is tokenised
        assert int(trailers["retry-after-ms"]) == round(missing * 600)
        answer = await it.ask(headers=keys.header("a"), max_tokens=101)
        assert answer.status_code == 400 and "lower max_tokens" in answer.json()["error"]["message"]
        service.gate.set()
        used = (await call).done.usage
        assert left() == 100 - used.prompt_tokens - used.completion_tokens == 100 - PROMPT - 6
        assert len(service.requests) == 1 and limits.active == 0
        clock.advance_ns(NS_PER_S * 60)
        assert left() == 100

    serve(tokenizer, test, keys, gate=True, clock=clock)


async def disconnect_http(it, keys, service):
    task = asyncio.create_task(it.ask(headers=keys.header("a"), max_tokens=60))
    await until(lambda: service.running)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def cancel_grpc(it, keys, service):
    call = it.stub.GenerateStream(ask(sampling={"max_tokens": 60}), metadata=keys.metadata("a"))
    assert (await call.read()).delta.text
    call.cancel()


async def abort(it, keys, service):
    name = f"r{len(service.requests)}"
    call = it.stub.Generate(ask("hi", name, sampling={"max_tokens": 60}), metadata=keys.metadata("a"))
    await until(lambda: service.running)
    await it.stub.Abort(pb.AbortRequest(request_id=name), metadata=keys.metadata("a"))
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call


async def wait(it, keys, service):
    await it.ask(headers=keys.header("a"), max_tokens=60)


async def stop_string(it, keys, service):
    answer = await it.ask(headers=keys.header("a"), max_tokens=60, stop="el")
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("client", "script", "gate", "used"), [
    (wait, HELLO, False, PROMPT + 6),
    (stop_string, HELLO, False, PROMPT + 3),
    (wait, [fail("RESOURCE_EXHAUSTED", "overloaded", 1.0)], False, 0),  # refused by the pools
    (wait, [fail("UNAVAILABLE")], False, 0),
    (wait, [ValueError("bug")], False, 0),
    (wait, [[65, 66], fail("UNAVAILABLE")], False, PROMPT + 2),  # what was given is paid for
    (disconnect_http, HELLO, True, PROMPT),
    (abort, HELLO, True, PROMPT),
    (cancel_grpc, [[65]] * 10_000, False, None),
])  # fmt: skip
def test_every_end_settles_the_budget_once(tokenizer, client, script, gate, used):
    keys, clock = Keys(), ManualClock()
    keys.add("a", tokens_per_minute=100_000, tokens_per_day=1_000_000, max_concurrent=1)

    async def test(it: Both, service):
        limits = it.chat.clients.limits_of(keys.ring.find(keys.tokens["a"]))
        for number in (1, 2):  # max_concurrent 1: the first has left nothing
            await client(it, keys, service)
            await until(lambda: not it.chat._running)
            assert limits.active == 0
            for limit, size in (("tokens_per_minute", 100_000), ("tokens_per_day", 1_000_000)):
                gone = size - limits.level(limit, 0)
                if used is None:
                    assert number * (PROMPT + 1) <= gone
                else:
                    assert gone == pytest.approx(number * used)

    serve(tokenizer, test, keys, script, gate, clock=clock)


def test_a_deadline_that_passes_settles_it_too(tokenizer):
    keys = Keys()
    keys.add("a", tokens_per_day=1000, max_concurrent=1)

    async def test(it: Both, service):  # by a real clock: the bucket refills a little
        limits = it.chat.clients.limits_of(keys.ring.find(keys.tokens["a"]))
        timeout_s = 0.1
        while not service.requests:  # on a busy machine the deadline may pass before the server hears of the call
            call = it.stub.Generate(ask(sampling={"max_tokens": 60}), metadata=keys.metadata("a"), timeout=timeout_s)
            assert (await grpc_error(call)).code() is CODE.DEADLINE_EXCEEDED
            await until(lambda: not it.chat._running)
            timeout_s *= 2.0
        assert limits.active == 0
        left = 1000 - PROMPT * len(service.requests)  # more than one if the server heard late of another
        assert left <= limits.level("tokens_per_day", 0) < left + 1

    serve(tokenizer, test, keys, gate=True)


def test_what_is_refused_before_any_work_costs_nothing(tokenizer):
    keys, clock = Keys(), ManualClock()
    keys.add("a", requests_per_minute=5, tokens_per_minute=5000)

    async def test(it: Both, service):
        limits = it.chat.clients.limits_of(keys.ring.find(keys.tokens["a"]))
        for fields in ({"max_tokens": 0}, {"model": "other"}, {"n": 2}):
            assert (await it.ask(headers=keys.header("a"), **fields)).status_code in (400, 404)
        assert limits.level("requests_per_minute", 0) == 5 and limits.level("tokens_per_minute", 0) == 5000
        for _ in range(5):
            assert (await it.ask(headers=keys.header("a"), max_tokens=1)).status_code == 200
        late = await it.ask(headers=keys.header("a"))
        assert late.status_code == 429 and late.headers["retry-after-ms"] == "12000" and len(service.requests) == 5
        assert it.chat.clients.counts()["limited_requests_per_minute"] == 1
        clock.advance_ns(12 * NS_PER_S)
        assert (await it.ask(headers=keys.header("a"))).status_code == 200

    serve(tokenizer, test, keys, clock=clock)


def test_one_client_at_its_limit_leaves_the_others_alone(tokenizer):
    keys = Keys()
    keys.add("greedy", max_concurrent=3)
    keys.add("modest")

    async def test(it: Both, service):
        calls = [it.stub.Generate(ask(), metadata=keys.metadata("greedy")) for _ in range(3)]
        await until(lambda: len(service.running) == 3)
        error = await grpc_error(it.stub.Generate(ask(), metadata=keys.metadata("greedy")))
        assert error.code() is CODE.RESOURCE_EXHAUSTED and "max_concurrent: 3" in error.details()
        other = it.stub.Generate(ask(), metadata=keys.metadata("modest"))
        await until(lambda: len(service.running) == 4)
        service.gate.set()
        assert {(await call).text for call in (*calls, other)} == {"Hello"}

    serve(tokenizer, test, keys, gate=True)


def test_a_revoked_key_ends_no_answer_but_begins_none(tokenizer):
    keys = Keys()
    keys.add("a")

    async def test(it: Both, service):
        call = it.stub.Generate(ask(), metadata=keys.metadata("a"))
        await until(lambda: service.running)
        keys.ring.replace(KeyFile())
        assert (await grpc_error(it.stub.Generate(ask(), metadata=keys.metadata("a")))).code() is CODE.UNAUTHENTICATED
        service.gate.set()
        assert (await call).text == "Hello"

    serve(tokenizer, test, keys, gate=True)


def test_the_command_makes_a_key_that_opens_the_configured_doors_until_it_is_revoked(tokenizer, tmp_path, capsys, monkeypatch):
    path = str(tmp_path / "keys.yaml")
    assert api_keys_main.main(["add", "me", "--file", path]) == 0
    token = capsys.readouterr().out.strip()
    gateway = GatewayConfig(http_listen="127.0.0.1:0", api_keys=path)
    config = CloudConfig(serving=ServingConfig(model="some/tiny"), gateway=gateway)

    async def go():
        doors = Doors(config, tokenizer, ScriptedService(lambda _: HELLO), SystemClock())
        await doors.start()
        url = f"http://{doors._doors[0].url}"

        async def chat(key):
            if key:
                monkeypatch.setenv("VLA_API_KEY", key)
            else:
                monkeypatch.delenv("VLA_API_KEY", raising=False)
            code = await asyncio.get_running_loop().run_in_executor(None, chat_main.main, ["--url", url, "hi"])
            return code, capsys.readouterr()

        code, told = await chat(token)
        assert (code, told.out) == (0, "Hello\n")
        code, told = await chat("")
        assert code == 1 and "an API key is needed" in told.err
        assert api_keys_main.main(["revoke", "me", "--file", path]) == 0
        doors.chat.clients._watch.look()  # as its thread does every few seconds
        code, told = await chat(token)
        assert code == 1 and "not known" in told.err and token not in told.err
        await doors.stop()
        assert not any(thread.name == "api-keys" for thread in threading.enumerate())

    asyncio.run(go())
    with pytest.raises(GatewayError, match="cannot read"):
        Doors(replace(config, gateway=replace(gateway, api_keys="/nowhere/keys.yaml")), tokenizer, None, SystemClock())
    with pytest.raises(ValueError, match="salt_secret"):
        GatewayConfig(salt_secret="x")
