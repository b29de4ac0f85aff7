"""What is taken of an image, before and while it is decoded, and how much of that at a time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import random
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'vla-runtime[gateway]'")
from PIL import Image

from vla_cloud.core.generate import InvalidRequest, QueueFull, RequestError
from vla_cloud.core.image_header import ImageError, ImageHeader, read_header
from vla_cloud.gateway.chat_types import ImagePart
from vla_cloud.gateway.image_checks import Encoded, checked, decode, from_data_url, from_file
from vla_cloud.gateway.image_checks import given as given_image
from vla_cloud.gateway.image_settings import MAX_PIXELS, FetchRules, ImageRules
from vla_cloud.gateway.images import FetchUnavailable, ImageIntake
from vla_common.clock import SystemClock

RULES = ImageRules(max_bytes=100_000, max_pixels=10_000, max_side=200, max_held_pixels=20_000)


def picture(width: int = 20, height: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def encoded(kind: str, image: np.ndarray | Image.Image | None = None, **options: object) -> bytes:
    image = picture() if image is None else image
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


KINDS = {
    "png": ("image/png", lambda **o: encoded("PNG", **o)), "jpeg": ("image/jpeg", lambda **o: encoded("JPEG", **o)),
    "progressive": ("image/jpeg", lambda **o: encoded("JPEG", progressive=True, **o)), "webp": ("image/webp", lambda **o: encoded("WEBP", **o)),
    "lossless": ("image/webp", lambda **o: encoded("WEBP", lossless=True, **o)),
    "extended": ("image/webp", lambda **o: encoded("WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0", **o)),
    "jpg": ("image/jpg", lambda **o: encoded("JPEG", **o)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_header_says_what_the_decoder_finds(kind: str) -> None:
    media_type, make = KINDS[kind]
    for size in ((20, 10), (1, 1), (199, 50)):
        data = make(image=picture(*size))
        one = checked(data, media_type, RULES)
        with Image.open(io.BytesIO(data)) as image:
            assert (one.header.width, one.header.height, one.header.format) == (*image.size, image.format) == (*size, one.header.format)
        made = decode(one)
        assert made.pixels.shape == (size[1], size[0], 3) and made.pixels.dtype == np.uint8
        assert made.sha256 == hashlib.sha256(data).digest() and not made.pixels.flags.writeable


def test_pixels_are_those_that_were_sent() -> None:
    assert (decode(checked(encoded("PNG"), "", RULES)).pixels == picture()).all()
    assert (decode(checked(encoded("WEBP", lossless=True), "", RULES)).pixels == picture()).all()
    grey = Image.fromarray(picture()[:, :, 0])
    assert (decode(checked(encoded("PNG", grey), "", RULES)).pixels == picture()[:, :, :1]).all()
    # Hidden colours do not come out: what is transparent is white.
    clear = Image.fromarray(np.dstack([picture(), np.zeros((10, 20), np.uint8)]), "RGBA")
    assert (decode(checked(encoded("PNG", clear), "", RULES)).pixels == 255).all()
    turned = Image.fromarray(picture())
    exif = turned.getexif()
    exif[0x0112] = 6  # a quarter turn
    assert (decode(checked(encoded("PNG", turned, exif=exif), "", RULES)).pixels == np.rot90(picture(), -1)).all()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes = b"", *chunks: bytes, depth: int = 8) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    frames = [Image.fromarray(picture(seed=seed)) for seed in (1, 2)]
    return encoded(kind, frames[0], save_all=True, append_images=frames[1:])


GOOD = encoded("PNG")


@pytest.mark.parametrize(("data", "media_type", "told"), [
    (b"", "", "no bytes"), (b"x" * 100_001, "", "100001 bytes"), (b"GIF89a" + b"x" * 50, "", "no JPEG, PNG or WebP"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "", "no JPEG"), (b"%PDF-1.4", "", "no JPEG"), (b"II*\x00" * 9, "", "no JPEG"),
    (b"BM" + b"\x00" * 60, "", "no JPEG"), (b"%!PS-Adobe EPSF", "", "no JPEG"), (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "", "no JPEG"),
    (GOOD, "image/jpeg", "declared as image/jpeg"), (encoded("JPEG"), "image/png", "its bytes are JPEG"),
    (GOOD, "image/gif", "not taken"), (GOOD, "text/html", "not taken"), (GOOD, "image/png; charset=x", "not taken"),
    (png(201, 10), "", "a side may have 200"), (png(10, 201), "", "a side may have 200"), (png(101, 100), "", "at most 10000 pixels"),
    (png(2**31 - 1, 2**31 - 1), "", "a side may"), (png(0, 5), "", "0 x 5"), (GOOD[:30], "", "damaged"), (GOOD[:-1], "", "cut off"), (GOOD[:33], "", "cut off"), (GOOD[:8], "", "damaged"),
    (animated("PNG"), "", "animated"), (animated("WEBP"), "", "animated"), (b"\xff\xd8\xff\xd9", "", "damaged"),
    (b"\xff\xd8\xff\xe0\x00\x01" * 5, "", "damaged"), (b"\xff\xd8" + b"\xff\xe0\x00\x02" * 600, "", "damaged"),
    (b"\xff\xd8\xff\xc3\x00\x11\x08" + b"\x00\x10" * 9, "", "lossless"), (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "", "damaged"),
    (b"RIFF\x00\x00\x00\x00WEBPXXXX" + b"\x00" * 20, "", "damaged"), (encoded("WEBP")[:-4], "", "cut off"),
    (GOOD[:33] + chunk(b"teSt", b"") * 8000 * 3 + GOOD[33:], "", "bytes|chunks"),
])  # fmt: skip
def test_what_is_refused_by_its_first_bytes_is_never_decoded(monkeypatch, data: bytes, media_type: str, told: str) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ImageError, match=told):
        checked(data, media_type, RULES)


def test_a_bomb_is_seen_in_its_header() -> None:
    """A megabyte that would be gigabytes: nothing of it is decompressed."""
    bomb = png(30_000, 30_000, b"\x00" * 10_000_000)
    assert len(bomb) < 20_000
    with pytest.raises(ImageError, match="30000 x 30000"):
        checked(bomb, "image/png", ImageRules())
    with pytest.raises(ValueError, match="max_pixels"):  # ours is never above the decoder's own guard
        ImageRules(max_pixels=MAX_PIXELS + 1)
    assert Image.MAX_IMAGE_PIXELS == MAX_PIXELS
    text = png(2, 2, b"\x00" * 14, chunk(b"zTXt", b"k\x00\x00" + zlib.compress(b"\x00" * 50_000_000)))
    with pytest.raises(ImageError, match="damaged"):  # the decoder's guard, in its own chunks
        decode(checked(text, "", RULES))


@pytest.mark.parametrize("kind", ["png", "jpeg", "progressive", "webp", "lossless"])
def test_what_is_cut_off_or_damaged_is_refused(kind: str) -> None:
    data = KINDS[kind][1](image=picture(90, 90))
    for part in (0.3, 0.6, 0.9):
        with pytest.raises(ImageError):
            decode(checked(data[: int(len(data) * part)], "", RULES))
    if kind in ("png", "webp", "lossless"):  # a JPEG has no checksum
        rng = random.Random(1)
        damaged = bytearray(data)
        for _ in range(40):
            damaged[rng.randrange(60, len(data))] ^= 0xFF
        if kind == "png":
            with pytest.raises(ImageError):
                decode(checked(bytes(damaged), "", RULES))


def test_kinds_of_pixels_that_would_be_distorted_are_refused() -> None:
    deep = encoded("PNG", Image.fromarray(np.full((4, 4), 40_000, np.uint16)))
    with pytest.raises(ImageError, match="8 bits per channel"):
        decode(checked(deep, "", RULES))
    with pytest.raises(ImageError, match="otherwise"):
        decode(Encoded(GOOD, ImageHeader("PNG", 21, 10)))


@given(st.binary(max_size=80), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR", b"\xff\xd8\xff", b"RIFF0000WEBPVP8X", GOOD[:60]]))
def test_any_bytes_are_a_header_or_refused(data: bytes, start: bytes) -> None:
    try:
        header = read_header(start + data)
    except ImageError:
        return
    assert header.width >= 1 and header.height >= 1


def test_random_damage_never_makes_another_error_or_another_size() -> None:
    rng = random.Random(7)
    for kind in ("png", "jpeg", "webp", "lossless", "extended"):
        whole = KINDS[kind][1]()
        for _ in range(120):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                one = checked(bytes(data), "", RULES)
                made = decode(one)
            except ImageError:
                continue
            assert made.pixels.size == 3 * one.pixels  # a turn by EXIF may swap the sides


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_a_data_url_is_read_strictly() -> None:
    assert from_data_url(data_url(GOOD), 10_000) == (GOOD, "image/png")
    assert given_image(ImagePart(url=data_url(GOOD)), RULES).data == GOOD
    for url, told in (
        ("data:image/png,AAAA", "form"), ("data:;base64,AAAA", "form"), ("data:text/html;base64,AAAA", "form"),
        ("data:image/png;charset=x;base64,AAAA", "form"), ("data:image/png;base64, AAAA", "base64"), ("data:image/png;base64,AA\nAA", "base64"),
        ("data:image/png;base64,AAA", "base64"), ("data:image/png;base64,AA-_", "base64"), ("data:image/png;base64,AAé=", "base64"),
        ("data:image/png;base64,AAAA====", "base64"), ("data:" + "image/" + "x" * 500 + ";base64,AAAA", "form"),
        ("data:image/png;base64,", "no bytes"), (data_url(GOOD, "image/webp"), "declared"), (data_url(GOOD, "image/svg+xml"), "not taken"),
        ("/etc/passwd", "must begin"), ("ftp://x/y", "must begin"), ("blob:x", "must begin"), ("DATA:image/png;base64,AAAA", "form"),
    ):  # fmt: skip
        with pytest.raises(ImageError, match=told):
            given_image(ImagePart(url=url), RULES)


def test_a_data_url_that_is_too_long_is_not_decoded(monkeypatch) -> None:
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="more than 100000 bytes"):
        given_image(ImagePart(url="data:image/png;base64," + "A" * 133_340), RULES)


def test_files_are_read_only_below_their_folders(tmp_path: Path) -> None:
    root, outside = tmp_path / "open", tmp_path / "secret.png"
    (root / "deep").mkdir(parents=True)
    for path in (root / "deep" / "a b.png", outside, tmp_path / "openly.png"):
        path.write_bytes(GOOD)
    (root / "link.png").symlink_to(outside)
    (root / "inner.png").symlink_to("deep/a b.png")
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    roots = (str(root),)
    for name in ("deep/a%20b.png", "inner.png", "deep/../deep/a%20b.png"):
        assert from_file(f"file://{root}/{name}", roots, 10_000) == GOOD
    assert from_file(f"file://localhost{root}/inner.png", roots, 10_000) == GOOD
    assert len(from_file(f"file://{root}/inner.png", roots, 10)) == 11  # one more than is taken, no more
    for url in (
        f"file://{root}/link.png", f"file://{root}/folder/secret.png", f"file://{root}/../secret.png", f"file://{root}/%2e%2e/secret.png",
        f"file://{outside}", f"file://{tmp_path}/openly.png", f"file://{root}/none.png", f"file://{root}/pipe", f"file://{root}",
        f"file://{root}/deep", "file:///etc/passwd", "file:///proc/self/environ", f"file://evil.example.org{root}/inner.png",
        "file:inner.png", f"file://{root}/inner.png%00.txt", "file:///dev/zero",
    ):  # fmt: skip
        with pytest.raises(ImageError, match="no such file") as caught:
            from_file(url, roots, 10_000)
        assert "secret" not in str(caught.value)
    with pytest.raises(ImageError, match="are not read"):
        from_file(f"file://{root}/inner.png", (), 10_000)
    with pytest.raises(ValueError, match="absolute"):
        ImageRules(allow_roots=("relative",))


# The intake


def run(test, rules: ImageRules = RULES, fetcher: object = None) -> None:
    async def go() -> None:
        intake = ImageIntake(rules, SystemClock(), fetcher)
        try:
            await test(intake)
            assert intake.held_pixels == 0
        finally:
            intake.close()

    asyncio.run(go())


async def refused(intake: ImageIntake, *parts: ImagePart) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async with intake.taken(parts):
            pass
    return caught.value


def test_images_of_a_request_are_taken_in_order_and_held_until_its_end() -> None:
    async def test(intake: ImageIntake) -> None:
        data = [encoded("PNG", picture(seed=seed)) for seed in range(3)]
        parts = [ImagePart(data=data[0]), ImagePart(url=data_url(data[1])), ImagePart(data=data[2], media_type="image/png")]
        async with intake.taken(parts) as images:
            assert [(image.pixels == picture(seed=seed)).all() for seed, image in enumerate(images)] == [True] * 3
            assert intake.held_pixels == 600
        async with intake.taken([]) as none:
            assert none == []

    run(test)


def test_one_wrong_image_is_named_and_nothing_is_held() -> None:
    async def test(intake: ImageIntake) -> None:
        good = ImagePart(data=GOOD)
        for part, told in (
            (ImagePart(data=b"x"), "image 1: the bytes"), (ImagePart(), "image 1: there are no"), (ImagePart(b"x", url="data:,"), "image 1 has both"),
            (ImagePart(url="https://images.example.org/x.png"), "image 1: URLs are not fetched here"), (ImagePart(url="http://x/"), "not fetched"),
            (ImagePart(url="file:///etc/passwd"), "image 1: files of the server"), (ImagePart(data=GOOD[:-20]), "image 1: the PNG is cut off"),
            (ImagePart(data=GOOD[:50] + b"xx" + GOOD[52:]), "image 1: it is damaged"),
        ):  # fmt: skip
            error = await refused(intake, good, part)
            assert isinstance(error, InvalidRequest) and told in str(error)
            assert intake.held_pixels == 0
        assert "at most 8 are taken" in str(await refused(intake, *[good] * 9))

    run(test)


def test_pixels_of_all_requests_together_are_bounded() -> None:
    async def test(intake: ImageIntake) -> None:
        large = ImagePart(data=encoded("PNG", picture(100, 100)))
        async with intake.taken([large]):
            async with intake.taken([large]):
                error = await refused(intake, ImagePart(data=GOOD))
                assert isinstance(error, QueueFull) and error.retry_after_s > 0 and "20000 pixels" in str(error)
            async with intake.taken([ImagePart(data=GOOD)]):
                pass
        assert "20000 pixels together" in str(await refused(intake, large, large, ImagePart(data=GOOD)))

    run(test)


class Slow:
    """A fetcher that waits until it may."""

    def __init__(self) -> None:
        self.may, self.urls = threading.Event(), []

    def fetch(self, url: str, max_bytes: int) -> object:
        from vla_cloud.gateway.image_fetch import Fetched, FetchError

        self.urls.append(url)
        if "down" in url:
            raise FetchError("elsewhere is down", is_refused=False)
        if "evil" in url:
            raise FetchError("not from there")
        assert self.may.wait(10.0)
        return Fetched(GOOD, "image/webp" if "lie" in url else "image/png")


def test_fetching_is_bounded_and_holds_up_nobody_else() -> None:
    slow = Slow()
    fetch = FetchRules(allow_hosts=("a.test",), threads=1, max_pending=2)

    async def test(intake: ImageIntake) -> None:
        async def get(url: str) -> int:
            async with intake.taken([ImagePart(url=url)]) as images:
                return len(images)

        assert "image 0: not from there" in str(await refused(intake, ImagePart(url="https://evil/")))
        down = await refused(intake, ImagePart(url="https://down/"))
        assert isinstance(down, FetchUnavailable) and down.code == "UNAVAILABLE" and down.retry_after_s > 0
        tasks = [asyncio.create_task(get(f"https://a.test/{number}")) for number in range(2)]
        while len(slow.urls) < 3:
            await asyncio.sleep(0.001)
        full = await refused(intake, ImagePart(url="https://a.test/3"))
        assert isinstance(full, QueueFull) and "2 images wait" in str(full)
        async with intake.taken([ImagePart(data=GOOD)]):  # who sends the image along waits for no fetch
            pass
        tasks[1].cancel()  # its client has gone: the place is free when the work is
        slow.may.set()
        assert await tasks[0] == 1
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert "declared as image/webp" in str(await refused(intake, ImagePart(url="https://a.test/lie")))

    run(test, ImageRules(fetch=fetch), slow)


def test_a_name_server_that_hangs_holds_no_client_up() -> None:
    slow = Slow()

    async def test(intake: ImageIntake) -> None:
        error = await refused(intake, ImagePart(url="https://a.test/"))
        assert isinstance(error, FetchUnavailable) and "within 0.01 s" in str(error)
        slow.may.set()

    run(test, ImageRules(fetch=FetchRules(allow_hosts=("a.test",), timeout_s=0.01)), slow)


@pytest.mark.parametrize("changes", [
    {"max_images": 0}, {"max_bytes": 0}, {"max_pixels": 0}, {"max_side": 0}, {"threads": 0}, {"max_held_pixels": 5}, {"max_pending": 0},
])  # fmt: skip
def test_rules_that_take_nothing_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        ImageRules(**changes)
