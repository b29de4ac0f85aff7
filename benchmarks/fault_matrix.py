"""The fault matrix: every kind of fault at every part around the motor process, with real processes.

    python benchmarks/fault_matrix.py [--target cloud ...] [--json runs/bench/fault_matrix.json]

Takes some minutes; ends with 1 if a cell deviates from what docs/safety.md promises. The cells are in
test/fault/matrix/cases.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test/fault/matrix"))

from runner import BY_TARGET, report, run_target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=sorted(BY_TARGET), help="only these; may be repeated")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/fault_matrix.json"))
    options = parser.parse_args()
    rows = [row for target in options.target or BY_TARGET for row in run_target(target, echo=True)]
    return 1 if report(rows, options.json) else 0


if __name__ == "__main__":
    sys.exit(main())
