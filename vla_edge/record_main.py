"""``vla record``: the topics of a running robot and of its cloud link into one MCAP file, without an edge.

The file is laid out as that of ``vla edge --record``. Subscribes only: nothing is published or stored elsewhere.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vla_common.clock import NS_PER_S, Clock, SystemClock
from vla_common.config import ConfigError
from vla_common.logging_setup import add_log_argument, setup_logging
from vla_common.manifest import ManifestError, load_manifest
from vla_common.process import StopFlag, end_with_parent, stop_on_signals
from vla_common.zenoh_session import BusError
from vla_edge.adapters.mcap_recorder import McapRecorder, RecordingError
from vla_edge.cloud_link import open_cloud_link
from vla_edge.config import EdgeConfig, load_edge_config
from vla_edge.core.trace import METADATA
from vla_edge.recorder_main import POLL_S, drain, free_path, subscribe
from vla_edge.robot_bus import RobotSubscriber, open_robot_bus

LOG = logging.getLogger(__name__)

NODE: Final = "vla_record"
REPORT_S: Final = 5.0
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


@dataclass(frozen=True)
class RecordOptions:
    """What to record.

    Attributes:
        path: MCAP file; with a number before its suffix if it exists. config: the edge's settings.
        cameras: names of the cameras; those of the model's manifest if none is given.
        duration_s: end by itself after so long; None: at a signal.
    """

    path: Path
    config: EdgeConfig
    cameras: tuple[str, ...]
    duration_s: float | None


def parse(argv: Sequence[str] | None) -> RecordOptions:
    """Options from the command line.

    Raises:
        ConfigError, ManifestError: with the remedy.
    """
    parser = argparse.ArgumentParser(
        prog="vla record", description="Record all topics of a running robot and of its cloud link, without an edge.",
        epilog="Give it the settings of the robot's edge (--config, --set): 'vla replay' takes them from the file.")
    parser.add_argument("file", type=Path, metavar="FILE.mcap",
                        help="where to; an existing file is kept and FILE-2.mcap made")
    parser.add_argument("--config", type=Path, help="settings of the edge, such as config/edge.yaml; default: built in")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one setting; may be repeated")
    parser.add_argument("--bus", metavar="ENDPOINT", help="robot bus, such as tcp/127.0.0.1:7447, or ros")
    parser.add_argument("--cloud", metavar="ENDPOINT", help="cloud link, such as tcp/127.0.0.1:7448")
    parser.add_argument("--robot-id", metavar="ID", dest="robot_id", help="robot id in topics")
    parser.add_argument("--model", metavar="FOLDER", help="model folder, for the names of its cameras")
    parser.add_argument("--camera", action="append", default=[], metavar="NAME", dest="cameras",
                        help="record this camera instead of the model's; may be repeated; no model folder is needed")
    parser.add_argument("--duration", type=float, metavar="S", dest="duration_s", help="end after so many seconds")
    add_log_argument(parser)
    options = parser.parse_args(argv)
    given = [f"{key}={value}" for key in ("bus", "cloud", "model", "robot_id")
             if (value := getattr(options, key)) is not None]
    config = load_edge_config(options.config, [*options.overrides, *given])
    if options.duration_s is not None and not options.duration_s > 0.0:
        raise ConfigError(f"--duration must be positive, got {options.duration_s}")
    cameras = options.cameras or [camera.name for camera in load_manifest(config.model, verify=False).cameras]
    return RecordOptions(options.file, config, tuple(cameras), options.duration_s)


def record(options: RecordOptions, stop: StopFlag, clock: Clock) -> Counter[str]:
    """Record until ``stop`` is set or the time is up.

    Returns:
        Number of messages by ROS topic; 0 for a topic on which nothing was heard.

    Raises:
        BusError, ConfigError, RecordingError: with the remedy.
    """
    config = options.config
    try:
        robot_text = config.robot_file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"no robot file {config.robot_file} ({error.strerror}): set robot_file to the robot's, "
                          "'vla replay' needs it") from error
    with open_robot_bus(config, NODE, clock) as bus, \
            open_cloud_link(config, NODE, watch=True) as cloud:
        try:
            readers = subscribe({"bus": bus, "cloud": cloud}, config, list(options.cameras))
        except ValueError as error:  # an id that is none
            raise ConfigError(str(error)) from error
        recorder = McapRecorder(free_path(options.path))
        try:
            recorder.describe(METADATA, {"settings": config.to_json(), "robot_file": robot_text})
            LOG.info("recording robot %s to %s; end with Ctrl-C", config.robot_id, recorder.path)
            _until_stopped(readers, recorder, options.duration_s, stop, clock)
        finally:
            recorder.close()
    LOG.info("%d messages in %s", recorder.messages, recorder.path)
    return Counter({topic: recorder.counts.get(topic, 0) for topic, _ in readers})


def _until_stopped(readers: list[tuple[str, RobotSubscriber]], recorder: McapRecorder, duration_s: float | None,
                   stop: StopFlag, clock: Clock) -> None:
    begin_ns = report_ns = clock.monotonic_ns()
    while not stop.wait(POLL_S):
        drain(readers, recorder, clock)
        recorder.flush()
        now_ns = clock.monotonic_ns()
        if now_ns - report_ns >= REPORT_S * NS_PER_S:
            report_ns = now_ns
            LOG.info("%d messages so far", recorder.messages)
        if duration_s is not None and now_ns - begin_ns >= duration_s * NS_PER_S:
            break
    drain(readers, recorder, clock)


def main(argv: Sequence[str] | None = None) -> int:
    """Record until SIGINT, SIGTERM or --duration.

    Returns:
        Exit code: 0; 1 if the recording failed or nothing was heard at all; 2 for wrong settings.
    """
    setup_logging("record")
    end_with_parent()
    try:
        options = parse(argv)
        counts = record(options, stop_on_signals(), SystemClock())
    except (ConfigError, ManifestError, BusError) as error:
        LOG.error("%s", error)
        return EXIT_USAGE
    except RecordingError as error:
        LOG.error("%s", error)
        return EXIT_FAILED
    for topic, count in counts.most_common():
        LOG.info("%7d  %s", count, topic)
    if not counts.total():
        LOG.error("nothing was heard: is robot_id %r right, and does anything run on %s and %s?",
                  options.config.robot_id, options.config.bus, options.config.cloud)
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
