"""The settings of the edge as ROS parameters: every key of edge.yaml, with dots for its levels.

Files and identity are read-only. The others may be set while the node is not configured; they count at the next
configure. Optional settings are "" (text) or -1 (numbers) where they are not given.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, ParameterType
from rclpy.parameter import Parameter

from vla_common.config import from_mapping
from vla_edge.config import EdgeConfig

READ_ONLY: Final = frozenset({"robot_id", "robot_file", "bus", "ros.remap", "motor.period_s", "allow_remote"})

DESCRIPTIONS: Final[dict[str, tuple[Any, ...]]] = {
    # Text, and for numbers the range.
    "robot_id": ("Part of every topic: letters, digits and _",),
    "robot_file": ("Joints and their limits: one of config/robots/",),
    "model": ("Folder with manifest.json, context_kv.onnx, denoise.onnx",),
    "bus": ("Robot bus: ros, or ros:<namespace> for a namespace before all topics",),
    "cloud": ("Zenoh endpoint of 'vla cloud', such as tcp/127.0.0.1:7448",),
    "allow_remote": ("Unencrypted endpoints outside this machine; tls/ needs no leave",),
    "cloud_link.ca": ("CA of the cloud's certificate, PEM file; empty: the public ones",),
    "cloud_link.certificate": ("Certificate of this robot, PEM file; empty: none",),
    "cloud_link.key": ("Private key of the certificate, PEM file",),
    "cloud_link.user": ("Name for the cloud's log-in; empty: none",),
    "cloud_link.password_file": ("File with the password of the log-in",),
    "record": ("FILE.mcap: record all topics; empty: do not",),
    "motor.period_s": ("Tick of the motor clock, s; must be the model's", 0.001, 0.1),
    "motor.fifo_priority": ("SCHED_FIFO priority where permitted; 0: ordinary scheduling", 0, 99),
    "motor.lock_memory": ("mlockall where permitted",),
    "motor.cpu": ("Core to stay on; -1: any", -1, 4095),
    "ensemble.rule": ("How a new chunk is merged: speed_ramp, ramp, constant, act, replace or prefix",),
    "ensemble.ramp_ticks": ("Length of the ramp, ticks", 1, 64),
    "ensemble.alpha": ("Weight of the old trajectory under 'constant'", 0.0, 1.0),
    "ensemble.act_decay": ("'act': weight exp(-act_decay i), i = 0 the oldest prediction", -10.0, 10.0),
    "ensemble.act_chunks": ("'act': most chunks that are averaged", 1, 64),
    "ensemble.prefix_ticks": ("'prefix': rows frozen at least", 1, 64),
    "gate.max_horizon": ("Longest chunk, steps", 1, 64),
    "gate.position_tolerance": ("rad (closure) beyond a position limit that a chunk may ask for", 0.0, 10.0),
    "gate.max_observation_age_s": ("Oldest observation behind a chunk, s", 0.01, 10.0),
    "gate.future_tolerance_s": ("A stamp this far in the future still counts as now, s", 0.0, 1.0),
    "gate.max_lead_ticks": ("How far a chunk's base tick may lie ahead, ticks", 0, 64),
    "shield.fresh_ticks": ("Newest chunk younger than this: NOMINAL, else COASTING", 0, 1000),
    "shield.first_chunk_ticks": ("How long a re-armed robot waits for its first chunk, ticks", 1, 10000),
    "shield.measurement_max_age_s": ("Older joint states cannot re-arm, s", 0.001, 10.0),
    "shield.outside_tolerance": ("Measured this far outside its limits a joint can be re-armed, rad", 0.0, 1.0),
    "shield.stall_ticks": ("Motor process not running for longer breaks the stream off; the robot's time-out", 1, 100),
    "policy.replan_ticks": ("A new chunk every so many ticks", 1, 64),
    "policy.max_context_age_s": ("Older contexts make no chunk, s", 0.01, 10.0),
    "policy.motor_max_age_s": ("No chunk from an older command, s", 0.01, 10.0),
    "policy.bridge_s": ("A new instruction without a context yet: stand for so long, s", 0.0, 60.0),
    "policy.home_phrases": ("Instructions that the robot serves itself by going to its ready pose",),
    "policy.home_limit_share": ("Fraction of the limits used on the way to the ready pose", 0.01, 0.9),
    "policy.noise_seed": ("For models that start the denoiser from noise", 0, 2**31 - 1),
    "policy.engine": ("auto, onnxruntime, tensorrt or torch",),
    "policy.fp16": ("tensorrt only: half precision",),
    "io.poll_s": ("Period of the io loop, s", 0.001, 0.1),
    "io.status_hz": ("Rate of ShieldStatus, Hz", 0.1, 200.0),
    "io.ticks_hz": ("Rate of MotorTicks, Hz", 0.1, 200.0),
    "io.uplink_local_instructions": ("Send observations also while the robot serves an instruction itself",),
    "io.estop_topic": ("Emergency stop input: watch, require (silence counts as pressed) or off",),
    "io.estop_silence_s": ("'require': longer silence counts as pressed, s", 0.01, 10.0),
    "io.camera_window_s": ("Several cameras: images of one observation are at most this far apart, s", 0.0, 0.5),
    "io.report_hz": ("Rate at which the shield's status goes to the cloud, Hz; 0: never", 0.0, 20.0),
    "io.metrics_listen": ("Prometheus metrics on loopback, such as 127.0.0.1:9107; empty: off",),
    "supervisor.motor_hang_s": ("The motor process did not tick for so long: reported, s", 0.01, 60.0),
    "supervisor.motor_start_s": ("... nor once since it was started, s", 0.1, 600.0),
    "supervisor.backoff_min_s": ("Shortest delay before a process is started again, s", 0.0, 600.0),
    "supervisor.backoff_max_s": ("Longest, s", 0.0, 600.0),
    "supervisor.backoff_reset_s": ("... short again after it ran this long, s", 0.0, 3600.0),
    "supervisor.motor_stop_s": ("Time to brake to rest at the end, s", 0.1, 10.0),
    "supervisor.others_stop_s": ("Time for the other processes to end, s", 0.1, 10.0),
    "ros.command_output": ("Form of the command: joint_state, forward_command or joint_trajectory",),
    "ros.command_topic": ("Topic of the command; empty: the usual one of its form",),
    "ros.image_transport": ("compressed (sensor_msgs/CompressedImage) or raw (sensor_msgs/Image)",),
    "ros.jpeg_quality": ("Of raw images on their way to the cloud", 1, 100),
    "ros.observation_hz": ("Observations go up to the cloud at most so often, Hz", 0.1, 100.0),
    "tracing.sample": ("Share of observations that are traced, as in cloud.yaml; 0: none", 0.0, 1.0),
    "tracing.export": ("file or otlp (OpenTelemetry collector)",),
    "tracing.folder": ("Folder of the span files, read by 'vla trace'",),
    "tracing.endpoint": ("Of the collector, OTLP over HTTP",),
    "tracing.max_file_mb": ("Then a process goes on in a new span file, MB", 0.1, 100000.0),
    "tracing.queue": ("Spans that wait to be exported", 1, 1000000),
    "ros.remap": ("Remapping rules from:=to for all processes of the edge",),
}


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, type hint and value of every setting."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{path}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, hints[field.name], value


def to_parameter(hint: Any, value: Any) -> Any:
    """A setting as a parameter's value."""
    if value is None:
        return -1 if int in typing.get_args(hint) else ""
    if isinstance(value, tuple):
        return [str(item) for item in value] or [""]  # rclpy cannot tell the type of an empty list
    return str(value) if isinstance(value, Path) else value


def to_setting(hint: Any, value: Any) -> Any:
    """Inverse of :func:`to_parameter`."""
    if type(None) in typing.get_args(hint) and value in (-1, ""):
        return None
    return [item for item in value if item] if isinstance(value, (list, tuple)) else value


def declare(node: Any, base: EdgeConfig) -> None:
    """Declare all of them on a node, with ``base`` for defaults."""
    for key, hint, value in leaves(base):
        text, *limits = DESCRIPTIONS[key]
        descriptor = ParameterDescriptor(description=text, read_only=key in READ_ONLY)
        parameter = to_parameter(hint, value)
        if isinstance(parameter, list):
            descriptor.type = ParameterType.PARAMETER_STRING_ARRAY
        elif isinstance(parameter, float):
            low, high = limits
            descriptor.floating_point_range = [FloatingPointRange(from_value=float(low), to_value=float(high))]
        elif isinstance(parameter, int) and not isinstance(parameter, bool):
            descriptor.integer_range = [IntegerRange(from_value=limits[0], to_value=limits[1], step=1)]
        node.declare_parameter(key, parameter, descriptor)


def read(node: Any, base: EdgeConfig, changes: typing.Iterable[Parameter] = ()) -> EdgeConfig:
    """The settings as the parameters say, with ``changes`` that are not made yet.

    Raises:
        ConfigError: values that do not go together.
    """
    new = {parameter.name: parameter.value for parameter in changes}
    data: dict[str, Any] = {}
    for key, hint, _ in leaves(base):
        *path, name = key.split(".")
        into = data
        for part in path:
            into = into.setdefault(part, {})
        value = to_setting(hint, new.get(key, node.get_parameter(key).value))
        if value is not None:
            into[name] = value
    return from_mapping(EdgeConfig, data)
