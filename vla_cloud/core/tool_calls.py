"""Calls of tools in an answer's text, as Hermes and Qwen models write them, and back into events as the text grows.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The grammar lets a model write no other form, so the places of name and arguments are known without parsing JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

OPEN: Final = "<tool_call>"
BEGIN: Final = '<tool_call>\n{"name": "'
MIDDLE: Final = '", "arguments": '
END: Final = "}\n</tool_call>"
"""Cannot stand inside JSON: a line end within a string is escaped there, and ``<`` begins no value."""
SEPARATOR: Final = "\n"
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Call number ``index`` (from 0) of the tool ``name``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON of the call begun last; never empty."""

    index: int
    text: str


ToolEvent: TypeAlias = Text | CallBegun | CallArguments


def written(name: str, arguments: str) -> str:
    """A call as a model writes it; ``arguments`` is JSON."""
    return f"{BEGIN}{name}{MIDDLE}{arguments}{END}"


class ToolCallReader:
    """Feed it the text as it comes. Nothing given out is taken back: what may still become a mark is held back."""

    def __init__(self) -> None:
        """At the beginning of an answer."""
        self._held = ""
        self._place = "text"
        self.calls = 0
        """How many calls have begun."""

    def push(self, text: str) -> list[ToolEvent]:
        """What this much more text makes certain."""
        self._held += text
        events: list[ToolEvent] = []
        while (event := self._next()) is not None:
            events.extend(event)
        return events

    def finish(self) -> list[ToolEvent]:
        """What was held back at the end of the answer (cut within a call: as much of it as there is)."""
        held, self._held = self._held, ""
        if not held or self._place == "name":
            return []  # a call whose name never came is none
        if self._place == "arguments":
            # A brace may be the arguments' own; with more of the mark behind it, it is not.
            return [] if len(held) > 2 else [CallArguments(self.calls - 1, held)]
        return [] if self.calls and not held.strip() else [Text(held)]

    def _next(self) -> list[ToolEvent] | None:
        """One piece, [] for a mark that was read, None if more text is needed."""
        if self._place == "text":
            return self._outside()
        if self._place == "name":
            begin = self._held.find(MIDDLE)
            if begin < 0:
                return None
            name = self._held[len(BEGIN) : begin]
            self._held, self._place = self._held[begin + len(MIDDLE) :], "arguments"
            self.calls += 1
            return [CallBegun(self.calls - 1, name)]
        return self._arguments()

    def _outside(self) -> list[ToolEvent] | None:
        begin = self._held.find(OPEN)
        if begin >= 0:
            before, self._held, self._place = self._held[:begin], self._held[begin:], "name"
            return list(self._text(before))
        sure = len(self._held) - _overlap(self._held, OPEN)
        before, rest = self._held[:sure], self._held[sure:]
        if self.calls and not before.strip():
            return None  # white space between calls belongs to nobody; wait for what follows
        if not before:
            return None
        self._held = rest
        return [Text(before)]

    def _text(self, text: str) -> Iterator[ToolEvent]:
        if text and not (self.calls and not text.strip()):
            yield Text(text)

    def _arguments(self) -> list[ToolEvent] | None:
        end = self._held.find(END)
        sure = end if end >= 0 else len(self._held) - _overlap(self._held, END)
        new = self._held[:sure]
        self._held = self._held[sure:]
        if end >= 0:
            self._held, self._place = self._held[len(END) :], "text"
        elif not new:
            return None
        return [CallArguments(self.calls - 1, new)] if new else []


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``mark``."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-count:]):
            return count
    return 0
