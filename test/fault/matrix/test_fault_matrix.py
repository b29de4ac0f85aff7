"""The fault matrix with real processes: a part of it by default, all of it with ``make faults``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runner import BY_TARGET, line, run_cells, run_target

# One edge for all of them; those whose message comes from the io process's log every five seconds first.
FEW = (
    ("wrong joint order", "robot", "two joints exchanged, every other"),
    ("kill -9", "cloud", ""),
    ("NaN", "cloud", "a token, all"),
    ("garbage bytes", "link", "8 bits flipped in 30 %"),
    ("NaN", "policy", "a position, every other chunk"),
    ("wrong width", "policy", "7 joints for 8, all chunks"),
    ("clock +1 h", "robot", ""),
    ("freeze", "robot", ""),
    ("disk full", "recorder", ""),
)


def test_every_cell_exists_or_says_why_not():
    from cases import missing

    assert missing() == []


@pytest.mark.timeout(900)
def test_some_cells(tmp_path):
    known = [cell for make in BY_TARGET.values() for cell in make()]
    cells = [next(cell for cell in known if (cell.fault, cell.target) == (fault, target)
                  and cell.variant.startswith(variant)) for fault, target, variant in FEW]
    judge(run_cells(cells, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", list(BY_TARGET))
def test_all_cells(target):
    judge(run_target(target))


def judge(rows):
    bad = [line(row) for row in rows if row.deviations]
    assert not bad, "\n" + "\n".join(bad)
