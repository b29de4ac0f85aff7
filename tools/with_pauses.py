"""Run a command and let all its processes stand still together now and then, as the host of a busy machine does.

    python tools/with_pauses.py -- python -m pytest test/fault

No test may fail by it: what it has to wait for comes, later. Linux only. Ends with the command's status.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


def descendants(root: int) -> list[int]:
    """Those that run or sleep: what a test has stopped stays stopped."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        states[int(path.name)] = state
        children.setdefault(int(parent), []).append(int(path.name))
    found, todo = [], [root]
    while todo:
        todo += (more := children.get(todo.pop(), []))
        found += more
    return [pid for pid in found if states[pid] not in "TtZX"]


def send(pids: list[int], number: int) -> None:
    """To those that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=6.0, metavar="S", help="mean time between pauses (default 6)")
    parser.add_argument("--shortest", type=float, default=0.3, metavar="S", help="of a pause (default 0.3)")
    parser.add_argument("--longest", type=float, default=2.0, metavar="S", help="of a pause (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="of the times (default 1)")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    rng, pauses = random.Random(options.seed), 0
    process = subprocess.Popen(options.command)
    try:
        while process.poll() is None:
            time.sleep(rng.expovariate(1 / options.every))
            stopped = [process.pid] if process.poll() is None else []
            try:
                send(stopped, signal.SIGSTOP)  # first: it must not stop others while they are being listed
                stopped += descendants(process.pid) if stopped else []
                send(stopped[1:], signal.SIGSTOP)
                time.sleep(rng.uniform(options.shortest, options.longest) if stopped else 0.0)
            finally:
                send(stopped, signal.SIGCONT)
            pauses += bool(stopped)
    except KeyboardInterrupt:
        process.wait()
    print(f"{pauses} pauses", file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
