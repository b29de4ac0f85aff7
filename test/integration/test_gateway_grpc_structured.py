"""JSON schemas and tools over gRPC."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
import grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from chat_service import AnyGrammar, ScriptedService
from grpc_rig import Rig, ask, rig
from tiny_chat_tokenizer import END, tiny_tokenizer

from vla_cloud.core.grammar import Tool, json_object_grammar, json_schema_grammar, tool_grammar
from vla_cloud.core.tool_calls import written
from vla_cloud.gateway.proto import vla_chat_pb2 as pb

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = pb.Tool(name="weather", description="outside", parameters=json.dumps(SCHEMA))
TEXT = "So: " + written("weather", '{"city": "Oslo"}')


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def served(tokenizer: Any, text: str, body: Callable[[Rig, ScriptedService], Awaitable[None]]) -> None:
    service = ScriptedService(lambda _: [[byte] for byte in text.encode()] + [[END]])

    async def go() -> None:
        async with rig(tokenizer, service, grammars=AnyGrammar()) as it:
            await body(it, service)

    asyncio.run(go())


def with_fields(**fields: Any) -> pb.GenerateRequest:
    message = ask()
    message.MergeFrom(pb.GenerateRequest(**fields))
    return message


def test_every_wish_arrives(tokenizer: Any) -> None:
    weather = Tool("weather", json.dumps(SCHEMA), "outside")
    wishes = {
        json_object_grammar(): {"response_format": pb.ResponseFormat(json_object=True)},
        json_schema_grammar(SCHEMA): {"response_format": pb.ResponseFormat(json_schema=json.dumps(SCHEMA))},
        json_schema_grammar(SCHEMA, False): {"response_format": pb.ResponseFormat(json_schema=json.dumps(SCHEMA), strict=False)},
        tool_grammar([weather], "auto"): {"tools": [WEATHER]},
        tool_grammar([weather], "auto", False): {"tools": [WEATHER], "parallel_tool_calls": False},
        tool_grammar([Tool("stop")], "required"): {"tools": [WEATHER, pb.Tool(name="stop")], "tool_choice": pb.TOOL_CHOICE_REQUIRED, "tool_name": "stop"},
        None: {"tools": [WEATHER], "tool_choice": pb.TOOL_CHOICE_NONE},
    }  # fmt: skip

    async def body(it: Rig, service: ScriptedService) -> None:
        for fields in wishes.values():
            await it.stub.Generate(with_fields(**fields))
        assert [request.grammar for request in service.requests] == list(wishes)

    served(tokenizer, "ok", body)


def test_calls_whole_and_as_a_stream(tokenizer: Any) -> None:
    async def body(it: Rig, service: ScriptedService) -> None:
        whole = await it.stub.Generate(with_fields(tools=[WEATHER]))
        (call,) = whole.tool_calls
        assert (whole.text, call.name, call.arguments) == ("So: ", "weather", '{"city": "Oslo"}')
        assert whole.done.finish_reason == pb.FINISH_REASON_TOOL_CALLS and bytes(whole.tokens).decode() == TEXT
        chunks = [chunk async for chunk in it.stub.GenerateStream(with_fields(tools=[WEATHER]))]
        calls = [chunk.tool_call for chunk in chunks if chunk.WhichOneof("event") == "tool_call"]
        assert calls[0].name == "weather" and calls[0].id.startswith("call_") and "".join(one.arguments for one in calls) == call.arguments
        assert chunks[-1].done.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        back = with_fields(tools=[WEATHER])
        back.messages.append(pb.Message(role="assistant", tool_calls=[call]))
        back.messages.append(pb.Message(role="tool", tool_call_id=call.id, parts=[pb.Part(text="rain")]))
        await it.stub.Generate(back)
        assert "<tool_response>\nrain" in bytes(token for token in service.requests[-1].tokens if token < 256).decode()

    served(tokenizer, TEXT, body)


@pytest.mark.parametrize(("fields", "told"), [
    ({"response_format": pb.ResponseFormat(json_schema="[1]")}, "no JSON object"), ({"response_format": pb.ResponseFormat(json_schema="{")}, "no JSON object"),
    ({"response_format": pb.ResponseFormat(json_schema='{"not": {}}')}, "schema has not"),
    ({"response_format": pb.ResponseFormat(json_object=True), "tools": [WEATHER]}, "beside tools"),
    ({"tools": [WEATHER], "tool_name": "weather"}, "TOOL_CHOICE_REQUIRED"), ({"tool_choice": pb.TOOL_CHOICE_REQUIRED}, "0 tools"),
    ({"tools": [WEATHER], "tool_choice": pb.TOOL_CHOICE_REQUIRED, "tool_name": "x"}, "names no tool"),
    ({"tools": [pb.Tool(name="a", parameters="x")]}, "no JSON object"), ({"tools": [pb.Tool(name="a b")]}, "letters, digits"), ({"tools": [WEATHER], "tool_choice": 9}, "not known"),
    ({"messages": [pb.Message(role="assistant", tool_calls=[pb.ToolCall(id="c", name="x", arguments="{")])]}, "no JSON object"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused(tokenizer: Any, fields: dict[str, Any], told: str) -> None:
    async def body(it: Rig, service: ScriptedService) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Generate(with_fields(**fields))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and told in caught.value.details()
        assert not service.requests

    served(tokenizer, "ok", body)
