"""What an answer must look like: pure data that travels with a request, and the checks that need no grammar library.

A :class:`Grammar` is a kind and a JSON text. The text is written by :func:`json_schema_grammar` and
:func:`tool_grammar` and is the same for the same wish, so that its hash can name a compiled grammar everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from vla_cloud.core.generate import InvalidRequest
from vla_cloud.core.grammar_spec import KINDS, MAX_GRAMMAR_BYTES, Grammar
from vla_cloud.core.json_schema import check_schema
from vla_cloud.core.tool_calls import TOOL_NAME

MAX_TOOLS: Final = 64

ANY_ARGUMENTS: Final = '{"type":"object"}'

ToolMode: TypeAlias = Literal["auto", "required"]
Choice: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. ``parameters``: JSON Schema of its arguments, an object, as canonical text."""

    name: str
    parameters: str = ANY_ARGUMENTS
    description: str = ""


def canonical(value: Any) -> str:
    """JSON without spaces, keys in the order given: the order of properties is that of the answer."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_schema_grammar(schema: Mapping[str, Any], strict: bool = True) -> Grammar:
    """The answer is JSON of this schema; ``strict``: objects have no properties beside those the schema names.

    Raises:
        InvalidRequest: the schema is too large, or asks for what cannot be kept.
    """
    check_schema(schema, "schema")
    return checked(Grammar("json_schema", canonical({"schema": schema, "strict": strict})))


def json_object_grammar() -> Grammar:
    """The answer is any JSON object."""
    return Grammar("json_object", "{}")


def tool_grammar(tools: Sequence[Tool], mode: ToolMode, parallel: bool = True) -> Grammar:
    """The answer is text with calls of these tools in it (auto), or calls alone (required).

    ``parallel`` False: it ends after the first call.

    Raises:
        InvalidRequest: no tools, too many, one name twice, or parameters as in :func:`json_schema_grammar`.
    """
    names = [tool.name for tool in tools]
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools, 1 to {MAX_TOOLS} are taken")
    if len(set(names)) != len(names):
        raise InvalidRequest("two tools have one name: give each its own")
    described = []
    for tool in tools:
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequest(f"tool name {tool.name[:80]!r} is not 1 to 64 letters, digits, _ or -")
        schema = json.loads(tool.parameters)
        check_schema(schema, f"parameters of tool {tool.name}")
        if schema.get("type", "object") != "object":
            raise InvalidRequest(f"parameters of tool {tool.name} must be of type object")
        described.append({"name": tool.name, "parameters": {"type": "object", **schema}})
    return checked(Grammar("tool_call", canonical({"mode": mode, "parallel": parallel, "tools": described})))


def chosen(
    form: Grammar | None, tools: tuple[Tool, ...], choice: Choice, name: str, parallel: bool
) -> tuple[Grammar | None, tuple[Tool, ...]]:
    """The grammar of the answer, and the tools to tell the model of (none where it must not call any).

    ``form``: of an answer without calls. ``name``: the one tool that must be called; "" for any.

    Raises:
        InvalidRequest: a form beside tools, an unknown name, or as :func:`tool_grammar`.
    """
    if choice == "none":
        return form, ()
    if form is not None:
        raise InvalidRequest("a form of the answer beside tools is not supported: ask for one of them")
    called = tuple(tool for tool in tools if not name or tool.name == name)
    return tool_grammar(called, choice, parallel), tools


def checked(grammar: Grammar) -> Grammar:
    """The grammar itself.

    Raises:
        InvalidRequest: an unknown kind, or a text that is too long.
    """
    if grammar.kind not in KINDS:
        raise InvalidRequest(f"a grammar of kind {grammar.kind[:40]!r}, expected one of {', '.join(KINDS)}")
    size = len(grammar.text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the schema has {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken: shorten it")
    return grammar
