"""One readable log line format for all processes: time, level, process, message.

The level comes from ``VLA_LOG`` (``debug``, ``info``, ``warning``, ``error``). Nothing logs once per tick or per
message: rates and counts go to the status topics.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from typing import Final

VARIABLE: Final = "VLA_LOG"
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def setup_logging(process: str, level: str | None = None) -> None:
    """Send the log of this process to standard error, replacing handlers set before.

    Args:
        process: short name shown on every line, such as ``motor``.
        level: overrides ``VLA_LOG``.

    Raises:
        ValueError: unknown level; names the nearest one.
    """
    name = (level or os.environ.get(VARIABLE) or "info").lower()
    if name not in LEVELS:
        near = difflib.get_close_matches(name, LEVELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(LEVELS)}"
        raise ValueError(f"{VARIABLE}: unknown level {name!r}; {hint}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process}: %(message)s", datefmt="%H:%M:%S")
    )
    logging.basicConfig(level=LEVELS[name], handlers=[handler], force=True)
