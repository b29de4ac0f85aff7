"""JSON schemas and tools as the API's official client uses them, over real workers; and answers that outlive a worker."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai", reason="openai is not installed: pip install 'vla-runtime[dev]'")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'vla-runtime[dev]'")
pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'vla-runtime[dev]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'vla-runtime[structured]'")
from http_rig import MODEL, HttpRig, http_rig  # noqa: E402
from serving_rig import PROMPT, Rig, chosen, rig  # noqa: E402

from vla_cloud.core.generate import FinishReason, GenerateRequest, SamplingParams  # noqa: E402
from vla_cloud.core.grammar_spec import Grammar  # noqa: E402
from vla_cloud.pools.events import Finished, TokenEvent  # noqa: E402

QUESTION = "What is a robot?"
# Random tokens inside a free string would hardly ever end it.
SCHEMA = {
    "type": "object", "required": ["kind", "sizes"], "additionalProperties": False,
    "properties": {"kind": {"enum": ["arm", "leg"]}, "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4}},
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "robot", "schema": SCHEMA, "strict": True}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "move", "description": "moves", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"]}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    longer = {"CHAIN_MAX_MODEL_LEN": "2048"}
    # The first answers wait until the worker has imported what its grammars need.
    with http_rig(tmp_path_factory.mktemp("tokenizer"), longer, structured=True, colocated=True, deadline_s=250.0) as it:
        yield it
        it.until(it.is_idle)


@pytest.fixture(scope="module")
def client(it: HttpRig):
    with openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0, timeout=280.0) as client:
        yield client


def ask(client, question: str = QUESTION, **fields: Any):
    fields = {"max_tokens": 200, "temperature": 0, "model": MODEL, "messages": [{"role": "user", "content": question}], **fields}
    return client.chat.completions.create(**fields)


def test_answers_are_of_the_schema_beside_others_that_are_not(it: HttpRig, client) -> None:
    with ThreadPoolExecutor(8) as threads:
        plain = [threads.submit(ask, client, f"plain {i}", max_tokens=20) for i in range(3)]
        structured = [
            threads.submit(ask, client, f"{i}", response_format=FORM, temperature=(0.0, 1.0)[i % 2], seed=i) for i in range(6)
        ]  # fmt: skip
        answers = [future.result().choices[0] for future in structured]
        for index, future in enumerate(plain):
            assert future.result().choices[0].message.content == it.expected(f"plain {index}", 20)
    for choice in answers:
        assert choice.finish_reason == "stop" and not choice.message.tool_calls
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert len({choice.message.content for choice in answers}) > 2


def test_a_pydantic_model_is_parsed(client) -> None:
    class Robot(pydantic.BaseModel):
        kind: Literal["arm", "leg"]
        joints: int | None
        parts: list[Literal["gripper", "camera"]]

    done = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_format=Robot, temperature=0, max_tokens=200
    )  # fmt: skip
    assert isinstance(done.choices[0].message.parsed, Robot)


def test_a_stream_is_the_same_answer(client) -> None:
    whole = ask(client, response_format=FORM).choices[0].message.content
    chunks = list(ask(client, response_format=FORM, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole and chunks[-1].choices[0].finish_reason == "stop"


def test_max_tokens_leaves_json_incomplete_and_says_so(client) -> None:
    choice = ask(client, response_format={"type": "json_object"}, max_tokens=5).choices[0]
    assert choice.message.content.startswith("{") and (choice.finish_reason == "length" or json.loads(choice.message.content) == {})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_tools_that_must_be_called(client, choice: Any) -> None:
    for seed in range(4):
        done = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=seed).choices[0]
        (call,) = done.message.tool_calls
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        jsonschema.validate(json.loads(call.function.arguments), parameters[call.function.name])
        assert done.finish_reason == "tool_calls" and done.message.content is None and call.id.startswith("call_")
        assert choice == "required" or call.function.name == "move"


def test_calls_in_a_stream_are_those_of_the_whole_answer_and_go_back(client) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, **fields).choices[0].message
    deltas = [chunk.choices[0] for chunk in ask(client, stream=True, **fields)]
    calls = [call for delta in deltas for call in delta.delta.tool_calls or []]
    assert calls[0].function.name == whole.tool_calls[0].function.name and calls[0].id and {call.index for call in calls} == {0}
    assert "".join(call.function.arguments for call in calls) == whole.tool_calls[0].function.arguments
    assert deltas[-1].finish_reason == "tool_calls" and not any(delta.delta.content for delta in deltas)
    messages = [{"role": "user", "content": QUESTION}, whole.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
                {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "done"}]  # fmt: skip
    assert ask(client, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5).choices[0].message.content


def test_the_client_gathers_a_stream_of_calls_itself(client) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], tools=TOOLS, tool_choice="required", temperature=0, max_tokens=400,
        parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        final = stream.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) is not None


def test_with_auto_a_model_may_just_talk(client) -> None:
    choice = ask(client, tools=TOOLS, max_tokens=12).choices[0]
    assert choice.message.content and not choice.message.tool_calls and choice.finish_reason in ("length", "stop")


@pytest.mark.parametrize(("schema", "told"), [
    ({"$ref": "#"}, "Circular"), ({"type": "string", "pattern": "("}, "parenthesis"), ({"not": {}}, "not supported"), ({"enum": []}, "empty"),
])  # fmt: skip
def test_bad_schemas_are_refused_before_any_work(it: HttpRig, client, schema: dict[str, Any], told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        ask(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert it.active == 0


# -- a worker that dies -----------------------------------------------------------------------------------------------

sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
PLACES = [[place, place + 300, place + 600] for place in range(1, 60)]


async def _write(it: Rig, request_id: str, kill: str | None = None) -> tuple[list[int], Finished]:
    request = GenerateRequest(
        request_id, tuple(PROMPT), SamplingParams(max_new_tokens=100, stop_token_ids=frozenset([996])),
        grammar=Grammar("json_schema", json.dumps(PLACES)),
    )  # fmt: skip
    tokens: list[int] = []
    async for event in it.service.generate(request):
        if isinstance(event, TokenEvent):
            tokens += event.tokens
            if kill and len(tokens) >= 10:
                it.kill(chosen(it, kill))
                kill = None
        else:
            return tokens, event
    raise AssertionError("a silent end")


def test_json_goes_on_on_another_worker() -> None:
    async def go() -> None:
        slow = {name: {"CHAIN_STEP_S": "0.05"} for name in ("d0", "d1")}
        async with rig(environment={"CHAIN_GRAMMARS": "counting"}, per_worker=slow, decode_workers=2) as it:
            whole, end = await _write(it, "whole")
            assert end.reason is FinishReason.STOP and whole[-1] == 996 and len(whole) == len(PLACES) + 1
            assert all(token in place for token, place in zip(whole, PLACES, strict=False))
            again, end = await _write(it, "killed", "decode")
            assert again == whole and end.attempts == 2

    asyncio.run(go())
