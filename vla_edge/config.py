"""Settings of the edge. ``config/edge.yaml`` explains each; ``--set a.b=c`` overrides one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from vla_common.config import ConfigError, from_mapping, load_config
from vla_common.joint_command import CommandOutput
from vla_common.link_security import CloudLink
from vla_common.tracing import TracingConfig
from vla_edge.core.chunk import GateConfig
from vla_edge.core.chunk_queue import ChunkQueue
from vla_edge.core.ensembler import CAPACITY, RuleName, make_rule
from vla_edge.core.joint_limits import JointLimits, LimitsError
from vla_edge.core.local_motion import HOME_PHRASES
from vla_edge.core.records import MAX_HORIZON
from vla_edge.core.shield import ShieldConfig
from vla_edge.engines import EngineSetting
from vla_edge.metrics_address import metrics_address


@dataclass(frozen=True)
class EnsembleConfig:
    """How a new chunk is merged with the queued trajectory; see :mod:`vla_edge.core.ensembler`."""

    rule: RuleName = "speed_ramp"
    ramp_ticks: int = 5
    alpha: float = 0.5
    act_decay: float = 0.01
    act_chunks: int = 8
    prefix_ticks: int = 3

    def __post_init__(self) -> None:
        """Check what the policy process uses; the rule itself checks its own."""
        if not 1 <= self.prefix_ticks <= MAX_HORIZON:
            raise ValueError(f"prefix_ticks must be 1 .. {MAX_HORIZON}, got {self.prefix_ticks}")


@dataclass(frozen=True)
class MotorConfig:
    """The motor process: its tick and what it asks of the scheduler."""

    period_s: float = 0.01
    fifo_priority: int = 80
    lock_memory: bool = True
    cpu: int | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0.001 <= self.period_s <= 0.1:
            raise ValueError(f"period_s must be 0.001 .. 0.1, got {self.period_s}")
        if not 0 <= self.fifo_priority <= 99:
            raise ValueError(f"fifo_priority must be 0 (ordinary scheduling) .. 99, got {self.fifo_priority}")


@dataclass(frozen=True)
class PolicyConfig:
    """The policy process: when it plans and on what."""

    replan_ticks: int = 5
    max_context_age_s: float = 0.6
    motor_max_age_s: float = 0.1
    bridge_s: float = 1.5
    home_phrases: tuple[str, ...] = HOME_PHRASES
    home_limit_share: float = 0.5
    noise_seed: int = 0
    engine: EngineSetting = "auto"
    fp16: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.replan_ticks < 1 or self.max_context_age_s <= 0:
            raise ValueError("replan_ticks must be at least 1 and max_context_age_s positive")
        if not 0.0 < self.home_limit_share <= 0.9:
            raise ValueError(f"home_limit_share must be in (0, 0.9], got {self.home_limit_share}")


@dataclass(frozen=True)
class IoConfig:
    """The io process: rates and what goes up to the cloud."""

    poll_s: float = 0.005
    status_hz: float = 20.0
    ticks_hz: float = 10.0
    uplink_local_instructions: bool = False
    estop_topic: Literal["off", "watch", "require"] = "watch"
    estop_silence_s: float = 0.5
    camera_window_s: float = 0.05
    report_hz: float = 1.0
    metrics_listen: str = ""

    def __post_init__(self) -> None:
        """Check ranges."""
        if min(self.poll_s, self.status_hz, self.ticks_hz, self.estop_silence_s) <= 0.0:
            raise ValueError("poll_s, status_hz, ticks_hz and estop_silence_s must be positive")
        if not self.report_hz >= 0.0:
            raise ValueError(f"report_hz must be 0 (no reports) or more, got {self.report_hz}")
        metrics_address(self.metrics_listen)
        if not 0.0 <= self.camera_window_s <= 0.5:
            raise ValueError(f"camera_window_s must be 0 .. 0.5 (an image's largest age), got {self.camera_window_s}")

    @property
    def estop_required_within_s(self) -> float | None:
        """How long the emergency stop input may be silent; None: for ever."""
        return self.estop_silence_s if self.estop_topic == "require" else None


@dataclass(frozen=True)
class SupervisorConfig:
    """Restarts, the watch over the motor process, and the end."""

    motor_hang_s: float = 0.25
    motor_start_s: float = 10.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 2.0
    backoff_reset_s: float = 10.0
    motor_stop_s: float = 1.0
    others_stop_s: float = 0.7

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.motor_hang_s <= 0.0 or self.motor_start_s <= 0.0:
            raise ValueError("motor_hang_s and motor_start_s must be positive")


COMMAND_TOPICS: Final[dict[str, str]] = {
    "forward_command": "/forward_position_controller/commands",
    "joint_trajectory": "/joint_trajectory_controller/joint_trajectory"}
"""Usual topics of the controllers of ros2_control."""


@dataclass(frozen=True)
class RosConfig:
    """How the robot is spoken to under ``bus: ros``.

    Attributes:
        command_output: form of the command. command_topic: where to; empty: the usual topic of that form.
        image_transport: raw images are made JPEG here. jpeg_quality: of these.
        observation_hz: newer images go up to the cloud at most so often.
        remap: ROS remapping rules ``from:=to`` for all processes of the edge.
    """

    command_output: CommandOutput = "joint_state"
    command_topic: str = ""
    image_transport: Literal["compressed", "raw"] = "compressed"
    jpeg_quality: int = 92
    observation_hz: float = 10.0
    remap: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 1 <= self.jpeg_quality <= 100 or self.observation_hz <= 0.0:
            raise ValueError("jpeg_quality must be 1 .. 100 and observation_hz positive")
        for rule in self.remap:
            if rule.count(":=") != 1 or not all(rule.split(":=")):
                raise ValueError(f"remap rule {rule!r} is not of the form from:=to")
        if self.command_topic and not self.command_topic.startswith("/"):
            raise ValueError(f"command_topic {self.command_topic!r} must start with /")


@dataclass(frozen=True)
class EdgeConfig:
    """Everything the edge's processes need to know."""

    robot_id: str = "arm1"
    robot_file: Path = Path("config/robots/panda_2f85.yaml")
    model: Path = Path("models/tabletop")
    bus: str = "tcp/127.0.0.1:7447"
    cloud: str = "tcp/127.0.0.1:7448"
    cloud_link: CloudLink = field(default_factory=CloudLink)
    allow_remote: bool = False
    record: Path | None = None
    motor: MotorConfig = field(default_factory=MotorConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    shield: ShieldConfig = field(default_factory=ShieldConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    io: IoConfig = field(default_factory=IoConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    ros: RosConfig = field(default_factory=RosConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if not self.is_ros and self.ros.command_output != "joint_state":
            raise ValueError(f"ros.command_output {self.ros.command_output} needs 'bus: ros'; it is {self.bus!r}")

    @property
    def is_ros(self) -> bool:
        """The robot bus is ROS: ``ros``, or ``ros:<namespace>``."""
        return self.bus == "ros" or self.bus.startswith("ros:")

    def to_json(self) -> str:
        """For child processes, so that all of them run on the same settings whatever happens to the file meanwhile."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> EdgeConfig:
        """Inverse of :meth:`to_json`."""
        return from_mapping(cls, json.loads(text))


def load_edge_config(path: Path | None, overrides: Sequence[str]) -> EdgeConfig:
    """Settings from a file and overrides; relative paths start from the working directory.

    Raises:
        ConfigError: names the wrong value and what would be valid.
    """
    return load_config(EdgeConfig, path, overrides)


def load_limits(path: Path, period_s: float) -> JointLimits:
    """Robot file, checked against the tick.

    Raises:
        ConfigError: unreadable file or limits that cannot be.
    """
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        limits = JointLimits.from_mapping(data)
        limits.check_period(period_s)
    except FileNotFoundError as error:
        raise ConfigError(f"no robot file {path}: set robot_file to one of config/robots/") from error
    except (OSError, yaml.YAMLError, LimitsError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return limits


def make_queue(config: EdgeConfig, joints: int) -> ChunkQueue:
    """The chunk queue with the configured merge rule.

    Raises:
        ConfigError: a parameter of the rule is out of range.
    """
    # Whatever the gate admits fits: one row of the past is kept.
    capacity = max(CAPACITY, config.gate.max_horizon + max(0, config.gate.max_lead_ticks) + 2)
    try:
        settings = config.ensemble
        rule = make_rule(settings.rule, joints, ramp_ticks=settings.ramp_ticks, alpha=settings.alpha,
                         act_decay=settings.act_decay, act_chunks=settings.act_chunks, capacity=capacity)
    except ValueError as error:
        raise ConfigError(f"ensemble: {error}") from error
    return ChunkQueue(joints, rule, config.motor.period_s, capacity)
