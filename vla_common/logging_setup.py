"""One log format for all processes: a readable line, or one JSON object per line for a log collector.

The level comes from ``VLA_LOG`` (``debug``, ``info``, ``warning``, ``error``), the format from ``--log-format`` or
``VLA_LOG_FORMAT`` (``text``, ``json``); a process passes the latter on to those it starts. Nothing logs once per tick
or per message: rates and counts go to the status topics and the metrics page.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import sys
import threading
from collections.abc import Collection
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, Final

VARIABLE: Final = "VLA_LOG"
FORMAT_VARIABLE: Final = "VLA_LOG_FORMAT"
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS: Final = ("text", "json")

FIELDS: Final = (
    "request_id", "robot", "worker", "door", "model", "outcome", "code", "attempt", "attempts", "prompt_tokens",
    "cached_tokens", "completion_tokens", "first_token_s", "total_s",
)  # fmt: skip
"""What a caller may add to a line with ``extra={...}``; shown in JSON only, where it is a field of its own."""


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC, RFC 3339), level, process, pid, message, FIELDS that are set, error."""

    def __init__(self, process: str) -> None:
        """``process``: short name shown on every line."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Escapes are JSON's, so that whatever a message holds stays on its line."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"), "level": record.levelname.lower(), "process": self._process,
            "pid": record.process, "message": record.getMessage(),
        }  # fmt: skip
        for name in FIELDS:
            value = record.__dict__.get(name)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Format(argparse.Action):
    """Takes effect where it stands on the command line, whether logging was set up before or is set up afterwards."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        os.environ[FORMAT_VARIABLE] = values
        if _SET_UP:
            setup_logging(*_SET_UP[-1])


def add_log_argument(parser: argparse.ArgumentParser) -> None:
    """``--log-format``: for this process and those that it starts."""
    told = f"of the log on standard error, here and in processes started from here; default: {FORMAT_VARIABLE}, or text"
    parser.add_argument("--log-format", action=_Format, choices=FORMATS, default=argparse.SUPPRESS, help=told)


def setup_logging(process: str, level: str | None = None) -> None:
    """Send the log of this process to standard error, replacing handlers set before.

    Args:
        process: short name shown on every line, such as ``motor``.
        level: overrides ``VLA_LOG``.

    Raises:
        ValueError: unknown level, or unknown format in ``VLA_LOG_FORMAT``; names the nearest one.
    """
    name = _one_of(LEVELS, level or os.environ.get(VARIABLE) or "info", VARIABLE, "level")
    is_json = _one_of(FORMATS, os.environ.get(FORMAT_VARIABLE) or "text", FORMAT_VARIABLE, "format") == "json"
    text = f"%(asctime)s.%(msecs)03d %(levelname)-7s {process}: %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if is_json else logging.Formatter(text, datefmt="%H:%M:%S"))
    sys.excepthook = _log_uncaught if is_json else sys.__excepthook__
    threading.excepthook = _log_uncaught_in_thread if is_json else threading.__excepthook__
    logging.basicConfig(level=LEVELS[name], handlers=[handler], force=True)
    _SET_UP[:] = [(process, level)]


_SET_UP: list[tuple[str, str | None]] = []
"""What :func:`setup_logging` was told last."""


def _one_of(known: Collection[str], value: str, variable: str, what: str) -> str:
    name = value.lower()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
        raise ValueError(f"{variable}: unknown {what} {name!r}; {hint}")
    return name


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A collector that reads lines would take a traceback for many of them."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("uncaught %s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value if arguments.exc_value is not None else arguments.exc_type()
    if not issubclass(arguments.exc_type, SystemExit):
        _log_uncaught(arguments.exc_type, error, arguments.exc_traceback)
