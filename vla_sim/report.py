"""Report of a run: ``report.html`` and ``summary.json`` from the folder that a demo left.

    python -m vla_sim.report runs/<stamp>
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vla_sim.recording import RecordingError
from vla_sim.report_data import load_run, summary_of
from vla_sim.report_html import page, percent
from vla_sim.report_plots import FIGURES, render


def write_report(folder: Path, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Write both files; returns the content of ``summary.json``.

    Args:
        folder: of the run, with ``recording.mcap``.
        progress: told what is being done.

    Raises:
        RecordingError: there is no recording.
    """
    progress("reading the recording")
    data = load_run(folder)
    summary = summary_of(data)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False), encoding="utf-8")
    progress("drawing figures")
    figures = {name: render(draw, data, width, height) for name, (draw, width, height) in FIGURES.items()}
    (folder / "report.html").write_text(page(summary, figures), encoding="utf-8")
    return summary


def table_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The per-task table for a terminal."""
    lines = [f"{'task':<14}{'episodes':>9}{'success':>9}   {'95 % interval':<16}{'wrong object':>13}{'time-out':>10}"]
    for row in rows:
        interval = f"{percent(row['success_low'])} – {percent(row['success_high'])}"
        lines.append(f"{(row['task'] + ' ' + row['motion']).strip():<14}{row['episodes']:>9}"
                     f"{percent(row['success_rate']):>9}   {interval:<16}{row['wrong_object']:>13}"
                     f"{row['timeouts']:>10}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a folder again; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m vla_sim.report", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    try:
        summary = write_report(arguments.folder)
    except (RecordingError, FileNotFoundError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print("\n".join(table_lines(summary["tasks"])))
    print(f"report: {arguments.folder / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
