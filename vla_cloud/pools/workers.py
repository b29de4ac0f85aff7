"""What the gateway sees of the engines behind it, whoever runs them: child processes here, other servers elsewhere.

A worker's id stands for one process: after a restart it is another. An engine that does not speak these messages (an
external server) is driven by an adapter that implements :class:`Workers` and turns them into its own calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vla_cloud.pools.messages import LaneReady, Load, Ready, ToGateway, ToWorker


@dataclass(frozen=True)
class WorkerInfo:
    """One worker as health shows it. ``state``: starting, ready, draining, waiting (to restart), failed, stopped."""

    name: str
    role: str
    state: str
    worker_id: str
    pid: int
    restarts: int
    load: Load | None
    detail: str = ""
    role_switches: int = 0


class WorkersListener(Protocol):
    """Who is told; called in the event loop, and must not block."""

    def worker_ready(self, worker_id: str, ready: Ready | LaneReady) -> None:
        """It can be given work; again when its role changes."""
        ...

    def worker_message(self, worker_id: str, message: ToGateway) -> None:
        """It said something about requests or itself (never Join or Ready)."""
        ...

    def worker_draining(self, worker_id: str) -> None:
        """It finishes what it has and takes nothing new."""
        ...

    def worker_lost(self, worker_id: str, reason: str) -> None:
        """No message goes to or comes from it any more; it may still run."""
        ...

    def worker_dead(self, worker_id: str) -> None:
        """After worker_lost: its process has ended, it writes nothing any more."""
        ...


class Workers(Protocol):
    """The pools."""

    def send(self, worker_id: str, message: ToWorker) -> bool:
        """Never waits. False: it is lost, and the listener has been or will be told."""
        ...

    def infos(self) -> list[WorkerInfo]:
        """All workers."""
        ...
