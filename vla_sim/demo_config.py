"""Configuration and command line of ``vla demo``; ``config/demo.yaml`` explains each value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vla_common.config import ConfigError, load_config
from vla_sim.tasks import TASKS


@dataclass(frozen=True)
class VideoConfig:
    """The replay that is drawn after the run."""

    enabled: bool = True
    max_s: float = 60.0


@dataclass(frozen=True)
class DemoConfig:
    """One run.

    ``cloud``, ``edge`` and ``sim`` are extra ``--set`` values for those processes. ``cloud_command`` starts another
    program in place of ``vla cloud``; it is given ``--listen`` and ``--model`` and must print a line with READY.
    """

    episodes: int = 10
    seed: int = 0
    tasks: tuple[str, ...] = TASKS
    motion: Literal["still", "moving", "both"] = "still"
    shuffled: bool = False
    episode_timeout_s: float = 8.0
    faults: Path | None = None
    model: Path = Path("models/tabletop")
    robot: str = "arm1"
    camera: str = "front"
    robot_file: Path = Path("config/robots/panda_2f85.yaml")
    runs: Path = Path("runs")
    headless: bool = False
    start_timeout_s: float = 120.0
    restart_after_s: float = 2.0
    video: VideoConfig = field(default_factory=VideoConfig)
    cloud: tuple[str, ...] = ()
    edge: tuple[str, ...] = ()
    sim: tuple[str, ...] = ()
    cloud_command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a run that could not begin."""
        if self.episodes < 1:
            raise ValueError(f"episodes must be at least 1, not {self.episodes}")
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or not self.tasks:
            raise ValueError(f"tasks must be some of {', '.join(TASKS)}, not {', '.join(self.tasks) or 'none'}")


def project_path(path: Path) -> Path:
    """A relative path from the working directory or, failing that, from the source tree this package lies in."""
    if path.is_absolute() or path.exists():
        return path.resolve()
    beside = Path(__file__).resolve().parent.parent / path
    return beside if beside.exists() else path.resolve()


def parser() -> argparse.ArgumentParser:
    """Arguments of ``vla demo``."""
    result = argparse.ArgumentParser(
        prog="vla demo", description="Run cloud, edge and simulator together on this machine, and report.",
        epilog="The run leaves runs/<stamp>/ with report.html, summary.json, recording.mcap and video.mp4.")
    result.add_argument("--config", type=Path, help="YAML file, such as config/demo.yaml; default: built-in values")
    result.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="override one value; repeatable")
    result.add_argument("--episodes", type=int, help="number of episodes (default 10)")
    result.add_argument("--tasks", help="comma-separated: touch,pick (default both)")
    result.add_argument("--motion", choices=("still", "moving", "both"), help="do the objects move? (default still)")
    result.add_argument("--seed", type=int, help="seed of the list of episodes (default 0)")
    result.add_argument("--faults", type=Path, metavar="FILE", help="fault schedule, such as config/faults/wifi.yaml")
    result.add_argument("--model", type=Path, metavar="FOLDER", help="model folder (default models/tabletop)")
    result.add_argument("--shuffled", action="store_true", default=None,
                        help="control: instructions name another object than the one that counts")
    result.add_argument("--no-video", action="store_true", help="do not draw video.mp4")
    result.add_argument("--headless", action="store_true", default=None, help="plain lines instead of the live view")
    return result


def read_config(argv: Sequence[str] | None) -> DemoConfig:
    """File, then options, then ``--set``.

    Raises:
        ConfigError: unknown key, wrong value.
    """
    given = parser().parse_args(argv)
    named: dict[str, Any] = {name: getattr(given, name) for name in (
        "episodes", "motion", "seed", "faults", "model", "shuffled", "headless")}
    named["tasks"] = None if given.tasks is None else f"[{given.tasks}]"
    named["video.enabled"] = False if given.no_video else None
    overrides = [f"{name}={str(value).lower() if isinstance(value, bool) else value}"
                 for name, value in named.items() if value is not None]
    config = load_config(DemoConfig, given.config, [*overrides, *given.set])
    if not (project_path(config.model) / "manifest.json").is_file():
        raise ConfigError(f"no model in {config.model}: 'vla train' makes one, or give --model FOLDER")
    return config
