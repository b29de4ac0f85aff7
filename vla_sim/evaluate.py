"""Closed-loop evaluation faster than real time: simulated cameras, latency, replanning, blending.

    images 10 Hz ──latency──▶ policy.act every 50 ms ──▶ chunk ──minimum-jerk blend──▶ commands 100 Hz

This is the edge's loop without its processes, so that a checkpoint can be judged in minutes. The
limits, the shield and real networks are not in it: `vla demo` measures those.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vla_sim.config import CONTROL_HZ, CONTROL_PERIOD_S, IMAGE_HZ
from vla_sim.expert import rollout_chunk
from vla_sim.images import encode_jpeg
from vla_sim.judge import RUNNING, SUCCESS, TIMEOUT, WRONG_OBJECT
from vla_sim.tasks import COLOURS, TASKS, TaskSpec, random_instruction
from vla_sim.world import TabletopWorld

FIRST_SEED = 900_000
NORMAL, SHUFFLED = "normal", "shuffled"
TICKS_PER_IMAGE = CONTROL_HZ // IMAGE_HZ


class Policy(Protocol):
    """What is evaluated. One object serves many episodes, one after the other."""

    def reset(self, instruction: str) -> None:
        """Begin an episode."""

    def act(
        self, image_jpeg: bytes | None, stamp_s: float, q_cmd: np.ndarray, grip_meas: float, now_s: float
    ) -> np.ndarray | None:
        """Plan from the commanded pose `q_cmd` [8] of instant `now_s`.

        `image_jpeg` with its `stamp_s` is the newest image not handed over yet, or None.
        → absolute commands [H, 8] of the next H ticks, or None to go on with the plan in force.
        """


@dataclass(frozen=True)
class LoopConfig:
    """Timing of the loop."""

    latency_s: float = 0.06  # from camera to policy
    replan_ticks: int = 5
    blend_ticks: int = 8


@dataclass(frozen=True)
class Cell:
    """One row of the table: `episodes` and how they ended."""

    episodes: int
    success: int
    wrong_object: int
    timeout: int
    mean_success_s: float | None  # None without a success

    def as_dict(self) -> dict[str, Any]:
        """Counts, rates and Wilson 95 % intervals as plain JSON values."""
        low, high = wilson_interval(self.success, self.episodes)
        return {
            "episodes": self.episodes,
            "success": self.success,
            "wrong_object": self.wrong_object,
            "timeout": self.timeout,
            "success_rate": round(self.success / max(1, self.episodes), 4),
            "success_low_95": round(low, 4),
            "success_high_95": round(high, 4),
            "wrong_object_high_95": round(wilson_interval(self.wrong_object, self.episodes)[1], 4),
            "mean_success_s": None if self.mean_success_s is None else round(self.mean_success_s, 3),
        }


def wilson_interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a proportion that stays sensible near 0 and 1."""
    if count == 0:
        return 0.0, 1.0
    share = successes / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


class PlanBlender:
    """Follows the newest chunk, fading from the plan in force along a minimum-jerk ramp."""

    def __init__(self, command: np.ndarray, ramp_ticks: int) -> None:
        self._plan = command[None].copy()
        fade = np.linspace(0.0, 1.0, ramp_ticks + 1)[1:]
        self._ramp = fade**3 * (10 - 15 * fade + 6 * fade**2)

    def accept(self, chunk: np.ndarray) -> None:
        """Blend in a chunk [H, 8] whose first row is the next tick's command."""
        count = len(chunk)
        weight = np.ones(count)
        ramp = min(count, len(self._ramp))
        weight[:ramp] = self._ramp[:ramp]
        # A plan that has run out stays at its last command.
        old = self._plan[np.minimum(np.arange(count), len(self._plan) - 1)]
        self._plan = old + weight[:, None] * (chunk - old)

    def next(self) -> np.ndarray:
        """The command [8] of the next tick."""
        command = self._plan[0]
        if len(self._plan) > 1:
            self._plan = self._plan[1:]
        return command.copy()


def instruction_for(world: TabletopWorld, rng: np.random.Generator, mode: str) -> str:
    """A phrasing of the world's task; `shuffled` names another cube that is present."""
    target = world.task.target
    if mode == SHUFFLED:
        others = [cube for cube in np.flatnonzero(world.present) if cube != target]
        target = int(rng.choice(others))
    elif mode != NORMAL:
        raise ValueError(f"instruction mode must be {NORMAL!r} or {SHUFFLED!r}, not {mode!r}")
    return random_instruction(rng, world.task.task, target)


def run_episode(
    world: TabletopWorld,
    policy: Policy,
    seed: int,
    task: TaskSpec,
    mode: str = NORMAL,
    loop: LoopConfig | None = None,
) -> tuple[str, float]:
    """One episode from the home pose: (outcome, duration in simulated seconds)."""
    loop = loop or LoopConfig()
    world.reset(seed, task)
    policy.reset(instruction_for(world, np.random.default_rng([seed, 2]), mode))
    latency_ticks = round(loop.latency_s * CONTROL_HZ)
    q_cmd = world.command()
    blender = PlanBlender(q_cmd, loop.blend_ticks)
    in_flight: list[tuple[int, bytes]] = []  # (tick of the image, image), oldest first
    tick = 0
    while world.outcome == RUNNING:
        if tick % TICKS_PER_IMAGE == 0:
            in_flight.append((tick, encode_jpeg(world.render("front"))))
        if tick % loop.replan_ticks == 0:
            arrived = [entry for entry in in_flight if entry[0] + latency_ticks <= tick]
            in_flight = in_flight[len(arrived) :]
            stamp, image = arrived[-1] if arrived else (0, None)
            chunk = policy.act(
                image, stamp * CONTROL_PERIOD_S, q_cmd, float(world.joint_positions()[7]), tick * CONTROL_PERIOD_S
            )
            if chunk is not None:
                blender.accept(chunk)
        q_cmd = blender.next()
        world.step(q_cmd)
        tick += 1
    return world.outcome, tick * CONTROL_PERIOD_S


def run_cell(
    world: TabletopWorld,
    policy: Policy,
    task: str,
    moving: bool,
    seeds: Iterable[int],
    mode: str = NORMAL,
    loop: LoopConfig | None = None,
) -> Cell:
    """Episodes of one task over `seeds`; the target colour follows from the seed."""
    counts: Counter[str] = Counter()
    success_s: list[float] = []
    for seed in seeds:
        target = int(np.random.default_rng([seed, 3]).integers(len(COLOURS)))
        outcome, duration_s = run_episode(world, policy, seed, TaskSpec(task, target, moving), mode, loop)
        counts[outcome] += 1
        if outcome == SUCCESS:
            success_s.append(duration_s)
    mean_s = float(np.mean(success_s)) if success_s else None
    return Cell(sum(counts.values()), counts[SUCCESS], counts[WRONG_OBJECT], counts[TIMEOUT], mean_s)


def run_table(
    policy: Policy,
    episodes: int,
    report: Callable[[str], None] = print,
    first_seed: int = FIRST_SEED,
    loop: LoopConfig | None = None,
    world: TabletopWorld | None = None,
) -> dict[str, dict[str, Any]]:
    """`episodes` per task and variant, and a quarter as many with shuffled instructions.

    → {"touch_still": {...}, "touch_moving": ..., "pick_still_shuffled": ...}: see `Cell.as_dict`.
    """
    own = world or TabletopWorld()
    table: dict[str, dict[str, Any]] = {}
    for mode, moving, count in (
        (NORMAL, False, episodes),
        (NORMAL, True, episodes),
        (SHUFFLED, False, max(1, episodes // 4)),
    ):
        for task in TASKS:
            name = f"{task}_{'moving' if moving else 'still'}" + ("_shuffled" if mode == SHUFFLED else "")
            seeds = range(first_seed, first_seed + count)
            table[name] = row = run_cell(own, policy, task, moving, seeds, mode, loop).as_dict()
            report(
                f"{name}: {row['success']}/{row['episodes']} "
                f"[{row['success_low_95']:.2f}, {row['success_high_95']:.2f}], "
                f"wrong object {row['wrong_object']}, timeout {row['timeout']}, mean {row['mean_success_s']} s"
            )
    if world is None:
        own.close()
    return table


class OraclePolicy:
    """The expert with the simulator's own state: what perfect perception would reach in this loop."""

    def __init__(self, world: TabletopWorld) -> None:
        self._world = world
        self._instruction = ""

    def reset(self, instruction: str) -> None:
        """Remember whom the instruction names."""
        self._instruction = instruction

    def act(
        self, image_jpeg: bytes | None, stamp_s: float, q_cmd: np.ndarray, grip_meas: float, now_s: float
    ) -> np.ndarray | None:
        """The expert's own chunk; images are ignored."""
        world = self._world
        target = next(i for i, colour in enumerate(COLOURS) if colour in self._instruction.split())
        return rollout_chunk(
            q_cmd[None],
            np.array([grip_meas]),
            world.cube_positions()[None, target],
            world.cube_velocities()[None, target],
            np.array([world.task.task_id]),
        )[0]


def main(argv: list[str] | None = None) -> int:
    """Print the oracle's table."""
    parser = argparse.ArgumentParser(
        prog="vla_sim.evaluate", description="Upper bound: the expert in the policy's place, in the same loop."
    )
    parser.add_argument("--episodes", type=int, default=60, help="per task and variant")
    parser.add_argument("--latency", type=float, default=LoopConfig.latency_s, help="seconds")
    args = parser.parse_args(argv)
    world = TabletopWorld()
    run_table(OraclePolicy(world), args.episodes, loop=LoopConfig(latency_s=args.latency), world=world)
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
