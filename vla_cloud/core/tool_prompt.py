"""Tools in a conversation, as its model's template takes them, or in words for a template that knows none.

The words are those of Qwen 2.5, which follow Hermes: signatures in ``<tools>``, calls in ``<tool_call>``, results in
``<tool_response>`` of a user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vla_cloud.core.grammar import Tool
from vla_cloud.core.tool_calls import SEPARATOR, written

_BEFORE: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. ``calls`` of an assistant: id, name and arguments (JSON text, an object) of each."""

    role: str
    text: str
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Rendered:
    """For the template: its messages, and further values."""

    messages: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)


def render(turns: Sequence[Turn], tools: Sequence[Tool], template_has_tools: bool) -> Rendered:
    """The conversation for the template. Without tools, calls and results it is what it was."""
    if template_has_tools:
        options = {"tools": [_signature(tool) for tool in tools]} if tools else {}
        return Rendered([_native(turn) for turn in turns], options)
    messages: list[dict[str, Any]] = []
    before = ""
    for turn in turns:
        role, text = turn.role, turn.text
        if turn.calls:
            calls = SEPARATOR.join(written(name, arguments) for _, name, arguments in turn.calls)
            text = f"{text}\n{calls}" if text else calls
        elif role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if before == "tool":
                messages[-1]["content"] += f"\n{text}"
                continue
        messages.append({"role": role, "content": text})
        before = turn.role
    return Rendered(_with_preamble(messages, preamble(tools)) if tools else messages)


def preamble(tools: Sequence[Tool]) -> str:
    """What a model is told of tools when its template cannot."""
    signatures = "".join(f"\n{json.dumps(_signature(tool), ensure_ascii=False)}" for tool in tools)
    return f"{_BEFORE}{signatures}{_AFTER}"


def _with_preamble(messages: list[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{words}"}, *messages[1:]]
    return [{"role": "system", "content": words}, *messages]


def _signature(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": json.loads(tool.parameters)}}


def _native(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.calls:
        # Templates write the arguments as JSON themselves, so they are given as a value.
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
            for call_id, name, arguments in turn.calls
        ]
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    return message
