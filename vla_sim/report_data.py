"""Everything the report shows, gathered from a run's folder and reduced to arrays and figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml

from vla_common.wire import stamp_ns
from vla_edge.core.joint_limits import JointLimits
from vla_sim.episodes import NOT_STARTED, RunResults
from vla_sim.event_log import read_events
from vla_sim.motion_metrics import (
    NS_PER_S,
    Interval,
    LimitReport,
    Summary,
    TickStream,
    check_limits,
    max_gap_s,
    merge_ticks,
    state_intervals,
    state_shares,
    summarise,
)
from vla_sim.recording import Recorded, Recording

Array = npt.NDArray[np.float64]

STATE_NAMES: Final = ("NOMINAL", "COASTING", "BRAKING", "HOLDING")
PERIOD_S: Final = 0.01
_TOPICS: Final = ("motor_ticks", "joint_states", "policy_status", "shield_status", "action_chunk", "task_status")


@dataclass
class Series:
    """Samples over the robot's clock."""

    stamp_ns: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, at_ns: int, value: Any) -> None:
        """Append one sample."""
        self.stamp_ns.append(at_ns)
        self.values.append(value)

    def array(self) -> Array:
        """Values as float64."""
        return np.asarray(self.values, dtype=np.float64)


@dataclass
class RunData:
    """A run, read."""

    folder: Path
    robot: dict[str, Any]
    results: RunResults
    sim: dict[str, Any]
    limits: JointLimits
    stream: TickStream
    limit_report: LimitReport
    intervals: list[Interval]
    measured: Series
    context_age: Series  # s, of the observation behind each chunk when the chunk was made
    denoise: Series  # s, newest at each policy status
    observation_stamps: list[int]  # distinct observations that became chunks, in order
    phases: Series
    rejects: dict[str, int]
    scheduling: str
    engine: str
    missed_ticks: int
    limit_interventions: int
    events: list[dict[str, Any]]
    cpu: dict[str, list[float]]  # process → share of one core, one per sample
    link: dict[str, Any]
    refused_in_recording: int

    @property
    def start_ns(self) -> int:
        """Instant of the first tick."""
        return int(self.stream.stamp_ns[0]) if len(self.stream.tick) else 0

    def seconds(self, stamps_ns: npt.ArrayLike) -> Array:
        """Instants as seconds since the first tick."""
        return (np.asarray(stamps_ns, dtype=np.int64) - self.start_ns) / NS_PER_S


def load_run(folder: Path) -> RunData:
    """Read a run's folder: run.json, robot.yaml, results.json, events.jsonl, cpu.json, link.json, recording.mcap."""
    run = _json(folder / "run.json", {})
    raw = _json(folder / "results.json", None)
    results = RunResults.from_json(raw) if raw else RunResults(0, "normal", 0.0, False, 0)
    limits = JointLimits.from_mapping(yaml.safe_load((folder / "robot.yaml").read_text(encoding="utf-8")))
    recording = Recording(folder / "recording.mcap", run["robot"], run["camera"])
    gathered = _Gathered()
    for recorded in recording.messages(_TOPICS):
        gathered.take(recorded)
    stream = merge_ticks(gathered.batches, PERIOD_S, gathered.anchor)
    policy, shield = gathered.policy, gathered.shield
    missed = int(shield.missed_ticks) if shield else 0
    return RunData(
        folder, run, results, (raw or {}).get("robot", {}), limits, stream,
        check_limits(stream, limits, PERIOD_S, missed),
        state_intervals(stream, PERIOD_S), gathered.measured, gathered.context_age, gathered.denoise,
        sorted(gathered.observations), gathered.phases,
        gathered.rejects(), shield.scheduling if shield else "", policy.engine if policy else "",
        missed, int(shield.limit_interventions) if shield else 0,
        read_events(folder / "events.jsonl"), _json(folder / "cpu.json", {}), _json(folder / "link.json", {}),
        recording.refused)


class _Gathered:
    """Reduces messages one by one; a long run does not fit in memory as messages."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.measured = Series()
        self.context_age = Series()
        self.denoise = Series()
        self.phases = Series()
        self.observations: set[int] = set()
        self.anchor: tuple[int, int] | None = None
        self.policy: Any = None
        self.shield: Any = None
        self._rejects: dict[str, int] = {}
        self._last_counts: dict[str, int] = {}

    def take(self, recorded: Recorded) -> None:
        """One message in order of receipt."""
        message, at_ns = recorded.message, stamp_ns(recorded.message.header)
        if recorded.name == "motor_ticks":
            self.batches.append(message)
        elif recorded.name == "joint_states":
            self.measured.add(at_ns, message.position)
        elif recorded.name == "action_chunk":
            self._take_chunk(message, at_ns)
        elif recorded.name == "policy_status":
            self._take_policy(message, at_ns)
        elif recorded.name == "shield_status":
            self.shield = message
        elif recorded.name == "task_status":
            self.phases.add(at_ns, message.phase)

    def _take_chunk(self, message: Any, at_ns: int) -> None:
        """A chunk is stamped with the instant of its base tick; one planned by the robot itself has no observation."""
        self.anchor = (int(message.base_tick), at_ns)
        if message.observation_stamp_ns != at_ns:
            self.context_age.add(at_ns, (at_ns - message.observation_stamp_ns) / NS_PER_S)
            self.observations.add(int(message.observation_stamp_ns))

    def _take_policy(self, message: Any, at_ns: int) -> None:
        self.policy = message
        if message.denoise_s > 0:
            self.denoise.add(at_ns, message.denoise_s)
        # Counts start again at zero when the policy process was restarted; add up what each life counted.
        for name, count in zip(message.reject_names, message.reject_counts.tolist(), strict=True):
            before = self._last_counts.get(name, 0)
            self._rejects[name] = self._rejects.get(name, 0) + (count - before if count >= before else count)
            self._last_counts[name] = count

    def rejects(self) -> dict[str, int]:
        """Refusals by name over the run, without those that never happened."""
        return {name: count for name, count in sorted(self._rejects.items()) if count}


def running_windows(data: RunData) -> list[tuple[int, int]]:
    """Running phases of the episodes, (start, end) in ns."""
    return [(episode.start_ns, episode.end_ns) for episode in data.results.episodes
            if episode.end_ns > episode.start_ns and episode.outcome != NOT_STARTED]


def context_rate_hz(data: RunData) -> float:
    """Fresh contexts per second used while episodes ran; the robot asks the cloud for none while it goes home."""
    stamps = np.asarray(data.observation_stamps, dtype=np.int64)
    total_s, count = 0.0, 0
    for start_ns, end_ns in running_windows(data):
        count += int(((stamps >= start_ns) & (stamps < end_ns)).sum())
        total_s += (end_ns - start_ns) / NS_PER_S
    return count / total_s if total_s else math.nan


def longest_context_gap_s(data: RunData) -> float:
    """Longest time between fresh contexts within one episode."""
    stamps = np.asarray(data.observation_stamps, dtype=np.int64)
    gaps = [max_gap_s([start_ns, *stamps[(stamps >= start_ns) & (stamps < end_ns)].tolist(), end_ns])
            for start_ns, end_ns in running_windows(data)]
    return max(gaps, default=math.nan)


def denoise_times_s(data: RunData) -> Array:
    """Denoise times while episodes ran; on its way home the robot plans without the denoiser."""
    stamps = np.asarray(data.denoise.stamp_ns, dtype=np.int64)
    inside = np.zeros(len(stamps), dtype=bool)
    for start_ns, end_ns in running_windows(data):
        inside |= (stamps >= start_ns + NS_PER_S // 2) & (stamps < end_ns)
    return data.denoise.array()[inside]


def summary_of(data: RunData) -> dict[str, Any]:
    """``summary.json``: every figure of the report; NaN becomes null."""
    report, stream = data.limit_report, data.stream
    shares = state_shares(data.intervals)
    summary: dict[str, Any] = _plain({
        "run": data.robot,
        "mode": data.results.mode,
        "seed": data.results.seed,
        "episode_timeout_s": data.results.timeout_s,
        "timeout_extended_by_outages": data.results.timeout_extended_by_outages,
        "aborted": data.results.aborted,
        "tasks": data.results.to_json()["table"],
        "episodes": data.results.to_json()["episodes"],
        "motor": {
            "ticks": len(stream.tick), "ticks_missing": stream.gaps, "ticks_repeated": stream.duplicates,
            "missed_deadlines": data.missed_ticks, "scheduling": data.scheduling,
            "lateness_s": _summary(summarise(stream.lateness_s)),
            "limit_violations": report.violations, "limit_violations_total": report.total,
            "first_violation": report.first_violation, "limit_interventions": data.limit_interventions,
            "peak_of_limit": {name: dict(zip(report.names, values.tolist(), strict=True))
                              for name, values in report.peak.items()},
            "reentries": report.reentries, "largest_reentry": report.largest_reentry,
            "stalls": report.stalls, "largest_stall_step": report.largest_stall,
            "holes_in_recording": report.holes},
        "context": {"rate_hz": context_rate_hz(data), "longest_gap_s": longest_context_gap_s(data),
                    "age_s": _summary(summarise(data.context_age.values))},
        "denoise_s": _summary(summarise(denoise_times_s(data))), "engine": data.engine,
        "shield": {
            "share": {STATE_NAMES[state]: share for state, share in sorted(shares.items())},
            "brakings": _entries(data.intervals, 2), "holds": _entries(data.intervals, 3),
            "operator_rearms": data.results.rearms},
        "rejected": data.rejects,
        "robot_side": data.sim,
        "link": data.link,
        "cpu_share": {name: {"mean": float(np.mean(values)), "max": float(np.max(values))}
                      for name, values in data.cpu.items() if values},
        "fault_events": data.events,
        "refused_in_recording": data.refused_in_recording,
    })
    return summary


def _entries(intervals: Sequence[Interval], state: int) -> int:
    return sum(interval.state == state for interval in intervals)


def _summary(summary: Summary) -> dict[str, float]:
    return {"count": summary.count, "p50": summary.p50, "p99": summary.p99, "p99.9": summary.p999, "max": summary.most}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _json(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default
