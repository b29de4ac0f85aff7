"""The recorder process: the wire bytes of every topic of both networks into one MCAP file. Nothing waits for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from vla_common.clock import Clock, sleep_s
from vla_common.joint_command import command_template
from vla_common.manifest import load_manifest
from vla_common.topics import TOPICS
from vla_edge.adapters.mcap_recorder import McapRecorder, RecordingError
from vla_edge.child import Child, PermanentError, main_exit, run
from vla_edge.cloud_link import open_cloud_link
from vla_edge.config import EdgeConfig
from vla_edge.core.trace import METADATA
from vla_edge.robot_bus import RobotBus, RobotSubscriber, command_spec, image_spec, open_robot_bus

LOG = logging.getLogger(__name__)

POLL_S: Final = 0.02
QUEUE: Final = 256


def free_path(path: Path) -> Path:
    """``path``, or with a number before the suffix if it exists: a restarted recorder keeps its predecessor's file."""
    candidate, number = path, 2
    while candidate.exists():
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1
    return candidate


def subscribe(buses: dict[str, RobotBus], config: EdgeConfig,
              cameras: list[str]) -> list[tuple[str, RobotSubscriber]]:
    """A queue for every topic: ROS topic name and subscriber. Buses by network."""
    command = command_template(config.ros.command_output, ["any"], config.motor.period_s).type_name
    own = {"image": image_spec(config), "joint_command": command_spec(config, command)}
    readers = []
    for name, row in TOPICS.items():
        spec = own.get(name, row)
        for camera in cameras if "{camera}" in spec.pattern else [""]:
            readers.append((spec.topic(config.robot_id, camera),
                            buses[spec.network].queue(spec, config.robot_id, camera, capacity=QUEUE)))
    return readers


def drain(readers: list[tuple[str, RobotSubscriber]], recorder: McapRecorder, clock: Clock) -> None:
    """Write everything that has arrived."""
    for topic, subscriber in readers:
        spec = subscriber.spec
        for _ in range(QUEUE):
            received = subscriber.try_recv()
            if received is None:
                break
            now_ns = clock.wall_ns()
            sent = received.attachment
            recorder.write(topic, spec.type_name, received.payload, now_ns,
                           now_ns if sent is None else sent.source_time_ns, 0 if sent is None else sent.sequence)


def body(child: Child) -> None:
    """Record until told to stop."""
    config = child.config
    if config.record is None:
        raise PermanentError("no file to record to: give --record FILE.mcap")
    cameras = [camera.name for camera in load_manifest(config.model, verify=False).cameras]
    try:
        recorder = McapRecorder(free_path(config.record))
        # All that 'vla replay' needs beside the messages.
        recorder.describe(METADATA, {"settings": config.to_json(),
                                     "robot_file": config.robot_file.read_text(encoding="utf-8")})
        with open_robot_bus(config, "vla_recorder", child.clock) as bus, \
                open_cloud_link(config, "vla_recorder") as cloud:
            readers = subscribe({"bus": bus, "cloud": cloud}, config, cameras)
            LOG.info("recording to %s", recorder.path)
            beat = child.memory.blank("recorder")
            beat["pid"] = os.getpid()
            while not child.stop.is_set():
                drain(readers, recorder, child.clock)
                recorder.flush()
                beat["loops"] += 1
                beat["stamp_ns"] = child.clock.monotonic_ns()
                child.memory.write("recorder", beat)
                sleep_s(child.clock, POLL_S)
            drain(readers, recorder, child.clock)
            recorder.close()
        LOG.info("%d messages in %s", recorder.messages, recorder.path)
    except RecordingError as error:
        raise PermanentError(str(error)) from error


if __name__ == "__main__":
    main_exit(run("recorder", body))
