"""What all processes started by the supervisor have in common: settings, shared memory, signals, a clean end."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from vla_common.clock import Clock, SystemClock
from vla_common.config import ConfigError
from vla_common.logging_setup import setup_logging
from vla_common.manifest import ManifestError
from vla_common.process import PARENT_VARIABLE, StopFlag, end_with_parent, stop_on_signals
from vla_common.zenoh_session import BusError
from vla_edge.config import EdgeConfig, load_limits
from vla_edge.core.denoiser import DenoiserError
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.records import EdgeMemory

LOG = logging.getLogger(__name__)

EXIT_FAILED: Final = 1
EXIT_PERMANENT: Final = 3
"""Starting again would fail the same way: the supervisor does not try."""


class PermanentError(RuntimeError):
    """The process cannot do its work until an operator acts; the message says how."""


@dataclass(frozen=True)
class Child:
    """What a process is handed.

    Attributes:
        config: the supervisor's settings. memory: shared with its siblings. limits: of the robot.
        clock: the host's. stop: set when it must end.
    """

    config: EdgeConfig
    memory: EdgeMemory
    limits: JointLimits
    clock: Clock
    stop: StopFlag


def arguments(config: EdgeConfig, memory: Path) -> list[str]:
    """Command line of a child."""
    return ["--settings", config.to_json(), "--memory", str(memory)]


def run(name: str, body: Callable[[Child], None], argv: Sequence[str] | None = None) -> int:
    """Main function of a child process.

    Returns:
        Exit code: 0, EXIT_FAILED, or EXIT_PERMANENT.
    """
    # The supervisor is dead if the parent is another; its shared memory then is ours to remove.
    supervisor_pid = int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    setup_logging(name)
    stop = stop_on_signals()  # before the kernel may tell the parent's death
    end_with_parent()
    parser = argparse.ArgumentParser(prog=f"vla edge: {name}", description="Started by 'vla edge', not by hand.")
    parser.add_argument("--settings", required=True)
    parser.add_argument("--memory", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        with _opened(options.settings, options.memory, stop) as child:
            body(child)
    except (ConfigError, ManifestError, DenoiserError, PermanentError) as error:
        LOG.error("%s", error)
        return EXIT_PERMANENT
    except (BusError, OSError, ValueError) as error:
        LOG.error("%s: %s", type(error).__name__, error)
        return EXIT_FAILED
    finally:
        if os.getppid() != supervisor_pid:
            options.memory.unlink(missing_ok=True)
    return 0


@contextmanager
def _opened(settings: str, path: Path, stop: StopFlag) -> Iterator[Child]:
    config = EdgeConfig.from_json(settings)
    limits = load_limits(config.robot_file, config.motor.period_s)
    memory = EdgeMemory.open(path, len(limits))
    try:
        yield Child(config, memory, limits, SystemClock(), stop)
    finally:
        memory.close()


def main_exit(code: int) -> NoReturn:
    """End the process at once after a clean shutdown: interpreter teardown has nothing left to do, and a library's
    thread must not delay it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
