"""Runs cells of the matrix on real processes and prints what came of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from cases import BY_TARGET, tmpfs_cell
from cells import FAULTS, TARGETS, Cell, Row, run_cell, settle, ticks_since
from matrix_rig import HOLDING, MatrixRig
from motion import SLACK, stretches, worst

SMALL_DISK = "1m"


def run_cells(cells: Sequence[Cell], folder: Path, record: Path | None = None, echo: bool = False) -> list[Row]:
    """Run cells one after the other on one edge.

    Args:
        cells: those with ``why`` become rows without being run.
        folder: new; for everything the processes write. record: file of the recorder, if elsewhere.
        echo: print each row when it is known.
    """
    rows = [not_run(cell) for cell in cells if cell.why]
    todo = [cell for cell in cells if not cell.why]
    rig = MatrixRig(folder, record)
    try:
        rig.wait(lambda: rig.state() == HOLDING, 60.0, "the first commands")
        pending = []
        for cell in todo:
            row, item = run_cell(rig, cell)
            pending.append(item)
            if echo:
                print(line(row), flush=True)
            if rig.started["edge"].poll() is not None:
                break  # the row says so
        settle(rig, pending)
        rows += [item.row for item in pending]
        whole = worst(stretches(ticks_since(rig, 0)))
        if max(whole["velocity"], whole["acceleration"], whole["jerk"]) > SLACK or whole["position"] > 0:
            rows[-1].deviations.append(f"limits over the whole run: {whole}")
    finally:
        rig.close()
    rows[-1].deviations += [f"left behind: {path}" for path in rig.memory_files()]
    return rows


def run_target(target: str, echo: bool = False) -> list[Row]:
    """All cells of one target; of the recorder with a second edge whose recording fills a small disk."""
    with tempfile.TemporaryDirectory(prefix="vla-matrix-") as name:
        rows = run_cells(BY_TARGET[target](), Path(name), echo=echo)
    if target == "recorder":
        rows.append(run_on_small_disk(tmpfs_cell(), echo))
    return rows


def run_on_small_disk(cell: Cell, echo: bool = False) -> Row:
    """Run a cell with the recording on a file system of SMALL_DISK, where mounting one is permitted."""
    with tempfile.TemporaryDirectory(prefix="vla-matrix-") as name:
        disk = Path(name) / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(disk)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            return Row(cell.fault, cell.target, cell.variant, effect="n/a: mounting is not permitted here")
        try:
            return run_cells([cell], Path(name), disk / "run.mcap", echo)[0]
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def not_run(cell: Cell) -> Row:
    """Row of a cell that makes no sense."""
    return Row(cell.fault, cell.target, cell.variant, effect=f"n/a: {cell.why}")


def line(row: Row) -> str:
    """A row for people; '!' where something deviates."""
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    limits = "-" if not row.rearmed and not row.velocity else "/".join(
        f"{value:.2f}" for value in (row.velocity, row.acceleration, row.jerk))
    text = (f"{row.fault:17} {row.target:8} {row.variant:47} {row.effect:10} {number(row.time_to_stop_s, '.2f'):>5} "
            f"{number(row.brake_s, '.2f'):>5} {number(row.distance, '.3f'):>6} {limits:>14} {row.rearmed:24} {row.message}")
    return text.rstrip() + "".join(f"\n    ! {deviation}" for deviation in row.deviations)


HEAD = (f"{'fault':17} {'target':8} {'variant':47} {'effect':10} {'stop':>5} {'brake':>5} {'dist':>6} {'v/a/j':>14} "
        f"{'re-armed':24} message for the operator\n"
        f"{'':84} {'s':>5} {'s':>5} {'rad':>6} {'worst/limit':>14}")


def report(rows: Iterable[Row], path: Path | None) -> int:
    """Print the table, write it as JSON; returns the number of rows with deviations."""
    order = {name: index for index, name in enumerate((*TARGETS, *FAULTS))}
    rows = sorted(rows, key=lambda row: (order[row.target], order[row.fault]))
    print(HEAD)
    for row in rows:
        print(line(row))
    bad = sum(bool(row.deviations) for row in rows)
    run = sum(not row.effect.startswith("n/a") for row in rows)
    print(f"{run} cells run, {len(rows) - run} not applicable, {bad} deviate")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"python": sys.version.split()[0], "cpus": os.cpu_count(), "cells": [asdict(row) for row in rows]}
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        print(f"written to {path}")
    return bad
