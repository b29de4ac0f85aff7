"""Writes the tables of docs/observability.md from what they describe: ``python tools/metrics_table.py``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. With ``--check`` nothing is written, and the exit
code is 1 if the page is not up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vla_cloud.gateway.metric_table import METRICS  # noqa: E402
from vla_edge.io_metrics import EDGE_METRICS  # noqa: E402

PAGE: Final = ROOT / "docs" / "observability.md"
ALERTS: Final = ROOT / "config" / "prometheus" / "alerts.yml"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its head."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def labels(names: Sequence[str]) -> str:
    """Names of labels as code."""
    return ", ".join(f"`{name}`" for name in names)


def cloud_table() -> str:
    """Every metric of the cloud."""
    rows = ((f"`{row.shown}`", row.kind, labels(row.labels), row.told) for row in METRICS.values())
    return table(("metric", "kind", "labels", "what"), rows)


def edge_table() -> str:
    """Every metric of a robot."""
    rows = (
        (f"`{name}_total`" if kind == "counter" else f"`{name}`", kind, labels(names), told)
        for name, (kind, names, told) in EDGE_METRICS.items()
    )
    return table(("metric", "kind", "labels", "what"), rows)


def alerts_table() -> str:
    """Every alert: when it fires."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    rows = (
        (f"`{one['alert']}`", one["labels"]["severity"], in_words(one["annotations"]["summary"]), one.get("for", ""))
        for one in rules
    )
    return table(("alert", "severity", "says", "after"), rows)


def in_words(summary: str) -> str:
    """A summary without the language of templates."""
    return re.sub(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}", r"*\1*", summary)


TABLES: Final[dict[str, Callable[[], str]]] = {"alerts": alerts_table, "cloud": cloud_table, "edge": edge_table}


def renewed(text: str) -> str:
    """The page with every table made anew.

    Raises:
        SystemExit: a table that is not known, or not used.
    """
    used = re.findall(r"<!-- table: (\S+) -->", text)
    if sorted(used) != sorted(TABLES):
        raise SystemExit(f"{PAGE.name} has the tables {sorted(used)}, this script makes {sorted(TABLES)}")
    pattern = r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Renew or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(description="Renew the tables of docs/observability.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    options = parser.parse_args(argv)
    text = PAGE.read_text(encoding="utf-8")
    new = renewed(text)
    if options.check:
        if new != text:
            print("docs/observability.md is not up to date: python tools/metrics_table.py", file=sys.stderr)
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
