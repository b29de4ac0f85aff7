"""JSON files of a run, written as a whole or not at all, so that a reader never sees half a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any) -> None:
    """Replace the file."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    partial.replace(path)


def read_json(path: Path, default: Any) -> Any:
    """Content, or ``default`` when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default
