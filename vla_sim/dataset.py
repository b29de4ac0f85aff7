"""Records training data faster than real time.

    python -m vla_sim.dataset --out DIR --episodes 1000 --seed 0 --workers 2
    python -m vla_sim.dataset --out DIR --grounding 20000 --seed 0 --workers 2

Episodes: the expert, disturbed now and then, for up to 5 s at 10 frames a second; half of them
start away from home, half have drifting cubes. Grounding frames: single images of random scenes
and arm poses, for vision alone. Both go to `shard_*.npz` (format: shards.py) in DIR.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np

from vla_common.clock import NS_PER_S, Clock, SystemClock, sleep_s
from vla_sim.config import CONTROL_HZ, IMAGE_HZ
from vla_sim.expert import expert_step
from vla_sim.grounding import record_grounding
from vla_sim.judge import SUCCESS
from vla_sim.perturb import Disturber
from vla_sim.shards import ShardWriter
from vla_sim.tasks import random_task
from vla_sim.world import TabletopWorld

EPISODE_MAX_S = 5.0
# After success the episode goes on for a moment: the policy must know how to stay there.
AFTER_SUCCESS_S = 0.6
DISTURBED_SHARE = 0.6
RANDOM_START_SHARE = 0.5
FRAMES_PER_SHARD = 3000
TICKS_PER_FRAME = CONTROL_HZ // IMAGE_HZ


@dataclass(frozen=True)
class Job:
    """What one worker records; item ids are `range(first, count, stride)`."""

    out: Path
    seed: int
    kind: str  # "episode" or "grounding"
    first: int
    count: int
    stride: int


def record_episode(world: TabletopWorld, writer: ShardWriter, seed: int, episode: int) -> None:
    """Simulate and store one episode; everything in it follows from (seed, episode)."""
    rng = np.random.default_rng([seed, episode])
    task = random_task(rng)
    start = "random" if rng.random() < RANDOM_START_SHARE else "home"
    world.reset(int(rng.integers(2**31)), task, start)
    disturber = Disturber(rng, enabled=bool(rng.random() < DISTURBED_SHARE))
    q_cmd = world.command()
    done_ticks = 0
    for tick in range(int(EPISODE_MAX_S * CONTROL_HZ)):
        if tick % TICKS_PER_FRAME == 0:
            writer.add(world, episode, tick // TICKS_PER_FRAME, q_cmd)
        expert = expert_command(world, q_cmd)
        q_cmd = disturber.command(q_cmd, expert)
        world.step(q_cmd)
        done_ticks += world.outcome == SUCCESS
        lost = not world.cubes_in_play()[task.target]
        if lost or done_ticks > AFTER_SUCCESS_S * CONTROL_HZ:
            break


def expert_command(world: TabletopWorld, q_cmd: np.ndarray) -> np.ndarray:
    """The expert's next command [8] with the world's true state."""
    target = world.task.target
    return expert_step(
        q_cmd[None],
        world.joint_positions()[None, 7],
        world.cube_positions()[None, target],
        world.cube_velocities()[None, target],
        np.array([world.task.task_id]),
    )[0]


def run_job(job: Job, progress: SimpleQueue[int] | None) -> None:
    """Worker body: record the job's items, reporting the number of frames after each."""
    world = TabletopWorld()
    letter = job.kind[0]
    writer = ShardWriter(job.out, f"{letter}{job.seed}_{job.first:02d}")
    for item in range(job.first, job.count, job.stride):
        before = len(writer)
        if job.kind == "episode":
            record_episode(world, writer, job.seed, item)
        else:
            record_grounding(world, writer, job.seed, item)
        if progress is not None:
            progress.put(len(writer) - before)
        if len(writer) >= FRAMES_PER_SHARD:
            writer.flush()
    writer.flush()
    world.close()


def record(out: Path, kind: str, count: int, seed: int, workers: int, clock: Clock) -> int:
    """Record `count` items with `workers` processes; returns the number of frames."""
    out.mkdir(parents=True, exist_ok=True)
    jobs = [Job(out, seed, kind, first, count, workers) for first in range(workers)]
    if workers == 1:
        run_job(jobs[0], None)
        return count
    context = multiprocessing.get_context("spawn")
    progress = context.SimpleQueue()
    processes = [context.Process(target=run_job, args=(job, progress)) for job in jobs]
    for process in processes:
        process.start()
    frames = _watch(progress, processes, kind, count, clock)
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"a {kind} worker ended with exit code {process.exitcode}")
    return frames


def _watch(
    progress: SimpleQueue[int],
    processes: Sequence[BaseProcess],
    kind: str,
    count: int,
    clock: Clock,
) -> int:
    """Print progress until all items are recorded or a worker has failed; returns frames."""
    begin_ns = clock.monotonic_ns()
    frames = done = 0
    while done < count:
        if progress.empty():
            if any(process.exitcode not in (None, 0) for process in processes):
                break
            sleep_s(clock, 0.2)
            continue
        frames += progress.get()
        done += 1
        if done % max(1, count // 50) == 0:
            elapsed_s = (clock.monotonic_ns() - begin_ns) / NS_PER_S
            left_s = elapsed_s / done * (count - done)
            print(
                f"{done}/{count} {kind}, {frames} frames, {frames / elapsed_s:.0f} frames/s, {left_s:.0f} s left",
                flush=True,
            )
    return frames


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="vla_sim.dataset", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=0)
    parser.add_argument("--grounding", type=int, default=0, help="single frames of random scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the workers: one core each
    clock = SystemClock()
    for kind, count in (("episode", args.episodes), ("grounding", args.grounding)):
        if count > 0:
            frames = record(args.out, kind, count, args.seed, args.workers, clock)
            print(f"{count} x {kind}: {frames} frames in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
