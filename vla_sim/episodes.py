"""Seeded lists of episodes, their results, and the per-task table with its confidence intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np

from vla_sim.tasks import COLOURS, TASKS, TaskSpec, random_instruction

Motion = Literal["still", "moving", "both"]
InstructionMode = Literal["normal", "shuffled"]

SUCCESS: Final = "success"
WRONG_OBJECT: Final = "wrong_object"
TIMEOUT: Final = "timeout"
NOT_STARTED: Final = "not_started"

# Seeds of episodes are far from those of training data, which counts up from small numbers.
_SEED_BASE: Final = 900_000_000
_SEED_STRIDE: Final = 100_000
_Z_95: Final = 1.959963984540054


@dataclass(frozen=True)
class Episode:
    """One episode: what is judged (``spec``) and what the operator says (``instruction``).

    The two differ only in the shuffled control, where the instruction names another object.
    """

    index: int
    seed: int
    spec: TaskSpec
    instruction: str

    @property
    def target(self) -> str:
        """Name of the object that counts."""
        return f"{self.spec.colour} cube"


@dataclass(frozen=True)
class EpisodeResult:
    """How one episode went. Times in seconds, stamps in nanoseconds of the robot's monotonic clock."""

    index: int
    seed: int
    task: str
    target: str
    moving: bool
    instruction: str
    outcome: str
    start_ns: int
    end_ns: int
    elapsed_s: float
    rearms: int
    outage_s: float


def plan_episodes(count: int, seed: int, tasks: Sequence[str] = TASKS, motion: Motion = "still",
                  mode: InstructionMode = "normal") -> list[Episode]:
    """Episodes that cycle through tasks and motions, with targets and phrasings drawn from the seed.

    Args:
        count: number of episodes, at least 1.
        seed: of the whole list, 0 .. 99999; an episode depends on (seed, index) only, so that lists of
            different lengths agree on their common part.
        tasks: subset of ``TASKS``.
        motion: still or moving objects, or both in turn.
        mode: ``shuffled`` names another object than the one that is judged.
    """
    if count < 1:
        raise ValueError(f"episodes must be at least 1, not {count}")
    if not 0 <= seed < _SEED_STRIDE // 10 * 10:
        raise ValueError(f"seed must be in 0 .. {_SEED_STRIDE - 1}, not {seed}")
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise ValueError(f"tasks must be some of {', '.join(TASKS)}, not {', '.join(tasks) or 'none'}")
    motions = {"still": (False,), "moving": (True,), "both": (False, True)}[motion]
    kinds = [(task, moving) for moving in motions for task in tasks]
    return [_draw(index, seed, *kinds[index % len(kinds)], mode) for index in range(count)]


def _draw(index: int, seed: int, task: str, moving: bool, mode: InstructionMode) -> Episode:
    episode_seed = _SEED_BASE + seed * _SEED_STRIDE + index
    # A generator of its own: the scene is drawn from the same seed elsewhere.
    rng = np.random.default_rng([episode_seed, 1])
    target = int(rng.integers(len(COLOURS)))
    named = target
    if mode == "shuffled":
        named = (target + 1 + int(rng.integers(len(COLOURS) - 1))) % len(COLOURS)
    return Episode(index, episode_seed, TaskSpec(task, target, moving), random_instruction(rng, task, named))


def wilson_interval(successes: int, trials: int, z: float = _Z_95) -> tuple[float, float]:
    """Wilson score interval of a proportion, 95 % by default; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


@dataclass(frozen=True)
class TableRow:
    """One line of the per-task table; rates as fractions, times in seconds."""

    task: str
    motion: str
    episodes: int
    successes: int
    success_rate: float
    success_low: float
    success_high: float
    wrong_object: int
    wrong_object_rate: float
    timeouts: int
    not_started: int
    median_success_s: float


def task_table(results: Sequence[EpisodeResult]) -> list[TableRow]:
    """Rows per task and motion in order of appearance, then one for all."""
    kinds = list(dict.fromkeys((result.task, result.moving) for result in results))
    rows = [_row(task, "moving" if moving else "still",
                 [r for r in results if (r.task, r.moving) == (task, moving)]) for task, moving in kinds]
    return [*rows, _row("all", "", list(results))]


def _row(task: str, motion: str, results: list[EpisodeResult]) -> TableRow:
    total = len(results)
    counts = {name: sum(r.outcome == name for r in results) for name in (SUCCESS, WRONG_OBJECT, TIMEOUT, NOT_STARTED)}
    low, high = wilson_interval(counts[SUCCESS], total)
    times = [r.elapsed_s for r in results if r.outcome == SUCCESS]
    return TableRow(task, motion, total, counts[SUCCESS], counts[SUCCESS] / total if total else 0.0, low, high,
                    counts[WRONG_OBJECT], counts[WRONG_OBJECT] / total if total else 0.0, counts[TIMEOUT],
                    counts[NOT_STARTED], float(np.median(times)) if times else math.nan)


@dataclass
class RunResults:
    """What the task runner found out, as written to ``results.json``."""

    seed: int
    mode: InstructionMode
    timeout_s: float
    timeout_extended_by_outages: bool
    episodes_planned: int
    episodes: list[EpisodeResult] = field(default_factory=list)
    rearms: int = 0
    aborted: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the table."""
        rows = [{key: None if value != value else value for key, value in asdict(row).items()}
                for row in task_table(self.episodes)]
        return {**asdict(self), "table": rows}

    @staticmethod
    def from_json(data: dict[str, Any]) -> RunResults:
        """Inverse of :meth:`to_json`."""
        fields = {key: value for key, value in data.items() if key in RunResults.__dataclass_fields__}
        fields["episodes"] = [EpisodeResult(**episode) for episode in data["episodes"]]
        return RunResults(**fields)
