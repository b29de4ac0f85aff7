"""`vla train`: demonstrations → vision stage → head stage → export → closed-loop evaluation, each resumable.

The composition root of training: the only place where the simulator (data, expert, evaluation) meets the models.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from vla_common.clock import SystemClock
from vla_common.config import load_config

STAGES = ("data", "vision", "head", "export", "evaluate")


@dataclass(frozen=True)
class DataConfig:
    """How many expert episodes and single scenes to make, and with how many processes."""

    episodes: int = 1200
    grounding_frames: int = 14000
    workers: int = 2


@dataclass(frozen=True)
class VisionConfig:
    """Stage 1: language grounding on images."""

    steps: int = 9000
    batch: int = 40
    learning_rate: float = 8e-4


@dataclass(frozen=True)
class HeadConfig:
    """Stage 2: the action head on cached contexts."""

    samples_per_frame: int = 10
    steps: int = 4500
    batch: int = 512
    learning_rate: float = 8e-4


@dataclass(frozen=True)
class TrainConfig:
    """config/train.yaml."""

    seed: int = 1
    threads: int = 2
    evaluate_episodes: int = 40
    data: DataConfig = field(default_factory=DataConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    head: HeadConfig = field(default_factory=HeadConfig)


def parser() -> argparse.ArgumentParser:
    """Command line of `vla train`."""
    p = argparse.ArgumentParser(
        prog="vla train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--config", type=Path, default=Path("config/train.yaml"))
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. --set vision.steps=2000"
    )
    p.add_argument(
        "--work", type=Path, default=Path("runs/train"), help="data and checkpoints; the same folder resumes"
    )
    p.add_argument("--out", type=Path, default=Path("models/tabletop"), help="model folder to write")
    p.add_argument(
        "--stage", choices=("all", *STAGES), default="all", help="run one stage only (earlier ones must be done)"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the stages in order; returns the process exit code."""
    args = parser().parse_args(argv)
    config = load_config(TrainConfig, args.config, args.set)
    from vla_cli.training_stages import Training  # torch and the simulator only when needed

    training = Training(config, args.work, args.out, SystemClock(), report=lambda line: print(line, flush=True))
    try:
        for stage in STAGES if args.stage == "all" else (args.stage,):
            getattr(training, stage)()
    except KeyboardInterrupt:
        print("interrupted: the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    return 0
