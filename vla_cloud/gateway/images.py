"""Images of chat messages, from whatever a client sends to pixels; everything that is not plainly in order is refused.

Order: where it is (bytes, data: URL, fetch, file), bytes, header and size, room for the pixels, and only then decoding.
All of it in threads of its own, in bounded number.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeVar

from vla_cloud.core.generate import InvalidRequest, QueueFull, RequestError
from vla_cloud.core.image_header import ImageError
from vla_cloud.gateway.chat_types import ImagePart
from vla_cloud.gateway.image_checks import DecodedImage, Encoded, checked, decode, given
from vla_cloud.gateway.image_settings import ImageRules
from vla_common.clock import Clock

T = TypeVar("T")
_RETRY_S: Final = 1.0
_GRACE_S: Final = 1.0


class FetchUnavailable(RequestError):
    """The server that has the image did not give it."""

    code = "UNAVAILABLE"


class Fetcher(Protocol):
    """See :class:`vla_cloud.gateway.image_fetch.ImageFetcher`."""

    def fetch(self, url: str, max_bytes: int) -> Any:
        """``data`` and ``media_type``; FetchError."""
        ...


class ImageIntake:
    """For one event loop. Close it."""

    def __init__(self, rules: ImageRules, clock: Clock, fetcher: Fetcher | None = None) -> None:
        """``fetcher``: for other hosts' images; None makes one if the rules name any host."""
        self.rules = rules
        if fetcher is None and rules.fetch.allow_hosts:
            from vla_cloud.gateway.image_fetch import ImageFetcher  # httpcore, only where something is fetched

            fetcher = ImageFetcher(rules.fetch, clock)
        self._fetcher = fetcher
        self._room = _Room(rules.max_held_pixels)
        self._decoding = _Threads("image", rules.threads, rules.max_pending)
        # Apart, so that a slow server elsewhere holds up nobody who sends images along.
        self._fetching = _Threads("image-fetch", rules.fetch.threads, rules.fetch.max_pending)

    @property
    def held_pixels(self) -> int:
        """Of all requests that have images now."""
        return self._room.taken

    @asynccontextmanager
    async def taken(self, parts: Sequence[ImagePart]) -> AsyncIterator[list[DecodedImage]]:
        """The images of one request, whose pixels are here for the body.

        Raises:
            InvalidRequest: one is not taken; names which and why. QueueFull: too many are being read now.
            FetchUnavailable: another server did not give one.
        """
        if len(parts) > self.rules.max_images:
            raise InvalidRequest(f"{len(parts)} images, at most {self.rules.max_images} are taken in a request")
        held = 0
        try:
            encoded: list[Encoded] = []
            for index, part in enumerate(parts):
                encoded.append(await self._encoded(index, part))
                if sum(image.pixels for image in encoded) > self.rules.max_held_pixels:
                    raise InvalidRequest(f"the images have more than {self.rules.max_held_pixels} pixels together")
            pixels = sum(image.pixels for image in encoded)
            self._room.take(pixels)
            held = pixels
            decoded: list[DecodedImage] = []
            while encoded:  # each one's bytes go as its pixels come
                one = encoded.pop(0)
                decoded.append(await self._decoding.run(len(decoded), decode, one))
            yield decoded
        finally:
            self._room.give(held)

    def close(self) -> None:
        """End the threads; what they are at ends by itself."""
        self._decoding.close()
        self._fetching.close()

    async def _encoded(self, index: int, part: ImagePart) -> Encoded:
        if part.data and part.url:
            raise InvalidRequest(f"image {index} has both bytes and a URL: send one")
        if part.url[:5].lower() not in ("http:", "https"):
            return await self._decoding.run(index, given, part, self.rules)
        if self._fetcher is None:
            raise InvalidRequest(f"image {index}: URLs are not fetched here: send the image as a data: URL")
        fetcher, rules = self._fetcher, self.rules

        def fetch() -> Encoded:
            found = fetcher.fetch(part.url, rules.max_bytes)
            return checked(found.data, found.media_type, rules)

        try:
            # The fetcher keeps the time itself, but a name server may hold its thread for longer.
            return await asyncio.wait_for(self._fetching.run(index, fetch), rules.fetch.timeout_s + _GRACE_S)
        except asyncio.TimeoutError:
            raise _unavailable(f"image {index} did not come within {rules.fetch.timeout_s:g} s") from None


def _named(index: int, work: Callable[..., T], *arguments: Any) -> T:
    """In a thread: errors say which image is meant."""
    try:
        return work(*arguments)
    except ImageError as error:
        raise InvalidRequest(f"image {index}: {error}") from error
    except ValueError as error:  # FetchError, known only where something is fetched
        told = f"image {index}: {error}"
        if getattr(error, "is_refused", True):
            raise InvalidRequest(told) from error
        raise _unavailable(told) from error


class _Room:
    """Pixels that may be in memory at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def take(self, pixels: int) -> None:
        if self.taken + pixels > self._most:
            raise _later(f"images of other requests have {self.taken} pixels")
        self.taken += pixels

    def give(self, pixels: int) -> None:
        self.taken -= pixels


class _Threads:
    """A pool whose queue is bounded by work, not by waiters: what a client has left is counted until it is done."""

    def __init__(self, name: str, threads: int, max_pending: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._max_pending = max_pending
        self._pending = 0
        self._lock = threading.Lock()

    async def run(self, index: int, work: Callable[..., T], *arguments: Any) -> T:
        """``index``: of the image, for errors."""
        with self._lock:
            if self._pending >= self._max_pending:
                raise _later(f"{self._pending} images wait to be read")
            self._pending += 1
        future = self._pool.submit(_named, index, work, *arguments)
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: object) -> None:
        with self._lock:
            self._pending -= 1


def _later(told: str) -> QueueFull:
    error = QueueFull(f"overloaded: {told}; try again")
    error.retry_after_s = _RETRY_S  # type: ignore[attr-defined]
    return error


def _unavailable(told: str) -> FetchUnavailable:
    error = FetchUnavailable(told)
    error.retry_after_s = _RETRY_S  # type: ignore[attr-defined]
    return error
