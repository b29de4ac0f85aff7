"""Zenoh sessions. Only this file and zenoh_endpoints.py, which is a part of it, import zenoh.

Choices that come from measurements:

* Readers keep the newest sample only (a ring of one), or a bounded ring for the recorder. A queue that blocks when full
  would stall every subscriber of the session.
* Publishers drop instead of blocking, and send at once (express).
* A session that joins is there at once and connects in the background, now or when the other side comes up, and again
  for ever: Zenoh's own open blocks until then, so it runs in a thread, and what was declared before is declared after.
* Shared memory is off: its segments would outlive a killed process.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import zenoh

from vla_common.bus_config import BusError, Role, check_endpoint, session_config
from vla_common.clock import NS_PER_S, Clock, SystemClock
from vla_common.topics import (
    ANY_ROBOT,
    NodeId,
    TopicSpec,
    data_key,
    endpoint_token,
    node_token,
    token_gid,
    topic_spec,
)
from vla_common.zenoh_endpoints import LatestSubscriber, Publisher, QueueSubscriber, Received, undeclare

LOG = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 1.0
OPEN_WAIT_S: Final = 0.2
"""How long open_bus waits for a router that is up; a bus without one is returned unconnected after this."""

# Noise without a remedy: zenoh_task complains 10 s after a session closed about tasks of that session, "establishment"
# four times a second about a log-in that is refused (vla_common/link_watch.py tells it once), "token" about the end of
# tokens that access control refused.
_LOG_FILTER: Final = (
    "error,zenoh_task=off,zenoh_transport::unicast::establishment=off,zenoh::net::routing::hat::broker::token=off"
)

__all__ = [
    "Bus",
    "BusError",
    "LatestSubscriber",
    "Publisher",
    "QueueSubscriber",
    "Received",
    "check_endpoint",
    "open_bus",
    "read_access_control",
]


def open_bus(
    endpoint: str,
    role: Role = "peer",
    *,
    node: str,
    namespace: str = "/",
    domain: int = 0,
    isolated: bool = False,
    allow_remote: bool = False,
    clock: Clock | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Bus:
    """Open a session on one network.

    Args:
        endpoint: Zenoh locator, such as ``tcp/127.0.0.1:7447``; ``router`` listens on it, ``peer`` connects to it.
        role: ``router`` hosts the network (one process does), ``peer`` joins it, now or whenever it comes up.
        node: ROS node name shown to ROS tools.
        namespace: ROS namespace of the node.
        domain: ROS domain id.
        isolated: a peer that exchanges samples with the router's process only, not with other peers.
        allow_remote: permit an endpoint outside loopback that is not encrypted.
        clock: time source for receive stamps and for source stamps.
        settings: further ones of Zenoh, such as :func:`vla_common.link_security.host_settings`.

    Raises:
        BusError: bad endpoint, or the port is in use.
    """
    check_endpoint(endpoint, allow_remote)
    zenoh.init_log_from_env_or(_LOG_FILTER)
    config = zenoh.Config()
    for key, value in session_config(endpoint, role, isolated, settings).items():
        config.insert_json5(key, json.dumps(value))
    bus = Bus(endpoint, NodeId("", node, namespace, domain), clock or SystemClock())
    if role == "router":
        bus._open(config)
    else:
        # A daemon: zenoh.open has no way to be called off, and the process may end before a router ever comes up.
        threading.Thread(target=bus._open, args=(config,), daemon=True, name="zenoh-open").start()
        bus._opened.wait(OPEN_WAIT_S)
    if bus._failure is not None:
        raise bus._failure
    return bus


def read_access_control(path: Path) -> dict[str, Any]:
    """Zenoh settings of the ``access_control`` in a Zenoh configuration file (JSON5).

    Raises:
        BusError: no such file, or it grants nothing because access control is not enabled in it.
    """
    try:
        found = json.loads(zenoh.Config.from_file(str(path)).get_json("access_control"))
    except zenoh.ZError as error:
        raise BusError(f"robot_link.access {path}: {str(error).split(' at /', 1)[0]}") from error
    if not found.get("enabled"):
        raise BusError(f"robot_link.access {path}: access_control is not enabled in it; 'vla keys' writes such a file")
    return {"access_control": found}


class Bus:
    """A session. Close it, or use it in a ``with`` block; thread-safe."""

    def __init__(self, endpoint: str, node: NodeId, clock: Clock) -> None:
        """Use :func:`open_bus`."""
        self.endpoint = endpoint
        self.node = node
        """Its ``zid`` is empty until the session is open."""
        self.clock = clock
        self._session: zenoh.Session | None = None
        self._failure: BusError | None = None
        self._opened = threading.Event()
        self._lock = threading.RLock()
        self._endpoints: list[Publisher | QueueSubscriber] = []
        self._entities: list[Any] = []  # what to undeclare, in reverse order
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Bus:
        """The bus itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    @property
    def closed(self) -> bool:
        """True from the call of :meth:`close` on."""
        return self._closed

    def connected(self) -> bool:
        """True while at least one other session is linked to this one."""
        session = self._session
        return session is not None and not self._closed and len(list(session.info.transports())) > 0

    def wait_connected(self, timeout_s: float, remedy: str = "start the process that hosts it") -> None:
        """Wait for the other side.

        Raises:
            BusError: nothing at the endpoint within ``timeout_s``; names ``remedy``, such as "start 'vla cloud'".
        """
        deadline_ns = self.clock.monotonic_ns() + round(timeout_s * NS_PER_S)
        while not self.connected():
            if self._failure is not None:
                raise self._failure
            if self.clock.monotonic_ns() >= deadline_ns:
                raise BusError(f"no router at {self.endpoint} after {timeout_s:g} s: {remedy}")
            self.clock.sleep_until_ns(self.clock.monotonic_ns() + NS_PER_S // 50)

    def publisher(self, topic: str | TopicSpec, robot: str, camera: str = "") -> Publisher:
        """Publisher of a topic of the table.

        Raises:
            ValueError: a robot or camera id that is not one.
            BusError: the bus is closed.
        """
        spec = topic_spec(topic) if isinstance(topic, str) else topic
        if robot == ANY_ROBOT:
            raise ValueError(f"a publisher of {spec.name!r} needs the id of one robot")
        publisher = Publisher(spec, spec.topic(robot, camera), self.clock)
        self._add(publisher)
        return publisher

    def latest(self, topic: str | TopicSpec, robot: str, camera: str = "") -> LatestSubscriber:
        """Reader that keeps the newest sample; poll it with ``try_recv()``."""
        return self.queue(topic, robot, camera, capacity=1)

    def queue(self, topic: str | TopicSpec, robot: str, camera: str = "", capacity: int = 256) -> QueueSubscriber:
        """Reader that keeps the newest ``capacity`` samples in order, dropping the oldest.

        With ``robot=ANY_ROBOT`` it hears all robots; :func:`vla_common.topics.robot_of` tells whose a sample is. Such
        a subscription is not shown to ROS tools, which know no wildcards.
        """
        spec = topic_spec(topic) if isinstance(topic, str) else topic
        subscriber = QueueSubscriber(spec, spec.topic(robot, camera), capacity, self.clock)
        self._add(subscriber)
        return subscriber

    def listen(
        self,
        topic: str | TopicSpec,
        robot: str,
        callback: Callable[[Received], None],
        camera: str = "",
        capacity: int = 1,
    ) -> None:
        """Call ``callback`` with each newest sample from a thread of its own, until the bus closes."""
        subscriber = self.queue(topic, robot, camera, capacity)
        name = f"listen-{subscriber.spec.name}"
        thread = threading.Thread(target=subscriber.serve, args=(callback,), daemon=True, name=name)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Undeclare everything and close, within a second; safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for endpoint in self._endpoints:
                endpoint.closed.set()
        # In a thread: some zenoh versions hang in close, and a hung close must not hold up the process's end.
        closer = threading.Thread(target=self._close_session, daemon=True, name="zenoh-close")
        closer.start()
        closer.join(CLOSE_TIMEOUT_S)
        if closer.is_alive():
            LOG.warning("zenoh did not close %s within %g s", self.endpoint, CLOSE_TIMEOUT_S)

    def _open(self, config: zenoh.Config) -> None:
        """Open the session, which blocks until connected, and declare what was asked for meanwhile."""
        try:
            session = zenoh.open(config)
        except zenoh.ZError as error:
            text = str(error).split(" at /", 1)[0]
            if "in use" in text:
                text = "it is in use: another router runs there; stop it or choose another port"
            self._failure = BusError(f"cannot open {self.endpoint}: {text}")
            self._failure.__cause__ = error
            LOG.debug("%s", self._failure)
        else:
            with self._lock:
                if self._closed:
                    _close(session)
                    return
                self.node = NodeId(str(session.zid()), self.node.name, self.node.namespace, self.node.domain)
                self._session = session
                self._entities.append(session.liveliness().declare_token(node_token(self.node)))
                for number, endpoint in enumerate(self._endpoints):
                    self._declare(session, number, endpoint)
        self._opened.set()

    def _add(self, endpoint: Publisher | QueueSubscriber) -> None:
        with self._lock:
            if self._closed:
                raise BusError(f"the session on {self.endpoint} is closed")
            self._endpoints.append(endpoint)
            if self._session is not None:
                self._declare(self._session, len(self._endpoints) - 1, endpoint)

    def _declare(self, session: zenoh.Session, number: int, endpoint: Publisher | QueueSubscriber) -> None:
        """Declare an endpoint and the presence token by which ROS tools see it."""
        spec, kind = endpoint.spec, endpoint.kind
        token = endpoint_token(
            self.node, number + 1, kind, endpoint.topic, spec.type_name, spec.reliability, spec.depth
        )
        if ANY_ROBOT not in endpoint.topic:
            self._entities.append(session.liveliness().declare_token(token))
        key = data_key(endpoint.topic, spec.type_name, self.node.domain)
        self._entities.append(endpoint.declare(session, key, token_gid(token)))

    def _close_session(self) -> None:
        with self._lock:
            entities, session = self._entities[::-1], self._session
        for entity in entities:
            undeclare(entity)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT_S / 2)
        if session is not None:
            _close(session)


def _close(session: zenoh.Session) -> None:
    session.close()  # type: ignore[no-untyped-call]
