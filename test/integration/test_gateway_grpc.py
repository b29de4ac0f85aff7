"""The gRPC doors on a scripted service: what clients see on the wire."""

import asyncio
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.importorskip("grpc")
pytest.importorskip("tokenizers")
import grpc
from chat_service import ScriptedService, fail
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_rig import CONFIG, ask, rig, until
from grpc_status import rpc_status
from tiny_chat_tokenizer import END, prompt_of, tiny_tokenizer

from vla_cloud.config import GatewayConfig
from vla_cloud.core.generate import DuplicateRequest, Priority
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.grpc_server import GrpcServer
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc
from vla_cloud.gateway.settings import GatewayError
from vla_cloud.pools.events import TokenEvent
from vla_common.clock import NS_PER_S, SystemClock

CODE = grpc.StatusCode
HELLO = [[*b"Hel"], [*b"lo", END]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def serve(tokenizer, test, script=HELLO, gate=False, limits=None, **rules):
    """Run ``test(rig, service)`` against a server; ``script`` may be a function of the request."""

    async def go():
        service = ScriptedService(script if callable(script) else lambda _: script)
        service.gate = asyncio.Event() if gate else None
        async with rig(tokenizer, service, limits, **rules) as it:
            await test(it, service)
        assert not service.running and not it.chat._running
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=5.0) if others else None

    asyncio.run(go())


async def code_of(call):
    """How a call ended."""
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call
    return info.value


async def read_all(call):
    """All, or what is left. With read(): a call that was read so cannot be iterated over."""
    chunks = []
    while (chunk := await call.read()) is not grpc.aio.EOF:
        chunks.append(chunk)
    return chunks


def test_unary_and_stream_give_the_same_answer(tokenizer):
    async def test(it, service):
        call = it.stub.Generate(ask("hi", "mine", sampling={"max_tokens": 9, "temperature": 0.0, "seed": 0}))
        answer = await call
        assert answer.text == "Hello" and list(answer.tokens) == [*b"Hello"]
        assert answer.done.finish_reason == pb.FINISH_REASON_STOP and answer.done.request_id == "mine"
        assert (answer.done.usage.prompt_tokens, answer.done.usage.completion_tokens) == (len(prompt), 6)
        assert answer.done.usage.HasField("cached_tokens") and answer.done.usage.cached_tokens == 0
        assert dict(await call.initial_metadata())["request-id"] == "mine"
        chunks = await read_all(it.stub.GenerateStream(ask("hi", "mine")))
        assert [chunk.delta.text for chunk in chunks[:-1]] == ["Hel", "lo"]
        assert chunks[-1].done == answer.done
        first, second = service.requests
        assert list(first.tokens) == list(second.tokens) == prompt
        assert (first.sampling.temperature, first.sampling.seed, first.sampling.max_new_tokens) == (0.0, 0, 9)
        assert (second.sampling.temperature, second.sampling.top_p, second.sampling.seed) == (1.0, 1.0, None)

    prompt = prompt_of(("user", "hi"))
    serve(tokenizer, test)


def test_the_server_names_a_request_that_has_no_id(tokenizer):
    async def test(it, service):
        call = it.stub.GenerateStream(ask())
        chunks = await read_all(call)
        name = dict(await call.initial_metadata())["request-id"]
        assert name == chunks[-1].done.request_id == service.requests[0].request_id and len(name) == 32

    serve(tokenizer, test)


def test_a_conversation_has_the_name_that_its_client_gives_it(tokenizer):
    async def test(it, service):
        await it.stub.Generate(ask(session="our talk"))
        await it.stub.Generate(ask())
        assert [request.session for request in service.requests] == ["our talk", ""]

    serve(tokenizer, test)


def test_log_probabilities_and_stop_strings(tokenizer):
    async def test(it, service):
        sampling = {"logprobs": True, "top_logprobs": 1, "stop": ["C"]}
        answer = await it.stub.Generate(ask(sampling=sampling, priority=pb.PRIORITY_LOW))
        assert answer.text == "AB" and answer.done.stop_string == "C"
        assert [(one.token, one.text, one.logprob) for one in answer.logprobs] == [(65, "A", -0.5), (66, "B", -1.0)]
        assert [(top.token, top.text) for top in answer.logprobs[0].top] == [(70, "F")]
        assert not answer.done.usage.HasField("cached_tokens")
        assert service.requests[0].priority is Priority.LOW

    event = TokenEvent("", (65, 66, 67, 68), (-0.5, -1.0, -2.0, -3.0), (((70, -0.1),), ((71, -0.2),), (), ()))
    serve(tokenizer, test, [event])


def test_wrong_requests_are_invalid_arguments(tokenizer):
    async def test(it, service):
        image = pb.Message(role="user", parts=[pb.Part(image=pb.Image(data=b"JPEG"))])
        empty = pb.Message(role="user", parts=[pb.Part()])
        for request, told in (
            (pb.GenerateRequest(messages=[image]), "no vision tower"),
            (pb.GenerateRequest(messages=[empty]), "neither text nor image"),
            (pb.GenerateRequest(), "messages"),
            (ask(sampling={"max_tokens": 0}), "max_tokens"),
            (ask(priority=77), "priority 77"),
            (ask(request_id="a\nb"), "request_id"),
        ):
            for call in (it.stub.Generate(request), read_all(it.stub.GenerateStream(request))):
                error = await code_of(call)
                assert error.code() is CODE.INVALID_ARGUMENT and told in error.details()
        error = await code_of(it.stub.Generate(ask(model="x" * 100_000)))
        assert error.code() is CODE.NOT_FOUND and len(error.details()) < 1000
        raw = it.channel.unary_unary("/vla.v1.Chat/Generate")
        error = await code_of(raw(b"\xff\xff\xff not a message"))
        assert error.code() is CODE.INVALID_ARGUMENT and "GenerateRequest" in error.details()
        assert (await code_of(it.channel.unary_unary("/vla.v1.Chat/Other")(b""))).code() is CODE.UNIMPLEMENTED
        assert not service.requests

    serve(tokenizer, test)


def test_a_message_beyond_the_limit_is_refused(tokenizer):
    async def test(it, service):
        error = await code_of(it.stub.Generate(ask("x" * 5000)))
        assert error.code() is CODE.RESOURCE_EXHAUSTED and not service.requests
        await it.stub.Generate(ask("x" * 3000))

    serve(tokenizer, test, max_message_bytes=4096)


def test_calls_beyond_the_limit_are_refused_at_once(tokenizer):
    async def test(it, service):
        calls = [it.stub.Generate(ask()) for _ in range(2)]
        await until(lambda: len(service.running) == 2)
        error = await code_of(it.stub.Generate(ask()))
        assert error.code() is CODE.RESOURCE_EXHAUSTED and len(service.requests) == 2
        service.gate.set()
        assert [(await call).text for call in calls] == ["Hello", "Hello"]

    serve(tokenizer, test, gate=True, max_rpcs=2)


def test_saturation_tells_when_to_come_back(tokenizer):
    async def test(it, service):
        for call in (it.stub.Generate(ask()), read_all(it.stub.GenerateStream(ask()))):
            error = await code_of(call)
            assert error.code() is CODE.RESOURCE_EXHAUSTED and "overloaded" in error.details()
            trailers = dict(error.trailing_metadata())
            assert trailers["retry-after-ms"] == trailers["grpc-retry-pushback-ms"] == "2500"
            assert not dict(error.initial_metadata())  # else no client would retry by itself
            (detail,) = rpc_status.from_call(error).details
            info = error_details_pb2.RetryInfo()
            assert detail.Unpack(info) and info.retry_delay.ToMilliseconds() == 2500

    serve(tokenizer, test, [fail("RESOURCE_EXHAUSTED", "overloaded", 2.5)])


def test_a_client_with_a_retry_policy_comes_back_by_itself_after_the_delay(tokenizer):
    attempts = 0

    def script(_):
        nonlocal attempts
        attempts += 1
        return HELLO if attempts == 3 else [fail("RESOURCE_EXHAUSTED", "overloaded", 0.02)]

    async def test(it, service):
        policy = (
            '{"methodConfig": [{"name": [{"service": "vla.v1.Chat"}], "retryPolicy": {"maxAttempts": 4, '
            '"initialBackoff": "60s", "maxBackoff": "60s", "backoffMultiplier": 1, '
            '"retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]}}]}'
        )
        async with it.connect(("grpc.service_config", policy)) as channel:
            stub = type(it.stub)(channel)
            assert (await stub.Generate(ask("hi", "mine"), timeout=20.0)).text == "Hello" and attempts == 3

    serve(tokenizer, test, script)


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "ALREADY_EXISTS"])
def test_failures_of_the_pools_keep_their_code_and_what_was_streamed_stays(tokenizer, code):
    async def test(it, service):
        call = it.stub.GenerateStream(ask())
        assert (await call.read()).delta.text == "A"
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call.read()
        assert await call.code() is CODE[code]
        assert "retry-after-ms" not in dict(await call.trailing_metadata() or ())

    serve(tokenizer, test, [[65], DuplicateRequest("no") if code == "ALREADY_EXISTS" else fail(code)])


def test_a_request_id_that_is_being_served_already_exists(tokenizer):
    async def test(it, service):
        first = it.stub.Generate(ask("hi", "mine"))
        await until(lambda: service.running)
        assert (await code_of(it.stub.Generate(ask("hi", "mine")))).code() is CODE.ALREADY_EXISTS
        service.gate.set()
        assert (await first).text == "Hello"
        assert (await it.stub.Generate(ask("hi", "mine"))).text == "Hello"

    serve(tokenizer, test, gate=True)


def test_abort_ends_a_request_and_may_be_repeated(tokenizer):
    async def test(it, service):
        call = it.stub.Generate(ask("hi", "mine"))
        await until(lambda: service.running)
        assert (await it.stub.Abort(pb.AbortRequest(request_id="mine"))).was_running
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call
        assert await call.code() is CODE.CANCELLED
        assert not (await it.stub.Abort(pb.AbortRequest(request_id="mine"))).was_running

    serve(tokenizer, test, gate=True)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_cancelled_call_closes_the_answer(tokenizer, method):
    async def test(it, service):
        call = getattr(it.stub, method)(ask("hi", "mine"))
        await until(lambda: service.running)
        call.cancel()
        await until(lambda: service.closed == ["mine"])

    serve(tokenizer, test, gate=True)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_the_deadline_reaches_the_pools_and_ends_the_call(tokenizer, method):
    clock, arrived_ns = SystemClock(), []

    def script(_):
        arrived_ns.append(clock.monotonic_ns())
        return HELLO

    async def test(it, service):
        before_ns, timeout_s = clock.monotonic_ns(), 0.15
        while not service.requests:  # on a busy machine the deadline may pass before the server hears of the call
            timeout_s *= 2.0
            call = getattr(it.stub, method)(ask(), timeout=timeout_s)
            error = await code_of(call if method == "Generate" else read_all(call))
            assert error.code() is CODE.DEADLINE_EXCEEDED
        await until(lambda: service.closed)
        # gRPC rounds what is left up, to three digits.
        assert before_ns < service.requests[0].deadline_ns <= arrived_ns[0] + 1.02 * timeout_s * NS_PER_S
        call = it.stub.Generate(ask())
        await until(lambda: any(request.deadline_ns is None for request in service.requests))
        call.cancel()
        await until(lambda: not service.running)

    serve(tokenizer, test, script, gate=True)


def test_a_storm_of_disconnects_leaves_nothing(tokenizer):
    async def test(it, service):
        async def one(number):
            async with it.connect() as channel:
                stub = type(it.stub)(channel)
                call = stub.GenerateStream(ask("hi", f"r{number}"))
                if number % 3:
                    assert (await call.read()).delta.text == "A"
                if number % 2:
                    call.cancel()
                # else the connection goes away under the call

        for start in range(0, 100, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))
        await until(lambda: not service.running)
        assert len(service.closed) >= 66
        assert (await it.stub.Generate(ask("hi", "last", sampling={"stop": ["AAAA"]}))).text == ""

    serve(tokenizer, test, lambda _: [[65]] * 10_000)


def test_a_reader_that_reads_nothing_is_given_up_and_others_go_on(tokenizer):
    async def test(it, service):
        small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
        async with it.connect(*small) as channel:
            slow = type(it.stub)(channel).GenerateStream(ask("hi", "slow"))
            assert (await slow.read()).delta.text
            await until(lambda: len(service.closed) == 1)
            assert (await it.stub.Generate(ask("hi", "other", sampling={"stop": ["AA"]}))).text == ""
            # When it reads again, it learns why.
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await read_all(slow)
            assert info.value.code() is CODE.RESOURCE_EXHAUSTED and "read faster" in info.value.details()

    serve(tokenizer, test, lambda _: [[65] * 2000] * 5000, slow_reader_s=0.2)


def test_a_slow_reader_gets_all_when_it_goes_on_in_time(tokenizer):
    async def test(it, service):
        async with it.connect(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)) as channel:
            call = type(it.stub)(channel).GenerateStream(ask("hi", "slow"))
            await call.read()
            await asyncio.sleep(0.3)
            assert service.running  # it waits for the reader
            assert sum(len(chunk.delta.tokens) for chunk in await read_all(call)) == 2000 * 199

    serve(tokenizer, test, lambda _: [[65] * 2000] * 200, slow_reader_s=60.0)


def test_models_and_status(tokenizer):
    async def test(it, service):
        (model,) = (await it.stub.ListModels(pb.ListModelsRequest())).models
        assert model.name == "tiny" and model.is_serving
        service.serving = False
        assert not (await it.stub.ListModels(pb.ListModelsRequest())).models[0].is_serving
        (status,) = (await it.control.Status(pb.StatusRequest())).models
        assert status.name == "tiny" and not status.is_serving and dict(status.counters) == {"served": 0}
        # Control is not to be had where clients come in.
        assert (await code_of(type(it.control)(it.channel).Status(pb.StatusRequest()))).code() is CODE.UNIMPLEMENTED
        error = await code_of(it.control.Drain(pb.DrainRequest(timeout_s=-1)))
        assert error.code() is CODE.INVALID_ARGUMENT

    serve(tokenizer, test)


async def health(channel, service=""):
    found = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(found.status)


def test_health_follows_capacity(tokenizer):
    async def test(it, service):
        watch = health_pb2_grpc.HealthStub(it.channel).Watch(health_pb2.HealthCheckRequest(service="vla.v1.Chat"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await health(it.channel) == await health(it.channel, "vla.v1.Chat") == "SERVING"
        service.serving = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health(it.channel) == "NOT_SERVING" and await health(it.control_channel, "vla.v1.Control") == "SERVING"
        service.serving = True
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await code_of(health(it.channel, "other"))).code() is CODE.NOT_FOUND
        watch.cancel()

    serve(tokenizer, test)


def test_a_drained_server_refuses_new_requests_and_finishes_the_old(tokenizer):
    async def test(it, service):
        old = it.stub.Generate(ask("hi", "old"))
        await until(lambda: service.running)
        drain = it.control.Drain(pb.DrainRequest(timeout_s=10.0))
        await until(lambda: service.draining)
        assert await health(it.channel) == await health(it.channel, "vla.v1.Chat") == "NOT_SERVING"
        assert (await code_of(it.stub.Generate(ask()))).code() is CODE.UNAVAILABLE
        service.gate.set()
        assert (await drain).all_ended and (await old).text == "Hello"
        assert (await it.control.Status(pb.StatusRequest())).models[0].is_draining

    serve(tokenizer, test, gate=True)


def test_a_drain_goes_on_when_its_caller_goes(tokenizer):
    async def test(it, service):
        drain = it.control.Drain(pb.DrainRequest(timeout_s=10.0))
        await until(lambda: service.draining)
        drain.cancel()
        await asyncio.sleep(0.3)
        assert await health(it.channel) == "NOT_SERVING"
        assert (await code_of(it.stub.Generate(ask()))).code() is CODE.UNAVAILABLE

    serve(tokenizer, test)


async def reflected(channel, **kwargs):
    """One answer of server reflection."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**kwargs)]))
    return await call.read()


def test_a_client_without_the_proto_file_finds_and_calls_a_method(tokenizer):
    async def test(it, service):
        found = await reflected(it.channel, list_services="")
        names = {one.name for one in found.list_services_response.service}
        assert names == {"vla.v1.Chat", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        found = await reflected(it.control_channel, list_services="")
        assert "vla.v1.Control" in {one.name for one in found.list_services_response.service}
        found = await reflected(it.channel, file_containing_symbol="vla.v1.Chat")
        pool = descriptor_pool.DescriptorPool()  # knows nothing of ours
        for data in found.file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
        method = pool.FindServiceByName("vla.v1.Chat").methods_by_name["GenerateStream"]
        assert method.server_streaming
        request = message_factory.GetMessageClass(method.input_type)()
        request.request_id = "dynamic"
        message = request.messages.add(role="user")
        message.parts.add(text="hi")
        call = it.channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        chunks = await read_all(call(request))
        assert "".join(chunk.delta.text for chunk in chunks) == "Hello"
        assert service.requests[0].request_id == "dynamic"

    serve(tokenizer, test)


def test_a_connection_that_says_nothing_is_closed(tokenizer):
    async def test(it, service):
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        while await asyncio.wait_for(reader.read(4096), 10.0):
            pass
        writer.close()

    serve(tokenizer, test, keepalive_timeout_s=0.2)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\n\r\n", PREFACE, PREFACE + SETTINGS])
def test_garbage_on_the_socket_harms_nobody_else(tokenizer, begin):
    draw = random.Random(len(begin))

    async def attack(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for _ in range(draw.randrange(1, 4)):
                kind = draw.randrange(12)
                body = draw.randbytes(draw.choice((0, 5, 30, 300)))
                frame = len(body).to_bytes(3, "big") + bytes([kind, draw.randrange(256)]) + draw.randbytes(4)
                writer.write(begin + (frame + body if begin.startswith(b"PRI") else draw.randbytes(400)))
                begin_again = draw.random() < 0.2
                if begin_again:
                    writer.write(begin)
                await writer.drain()
            if draw.random() < 0.5:
                await asyncio.wait_for(reader.read(65536), 0.05)
        except (ConnectionError, asyncio.TimeoutError):
            pass
        finally:
            writer.close()
            try:
                await writer.wait_closed()
            except ConnectionError:
                pass

    async def test(it, service):
        for _ in range(10):
            await asyncio.gather(*(attack(it.server.port) for _ in range(5)))
            assert (await it.stub.Generate(ask(), timeout=10.0)).text == "Hello"
        async with it.connect() as channel:
            assert (await type(it.stub)(channel).Generate(ask(), timeout=10.0)).text == "Hello"

    serve(tokenizer, test)


def test_a_port_in_use_is_an_error_that_says_so(tokenizer):
    async def test(it, service):
        config = GatewayConfig(grpc_listen="127.0.0.1:0", control_listen=f"127.0.0.1:{it.server.port}")
        with pytest.raises(GatewayError, match="in use"):
            await GrpcServer(it.chat, config, SystemClock()).start()
        assert (await it.stub.Generate(ask())).text == "Hello"

    serve(tokenizer, test)


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "192.168.1.5:1", "example.org:443"])
def test_an_address_that_others_reach_needs_leave(listen):
    with pytest.raises(GatewayError, match="reachable from other machines"):
        GrpcServer(None, GatewayConfig(grpc_listen=listen), SystemClock())
    GrpcServer(None, GatewayConfig(grpc_listen=listen), SystemClock(), allow_remote=True)
    with pytest.raises(ValueError, match="control_listen"):
        GatewayConfig(control_listen=listen)


@pytest.mark.parametrize("listen", ["50051", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:x", ":1", "unix:"])
def test_a_malformed_address_is_refused(listen):
    with pytest.raises(GatewayError, match="form"):
        GrpcServer(None, GatewayConfig(grpc_listen=listen), SystemClock(), allow_remote=True)


def test_a_unix_socket_serves(tokenizer, tmp_path):
    async def go():
        chat = Chat([ServedModel("tiny", tokenizer, ScriptedService(lambda _: HELLO))], SystemClock())
        server = GrpcServer(chat, replace(CONFIG, grpc_listen=f"unix:{tmp_path}/s", control_listen=""), SystemClock())
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            assert (await pb_grpc.ChatStub(channel).Generate(ask())).text == "Hello"
        await server.stop()
        await server.stop()

    asyncio.run(go())
