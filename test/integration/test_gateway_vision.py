"""Images through both doors: to a model that can see, and to one that cannot."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import socket
import struct
import sys
import threading
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
pytest.importorskip("PIL")
import grpc
from both_doors import Both, Keys, both_doors
from chat_service import ScriptedService
from grpc_rig import until
from PIL import Image
from seeing_model import IMAGE_TOKENS, PLACEHOLDER, SeeingModel
from tiny_chat_tokenizer import END, tiny_tokenizer

from vla_cloud.gateway.chat import ServedModel
from vla_cloud.gateway.image_settings import FetchRules, ImageRules
from vla_cloud.gateway.images import ImageIntake
from vla_cloud.gateway.proto import vla_chat_pb2 as pb
from vla_common.clock import ManualClock, SystemClock

CODE = grpc.StatusCode
RULES = ImageRules(max_images=3, max_pixels=10_000, max_held_pixels=20_000, max_bytes=100_000)
RED = (200, 10, 20)


def png(colour: tuple[int, int, int] = RED, size: tuple[int, int] = (30, 20)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def part(url: str, **more: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def messages(*parts: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what is "}, *parts, {"type": "text", "text": "?"}]}]


def message(*images: pb.Image) -> pb.GenerateRequest:
    parts = [pb.Part(text="what is "), *(pb.Part(image=image) for image in images), pb.Part(text="?")]
    return pb.GenerateRequest(model="eyes", messages=[pb.Message(role="user", parts=parts)])


class NoFetch:
    """Fails the test if anything is fetched."""

    def fetch(self, url: str, max_bytes: int) -> object:
        pytest.fail(f"fetched {url}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def serve(tokenizer, test, rules=RULES, fetcher=None, gate=False, keys=None, clock=None, **gateway):
    """Run ``test(both, service, eyes)``; the models are "eyes" and "blind"."""

    async def go():
        service = ScriptedService(lambda _: [[*b"red", END]], gate=asyncio.Event() if gate else None)
        eyes = SeeingModel(ImageIntake(rules, SystemClock(), fetcher))
        models = [ServedModel("eyes", tokenizer, service, eyes), ServedModel("blind", tokenizer, service)]
        async with both_doors(models, keys, clock, **gateway) as it:
            await test(it, service, eyes)
            assert eyes.intake.held_pixels == 0 and not it.chat._running

    asyncio.run(go())


def test_a_model_that_can_see_gets_pixels_and_the_pools_get_their_hash(tokenizer):
    first, second = png(), png((0, 0, 255), (10, 40))
    hashes = [hashlib.sha256(data).digest() for data in (first, second)]

    async def test(it: Both, service, eyes):
        answer = await it.ask(model="eyes", messages=messages(part(data_url(first), detail="high"), part(data_url(second))))
        assert answer.json()["choices"][0]["message"]["content"] == "red"
        images = pb.Image(data=first), pb.Image(url=data_url(second), media_type="")
        assert (await it.stub.Generate(message(*images))).text == "red"
        assert eyes.seen == [((20, 30, 3), list(RED)), ((40, 10, 3), [0, 0, 255])] * 2 and eyes.held == [1000, 1000]
        for request in service.requests:
            assert [span.sha256 for span in request.images] == hashes
            for span in request.images:
                assert request.tokens[span.start : span.start + span.length] == (PLACEHOLDER,) * IMAGE_TOKENS
        assert service.requests[0].tokens == service.requests[1].tokens
        # Text alone goes the usual way.
        assert (await it.ask(model="eyes")).status_code == 200 and service.requests[-1].images == ()

    serve(tokenizer, test)


WRONG = [
    ("data:image/png;base64,AAAA", "image 0: the bytes are no"), ("https://images.example.org/x.png", "image 0: URLs are not fetched"),
    ("http://169.254.169.254/latest/", "not fetched"), ("file:///etc/passwd", "files of the server are not read"),
    ("/etc/passwd", "must begin with data:"), (data_url(png(size=(101, 100))), "at most 10000 pixels"), (data_url(png())[:-24], "cut off"),
    ("data:image/gif;base64,R0lGODlh", "no JPEG, PNG or WebP"),
]  # fmt: skip


def test_images_that_are_not_in_order_are_refused_before_the_pools(tokenizer):
    async def test(it: Both, service, eyes):
        for url, told in WRONG:
            answer = await it.ask(model="eyes", messages=messages(part(url)))
            assert answer.status_code == 400 and told in answer.json()["error"]["message"], url
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.stub.Generate(message(pb.Image(url=url)))
            assert caught.value.code() is CODE.INVALID_ARGUMENT and told in caught.value.details()
        for image, told in ((pb.Image(data=png(), media_type="image/jpeg"), "declared as image/jpeg"), (pb.Image(), "no bytes"),
                            (pb.Image(data=png()[:50]), "cut off")):  # fmt: skip
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.stub.Generate(message(image))
            assert told in caught.value.details()
        four = await it.ask(model="eyes", messages=messages(*[part(data_url(png()))] * 4))
        assert four.status_code == 400 and "at most 3" in four.json()["error"]["message"]
        for wrong in ({"url": 5}, {}, "x", {"url": "x", "size": 3}, {"url": "x", "detail": "best"}, None):
            answer = await it.ask(model="eyes", messages=messages({"type": "image_url", "image_url": wrong}))
            assert answer.status_code == 400 and "image_url" in answer.json()["error"]["message"]
        answer = await it.ask(model="eyes", messages=messages({**part("x"), "text": "y"}))
        assert answer.status_code == 400
        assert not service.requests and not eyes.seen

    serve(tokenizer, test)


def test_a_model_that_cannot_see_refuses_before_any_byte_is_fetched(tokenizer):
    async def test(it: Both, service, eyes):
        url = "https://images.example.org/x.png"
        answer = await it.ask(model="blind", messages=messages(part(url)))
        assert answer.status_code == 400 and "no vision tower" in answer.json()["error"]["message"]
        request = message(pb.Image(url=url))
        request.model = "blind"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Generate(request)
        assert caught.value.code() is CODE.INVALID_ARGUMENT and "no vision tower" in caught.value.details()
        assert not service.requests

    serve(tokenizer, test, ImageRules(fetch=FetchRules(allow_hosts=("images.example.org",))), NoFetch())


def test_a_fetched_image_is_checked_like_any_other_and_a_key_comes_first(tokenizer):
    class Fetcher:
        def __init__(self) -> None:
            self.urls: list[str] = []

        def fetch(self, url: str, max_bytes: int) -> object:
            from vla_cloud.gateway.image_fetch import Fetched, FetchError

            self.urls.append(url)
            if "down" in url:
                raise FetchError("elsewhere is down", is_refused=False)
            return Fetched(png(), "image/jpeg" if "lie" in url else "image/png")

    fetcher, keys = Fetcher(), Keys()
    keys.add("a", requests_per_minute=3)

    async def test(it: Both, service, eyes):
        async def ask(url: str, headers=None):
            return await it.ask(model="eyes", messages=messages(part(url)), headers=headers)

        assert (await ask("https://x/")).status_code == 401 and not fetcher.urls
        good = keys.header("a")
        assert (await ask("https://x/", good)).status_code == 200 and eyes.seen == [((20, 30, 3), list(RED))]
        lie = await ask("https://lie/", good)
        assert lie.status_code == 400 and "declared as image/jpeg" in lie.json()["error"]["message"]
        down = await ask("https://down/", good)
        assert down.status_code == 503 and "retry-after" in down.headers
        assert (await ask("https://x/", good)).status_code == 429 and len(fetcher.urls) == 3  # no key's limit is passed by fetching

    serve(tokenizer, test, ImageRules(fetch=FetchRules(allow_hosts=("x",))), fetcher, keys=keys, clock=ManualClock())


def test_a_client_that_leaves_while_its_image_is_fetched_leaves_nothing(tokenizer):
    may = threading.Event()

    class Fetcher:
        def fetch(self, url: str, max_bytes: int) -> object:
            from vla_cloud.gateway.image_fetch import Fetched

            started.append(url)
            assert may.wait(10.0)
            return Fetched(png(), "image/png")

    started: list[str] = []

    async def test(it: Both, service, eyes):
        call = it.stub.Generate(message(pb.Image(url="https://x/")))
        await until(lambda: started)
        call.cancel()
        await until(lambda: not it.chat._running)
        may.set()
        assert not service.requests

    serve(tokenizer, test, ImageRules(fetch=FetchRules(allow_hosts=("x",))), Fetcher())


# Too large


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def post_endlessly(address: tuple[str, int], length: int | None, pieces: int) -> bytes:
    """A body of pieces of 64 KiB, made as it goes; what the server says of it."""
    how = f"Content-Length: {length}" if length is not None else "Transfer-Encoding: chunked"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{how}\r\n\r\n".encode()
    piece = b"A" * 65_536
    chunk = piece if length is not None else b"10000\r\n" + piece + b"\r\n"
    with socket.create_connection(address, timeout=20.0) as sock:
        sock.sendall(head)
        try:
            for _ in range(pieces):
                sock.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            return sock.recv(65_536)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(("is_chunked", "has_keys"), [(False, False), (True, False), (True, True)])
def test_a_body_beyond_the_bound_takes_no_memory_over_http(tokenizer, is_chunked, has_keys):
    keys = Keys() if has_keys else None
    if keys is not None:
        keys.add("a")

    async def test(it: Both, service, eyes):
        await it.ask()
        before = resident_bytes()
        pieces = 1024  # 64 MiB
        length = None if is_chunked else pieces * 65_536
        loop = asyncio.get_running_loop()
        told = await loop.run_in_executor(None, post_endlessly, it.http_server.address, length, pieces)
        assert told.startswith(b"HTTP/1.1 401" if has_keys else b"HTTP/1.1 413")
        assert resident_bytes() - before < 24 << 20
        assert (await it.ask(headers=keys.header("a") if keys is not None else None)).status_code == 200

    serve(tokenizer, test, keys=keys, http_max_body_bytes=1_000_000, http_head_timeout_s=2.0)


def test_a_message_beyond_the_bound_is_refused_over_grpc(tokenizer):
    async def test(it: Both, service, eyes):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Generate(message(pb.Image(data=bytes(5_000_000))))
        assert caught.value.code() is CODE.RESOURCE_EXHAUSTED and not eyes.seen
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # below the door's bound, above the image's
            await it.stub.Generate(message(pb.Image(data=bytes(200_000))))
        assert caught.value.code() is CODE.INVALID_ARGUMENT and "at most 100000" in caught.value.details()

    serve(tokenizer, test)


def test_a_bomb_takes_no_memory_through_either_door(tokenizer):
    bomb = _bomb(20_000, 20_000)  # claims 1.2 GB of pixels

    async def test(it: Both, service, eyes):
        before = resident_bytes()
        answer = await it.ask(model="eyes", messages=messages(part(data_url(bomb))))
        assert answer.status_code == 400 and "20000 x 20000" in answer.json()["error"]["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Generate(message(pb.Image(data=bomb)))
        assert "20000 x 20000" in caught.value.details() and resident_bytes() - before < 64 << 20

    serve(tokenizer, test, ImageRules())


def _bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(50_000_000), 1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
