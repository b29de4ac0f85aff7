"""The link between two real Zenoh networks on loopback."""

from __future__ import annotations

import threading
from pathlib import Path

from vla_common.clock import NS_PER_S, SystemClock, sleep_s
from vla_common.messages import new
from vla_common.process import StopFlag
from vla_common.wire import encode, make_header
from vla_common.zenoh_session import Bus, Publisher, QueueSubscriber, Received, open_bus
from vla_sim.event_log import EventLog, read_events
from vla_sim.faults import DirectionFaults, EpisodeOutage, LinkFaults
from vla_sim.link_main import LinkService
from vla_sim.ports import with_free_port

CLOCK = SystemClock()


def warm_up(publisher: Publisher, subscriber: QueueSubscriber) -> None:
    """Send until the subscriptions have travelled, then let what is under way arrive."""
    for _ in range(100):
        publisher.put(b"warm")
        if wait_for(subscriber, 0.3) is not None:
            break
    while wait_for(subscriber, 0.6) is not None:
        pass


def wait_for(subscriber: QueueSubscriber, timeout_s: float = 10.0) -> Received | None:
    deadline_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
    while CLOCK.monotonic_ns() < deadline_ns:
        received = subscriber.try_recv()
        if received is not None:
            return received
        sleep_s(CLOCK, 0.002)
    return None


def status(phase: str) -> bytes:
    return encode(new("TaskStatus", header=make_header(CLOCK.monotonic_ns()), phase=phase, episode=0, elapsed_s=0.0))


def test_forwards_both_ways_delays_and_cuts(tmp_path: Path) -> None:
    link_at, cloud_at, bus_at = (with_free_port("tcp/127.0.0.1:0") for _ in range(3))
    faults = LinkFaults(up=DirectionFaults(delay_s=0.2), episode_outage=EpisodeOutage(30.0, 0.0, 0.0))
    service = LinkService(faults, 0, CLOCK, EventLog(tmp_path / "events.jsonl", CLOCK))
    stop = StopFlag()
    buses: list[Bus] = []

    def bus(endpoint: str, role: str, node: str) -> Bus:
        buses.append(open_bus(endpoint, role, node=node))  # type: ignore[arg-type]
        return buses[-1]

    try:
        cloud, robot = bus(cloud_at, "router", "cloud"), bus(bus_at, "router", "robot")
        link_edge, link_cloud, watch = bus(link_at, "router", "a"), bus(cloud_at, "peer", "b"), bus(bus_at, "peer", "c")
        edge = bus(link_at, "peer", "edge")
        service.connect(link_edge, link_cloud, watch, "panda")
        thread = threading.Thread(target=service.run, args=(stop,))
        thread.start()
        observations, contexts = cloud.latest("observation", "panda"), edge.queue("context", "panda")
        up, down = edge.publisher("observation", "panda"), cloud.publisher("context", "panda")
        task = robot.publisher("task_status", "panda")
        for session in (edge, link_cloud, watch):
            session.wait_connected(20.0)
        warm_up(up, observations)
        warm_up(down, contexts)

        sent_ns = CLOCK.monotonic_ns()
        up.put(b"observation")
        received = wait_for(observations)
        assert received is not None and received.payload == b"observation"
        assert 0.2 <= (received.received_ns - sent_ns) / NS_PER_S
        assert received.attachment is not None and received.attachment.sequence == up.sequence
        assert received.attachment.gid == up._gid, "attachments pass unchanged"

        down.put(b"context")
        received = wait_for(contexts)
        assert received is not None and received.payload == b"context"

        before = service.report()["down"]
        task.put(status("homing"))
        while not read_events(tmp_path / "events.jsonl"):
            task.put(status("running"))
            sleep_s(CLOCK, 0.05)
        down.put(b"lost")
        assert wait_for(contexts, 0.6) is None
        after = service.report()["down"]
        assert (after["cut"], after["delivered"]) == (before["cut"] + 1, before["delivered"])
        (event,) = read_events(tmp_path / "events.jsonl")
        assert event["kind"] == "outage" and event["end_ns"] - event["start_ns"] == 30 * NS_PER_S
    finally:
        stop.set()
        for opened in reversed(buses):
            opened.close()
        thread.join(2.0)
