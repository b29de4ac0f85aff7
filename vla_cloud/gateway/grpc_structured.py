"""JSON schemas, tools and their calls in messages of vla_chat.proto."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vla_cloud.core.generate import InvalidRequest
from vla_cloud.core.grammar import ANY_ARGUMENTS, Choice, Tool, chosen, json_object_grammar, json_schema_grammar
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.gateway.chat_types import ToolCall
from vla_cloud.gateway.proto import vla_chat_pb2 as pb

_CHOICES: dict[int, Choice] = {
    pb.TOOL_CHOICE_NONE: "none", pb.TOOL_CHOICE_AUTO: "auto", pb.TOOL_CHOICE_REQUIRED: "required",
}  # fmt: skip


def wishes(message: pb.GenerateRequest) -> tuple[Grammar | None, tuple[Tool, ...]]:
    """What the answer must look like, and the tools to tell the model of.

    Raises:
        InvalidRequest: text that is no schema, an unknown choice, or what cannot be kept.
    """
    tools = tuple(
        Tool(tool.name, tool.parameters or ANY_ARGUMENTS, tool.description)
        for tool in message.tools
        if not tool.parameters or _object(tool.parameters, f"parameters of tool {tool.name[:80]!r}") is not None
    )
    choice: Choice = "auto" if tools else "none"
    if message.tool_choice != pb.TOOL_CHOICE_UNSPECIFIED:
        if message.tool_choice not in _CHOICES:
            raise InvalidRequest(f"tool_choice {message.tool_choice} is not known")
        choice = _CHOICES[message.tool_choice] if tools or message.tool_choice == pb.TOOL_CHOICE_REQUIRED else "none"
    if message.tool_name and choice != "required":
        raise InvalidRequest("tool_name needs TOOL_CHOICE_REQUIRED")
    if message.tool_name and all(tool.name != message.tool_name for tool in tools):
        raise InvalidRequest(f"tool_name names no tool: {message.tool_name[:80]!r}")
    parallel = message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True
    return chosen(_form(message), tools, choice, message.tool_name, parallel)


def tool_calls(index: int, calls: Iterable[pb.ToolCall]) -> tuple[ToolCall, ...]:
    """The calls of message ``index``. Raises InvalidRequest for arguments that are no JSON object."""
    found = []
    for call in calls:
        _object(call.arguments or "{}", f"arguments of a call in message {index}")
        found.append(ToolCall(call.id, call.name, call.arguments or "{}"))
    return tuple(found)


def _form(message: pb.GenerateRequest) -> Grammar | None:
    form = message.response_format
    kind = form.WhichOneof("format")
    if kind == "json_schema":
        strict = form.strict if form.HasField("strict") else True
        return json_schema_grammar(_object(form.json_schema, "json_schema"), strict)
    return json_object_grammar() if kind == "json_object" and form.json_object else None


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name}: this is no JSON object")
    return value
