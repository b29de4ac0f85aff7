"""response_format, tools, tool_choice and calls of tools in a body of POST /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from vla_cloud.core.generate import InvalidRequest
from vla_cloud.core.grammar import (
    ANY_ARGUMENTS,
    Choice,
    Tool,
    canonical,
    chosen,
    json_object_grammar,
    json_schema_grammar,
)
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.gateway.chat_types import ToolCall
from vla_cloud.gateway.http_errors import bad_request

T = TypeVar("T")


class _Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    pass


class _JsonSchema(_Strict, frozen=True):
    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class _ResponseFormat(_Strict, frozen=True):
    type: str
    json_schema: _JsonSchema | None = None


class _Function(_Strict, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Strict, frozen=True):
    type: str
    function: _Function


class _Named(_Strict, frozen=True):
    name: str


class _Choice(_Strict, frozen=True):
    type: str
    function: _Named


class _Called(_Strict, frozen=True):
    name: str
    arguments: str


class _Call(_Strict, frozen=True):
    id: str
    function: _Called
    type: str = "function"
    index: int | None = None


def wishes(
    response_format: msgspec.Raw, tools: msgspec.Raw, tool_choice: msgspec.Raw, parallel_tool_calls: bool | None
) -> tuple[Grammar | None, tuple[Tool, ...]]:
    """What the answer must look like, and the tools to tell the model of.

    Raises:
        HttpError: 400, names the field.
    """
    form = _response_format(response_format)
    known = _tools(tools)
    choice, name = _choice(tool_choice, known)
    if form is not None and choice != "none":
        told = "response_format beside tools is not supported: send one, or tool_choice none"
        raise bad_request(told, "response_format")
    try:
        return chosen(form, known, choice, name, parallel_tool_calls is not False)
    except InvalidRequest as error:
        raise bad_request(f"tools: {error}", "tools") from error


def tool_calls(raw: msgspec.Raw, place: str) -> tuple[ToolCall, ...]:
    """The calls of an assistant's earlier message.

    Raises:
        HttpError: 400, names the field.
    """
    calls = []
    for call in _decoded(raw, list[_Call], place) or ():
        if call.type != "function":
            raise bad_request(f"{place}: a call of type {call.type[:40]!r} is not supported", place)
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise bad_request(f"{place}: the arguments of call {call.id[:40]!r} are no JSON object", place)
        calls.append(ToolCall(call.id, call.function.name, call.function.arguments or "{}"))
    return tuple(calls)


def _response_format(raw: msgspec.Raw) -> Grammar | None:
    given = _decoded(raw, _ResponseFormat, "response_format")
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return json_object_grammar()
    if given.type != "json_schema":
        raise bad_request(
            f"response_format {given.type[:40]!r} is not supported: text, json_object or json_schema is",
            "response_format", "unsupported_parameter",
        )  # fmt: skip
    if given.json_schema is None or given.json_schema.schema is None:
        raise bad_request("response_format json_schema needs json_schema.schema", "response_format")
    try:
        return json_schema_grammar(given.json_schema.schema, given.json_schema.strict is not False)
    except InvalidRequest as error:
        raise bad_request(f"response_format: {error}", "response_format") from error


def _tools(raw: msgspec.Raw) -> tuple[Tool, ...]:
    tools = []
    for tool in _decoded(raw, list[_Tool], "tools") or ():
        if tool.type != "function":
            raise bad_request(f"tools: type {tool.type[:40]!r} is not supported, only function is", "tools")
        function = tool.function
        parameters = canonical(function.parameters) if function.parameters else ANY_ARGUMENTS
        tools.append(Tool(function.name, parameters, function.description or ""))
    return tuple(tools)


def _choice(raw: msgspec.Raw, tools: tuple[Tool, ...]) -> tuple[Choice, str]:
    """For :func:`chosen`: which, and the name of the one tool that is meant."""
    if bytes(raw).lstrip()[:1] == b"{":
        choice = _decoded(raw, _Choice, "tool_choice")
        assert choice is not None
        if choice.type != "function" or all(tool.name != choice.function.name for tool in tools):
            raise bad_request(f"tool_choice names no function of tools: {choice.function.name[:80]!r}", "tool_choice")
        return "required", choice.function.name
    word = _decoded(raw, str, "tool_choice")
    if word is None:
        return "auto" if tools else "none", ""
    if word not in ("none", "auto", "required"):
        told = f"tool_choice {word[:40]!r} is not supported: none, auto, required or a function"
        raise bad_request(told, "tool_choice")
    if word == "required" and not tools:
        raise bad_request("tool_choice required needs tools", "tool_choice")
    return (word if tools else "none"), ""  # type: ignore[return-value]


def _decoded(raw: msgspec.Raw, kind: type[T], param: str) -> T | None:
    if bytes(raw).strip() == b"null":
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError:
        raise bad_request(f"{param} is nested too deeply", param) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(f"{param}: {error}", param) from None
