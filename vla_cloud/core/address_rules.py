"""Which addresses a server may call on behalf of a stranger, and which URLs it may be given. Pure: nothing is resolved.

The tables are those of IANA's special-purpose registries, written out: what the standard library calls global has
changed between versions of Python.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

IPv4 = ipaddress.IPv4Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_IPV4_REFUSED: Final = tuple(map(ipaddress.IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    "168.63.129.16/32",  # the host agent of one large cloud, on a public address
)))  # fmt: skip
_IPV6_GLOBAL: Final = ipaddress.IPv6Network("2000::/3")
_IPV6_REFUSED: Final = tuple(map(ipaddress.IPv6Network, (
    "2001::/23",  # protocols, Teredo (2001::/32) among them: it carries IPv4 addresses
    "2001:db8::/32", "2002::/16",  # 6to4, which carries them, too
    "2620:4f:8000::/48", "3fff::/20",
)))  # fmt: skip
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP: Final = (0x00005EFE, 0x02005EFE)

_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER: Final = re.compile(r"\d+|0x[0-9a-f]*")
_DEFAULT_PORT: Final = {"https": 443, "http": 80}
MAX_URL_CHARS: Final = 2048


class AddressRefused(ValueError):
    """A URL or an address that is not called; the text is for who asked for it."""


def refusal_of(address: str, allowed: Sequence[Network] = ()) -> str | None:
    """Why an address (as a resolver gives it) is not called; None if it may be.

    An IPv6 address that carries an IPv4 one (mapped, NAT64, ISATAP) is judged by that, too. ``allowed``: networks that
    are called although they are special.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "not an address"
    if any(parsed in network for network in allowed if network.version == parsed.version):
        return None
    if isinstance(parsed, IPv4):
        return "a special address" if any(parsed in network for network in _IPV4_REFUSED) else None
    if "%" in address:
        return "an address of one link"
    embedded = parsed.ipv4_mapped or (IPv4(int(parsed) & 0xFFFFFFFF) if parsed in _NAT64 else None)
    if embedded is not None:
        return refusal_of(str(embedded), allowed)
    if parsed not in _IPV6_GLOBAL or any(parsed in network for network in _IPV6_REFUSED):
        return "a special address"
    if int(parsed) >> 32 & 0xFFFFFFFF in _ISATAP:
        return refusal_of(str(IPv4(int(parsed) & 0xFFFFFFFF)), allowed)
    return None


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be asked for: ``scheme`` is https or http, ``path`` has the query and no fragment."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        """In one piece."""
        port = "" if self.port == _DEFAULT_PORT[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}"


def check_url(url: str, allow_hosts: Sequence[str], allow_http: bool) -> Target:
    """Take a URL apart, strictly, and hold it against the list.

    ``allow_hosts``: names; ``*.example.org`` is every name below (not the name itself), ``name:8443`` another port.

    Raises:
        AddressRefused: names what is wrong.
    """
    if len(url) > MAX_URL_CHARS or not url.isascii() or re.search(r"[\x00-\x20\x7f\\]", url):
        raise AddressRefused(f"a URL has at most {MAX_URL_CHARS} ASCII characters, without spaces and backslashes")
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
    except ValueError as error:
        raise AddressRefused(f"the URL cannot be read: {error}") from error
    if scheme not in (("https", "http") if allow_http else ("https",)):
        raise AddressRefused(f"scheme {scheme[:20]!r} is not fetched: use https, or send the image as a data: URL")
    if "@" in parts.netloc:
        raise AddressRefused("a URL with a user name or password is not fetched")
    host = host.lower()
    check_host(host)
    port = _DEFAULT_PORT[scheme] if port is None else port
    if not any(_matches(host, port, port == _DEFAULT_PORT[scheme], pattern) for pattern in allow_hosts):
        raise AddressRefused(f"images are not fetched from {host}:{port}: send the image as a data: URL")
    return Target(scheme, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def check_host(host: str) -> None:
    """Refuse what is not a name: also every spelling of an address (decimal, octal, hexadecimal, short, bracketed).

    Raises:
        AddressRefused: see above.
    """
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise AddressRefused(f"host {host[:80]!r} is not a name in ASCII (without a dot at its end)")
    if _NUMBER.fullmatch(labels[-1]):  # as browsers tell an IPv4 address from a name
        raise AddressRefused(f"host {host[:80]!r} is an address: only names are fetched from")


def _matches(host: str, port: int, is_default_port: bool, pattern: str) -> bool:
    name, _, listed = pattern.lower().partition(":")
    if (listed != str(port)) if listed else not is_default_port:
        return False
    return host.endswith(name[1:]) and host != name[2:] if name.startswith("*.") else host == name
