"""What a check of ``vla doctor`` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """Result of one check. ``note``: something works with a limitation; ``fail``: something cannot work."""

    level: Level
    subject: str
    text: str
    remedy: str = ""
