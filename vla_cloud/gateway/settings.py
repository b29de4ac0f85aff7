"""Settings of the gRPC doors; ``config/cloud.yaml`` explains each value."""

from __future__ import annotations

from dataclasses import dataclass

from vla_common.bus_config import BusError, check_endpoint, is_local

_UNIX = "unix:"


class GatewayError(ValueError):
    """A front door cannot be opened; the message names the remedy."""


def is_reachable(listen: str) -> bool:
    """Whether other machines reach host:port."""
    return not listen.startswith(_UNIX) and not is_local(f"tcp/{listen}")


def check_listen(listen: str, allow_remote: bool, name: str) -> None:
    """Refuse an address that is malformed, or that other machines reach without leave.

    Args:
        listen: host:port, or unix:/path.
        name: of the setting, for the message.

    Raises:
        GatewayError: with the remedy.
    """
    if listen.startswith(_UNIX) and len(listen) > len(_UNIX):
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise GatewayError(f"{name} {listen!r} is not of the form host:port or unix:/path, such as 127.0.0.1:50051")
    try:
        check_endpoint(f"tcp/{listen}", allow_remote)
    except BusError as error:
        raise GatewayError(f"{name}: {error}") from error


@dataclass(frozen=True)
class GrammarRules:
    """Limits of what a schema of a client may cost."""

    cpu_s: float = 1.0
    memory_bytes: int = 1 << 30
    max_waiting: int = 32

    def __post_init__(self) -> None:
        """Refuse values that would serve nobody."""
        if not 0.0 < self.cpu_s <= 60.0:
            raise ValueError(f"cpu_s must be above 0 and at most 60, got {self.cpu_s}")
        if self.memory_bytes < 1 << 26 or self.max_waiting < 1:
            raise ValueError("memory_bytes must be at least 64 MiB, max_waiting at least 1")


@dataclass(frozen=True)
class GrpcRules:
    """Limits of the gRPC servers."""

    max_message_bytes: int = 4_194_304
    max_metadata_bytes: int = 16_384
    max_connections: int = 512
    max_rpcs: int = 2048
    max_streams: int = 512
    slow_reader_s: float = 10.0
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    min_ping_s: float = 10.0
    connection_age_s: float = 3600.0
    connection_grace_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse values that would serve nobody."""
        for name in ("max_message_bytes", "max_metadata_bytes", "max_connections", "max_rpcs", "max_streams"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("slow_reader_s", "keepalive_s", "keepalive_timeout_s", "min_ping_s", "connection_age_s",
                     "connection_grace_s"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
