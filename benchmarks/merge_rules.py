"""Merge rules side by side: success, motion before and behind the shield, reaction to a moved target.

    python benchmarks/merge_rules.py [--episodes 6] [--reactions 10] [--rules ...] [--delays 0 50 100 ...]

The shipped policy drives the simulated cell through the edge's own gate, queue, planner, shield and motor loop, in
lock step (vla_sim/lockstep.py). Contexts reach the policy `delay` ms after the image; a chunk is made every 5 ticks and
takes 1 or 2 ticks. Per rule and delay:

* success: `--episodes` episodes each of touch/pick x still/moving, the same scenes for all rules and delays.
* desired: the merged plan before the shield, sent: the commands behind it. Finite differences of consecutive rows over
  the robot file's limits; the largest over joints and ticks of all episodes, and the mean over ticks of the largest
  over joints.
* limited: share of the ticks with a plan in which an arm joint's command is not the planned position; "+ grip" counts
  the gripper too, whose plan is neither smoothed nor kept inside 0 .. 1.
* reaction: `--reactions` scenes. The target is moved by 10 cm at tick 35 + delay + scene modulo 10, so 0.35 s after the
  first context at every phase of the camera. Time from there until the commanded tool position (forward kinematics of
  the sent command) is more than 2 mm, and 20 mm, away from that of the same run without the move. Both runs are equal
  up to the move, which is checked.

The steps of merge_steps.py, which need no simulator, are printed first. About half a minute of one core per rule and
delay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from merge_steps import print_steps, steps

from vla_common.manifest import load_manifest
from vla_edge.adapters.denoiser_onnx import OnnxDenoiser
from vla_edge.config import EdgeConfig, EnsembleConfig, load_limits
from vla_edge.core.joint_limits import JointLimits
from vla_models.model_folder import load_vlm
from vla_models.text import tokenize
from vla_models.training.data import decode_images
from vla_sim.config import CONTROL_PERIOD_S
from vla_sim.evaluate import NORMAL, instruction_for, wilson_interval
from vla_sim.images import encode_jpeg
from vla_sim.judge import SUCCESS
from vla_sim.kinematics import forward
from vla_sim.lockstep import Delays, LockstepEdge, LockstepRun, Policy, run_lockstep
from vla_sim.tasks import COLOURS, TASKS, TaskSpec
from vla_sim.world import TabletopWorld

FIRST_SEED = 910_000
RULES = ("speed_ramp", "ramp", "constant", "act", "replace", "prefix")
QUANTITIES = ("v", "a", "j")
MOVE_M = 0.10
AFTER_MOVE_TICKS = 90
DEVIATIONS_M = (0.002, 0.020)


class CameraContexts:
    """Renders and runs the backbone; scenes that are equal to the bit are computed once (all episodes start alike)."""

    def __init__(self, folder: Path) -> None:
        self._vlm, manifest = load_vlm(folder)
        self._vlm.eval()
        self._vocabulary = manifest.instruction.vocabulary
        self._known: dict[tuple[Any, ...], np.ndarray] = {}
        self._text: Any = None
        self._instruction = ""
        self.scene: tuple[Any, ...] = ()
        self.asked = self.computed = 0

    def reset(self, instruction: str) -> None:
        self._instruction = instruction
        ids = tokenize(instruction, self._vocabulary, self._vlm.config.text_length)
        with torch.inference_mode():
            self._text = self._vlm.encode_text(torch.tensor([ids]))

    def tokens(self, world: TabletopWorld) -> np.ndarray:
        key = (self._instruction, self.scene, world.qpos().tobytes())
        self.asked += 1
        if key not in self._known:
            self.computed += 1
            blob = np.frombuffer(encode_jpeg(world.render("front")), np.uint8)
            image = torch.from_numpy(decode_images(blob, np.array([0, len(blob)])))
            with torch.inference_mode():
                self._known[key] = self._vlm.context(self._text, image)[0].float().numpy()
        return self._known[key]


@dataclass
class Bench:
    config: EdgeConfig
    limits: JointLimits
    policy: Policy
    contexts: CameraContexts
    world: TabletopWorld = field(default_factory=TabletopWorld)

    def run(self, rule: str, delay_ms: int, seed: int, task: TaskSpec, **options: Any) -> LockstepRun:
        self.world.reset(seed, task)
        self.contexts.scene = (seed, task)  # the appearance is drawn from these
        config = replace(self.config, ensemble=replace(self.config.ensemble, rule=rule))
        instruction = instruction_for(self.world, np.random.default_rng([seed, 2]), NORMAL)
        edge = LockstepEdge(config, self.limits, self.policy, instruction, Delays(context=ticks(delay_ms), seed=seed),
                            self.world, self.contexts)
        return run_lockstep(edge, self.world, **options)


def ticks(delay_ms: int) -> int:
    return round(delay_ms * 1e-3 / CONTROL_PERIOD_S)


def task_of(seed: int, task: str, moving: bool) -> TaskSpec:
    return TaskSpec(task, int(np.random.default_rng([seed, 3]).integers(len(COLOURS))), moving)


# ------------------------------------------------------------------ motion


def ratios(rows: np.ndarray, limits: JointLimits) -> dict[str, np.ndarray]:
    """Per quantity [n] the largest share of a limit over the arm's joints; rows with a gap count for nothing."""
    shares = {}
    for order, (name, limit) in enumerate(zip(QUANTITIES, (limits.velocity, limits.acceleration, limits.jerk),
                                              strict=True), start=1):
        difference = np.abs(np.diff(rows[:, :7], order, axis=0)) / CONTROL_PERIOD_S**order / limit[:7]
        shares[name] = difference[np.isfinite(difference).all(axis=1)].max(axis=1)
    return shares


def motion(runs: Sequence[LockstepRun], limits: JointLimits) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stream in ("desired", "sent"):
        per_run = [ratios(getattr(run, stream), limits) for run in runs]
        for name in QUANTITIES:
            values = np.concatenate([shares[name] for shares in per_run])
            found[f"{stream}_{name}_max"] = float(values.max())
            found[f"{stream}_{name}_mean"] = float(values.mean())
    planned = np.concatenate([np.isfinite(run.desired[:, 0]) for run in runs])
    found["limited_share"] = float(np.concatenate([run.limited for run in runs])[planned].mean())
    away = np.concatenate([np.abs(run.desired - run.sent)[:, :7].max(axis=1) for run in runs])[planned]
    found["limited_arm_share"], found["lag_max_rad"] = float((away > 1e-9).mean()), float(away.max())
    found["stops"] = sum(int(((run.state[1:] == 2) & (run.state[:-1] != 2)).sum()) for run in runs)
    found["chunks_refused"] = sum(run.rejects for run in runs)
    return found


# ------------------------------------------------------------------ reaction


def moved_position(world: TabletopWorld) -> np.ndarray | None:
    """Where the target goes: 10 cm along y or x, on the table and clear of the other cubes; None if nowhere."""
    target = world.task.target
    here = world.cube_positions()[target]
    others = world.cube_positions()[[i for i in range(4) if world.present[i] and i != target]]
    config = world.config
    for way in ((0, MOVE_M), (0, -MOVE_M), (MOVE_M, 0), (-MOVE_M, 0)):
        there = here + np.array([*way, 0.0])
        inside = config.cube_x_min_m <= there[0] <= config.cube_x_max_m and abs(there[1]) <= config.cube_y_abs_max_m
        if inside and (np.linalg.norm(others[:, :2] - there[:2], axis=1) > 0.06).all():
            return there
    return None


def reaction(bench: Bench, rule: str, delay_ms: int, seed: int) -> tuple[float, ...] | None:
    """Seconds from the move to each of DEVIATIONS_M (inf: not within the run); None if the cube cannot be moved."""
    task = task_of(seed, "touch", False)
    move_tick = 35 + ticks(delay_ms) + seed % 10
    bench.world.reset(seed, task)
    there = moved_position(bench.world)
    if there is None:
        return None

    def move(tick: int) -> None:
        if tick == move_tick:
            bench.world.set_cube(task.target, there, np.eye(3))

    last = move_tick + AFTER_MOVE_TICKS
    without = bench.run(rule, delay_ms, seed, task, last_tick=last).sent
    with_move = bench.run(rule, delay_ms, seed, task, last_tick=last, before_tick=move).sent
    if not np.array_equal(without[:move_tick], with_move[:move_tick]):
        raise RuntimeError("two equal runs differ: the simulation is not repeatable, reactions mean nothing")
    away = np.linalg.norm(forward(without[:, :7])[0] - forward(with_move[:, :7])[0], axis=1)
    return tuple(float(np.argmax(away > limit) - move_tick) * CONTROL_PERIOD_S if (away > limit).any() else np.inf
                 for limit in DEVIATIONS_M)


# ------------------------------------------------------------------ cells


def cell(bench: Bench, rule: str, delay_ms: int, episodes: int, reactions: int) -> dict[str, Any]:
    runs: list[LockstepRun] = []
    by_task: dict[str, int] = {}
    for task in TASKS:
        for moving in (False, True):
            seeds = range(FIRST_SEED, FIRST_SEED + episodes)
            found = [bench.run(rule, delay_ms, seed, task_of(seed, task, moving)) for seed in seeds]
            by_task[f"{task}_{'moving' if moving else 'still'}"] = sum(run.outcome == SUCCESS for run in found)
            runs += found
    success = sum(by_task.values())
    low, high = wilson_interval(success, len(runs))
    times = [r for k in range(reactions) if (r := reaction(bench, rule, delay_ms, FIRST_SEED + k)) is not None]
    taken = [len(run.sent) * CONTROL_PERIOD_S for run in runs if run.outcome == SUCCESS]
    row = {"rule": rule, "delay_ms": delay_ms, "episodes": len(runs), "success": success, "success_by_task": by_task,
           "success_low_95": round(low, 4), "success_high_95": round(high, 4),
           "mean_success_s": float(np.mean(taken)) if taken else None, "reaction_scenes": len(times),
           **motion(runs, bench.limits)}
    for at, name in enumerate(("reaction_2mm_s", "reaction_20mm_s")):
        values = [t[at] for t in times if np.isfinite(t[at])]
        row[name] = float(np.mean(values)) if values else None
        row[name.replace("_s", "_missed")] = len(times) - len(values)
    return row


COLUMNS: tuple[tuple[str, str, str, float], ...] = (
    ("rule", "rule", "10s", 1), ("delay", "delay_ms", "5d", 1), ("success", "success", "7d", 1),
    ("of", "episodes", "3d", 1), ("time s", "mean_success_s", "6.2f", 1),
    ("| desired max v", "desired_v_max", "15.2f", 1), ("a", "desired_a_max", "6.2f", 1),
    ("j", "desired_j_max", "6.2f", 1), ("mean a", "desired_a_mean", "6.3f", 1), ("j", "desired_j_mean", "6.3f", 1),
    ("| sent max v", "sent_v_max", "12.3f", 1), ("a", "sent_a_max", "5.3f", 1), ("j", "sent_j_max", "5.3f", 1),
    ("mean a", "sent_a_mean", "6.3f", 1), ("j", "sent_j_mean", "5.3f", 1),
    ("| limited", "limited_arm_share", "9.3f", 1), ("+ grip", "limited_share", "6.3f", 1),
    ("stops", "stops", "5d", 1), ("| reaction ms 2 mm", "reaction_2mm_s", "18.0f", 1e3),
    ("20 mm", "reaction_20mm_s", "5.0f", 1e3))


def width(form: str) -> int:
    return int(form.rstrip("sdf").split(".")[0])


def header() -> str:
    return " ".join(f"{title:>{width(form)}s}" for title, _, form, _ in COLUMNS)


def line(row: dict[str, Any]) -> str:
    cells = []
    for _, key, form, factor in COLUMNS:
        value = row[key]
        if value is None:
            cells.append(f"{'-':>{width(form)}s}")
        else:
            cells.append(format(value * factor if factor != 1 else value, form))
    return " ".join(cells)


def make_bench(args: argparse.Namespace) -> tuple[Bench, bool]:
    manifest = load_manifest(args.model)
    denoiser = OnnxDenoiser(args.model, manifest)
    config = EdgeConfig(ensemble=EnsembleConfig(ramp_ticks=args.ramp_ticks))
    policy = Policy(denoiser, (manifest.context.num_tokens, manifest.context.dim), manifest.horizon,
                    float(manifest.extra.get("noise_scale", 0.0)))
    bench = Bench(config, load_limits(args.robot, config.motor.period_s), policy, CameraContexts(args.model))
    return bench, denoiser.supports_prefix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tabletop"))
    parser.add_argument("--robot", type=Path, default=Path("config/robots/panda_2f85.yaml"))
    parser.add_argument("--episodes", type=int, default=6, help="per task (touch, pick) and variant (still, moving)")
    parser.add_argument("--reactions", type=int, default=10, help="scenes with a moved target")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--delays", nargs="+", type=int, default=[0, 50, 100, 150, 200], help="ms, image to policy")
    parser.add_argument("--ramp-ticks", type=int, default=EnsembleConfig().ramp_ticks)
    parser.add_argument("--json", type=Path, default=Path("runs/bench/merge_rules.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = steps()
    print_steps(table)
    bench, has_prefix = make_bench(args)
    if "prefix" in args.rules and not has_prefix:
        print("prefix: left out, this model's denoiser takes none")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    print(header())
    for delay_ms in args.delays:
        for rule in args.rules:
            if rule == "prefix" and not has_prefix:
                continue
            rows.append(cell(bench, rule, delay_ms, args.episodes, args.reactions))
            print(line(rows[-1]), f"[{time.perf_counter() - start:.0f} s]", flush=True)
            args.json.write_text(json.dumps({
                "model": str(args.model), "episodes_per_task": args.episodes, "reactions": args.reactions,
                "ensemble": asdict(bench.config.ensemble), "synthetic": table, "cells": rows}, indent=2) + "\n")
    print(f"contexts: {bench.contexts.asked} asked for, {bench.contexts.computed} computed")
    bench.world.close()


if __name__ == "__main__":
    main()
