"""Settings of images in chat messages; ``config/cloud.yaml`` explains each value."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from vla_cloud.core.address_rules import AddressRefused, check_host

MAX_PIXELS = 89_478_485
"""Beyond so many the decoder's own guard warns."""


@dataclass(frozen=True)
class FetchRules:
    """Fetching of images by URL. No host: none is fetched."""

    allow_hosts: tuple[str, ...] = ()
    allow_http: bool = False
    allow_networks: tuple[str, ...] = ()
    max_redirects: int = 3
    timeout_s: float = 5.0
    threads: int = 4
    max_pending: int = 32

    def __post_init__(self) -> None:
        """Refuse what no URL could match, and values that would fetch nothing."""
        for pattern in self.allow_hosts:
            name, separator, port = pattern.lower().removeprefix("*.").partition(":")
            try:
                check_host(name)
            except AddressRefused as error:
                raise ValueError(f"allow_hosts {pattern!r}: {error}") from error
            if separator and not (port.isdecimal() and 0 < int(port) < 65536):
                raise ValueError(f"allow_hosts {pattern!r}: the port is not 1 to 65535")
        for network in self.allow_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"allow_networks: {error}; write it as 10.1.2.0/24") from error
        if self.max_redirects < 0:
            raise ValueError(f"max_redirects cannot be negative, got {self.max_redirects}")
        for name in ("timeout_s", "threads", "max_pending"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class ImageRules:
    """Bounds of images in chat messages."""

    max_images: int = 8
    max_bytes: int = 4_194_304
    max_pixels: int = 16_777_216
    max_side: int = 8192
    max_held_pixels: int = 67_108_864
    threads: int = 2
    max_pending: int = 64
    allow_roots: tuple[str, ...] = ()
    fetch: FetchRules = field(default_factory=FetchRules)

    def __post_init__(self) -> None:
        """Refuse values that would take no image, or more than the decoder's own guard."""
        for name in ("max_images", "max_bytes", "max_pixels", "max_side", "threads", "max_pending"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_pixels > MAX_PIXELS:
            raise ValueError(f"max_pixels may be {MAX_PIXELS} at most, got {self.max_pixels}")
        if self.max_held_pixels < self.max_pixels:
            raise ValueError(f"max_held_pixels {self.max_held_pixels} is below max_pixels {self.max_pixels}")
        for root in self.allow_roots:
            if not root.startswith("/"):
                raise ValueError(f"allow_roots {root!r} is not an absolute path")
