"""What a session publishes and reads with. Made by :class:`vla_common.zenoh_session.Bus`, of which this is a part."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import zenoh

from vla_common.bus_config import BusError
from vla_common.clock import Clock
from vla_common.topics import Attachment, TopicSpec, pack_attachment, unpack_attachment

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Received:
    """One sample. ``received_ns`` is the monotonic instant at which it left the ring, not of its arrival."""

    payload: bytes
    attachment: Attachment | None
    received_ns: int
    key: str


class Publisher:
    """Sends payloads with the attachment of rmw_zenoh; never blocks. For one thread."""

    kind: Final[Literal["MP"]] = "MP"

    def __init__(self, spec: TopicSpec, topic: str, clock: Clock) -> None:
        """Use :meth:`Bus.publisher`."""
        self.spec = spec
        self.topic = topic
        self.sequence = 0
        self._declared: zenoh.Publisher | None = None
        self._gid = b""
        self._clock = clock
        self.closed = threading.Event()

    def put(self, payload: bytes, attachment: Attachment | None = None) -> None:
        """Send; dropped when no one listens or the link is congested. Sequence numbers count from 1.

        Args:
            payload: the bytes to send.
            attachment: of a forwarded sample, passed on as it is; default one of this publisher's own.

        Raises:
            BusError: the bus is closed.
        """
        self.sequence += 1
        declared = self._declared
        try:
            if declared is not None:
                own = attachment or Attachment(self.sequence, self._clock.wall_ns(), self._gid)
                declared.put(payload, attachment=pack_attachment(own.sequence, own.source_time_ns, own.gid))
        except zenoh.ZError as error:
            raise BusError(f"cannot publish {self.spec.name}: {error}") from error
        if self.closed.is_set():
            raise BusError(f"cannot publish {self.spec.name}: the bus is closed")

    def declare(self, session: zenoh.Session, key: str, gid: bytes) -> zenoh.Publisher:
        """Called by the bus once its session is open."""
        self._gid = gid
        self._declared = session.declare_publisher(
            key,
            congestion_control=zenoh.CongestionControl.DROP,
            priority=getattr(zenoh.Priority, self.spec.priority.upper()),
            reliability=getattr(zenoh.Reliability, self.spec.reliability.upper()),
            express=True,
        )
        return self._declared


class QueueSubscriber:
    """The newest samples of a topic, oldest first. For one thread, except :meth:`close`."""

    kind: Final[Literal["MS"]] = "MS"

    def __init__(self, spec: TopicSpec, topic: str, capacity: int, clock: Clock) -> None:
        """Use :meth:`Bus.latest` or :meth:`Bus.queue`."""
        self.spec = spec
        self.topic = topic
        self._capacity = capacity
        self._clock = clock
        self._declared: Any = None
        self._handler: zenoh.handlers.Handler[zenoh.Sample] | None = None
        self._ready = threading.Event()
        self.closed = _WakingEvent(self._ready)

    def try_recv(self) -> Received | None:
        """Next sample, or None at once if there is none (also before the bus has connected and after it has closed)."""
        if self._handler is None:
            return None
        try:
            sample = self._handler.try_recv()
        except zenoh.ZError:  # channel closed
            return None
        return None if sample is None else self._received(sample)

    def close(self) -> None:
        """End the subscription before the bus does; :meth:`serve` returns. From any thread, more than once."""
        self.closed.set()
        if self._declared is not None:
            undeclare(self._declared)

    def serve(self, callback: Callable[[Received], None]) -> None:
        """Call back with each sample until this subscriber or the bus closes; blocks.

        An exception in the callback is logged and the next sample is served.
        """
        self._ready.wait()
        handler = self._handler
        while handler is not None and not self.closed.is_set():
            try:
                sample = handler.recv()
            except zenoh.ZError:  # channel closed
                return
            try:
                callback(self._received(sample))
            except Exception:
                LOG.exception("the receiver of %s failed", self.spec.name)

    def declare(self, session: zenoh.Session, key: str, gid: bytes) -> Any:
        """Called by the bus once its session is open."""
        self._declared = session.declare_subscriber(key, zenoh.handlers.RingChannel(self._capacity))
        # Undeclaring ends recv() on this copy; while recv() runs on the subscriber itself, undeclaring it fails.
        self._handler = self._declared.handler
        self._ready.set()
        if self.closed.is_set():  # closed before the session was there
            undeclare(self._declared)
        return self._declared

    def _received(self, sample: zenoh.Sample) -> Received:
        attachment = None if sample.attachment is None else unpack_attachment(sample.attachment.to_bytes())
        return Received(sample.payload.to_bytes(), attachment, self._clock.monotonic_ns(), str(sample.key_expr))


class _WakingEvent(threading.Event):
    """An event that sets another with itself."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    def set(self) -> None:
        super().set()
        self._other.set()


def undeclare(entity: Any) -> None:
    """End a publisher, subscriber or token; nothing happens when it has ended already."""
    try:
        entity.undeclare()
    except zenoh.ZError as error:  # undeclared before, or its session is gone: nothing is left to undo
        LOG.debug("undeclare: %s", error)


LatestSubscriber = QueueSubscriber
"""A subscriber of capacity one."""
