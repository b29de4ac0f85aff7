"""The link process of a demo with faults: it stands between edge and cloud and treats messages as the schedule says.

    edge ──connects to──▶ router at --listen ══ Link (delay, loss, outage ...) ══▶ peer at --cloud ──▶ cloud

Payloads are never read, so flipped bits reach the other side; attachments pass unchanged. It also listens to the task
status on the robot bus, for outages that belong to episodes. Nothing here blocks a publisher: receiving threads put
messages into the schedule, one thread takes them out when they are due. SIGHUP reads the fault file again; messages
that enter after that are treated by it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from vla_common.clock import NS_PER_S, Clock, SystemClock
from vla_common.config import ConfigError, load_config
from vla_common.logging_setup import add_log_argument, setup_logging
from vla_common.process import StopFlag, end_with_parent, stop_on_signals
from vla_common.wire import WireError, decode, stamp_ns
from vla_common.zenoh_session import Bus, BusError, Publisher, Received, open_bus
from vla_sim.event_log import EventLog
from vla_sim.faults import FaultPlan, LinkFaults
from vla_sim.link import Direction, Link

LOG = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.05
_RECEIVE_CAPACITY: Final = 64


class LinkService:
    """Moves messages between two buses through a :class:`Link`."""

    def __init__(self, faults: LinkFaults, seed: int, clock: Clock, events: EventLog) -> None:
        """Outages are written to ``events`` as they are planned."""
        self.link = Link(faults, seed)
        self._clock = clock
        self._events = events
        self._changed = threading.Condition()
        self._publishers: dict[Direction, Publisher] = {}

    def connect(self, edge_side: Bus, cloud_side: Bus, robot_bus: Bus | None, robot: str) -> None:
        """Declare both directions and follow the episodes."""
        self._publishers = {"up": cloud_side.publisher("observation", robot),
                            "down": edge_side.publisher("context", robot)}
        edge_side.listen("observation", robot, lambda got: self._enter("up", got), capacity=_RECEIVE_CAPACITY)
        cloud_side.listen("context", robot, lambda got: self._enter("down", got), capacity=_RECEIVE_CAPACITY)
        if robot_bus is not None:
            robot_bus.listen("task_status", robot, self._follow_episode)

    def _enter(self, direction: Direction, received: Received) -> None:
        with self._changed:
            self.link.enter(self._clock.monotonic_ns(), direction, received.payload, received.attachment)
            self._changed.notify()

    def _follow_episode(self, received: Received) -> None:
        try:
            status = decode("TaskStatus", received.payload)
        except WireError as error:
            LOG.warning("task status refused: %s", error)
            return
        if status.phase != "running":
            return
        start_ns = stamp_ns(status.header) - round(status.elapsed_s * NS_PER_S)
        with self._changed:
            windows = self.link.outages.begin_episode(int(status.episode), start_ns)
        for begin_ns, end_ns in windows:
            self._events.write("outage", start_ns=begin_ns, end_ns=end_ns, episode=int(status.episode))

    def change(self, faults: LinkFaults) -> None:
        """Other faults for messages that enter from now on."""
        with self._changed:
            self.link.change(faults)

    def run(self, stop: StopFlag, each_turn: Callable[[], None] = lambda: None) -> None:
        """Deliver until stopped; calls ``each_turn`` at least every _IDLE_WAIT_S."""
        while not stop.is_set():
            each_turn()
            with self._changed:
                now_ns = self._clock.monotonic_ns()
                leaving = self.link.leave(now_ns)
                if not leaving:
                    due_ns = self.link.next_due_ns()
                    wait_s = _IDLE_WAIT_S if due_ns is None else min(_IDLE_WAIT_S, (due_ns - now_ns) / NS_PER_S)
                    self._changed.wait(wait_s)
            for direction, payload, tag in leaving:
                self._publishers[direction].put(payload, tag)  # type: ignore[arg-type]

    def report(self) -> dict[str, Any]:
        """Counters by direction."""
        with self._changed:
            return {name: dataclasses.asdict(counters) for name, counters in self.link.counters.items()}


def _reread(service: LinkService, path: Path, asked: list[int]) -> None:
    """Read the fault file again if that was asked for; a file with an error changes nothing."""
    if not asked:
        return
    asked.clear()
    try:
        plan = load_config(FaultPlan, path)
    except ConfigError as error:
        LOG.error("faults stay as they are: %s", error)
        return
    service.change(plan.link or LinkFaults())
    LOG.info("faults are now: %s", plan.title)


def parser() -> argparse.ArgumentParser:
    """Arguments of the link process."""
    result = argparse.ArgumentParser(prog="python -m vla_sim.link_main", description=__doc__.split("\n\n")[0])
    result.add_argument("--listen", required=True, help="endpoint to host for the edge, such as tcp/127.0.0.1:7449")
    result.add_argument("--cloud", required=True, help="endpoint of the cloud")
    result.add_argument("--bus", help="endpoint of the robot bus, for outages per episode")
    result.add_argument("--faults", type=Path, required=True, help="fault file, such as config/faults/wifi.yaml")
    result.add_argument("--robot", default="arm1", help="robot id in topic names")
    result.add_argument("--seed", type=int, default=0, help="seed of all draws")
    result.add_argument("--events", type=Path, help="append events as JSON lines here")
    result.add_argument("--report", type=Path, help="write counters as JSON here at the end")
    add_log_argument(result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    end_with_parent()
    setup_logging("link")
    stop = stop_on_signals()
    asked: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, frame: asked.append(number))
    arguments = parser().parse_args(argv)
    clock = SystemClock()
    try:
        plan = load_config(FaultPlan, arguments.faults)
        service = LinkService(plan.link or LinkFaults(), arguments.seed, clock, EventLog(arguments.events, clock))
        with open_bus(arguments.listen, "router", node="vla_link_edge", clock=clock) as edge_side, \
                open_bus(arguments.cloud, node="vla_link_cloud", clock=clock) as cloud_side:
            robot_bus = open_bus(arguments.bus, node="vla_link_watch", clock=clock) if arguments.bus else None
            service.connect(edge_side, cloud_side, robot_bus, arguments.robot)
            print(f"READY {arguments.listen} {plan.title}", flush=True)
            service.run(stop, partial(_reread, service, arguments.faults, asked))
            if robot_bus is not None:
                robot_bus.close()
    except (ConfigError, BusError) as error:
        LOG.error("%s", error)
        return 2
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(service.report(), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
