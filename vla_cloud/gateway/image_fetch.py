"""Images by URL, fetched so that no client can make this server call on its own network (SSRF).

Each connection is made by :class:`_CheckedBackend`: it resolves a name once, refuses it if any of its addresses is
special, and connects to the address that was checked, so that no second answer of a name server counts. TLS still sees
the name. Redirects are followed by hand with the same checks. One deadline ends everything: names, TLS, headers, body.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urljoin

import httpcore

from vla_cloud.core.address_rules import AddressRefused, Target, check_url, refusal_of
from vla_cloud.core.image_header import MEDIA_TYPES
from vla_cloud.gateway.image_settings import FetchRules
from vla_common.clock import NS_PER_S, Clock

Resolve = Callable[[str, int], list[str]]
"""Host and port to addresses, or OSError."""

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_HEADERS: Final = [
    (b"Accept", ", ".join(sorted(MEDIA_TYPES.keys() - {"image/jpg"})).encode()), (b"Accept-Encoding", b"identity"),
    (b"User-Agent", b"vla-runtime"), (b"Connection", b"close"),
]  # fmt: skip


class FetchError(ValueError):
    """No image came; the text is for who asked for it. ``is_refused``: nothing but another URL helps."""

    def __init__(self, message: str, is_refused: bool = True) -> None:
        """``is_refused`` False: the other server failed, and may not the next time."""
        super().__init__(message)
        self.is_refused = is_refused


@dataclass(frozen=True, slots=True)
class Fetched:
    """A body, and what it is declared to be (one of MEDIA_TYPES); its bytes are not checked yet."""

    data: bytes
    media_type: str


class ImageFetcher:
    """Fetches in the thread that asks; safe in several."""

    def __init__(
        self, rules: FetchRules, clock: Clock, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """``resolve`` and ``tls`` replace the system's resolver and trust."""
        self._rules, self._clock = rules, clock
        self._resolve = resolve if resolve is not None else system_resolve
        self._tls = tls if tls is not None else httpcore.default_ssl_context()
        self._networks = [ipaddress.ip_network(network) for network in rules.allow_networks]

    def fetch(self, url: str, max_bytes: int) -> Fetched:
        """An image of at most so many bytes.

        Raises:
            FetchError: refused, or not got.
        """
        end_ns = self._clock.monotonic_ns() + round(self._rules.timeout_s * NS_PER_S)
        try:
            for _ in range(self._rules.max_redirects + 1):
                target = check_url(url, self._rules.allow_hosts, self._rules.allow_http)
                found = self._get(target, max_bytes, end_ns)
                if isinstance(found, Fetched):
                    return found
                url = self._next(target, found)
        except AddressRefused as error:
            raise FetchError(str(error)) from error
        except httpcore.TimeoutException as error:
            raise FetchError(f"the image did not come within {self._rules.timeout_s:g} s", False) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            told = str(error)[:200] or type(error).__name__
            raise FetchError(f"the image could not be fetched: {told}", False) from error
        raise FetchError(f"the URL leads on more than {self._rules.max_redirects} times")

    def _next(self, target: Target, location: str) -> str:
        url = urljoin(target.url, location)
        if target.scheme == "https" and not url.lower().startswith("https:"):
            raise FetchError("the URL leads from https to something else")
        return url

    def _get(self, target: Target, max_bytes: int, end_ns: int) -> Fetched | str:
        """The image, or where it is."""
        left = _Deadline(self._clock, end_ns)
        backend = _CheckedBackend(self._resolve, self._networks, left)
        with httpcore.ConnectionPool(self._tls, max_connections=1, network_backend=backend) as pool:
            url = httpcore.URL(
                scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path.encode()
            )
            with pool.stream("GET", url, headers=[(b"Host", _host(target)), *_HEADERS]) as response:
                headers = _headers(response.headers)
                if response.status in _REDIRECTS:
                    if "location" not in headers:
                        raise FetchError(f"{target.host} answered {response.status} without a location")
                    return headers["location"]
                if response.status != 200:
                    raise FetchError(f"{target.host} answered {response.status}", response.status < 500)
                media_type = _check_headers(headers, max_bytes)
                return Fetched(_body(response.iter_stream(), max_bytes), media_type)


def system_resolve(host: str, port: int) -> list[str]:
    """The system's answer, in its order; OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _host(target: Target) -> bytes:
    return target.url.split("/")[2].encode()


def _headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, value in raw}


def _check_headers(headers: dict[str, str], max_bytes: int) -> str:
    """The declared type."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in MEDIA_TYPES:
        raise FetchError(f"what is there is {media_type[:60]!r}, not a JPEG, PNG or WebP image")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise FetchError("what is there is compressed once more (content-encoding)")
    length = headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 15 or int(length) > max_bytes):
        raise FetchError(f"the image has {length[:20]} bytes, at most {max_bytes} are taken")
    return media_type


def _body(parts: Iterable[bytes], max_bytes: int) -> bytes:
    data = bytearray()
    for part in parts:
        data += part
        if len(data) > max_bytes:
            raise FetchError(f"the image has more than {max_bytes} bytes")
    return bytes(data)


class _Deadline:
    def __init__(self, clock: Clock, end_ns: int) -> None:
        self._clock, self._end_ns = clock, end_ns

    def left_s(self) -> float:
        """Seconds, above 0."""
        left_s = (self._end_ns - self._clock.monotonic_ns()) / NS_PER_S
        if left_s <= 0:
            raise httpcore.ReadTimeout("the time is over")
        return left_s


class _CheckedBackend(httpcore.NetworkBackend):
    """The only way to a socket."""

    def __init__(self, resolve: Resolve, allowed: list[Any], deadline: _Deadline) -> None:
        self._resolve, self._allowed, self._deadline = resolve, allowed, deadline
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        addresses = self._resolve(host, port)
        if not addresses:
            raise AddressRefused(f"host {host} has no address")
        for address in addresses:
            refusal = refusal_of(address, self._allowed)
            if refusal is not None:  # not which: that would tell strangers about this network
                raise AddressRefused(f"host {host} has {refusal}: images are fetched from public addresses only")
        failure: Exception | None = None
        for address in addresses:
            try:
                stream = self._inner.connect_tcp(address, port, self._deadline.left_s(), None, socket_options)
                return _TimedStream(stream, self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure if failure is not None else httpcore.ConnectError(host)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        raise AddressRefused("a Unix socket is not fetched from")


class _TimedStream(httpcore.NetworkStream):
    """Every wait ends at the deadline, so that a server that sends a byte at a time gains nothing."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._inner, self._deadline = inner, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._deadline.left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._deadline.left_s())

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        inner = self._inner.start_tls(ssl_context, server_hostname, self._deadline.left_s())
        return _TimedStream(inner, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
