"""The link between two real Zenoh networks on loopback."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from free_port import free_endpoint

from vla_common.clock import NS_PER_S, SystemClock, sleep_s
from vla_common.messages import new
from vla_common.process import StopFlag
from vla_common.wire import encode, make_header
from vla_common.zenoh_session import Bus, Publisher, QueueSubscriber, Received, open_bus
from vla_sim.event_log import EventLog, read_events
from vla_sim.faults import DirectionFaults, EpisodeOutage, LinkFaults
from vla_sim.link_main import LinkService

CLOCK = SystemClock()


def exchange(publisher: Publisher, subscriber: QueueSubscriber) -> tuple[int, int, Received]:
    """When the sample that arrived first was sent, its sequence number, and the sample. Others go before it while the
    subscriptions travel, or a link is gone because the machine stood still: each has a payload of its own."""
    sent: dict[bytes, tuple[int, int]] = {}
    for number in range(200):
        payload = f"{publisher.spec.name} {number}".encode()
        sent[payload] = CLOCK.monotonic_ns(), publisher.sequence + 1
        publisher.put(payload)
        received = wait_for(subscriber, 0.3)
        if received is not None:
            return *sent[received.payload], received
    raise AssertionError("nothing arrives")


def wait_for(subscriber: QueueSubscriber, timeout_s: float) -> Received | None:
    deadline_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
    while (received := subscriber.try_recv()) is None and CLOCK.monotonic_ns() < deadline_ns:
        sleep_s(CLOCK, 0.002)
    return subscriber.try_recv() if received is None else received


def status(phase: str) -> bytes:
    return encode(new("TaskStatus", header=make_header(CLOCK.monotonic_ns()), phase=phase, episode=0, elapsed_s=0.0))


def test_forwards_both_ways_delays_and_cuts(tmp_path: Path) -> None:
    link_at, cloud_at, bus_at = (free_endpoint() for _ in range(3))
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
            session.wait_connected(60.0)

        sent_ns, sequence, received = exchange(up, observations)
        assert 0.2 <= (received.received_ns - sent_ns) / NS_PER_S
        assert received.attachment is not None and received.attachment.sequence == sequence
        assert received.attachment.gid == up._gid, "attachments pass unchanged"
        exchange(down, contexts)

        task.put(status("homing"))
        while not read_events(tmp_path / "events.jsonl"):
            task.put(status("running"))
            sleep_s(CLOCK, 0.05)
        while wait_for(contexts, 0.6) is not None:  # what was sent before the outage
            pass
        before = service.report()["down"]
        while (after := service.report()["down"])["cut"] == before["cut"]:
            down.put(b"lost")
            assert wait_for(contexts, 0.6) is None
        assert after["delivered"] == before["delivered"]
        (event,) = read_events(tmp_path / "events.jsonl")
        assert event["kind"] == "outage" and event["end_ns"] - event["start_ns"] == 30 * NS_PER_S
    finally:
        stop.set()
        for opened in reversed(buses):
            opened.close()
        thread.join(2.0)
