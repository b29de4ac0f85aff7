"""The grammar of a request as it travels between processes; :mod:`vla_cloud.core.grammar` makes and checks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KINDS: Final = ("json_schema", "json_object", "tool_call")
MAX_GRAMMAR_BYTES: Final = 65_536
"""Of its text, in UTF-8."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like.

    ``text`` is JSON. json_schema: ``{"schema": ..., "strict": true}``. json_object: ``{}``. tool_call:
    ``{"mode": "auto" | "required", "parallel": true, "tools": [{"name": ..., "parameters": schema}]}``.
    """

    kind: str
    text: str
