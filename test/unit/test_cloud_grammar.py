"""Which schemas are taken, how tools are written into a conversation, and how calls are read out of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_cloud.core.generate import GenerateRequest, InvalidRequest, SamplingParams, check_request
from vla_cloud.core.grammar import Tool, json_object_grammar, json_schema_grammar, tool_grammar
from vla_cloud.core.grammar_spec import MAX_GRAMMAR_BYTES, Grammar
from vla_cloud.core.tool_calls import CallArguments, CallBegun, Text, ToolCallReader, ToolEvent, written
from vla_cloud.core.tool_prompt import Turn, preamble, render

WEATHER = Tool("weather", '{"type":"object","properties":{"city":{"type":"string"}}}', "How it is outside")


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_the_same_wish_is_the_same_text_and_another_is_not() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}
    assert json_schema_grammar(schema) == json_schema_grammar(dict(schema))
    assert json_schema_grammar(schema).text == '{"schema":{"type":"object","properties":{"b":{},"a":{"const":"é"}}},"strict":true}'
    grammars = [json_schema_grammar(schema), json_schema_grammar(schema, False), json_object_grammar(), tool_grammar([WEATHER], "auto"),
                tool_grammar([WEATHER], "required"), tool_grammar([WEATHER], "auto", False)]  # fmt: skip
    assert len(set(grammars)) == len(grammars)


@pytest.mark.parametrize(("schema", "told"), [
    (nested(40), "nested more than 64 levels"), ({"enum": list(range(9000))}, "more than 8192 values"),
    ({"enum": ["x" * 5000] * 20}, f"at most {MAX_GRAMMAR_BYTES}"), ({"not": {}}, "schema has not"), ({"if": {}}, "has if"),
    ({"properties": {"a": {"multipleOf": 3}}}, r"schema.properties.a has multipleOf"), ({"uniqueItems": True}, "uniqueItems"),
    ({"anyOf": [{"contains": {}}]}, r"schema.anyOf\[0\] has contains"), ({"allOf": [{}, {}]}, "allOf has several"),
    ({"anyOf": [{}], "type": "string"}, "anyOf and type side by side"), ({"$ref": "#/$defs/a", "minLength": 1}, "side by side"),
    ({"enum": ["a"], "minLength": 3}, "enum or const and minLength"), ({"$ref": "http://10.0.0.1/x"}, "only places within"),
    ({"items": [{}]}, "use prefixItems"), ({"anyOf": []}, "must be a list"), ({"properties": []}, "must be an object"),
    ({"items": 3}, "not a schema"), ({"maxLength": 10**9}, "whole number"), ({"minItems": True}, "whole number"),
    ({"pattern": "a" * 300}, "300 characters"), ({"pattern": "a{1,9999}"}, "repeats up to 9999"), ({"pattern": "((a{20}){20})"}, "400 times"),
    ({"pattern": "(?=a)b"}, "in a pattern"), ({"pattern": r"\bx"}, "in a pattern"), ({"pattern": 'a"b'}, "JSON writes it"), ({"pattern": r"\\"}, "JSON writes it"), ({"pattern": r"\x22"}, "JSON writes it"), ({"pattern": "a", "maxLength": 3}, "say all of it in the pattern"),
    ({"properties": {"a": {}}, "patternProperties": {"b": {}}}, "properties and patternProperties"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused_with_its_place(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        json_schema_grammar(schema)


@pytest.mark.parametrize("schema", [
    nested(30), {"title": "T", "default": None, "anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}}}, {}, {"x-ours": 1},
    {"type": "string", "enum": ["a", "b"]}, {"pattern": "^[a-z]{1,20}$"}, {"additionalProperties": False, "patternProperties": {"^a": {}}},
])  # fmt: skip
def test_what_can_be_kept_is_taken(schema: dict[str, Any]) -> None:
    assert json.loads(json_schema_grammar(schema).text)["schema"] == schema


@pytest.mark.parametrize(("tools", "told"), [
    ([], "0 tools"), ([WEATHER] * 2, "one name"), ([Tool("a b")], "tool name"), ([Tool("x" * 65)], "tool name"), ([Tool("")], "tool name"),
    ([Tool("a", '{"type":"string"}')], "must be of type object"), ([Tool("a", '{"not":{}}')], "parameters of tool a has not"),
    ([Tool(f"t{i}") for i in range(65)], "65 tools"),
])  # fmt: skip
def test_tools_that_cannot_be_called_are_refused(tools: list[Tool], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        tool_grammar(tools, "auto")


def test_a_worker_checks_what_it_is_sent() -> None:
    def check(grammar: Grammar | None = None, stops: frozenset[int] = frozenset([1]), answered: int = 0) -> None:
        check_request(GenerateRequest("r", (1, 2), SamplingParams(stop_token_ids=stops), answered=answered, grammar=grammar), 10)

    check(Grammar("json_object", "{}"), answered=1)
    with pytest.raises(InvalidRequest, match="a grammar is one of"):
        check(Grammar("ebnf", "x"))
    with pytest.raises(InvalidRequest, match="65536 bytes"):
        check(Grammar("json_schema", "é" * 40_000))
    with pytest.raises(InvalidRequest, match="needs stop tokens"):
        check(Grammar("json_object", "{}"), frozenset())
    with pytest.raises(InvalidRequest, match="2 of 2 tokens"):
        check(answered=2)


# -- reading calls ----------------------------------------------------------------------------------------------------


def read(pieces: list[str]) -> list[ToolEvent]:
    reader = ToolCallReader()
    return [event for piece in pieces for event in reader.push(piece)] + reader.finish()


def joined(events: list[ToolEvent]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", []
    for event in events:
        match event:
            case Text(more):
                assert more
                text += more
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, more):
                assert more and index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, calls


JSON = st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=4)
ARGUMENTS = st.dictionaries(st.text(max_size=4) | st.just("}\n</tool_call>"), JSON | st.just("<tool_call>"), max_size=3).map(json.dumps)
WORDS = st.text(alphabet="<tolc_ a>\n", max_size=20).filter(lambda text: "<tool_call>" not in text)


@given(WORDS, st.lists(st.tuples(st.sampled_from(["f", "weather"]), ARGUMENTS), max_size=3), st.data())
def test_calls_are_read_however_the_text_is_cut(before: str, calls: list[tuple[str, str]], data: st.DataObject) -> None:
    text = before + "\n".join(written(name, arguments) for name, arguments in calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    events = read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    assert joined(events) == (before, calls)


@given(st.data())
def test_nothing_that_was_given_out_is_taken_back(data: st.DataObject) -> None:
    text = "so: " + written("f", '{"a": "b"}') + "\nand " + written("g", "{}")
    whole, (end, reader) = joined(read([text])), (data.draw(st.integers(0, len(text))), ToolCallReader())
    begun, calls = joined(reader.push(text[:end]))
    assert whole[0].startswith(begun) and all(w[0] == c[0] and w[1].startswith(c[1]) for w, c in zip(whole[1], calls, strict=False))


def test_a_call_that_was_cut_gives_what_there_is() -> None:
    text = written("f", '{"a": 1}')
    assert joined(read([text[:-15]])) == ("", [("f", '{"a": 1')])
    assert joined(read([text[:-3]])) == ("", [("f", '{"a": 1}')])
    assert joined(read([text[:14]])) == ("", [])
    assert joined(read(["1 < 2 <tool"])) == ("1 < 2 <tool", [])


# -- writing conversations --------------------------------------------------------------------------------------------

TURNS = [Turn("user", "Weather in Oslo and Bonn?"), Turn("assistant", "", (("c1", "weather", '{"city": "Oslo"}'), ("c2", "weather", '{"city": "Bonn"}'))),
         Turn("tool", "rain", call_id="c1"), Turn("tool", "sun", call_id="c2")]  # fmt: skip


def test_a_template_that_knows_tools_gets_them_as_values() -> None:
    rendered = render(TURNS, [WEATHER], True)
    assert rendered.options["tools"][0]["function"] == {
        "name": "weather", "description": "How it is outside", "parameters": json.loads(WEATHER.parameters)
    }  # fmt: skip
    assert rendered.messages[1]["tool_calls"][1] == {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    assert rendered.messages[2] == {"role": "tool", "content": "rain", "tool_call_id": "c1"}
    assert render(TURNS[:1], [], True).options == {}


def test_other_templates_get_words() -> None:
    rendered = render([Turn("system", "Be brief."), *TURNS], [WEATHER], False)
    system, user, assistant, results = rendered.messages
    assert system == {"role": "system", "content": f"Be brief.\n\n{preamble([WEATHER])}"} and rendered.options == {}
    assert assistant["content"] == written("weather", '{"city": "Oslo"}') + "\n" + written("weather", '{"city": "Bonn"}')
    assert results == {"role": "user", "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"}
    assert '"name": "weather"' in system["content"]
    assert render(TURNS[:1], [WEATHER], False).messages[0]["role"] == "system"
    assert render(TURNS[:1], [], False).messages == [{"role": "user", "content": "Weather in Oslo and Bonn?"}]
