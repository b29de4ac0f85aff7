"""JSON schemas and tools from an HTTP body to the engine's request, and calls of tools back to the client."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("msgspec", reason="msgspec is not installed: pip install 'vla-runtime[gateway]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from chat_service import AnyGrammar, ScriptedService
from tiny_chat_tokenizer import END, prompt_of, tiny_tokenizer

from vla_cloud.core.generate import FinishReason, InvalidRequest, RequestError
from vla_cloud.core.grammar import Tool, json_object_grammar, json_schema_grammar, tool_grammar
from vla_cloud.core.tool_calls import written
from vla_cloud.core.tool_prompt import preamble
from vla_cloud.engine.tokenizer import ChatTokenizer
from vla_cloud.gateway.chat import Chat, ServedModel
from vla_cloud.gateway.chat_types import ChatRequest, Done, Message, TextDelta, TextPart, ToolCall, ToolCallDelta
from vla_cloud.gateway.http_errors import HttpError
from vla_cloud.gateway.http_request import parse
from vla_cloud.pools.events import TokenEvent
from vla_common.clock import ManualClock

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "outside", "parameters": SCHEMA, "strict": True}}
OTHER = {"type": "function", "function": {"name": "time"}}
WEATHER, TIME = Tool("weather", json.dumps(SCHEMA, separators=(",", ":")), "outside"), Tool("time")


def asked(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode(), "id", 10).request


def test_forms_of_an_answer() -> None:
    assert asked(response_format=FORM).grammar == json_schema_grammar(SCHEMA)
    assert asked(response_format={"type": "json_object"}).grammar == json_object_grammar()
    assert asked(response_format={"type": "text"}).grammar is None
    loose = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": False, "description": "d"}}
    assert asked(response_format=loose).grammar == json_schema_grammar(SCHEMA, False)


@pytest.mark.parametrize(("fields", "called", "mode", "parallel"), [
    ({}, [WEATHER, TIME], "auto", True), ({"tool_choice": "auto", "parallel_tool_calls": False}, [WEATHER, TIME], "auto", False),
    ({"tool_choice": "required", "parallel_tool_calls": True}, [WEATHER, TIME], "required", True),
    ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, [TIME], "required", True),
])  # fmt: skip
def test_choices_of_tools(fields: dict[str, Any], called: list[Tool], mode: Any, parallel: bool) -> None:
    request = asked(tools=[FUNCTION, OTHER], **fields)
    assert request.tools == (WEATHER, TIME) and request.grammar == tool_grammar(called, mode, parallel)


def test_tools_that_must_not_be_called_are_not_told_of() -> None:
    request = asked(tools=[FUNCTION], tool_choice="none", response_format=FORM)
    assert request.tools == () and request.grammar == json_schema_grammar(SCHEMA)


@pytest.mark.parametrize(("fields", "param", "told"), [
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "response_format", "schema has not"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format", "missing required field `name`"),
    ({"response_format": FORM, "tools": [FUNCTION]}, "response_format", "beside tools"), ({"tools": [{}]}, "tools", "missing"),
    ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools", "only function"), ({"tools": [OTHER, OTHER]}, "tools", "one name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters, digits"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools", "of type object"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]}, "tools", "Expected `object"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"), ({"tools": [OTHER], "tool_choice": "any"}, "tool_choice", "'any'"),
    ({"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names no function"),
    ({"tools": [OTHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", "allowed_tools"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(HttpError, match=None) as caught:
        asked(**fields)
    assert caught.value.status == 400 and caught.value.param == param and told in caught.value.message


@pytest.mark.parametrize("depth", [100, 5_000, 100_000])
def test_nesting_is_bounded(depth: int) -> None:
    deep = b'{"properties":{"a":' * depth + b"{}" + b"}}" * depth
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":'
    with pytest.raises(HttpError, match=None) as caught:
        parse(body + deep + b"}}}", "id", 10)
    assert caught.value.status == 400 and "nested" in caught.value.message


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def test_a_conversation_with_calls_and_results() -> None:
    messages = asked(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                               {"role": "tool", "tool_call_id": "c1", "content": "rain"}, {"role": "assistant", "content": "ok", "tool_calls": [CALL]}]).messages  # fmt: skip
    call = ToolCall("c1", "weather", '{"city": "Oslo"}')
    assert messages[1:] == (Message("assistant", (), (call,)), Message("tool", (TextPart("rain"),), (), "c1"), Message("assistant", (TextPart("ok"),), (call,)))


@pytest.mark.parametrize(("call", "told"), [
    ({**CALL, "function": {"name": "x", "arguments": "{"}}, "no JSON object"), ({**CALL, "function": {"name": "x", "arguments": "[1]"}}, "no JSON object"),
    ({**CALL, "type": "custom"}, "custom"), ({"id": "c"}, "missing"), ({**CALL, "function": {"name": "x", "arguments": "[" * 100_000}}, "no JSON object"),
])  # fmt: skip
def test_calls_that_nobody_can_have_made_are_refused(call: dict[str, Any], told: str) -> None:
    with pytest.raises(HttpError, match=None) as caught:
        asked(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages[1].tool_calls" and told in caught.value.message


# -- the chat layer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def answer(
    tokenizer: Any, text: str, request: ChatRequest, grammars: Any = None, size: int = 1, **service: Any
) -> tuple[list[Any], Done, ScriptedService]:
    """Deltas, the end, and the service."""
    tokens = [*text.encode()] + ([END] if service.get("reason", FinishReason.STOP) is FinishReason.STOP else [])
    scripted = ScriptedService(lambda _: [tokens[i : i + size] for i in range(0, len(tokens), size)], **service)
    chat = Chat([ServedModel("tiny", tokenizer, scripted, grammars=grammars or AnyGrammar())], ManualClock())

    async def collect() -> list[Any]:
        return [event async for event in chat.stream(request)]

    try:
        *deltas, done = asyncio.run(collect())
    finally:
        chat.close()
    assert not scripted.running
    return deltas, done, scripted


def calls_of(deltas: list[Any]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta) and delta.name:
            assert delta.index == len(calls) and delta.call_id.startswith("call_") and not delta.arguments
            calls.append((delta.name, ""))
        elif isinstance(delta, ToolCallDelta):
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return calls


TWO = "So: " + written("weather", '{"city": "Oslo"}') + "\n" + written("time", "{}")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_events_of_their_own(tokenizer: ChatTokenizer, size: int) -> None:
    request = asked(tools=[FUNCTION, OTHER])
    deltas, done, service = answer(tokenizer, TWO, request, size=size)
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "So: "
    assert calls_of(deltas) == [("weather", '{"city": "Oslo"}'), ("time", "{}")] and done.finish_reason == "tool_calls"
    assert len({delta.call_id for delta in deltas if isinstance(delta, ToolCallDelta) and delta.name}) == 2
    assert [token for delta in deltas for token in delta.tokens] == [*TWO.encode()]
    assert service.requests[0].grammar == request.grammar
    assert list(service.requests[0].tokens) == prompt_of(("system", preamble((WEATHER, TIME))), ("user", "hi"))


def test_text_alone_is_text(tokenizer: ChatTokenizer) -> None:
    deltas, done, _ = answer(tokenizer, "1 < 2 <tool", asked(tools=[FUNCTION]))
    assert "".join(delta.text for delta in deltas) == "1 < 2 <tool" and done.finish_reason == "stop"


def test_an_answer_that_was_cut_says_so(tokenizer: ChatTokenizer) -> None:
    deltas, done, _ = answer(tokenizer, TWO[: TWO.index("Oslo")], asked(tools=[FUNCTION]), reason=FinishReason.LENGTH)
    assert done.finish_reason == "length" and calls_of(deltas) == [("weather", '{"city": "')]


def test_without_tools_the_same_text_is_text(tokenizer: ChatTokenizer) -> None:
    deltas, done, _ = answer(tokenizer, TWO, asked())
    assert "".join(delta.text for delta in deltas) == TWO and done.finish_reason == "stop"


def test_logprobs_come_with_the_calls(tokenizer: ChatTokenizer) -> None:
    text = written("time", "{}")
    service = ScriptedService(lambda _: [TokenEvent("id", (byte,), (-0.5,), ((),)) for byte in text.encode()] + [[END]])
    chat = Chat([ServedModel("tiny", tokenizer, service, grammars=AnyGrammar())], ManualClock())

    async def collect() -> list[Any]:
        return [event async for event in chat.stream(asked(tools=[OTHER], logprobs=True))]

    deltas = asyncio.run(collect())[:-1]
    chat.close()
    assert "".join(row.text for delta in deltas for row in delta.logprobs) == text


def test_results_go_back_into_the_conversation(tokenizer: ChatTokenizer) -> None:
    request = asked(tools=[FUNCTION], messages=[
        {"role": "system", "content": "s"}, USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ])  # fmt: skip
    _, _, service = answer(tokenizer, "It rains.", request)
    assert list(service.requests[0].tokens) == prompt_of(
        ("system", f"s\n\n{preamble((WEATHER,))}"), ("user", "hi"), ("assistant", written("weather", '{"city": "Oslo"}')),
        ("user", "<tool_response>\nrain\n</tool_response>"),
    )  # fmt: skip


def test_a_template_with_tools_is_used(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %};{% endfor %}"
    )  # fmt: skip
    tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    native = ChatTokenizer(tmp_path)
    assert native.has_tools and not tokenizer.has_tools
    request = asked(tools=[FUNCTION], messages=[USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "rain"}])
    _, _, service = answer(native, "ok", request)
    expected = '[weather]user:hi;assistant:<tool_call>{"city": "Oslo"}</tool_call>;tool:rain;'
    assert bytes(service.requests[0].tokens).decode() == expected


def test_grammars_are_checked_before_any_work(tokenizer: ChatTokenizer) -> None:
    checker = AnyGrammar(InvalidRequest("the schema cannot be compiled: no"))
    with pytest.raises(InvalidRequest, match="cannot be compiled: no"):
        answer(tokenizer, "{}", asked(response_format=FORM), checker)
    assert checker.seen == [json_schema_grammar(SCHEMA)]
    service = ScriptedService(lambda _: [[END]])
    chat = Chat([ServedModel("tiny", tokenizer, service)], ManualClock())

    async def go(request: ChatRequest) -> None:
        async for _ in chat.stream(request):
            pass

    with pytest.raises(RequestError, match="without response_format and tools"):
        asyncio.run(go(asked(response_format=FORM)))
    with pytest.raises(InvalidRequest, match="answers call 'c9'"):
        asyncio.run(go(asked(messages=[USER, {"role": "tool", "tool_call_id": "c9", "content": "x"}])))
    with pytest.raises(InvalidRequest, match="only an assistant"):
        asyncio.run(go(asked(messages=[{**USER, "tool_calls": [CALL]}])))
    assert not service.requests
    chat.close()


def test_a_client_that_leaves_ends_the_request(tokenizer: ChatTokenizer) -> None:
    service = ScriptedService(lambda _: [[65], [66], [67]])
    chat = Chat([ServedModel("tiny", tokenizer, service, grammars=AnyGrammar())], ManualClock())

    async def go() -> None:
        stream = chat.stream(asked(tools=[OTHER]))
        await anext(stream)
        await stream.aclose()

    asyncio.run(go())
    chat.close()
    assert service.closed == ["id"] and not service.running
