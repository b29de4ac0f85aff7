"""`vla replay`: run a recording through the motor loop again and compare every command bit by bit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import yaml

from vla_common.clock import Clock
from vla_common.config import ConfigError
from vla_common.process import StopFlag
from vla_common.topics import topic_spec
from vla_common.wire import WireError, decode
from vla_edge.adapters.mcap_reader import McapMessage, McapMetadata, ReadError, read_mcap
from vla_edge.child import Child
from vla_edge.config import EdgeConfig, load_edge_config
from vla_edge.core.joint_limits import JointLimits, LimitsError
from vla_edge.core.motor_loop import MotorLoop, Send
from vla_edge.core.records import EdgeMemory
from vla_edge.core.replay import MakeLoop, Replayed, replay
from vla_edge.core.trace import METADATA, TOPICS, Trace, TraceBuilder, TraceError
from vla_edge.motor_main import build_loop

EXIT_IDENTICAL, EXIT_DIFFERENT, EXIT_UNUSABLE = 0, 1, 2
NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True)
class Recorded:
    """A recording, read.

    Attributes:
        config: settings it was made with. limits: of its robot. trace: of its motor loop.
        refused: messages whose bytes the wire refuses.
    """

    config: EdgeConfig
    limits: JointLimits
    trace: Trace
    refused: int


def parser() -> argparse.ArgumentParser:
    """Command line of `vla replay`."""
    p = argparse.ArgumentParser(
        prog="vla replay",
        description="Run a recording's chunks, joint states and operator commands through the motor loop again, at the "
        "recorded clock, and compare every command bit by bit. Exit code 0: identical, 1: a difference, 2: nothing "
        "could be compared.")
    p.add_argument("recording", type=Path, nargs="+", metavar="RECORDING.mcap",
                   help="made with 'vla edge --record'; several files of one run are read as one")
    p.add_argument("--config", type=Path, help="settings instead of the recorded ones, such as config/edge.yaml")
    p.add_argument("--robot", type=Path, metavar="FILE", help="robot file instead of the recorded one")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                   help="override one setting of --config; may be repeated")
    return p


def read(paths: Sequence[Path], config_file: Path | None = None, robot_file: Path | None = None,
         overrides: Sequence[str] = ()) -> Recorded:
    """A recording and what it was made with.

    Args:
        paths: files of one run. config_file, overrides: settings instead of the recorded ones.
        robot_file: robot file instead of the recorded one.

    Raises:
        ReadError, TraceError, ConfigError: with the remedy.
    """
    messages, described = _read_files(paths)
    if config_file is not None or overrides:
        config = load_edge_config(config_file, overrides)
    elif "settings" in described:
        config = EdgeConfig.from_json(described["settings"])
    else:
        raise TraceError(f"{paths[0]} does not hold the edge's settings: give --config and --robot of that run")
    text = described.get("robot_file") if robot_file is None else robot_file.read_text(encoding="utf-8")
    if text is None:
        raise TraceError(f"{paths[0]} does not hold the robot file: give --robot of that run")
    builder, refused, robots = TraceBuilder(), 0, set()
    by_topic = {topic_spec(name).topic(config.robot_id): name for name in TOPICS}
    if config.is_ros:  # a driver's own stamps, names and order; measured_joints are those that the edge took
        del by_topic[topic_spec("joint_states").topic(config.robot_id)]
    for message in messages:
        robots.add(message.topic.rpartition("/")[0].strip("/"))
        if message.topic in by_topic:
            try:
                builder.take(by_topic[message.topic], decode(message.type_name, message.payload))
            except (WireError, KeyError, TraceError):
                refused += 1
    if config.robot_id not in robots:
        raise TraceError(f"no robot {config.robot_id!r} in the recording, but {sorted(robots)}: --set robot_id=...")
    limits, trace = limits_of(text, config.motor.period_s), builder.trace(round(config.motor.period_s * NS_PER_S))
    if trace.joints != len(limits):
        raise TraceError(f"the recording is of {trace.joints} joints, the robot file of {len(limits)}: give --robot")
    return Recorded(config, limits, trace, refused)


def _read_files(paths: Sequence[Path]) -> tuple[list[McapMessage], dict[str, str]]:
    described: dict[str, str] = {}
    messages: list[McapMessage] = []
    for path in paths:
        for item in read_mcap(path):
            if isinstance(item, McapMetadata):
                if item.name == METADATA:
                    if described and described != item.entries and _parts(described) != _parts(item.entries):
                        raise TraceError(f"{path} was recorded with other settings: replay the files one by one")
                    described = item.entries
            elif item.topic.rpartition("/")[2] in TOPICS:
                messages.append(item)
    return messages, described


def _parts(described: dict[str, str]) -> tuple[EdgeConfig, str]:
    """What of a recording's description must be equal for two files to be of one run."""
    return replace(EdgeConfig.from_json(described["settings"]), record=None), described["robot_file"]


def limits_of(robot_text: str, period_s: float) -> JointLimits:
    """Limits from the text of a robot file.

    Raises:
        ConfigError: no robot file, or limits that do not fit the tick.
    """
    try:
        limits = JointLimits.from_mapping(yaml.safe_load(robot_text))
        limits.check_period(period_s)
    except (yaml.YAMLError, LimitsError) as error:
        raise ConfigError(f"robot file of the recording: {error}") from error
    return limits


def loop_maker(config: EdgeConfig, limits: JointLimits) -> MakeLoop:
    """Makes motor loops as the motor process does, around a memory, a clock and an outlet."""
    def make(memory: EdgeMemory, clock: Clock, send: Send) -> MotorLoop:
        return build_loop(Child(config, memory, limits, clock, StopFlag()), send, "replay")

    return make


def describe(result: Replayed, trace: Trace) -> str:
    """What was done and found, a few lines."""
    ticks = trace.ticks
    lines = [f"{result.recorded} ticks recorded ({int(ticks['tick'][0])} .. {int(ticks['tick'][-1])}), "
             f"{result.lost} lost by the recording, {result.missed} deadlines missed by the motor process"]
    states = ", ".join(f"{count} {name}" for name, count in sorted(result.states.items()))
    lines.append(f"{result.compared} ticks replayed and compared" + (f": {states}" if states else ""))
    if result.published:
        lines.append(f"{result.published} of them also against the command as published, with its velocity")
    if result.unknown:
        lines.append(f"{result.unknown} ticks not compared: the state is known from a HOLDING tick on, which was taken "
                     f"{result.begun} times: at the first one, and at the next after anything that is missing")
    lines += [f"missing in the recording: {kind}, {count} times" for kind, count in sorted(result.missing.items())]
    if result.first is not None:
        lines.append(f"DIFFERENT at {result.different} ticks; first at {result.first}")
    elif result.compared:
        lines.append("identical, bit by bit")
    else:
        lines.append("nothing to compare: the recording has no HOLDING tick from which the state is known")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Replay; see the parser for exit codes."""
    args = parser().parse_args(argv)
    try:
        recorded = read(args.recording, args.config, args.robot, args.overrides)
        result = replay(recorded.trace, loop_maker(recorded.config, recorded.limits))
    except (ReadError, TraceError, OSError) as error:
        print(f"vla replay: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    print(describe(result, recorded.trace))
    if recorded.refused:
        print(f"{recorded.refused} recorded messages were refused: another wire version, or garbage on the bus")
    if not result.compared:
        return EXIT_UNUSABLE
    return EXIT_IDENTICAL if result.identical else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
