"""The HTTP and gRPC doors over TLS: who gets in, what the others are told, and that the door stays up."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
pytest.importorskip("cryptography")
import grpc
import grpc.aio
from chat_service import ScriptedService
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_rig import CONFIG, ask, until
from tiny_chat_tokenizer import END, tiny_tokenizer
from tls_rig import Keys

from vla_cli import chat_main, keys_main
from vla_cloud.config import GatewayConfig
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.grpc_server import GrpcServer
from vla_cloud.gateway.http_server import HttpServer
from vla_cloud.gateway.proto import vla_chat_pb2_grpc as pb_grpc
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import NS_PER_S, SystemClock
from vla_common.link_diagnosis import tls_problem
from vla_common.tls import ServerTls, client_context

HELLO = [[*b"Hel"], [*b"lo", END]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def warnings_are_kept(caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    # A refusal is heard of at once, but on a busy machine the server may take its time with it.
    monkeypatch.setattr("vla_common.link_diagnosis._REFUSAL_S", 30.0)
    monkeypatch.setattr("vla_common.link_diagnosis._CONNECT_S", 30.0)


@asynccontextmanager
async def door(kind, tokenizer, tls, script=HELLO, config=CONFIG, **settings):
    chat = Chat([ServedModel("tiny", tokenizer, ScriptedService(script if callable(script) else lambda _: script))], SystemClock())
    if kind is HttpServer:
        config = GatewayConfig(http_listen="127.0.0.1:0", **settings)
    server = kind(chat, config, SystemClock(), tls=tls)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        chat.close()


def told(caplog, what):
    return [record.getMessage() for record in caplog.records if what in record.getMessage()]


# HTTP, by the client that we ship


async def talk(capsys, server, *options, scheme="https", host="127.0.0.1"):
    """Exit code of vla chat, and what it printed."""
    url = f"{scheme}://{host}:{server.address[1]}"
    code = await asyncio.to_thread(chat_main.main, ["hi", "--url", url, *map(str, options)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_http_with_the_right_certificates(keys, tokenizer, capsys, caplog):
    async def go():
        own = ("--ca", keys.ca, "--cert", keys.client / "client.pem", "--key", keys.client / "client.key")
        async with door(HttpServer, tokenizer, keys.mutual_tls) as server:
            for host in ("127.0.0.1", "localhost"):
                assert await talk(capsys, server, *own, host=host) == (0, "Hello\n")
        async with door(HttpServer, tokenizer, keys.tls) as server:
            assert await talk(capsys, server, "--ca", keys.ca) == (0, "Hello\n")

    asyncio.run(go())
    assert not caplog.records


def test_http_says_on_both_sides_what_is_wrong(keys, tokenizer, capsys, caplog):
    own = ("--cert", keys.client / "client.pem", "--key", keys.client / "client.key")

    async def go():
        async with door(HttpServer, tokenizer, keys.mutual_tls) as server:
            for options, at_client, at_server in (
                ((), "the server's certificate is not of the CA given", "a client does not trust"),
                (("--ca", keys.other_ca, *own), "the server's certificate is not of the CA given", "a client does not trust"),
                (("--ca", keys.ca), "the server demands a client certificate", "a client showed no certificate"),
                (("--ca", keys.ca, "--cert", keys.stranger[0], "--key", keys.stranger[1]),
                 "the server does not know the CA of the client certificate", "a client's certificate was refused"),
                (("--ca", keys.ca, "--cert", keys.expired[0], "--key", keys.expired[1]),
                 "the client certificate has expired", "certificate has expired"),
            ):  # fmt: skip
                for _ in range(3):
                    code, printed = await talk(capsys, server, *options)
                    assert code == chat_main.EXIT_FAILED and at_client in printed and "Traceback" not in printed
                await until(lambda what=at_server: told(caplog, what))  # the server may hear of it after the client
                assert len(told(caplog, at_server)) == 1, "once"
            code, printed = await talk(capsys, server, scheme="http")
            assert code == chat_main.EXIT_FAILED and "https://" in printed
            await until(lambda: told(caplog, "a client spoke plain HTTP"))
            assert len(told(caplog, "a client spoke plain HTTP")) == 1
            # It lives on.
            assert await talk(capsys, server, "--ca", keys.ca, *own) == (0, "Hello\n")

    asyncio.run(go())


@pytest.mark.parametrize("kind, message", [("expired_server", "has expired"), ("elsewhere", "--host 127.0.0.1")])
def test_http_with_a_certificate_that_clients_refuse(keys, tokenizer, capsys, kind, message):
    async def go():
        async with door(HttpServer, tokenizer, getattr(keys, kind)) as server:
            code, printed = await talk(capsys, server, "--ca", keys.ca)
            assert code == chat_main.EXIT_FAILED and message in printed

    asyncio.run(go())


def test_chat_refuses_keys_that_would_have_no_effect(keys, capsys, tmp_path):
    for options, message in (
        (["--url", "http://127.0.0.1:1", "--ca", str(keys.ca)], "https://"),
        (["--url", "https://127.0.0.1:1", "--ca", str(tmp_path / "none")], "no CA certificate"),
        (["--url", "https://127.0.0.1:1", "--cert", str(keys.client / "client.pem")], "belong together"),
    ):
        assert chat_main.main(["hi", *options]) == chat_main.EXIT_USAGE
        assert message in capsys.readouterr().err


def test_plain_http_against_tls_and_tls_against_plain_http(keys, tokenizer, capsys):
    async def go():
        async with door(HttpServer, tokenizer, None) as server:
            code, printed = await talk(capsys, server, "--ca", keys.ca)
            assert code == chat_main.EXIT_FAILED and "does not speak TLS" in printed

    asyncio.run(go())


def test_a_handshake_that_does_not_come_is_not_waited_for(keys, tokenizer):
    async def go():
        async with door(HttpServer, tokenizer, keys.tls, http_head_timeout_s=1.0) as server:
            reader, writer = await asyncio.open_connection(*server.address)
            assert await asyncio.wait_for(reader.read(), 20.0) == b""  # a minute with uvicorn's own limits
            writer.close()

    asyncio.run(go())


def test_a_reader_that_takes_nothing_is_cut_off_over_tls_too(keys, tokenizer):
    def endless(_):
        for _ in range(20_000):
            made.append(1)
            yield [*b"0123456789" * 100]

    made: list[int] = []

    async def go():
        async with door(HttpServer, tokenizer, keys.tls, script=endless, http_stall_timeout_s=0.3) as server:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(server.address)
            body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 7000}'
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            head += b"Content-Length: %d\r\n\r\n" % len(body)

            def send():
                secure = client_context(keys.ca).wrap_socket(sock, server_hostname="127.0.0.1")
                secure.sendall(head + body)
                return secure

            secure = await asyncio.to_thread(send)
            await until(lambda: server._connections()["open"] == 1)
            await until(lambda: server._connections()["open"] == 0)
            assert server._connections()["evicted"] == 1 and 0 < len(made) < 20_000
            secure.close()

    asyncio.run(go())


def test_http_addresses_and_certificates(keys, tmp_path):
    class FakeChat:
        health = None

    config = GatewayConfig(http_listen="0.0.0.0:0")
    with pytest.raises(GatewayError, match="tls.certificate .*insecure_non_loopback"):
        HttpServer(FakeChat(), config, SystemClock())
    HttpServer(FakeChat(), config, SystemClock(), allow_remote=True)
    for kind, listen in ((HttpServer, {"http_listen": "0.0.0.0:0"}), (GrpcServer, {"grpc_listen": "0.0.0.0:0"})):
        config = GatewayConfig(**listen)
        kind(FakeChat(), config, SystemClock(), tls=keys.tls)
        for tls, message in (
            (replace(keys.tls, key=keys.client / "client.key"), "do not belong together"),
            (replace(keys.tls, certificate=tmp_path / "none.pem"), "no certificate .*none.pem"),
            (replace(keys.tls, client_ca=tmp_path / "ca.pem"), "no CA certificate"),
            (ServerTls(), "other machines"),
        ):
            with pytest.raises(GatewayError, match=message):
                kind(FakeChat(), config, SystemClock(), tls=tls)


# gRPC


async def call(server, ca, certificate=None, key=None, **options):
    """The answer's text, or the error."""
    own = (None, None) if certificate is None else (key.read_bytes(), certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *own)
    alone = [("grpc.use_local_subchannel_pool", 1), *options.items()]
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials, options=alone) as channel:
        try:
            return (await pb_grpc.ChatStub(channel).Generate(ask(), timeout=10.0)).text
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return error.details()


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call
    return info.value.code()


def test_grpc(keys, tokenizer, caplog):
    own = keys.client / "client.pem", keys.client / "client.key"

    async def go():
        async with door(GrpcServer, tokenizer, keys.mutual_tls) as server:
            server._handshakes._patience_ns = NS_PER_S // 5
            assert await call(server, keys.ca, *own) == "Hello"
            assert "CERTIFICATE_VERIFY_FAILED" in await call(server, keys.other_ca, *own)
            wrong_name = await call(server, keys.ca, *own, **{"grpc.ssl_target_name_override": "elsewhere"})
            assert "Hostname Verification Check failed" in wrong_name
            # gRPC's clients are told nothing more; 'vla keys check' is (below).
            for pair in ((), keys.stranger, keys.expired):
                assert "closed" in await call(server, keys.ca, *pair)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as plain:
                assert (await code_of(pb_grpc.ChatStub(plain).Generate(ask(), timeout=10.0))) is grpc.StatusCode.UNAVAILABLE
            await until(lambda: bool(told(caplog, "brought no call")))
            assert re.search(r"gRPC on .*: [1-9]\d* connections brought no call", caplog.text)
            assert await call(server, keys.ca, *own) == "Hello"
        assert len(told(caplog, "brought no call")) == 1

    asyncio.run(go())


def test_grpc_without_client_certificates_and_its_other_services(keys, tokenizer, caplog):
    async def go():
        async with door(GrpcServer, tokenizer, keys.tls) as server:
            server._handshakes._patience_ns = 600 * NS_PER_S  # until the end, however long the calls take
            assert await call(server, keys.ca) == "Hello"
            credentials = grpc.ssl_channel_credentials(keys.ca.read_bytes())
            alone = [("grpc.use_local_subchannel_pool", 1)]
            for _ in range(2):
                async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials, options=alone) as channel:
                    health = health_pb2_grpc.HealthStub(channel)
                    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
                    watch = health.Watch(health_pb2.HealthCheckRequest())
                    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                    watch.cancel()
                    lists = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
                    )
                    assert "vla.v1.Chat" in str([answer async for answer in lists])
                    stream = pb_grpc.ChatStub(channel).GenerateStream(ask())
                    assert "".join([chunk.delta.text async for chunk in stream]) == "Hello"
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.control_port}") as channel:  # local: as it was
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert not server._handshakes._pending, "each of these connections made a call"
        assert not told(caplog, "brought no call")

    asyncio.run(go())


def test_a_unix_socket_needs_no_certificate(keys, tokenizer, tmp_path):
    async def go():
        listen = f"unix:{tmp_path}/s"
        async with door(GrpcServer, tokenizer, keys.mutual_tls, config=GatewayConfig(grpc_listen=listen)):
            async with grpc.aio.insecure_channel(listen) as channel:
                assert (await pb_grpc.ChatStub(channel).Generate(ask())).text == "Hello"

    asyncio.run(go())


# Any server


@pytest.mark.parametrize("kind", [HttpServer, GrpcServer])
def test_vla_keys_check_tells_what_is_wrong_with_either_door(keys, tokenizer, capsys, monkeypatch, kind):
    own = ["--cert", str(keys.client / "client.pem"), "--key", str(keys.client / "client.key")]

    async def check(server, *options):
        port = server.port if kind is GrpcServer else server.address[1]
        code = await asyncio.to_thread(keys_main.main, ["check", f"127.0.0.1:{port}", "--ca", str(keys.ca), *options])
        return code, capsys.readouterr().out

    async def go():
        async with door(kind, tokenizer, keys.mutual_tls) as server:
            with monkeypatch.context() as accepted:  # nothing is heard then
                accepted.setattr("vla_common.link_diagnosis._REFUSAL_S", 0.3)
                code, printed = await check(server, *own)
            assert code == 0 and "accept each other" in printed
            for options, message in (
                ((), "demands a client certificate"),
                (("--ca", str(keys.other_ca), *own), "not of the CA given"),
                (("--cert", str(keys.expired[0]), "--key", str(keys.expired[1])), "expired"),
                (("--cert", str(keys.stranger[0]), "--key", str(keys.stranger[1])), "does not know the CA"),
            ):
                code, printed = await check(server, *options)
                assert code == 1 and message in printed
        assert (await check(server, *own))[1].startswith("nothing answers")
        async with door(kind, tokenizer, keys.elsewhere) as server:
            assert "for other addresses than 127.0.0.1" in (await check(server))[1]

    asyncio.run(go())


def test_a_server_that_does_not_speak_tls_or_does_not_answer(keys, monkeypatch):
    monkeypatch.setattr("vla_common.link_diagnosis._CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "does not answer" in tls_problem(*silent.getsockname(), client_context(keys.ca))
    assert client_context().verify_mode is ssl.CERT_REQUIRED
