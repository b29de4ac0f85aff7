"""Connectors by name, so that an installation without NIXL never imports it."""

from __future__ import annotations

from typing import Final

from vla_cloud.kv_transfer.connector import KvReceiver, KvSender
from vla_cloud.kv_transfer.memory import KvMemory
from vla_cloud.kv_transfer.receiver import ReceiverOptions
from vla_cloud.kv_transfer.sender import SenderOptions
from vla_common.clock import Clock

KINDS: Final = ("shm", "tcp", "nixl")


class ConnectorMissing(RuntimeError):
    """The connector's library is not installed."""


def make_receiver(kind: str, memory: KvMemory, clock: Clock, options: ReceiverOptions | None = None, *,
                  host: str = "127.0.0.1", port: int = 0, advertise: str | None = None) -> KvReceiver:
    """A receiver over the pool. ``host``, ``port``, ``advertise`` are for tcp and nixl.

    Raises:
        ValueError: unknown kind. ConnectorMissing. OSError: the address cannot be listened at.
    """
    if kind == "shm":
        from vla_cloud.kv_transfer.shared_memory import SharedMemoryReceiver
        return SharedMemoryReceiver(memory, clock, options)
    if kind == "tcp":
        from vla_cloud.kv_transfer.tcp import TcpReceiver
        return TcpReceiver(memory.layout, memory.array, clock, options, host, port, advertise)
    if kind == "nixl":
        _require_nixl()
        from vla_cloud.kv_transfer.nixl import NixlReceiver
        return NixlReceiver(memory.layout, memory.array, clock, options, host, port, advertise)
    raise ValueError(f"kv transfer {kind!r}; known: {', '.join(KINDS)}")


def make_sender(kind: str, memory: KvMemory, clock: Clock, options: SenderOptions | None = None) -> KvSender:
    """A sender from the pool; errors as :func:`make_receiver`."""
    if kind == "shm":
        from vla_cloud.kv_transfer.shared_memory import SharedMemorySender
        return SharedMemorySender(memory.layout, memory.array, clock, options)
    if kind == "tcp":
        from vla_cloud.kv_transfer.tcp import TcpSender
        return TcpSender(memory.layout, memory.array, clock, options)
    if kind == "nixl":
        _require_nixl()
        from vla_cloud.kv_transfer.nixl import NixlSender
        return NixlSender(memory.layout, memory.array, clock, options)
    raise ValueError(f"kv transfer {kind!r}; known: {', '.join(KINDS)}")


def _require_nixl() -> None:
    try:
        import nixl_cu12  # noqa: F401
    except ImportError as error:
        raise ConnectorMissing("kv transfer \"nixl\" needs: pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 "
                               f"({error})") from error
