"""The loop of a worker process: control messages in, one engine step, messages out; one thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from vla_cloud.pools.link import LinkClosed, WorkerLink
from vla_cloud.pools.messages import (
    PROTOCOL_VERSION,
    Error,
    Hello,
    Join,
    LaneReady,
    Ready,
    Shutdown,
    ToGateway,
    ToWorker,
)
from vla_cloud.pools.supervisor import SECRET_VARIABLE
from vla_common.process import StopFlag

LOG = logging.getLogger(__name__)

IDLE_S: Final = 0.5
"""Longest wait without work."""

FAREWELL_S: Final = 1.0
"""Longest wait for the last words to leave."""


class Engine(Protocol):
    """What a worker process runs: :class:`vla_cloud.engine.worker_engine.WorkerEngine`, or a robot lane."""

    def ready(self, worker: str) -> Ready | LaneReady:
        """What it can do, under this worker id."""
        ...

    def handle(self, message: ToWorker) -> None:
        """Any message but Hello and Shutdown; never waits."""
        ...

    def step(self) -> bool:
        """One step; False if there was nothing to do."""
        ...

    def events(self) -> Iterable[ToGateway]:
        """Messages for the gateway since the last call."""
        ...

    def wait_fds(self) -> Sequence[int]:
        """Descriptors that are readable when there is something to do."""
        ...

    def wait_s(self) -> float | None:
        """How long nothing happens without a message or a readable descriptor; None: for ever."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine has ended; None while it works."""
        ...

    def close(self) -> None:
        """Let go of memory, sockets and files."""
        ...


def connect(address: str, worker: str) -> WorkerLink:
    """Link to the gateway that started this process.

    Raises:
        LinkClosed: it is gone.
    """
    return WorkerLink.connect(address, Join(worker, os.environ.pop(SECRET_VARIABLE, ""), os.getpid()))


def serve(link: WorkerLink, engine: Engine, stop: StopFlag) -> None:
    """Serve until Shutdown, the loss of the gateway, or ``stop``.

    Raises:
        ValueError: the gateway speaks another protocol version.
        RuntimeError: the engine has failed; the gateway knows.
    """
    busy = False
    try:
        while not stop.is_set():
            for message in link.poll(0.0 if busy else _idle_s(engine), [*engine.wait_fds(), stop.fileno()]):
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, Hello):
                    _hello(link, engine, message)
                else:
                    engine.handle(message)
            busy = engine.step()
            for event in engine.events():
                link.send(event)
            if engine.failure is not None:
                link.drain(FAREWELL_S)
                raise RuntimeError(engine.failure)
    except LinkClosed as error:
        LOG.info("the worker ends: %s", error)


def _idle_s(engine: Engine) -> float:
    wait_s = engine.wait_s()
    return IDLE_S if wait_s is None else min(IDLE_S, wait_s)


def _hello(link: WorkerLink, engine: Engine, message: Hello) -> None:
    if message.version != PROTOCOL_VERSION:
        text = f"the gateway speaks version {message.version}, this worker {PROTOCOL_VERSION}: install one version"
        link.send(Error("FAILED_PRECONDITION", text))
        link.drain(FAREWELL_S)
        raise ValueError(text)
    link.send(engine.ready(message.worker))
