"""xgrammar over a tokenizer folder: what is allowed is what JSON Schema allows, also for a model of random weights."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'vla-runtime[structured]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'vla-runtime[dev]'")

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from engine_bench import Bench  # noqa: E402
from grammar_walk import allowed_tokens, walk  # noqa: E402
from tiny_chat_tokenizer import END, VOCAB, tiny_tokenizer  # noqa: E402

from vla_cloud.core.generate import InvalidRequest  # noqa: E402
from vla_cloud.core.grammar import Tool, json_object_grammar, json_schema_grammar, tool_grammar  # noqa: E402
from vla_cloud.core.grammar_spec import Grammar  # noqa: E402
from vla_cloud.core.step_plan import Role  # noqa: E402
from vla_cloud.core.tool_calls import CallArguments, CallBegun, Text, ToolCallReader  # noqa: E402
from vla_cloud.engine.grammar_xgrammar import XGrammarBackend  # noqa: E402
from vla_cloud.engine.runner import Batch, Chunk  # noqa: E402
from vla_cloud.engine.tokenizer import ChatTokenizer  # noqa: E402

QUOTE, BRACKET, BRACE = b'"]}'

OBJECT = {
    "type": "object", "required": ["kind", "count", "flags"],
    "properties": {
        "kind": {"enum": ["a", "bc", "d e"]}, "count": {"type": "integer", "minimum": -5, "maximum": 17}, "note": {"type": "string", "maxLength": 4},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
}  # fmt: skip
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"type": "object", "required": ["value"], "properties": {
        "value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
}  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": OBJECT, "tree": TREE, "any": {}, "string": {"type": "string", "minLength": 2, "maxLength": 6}, "pattern": {"type": "string", "pattern": "^[a-f]{2,5}(x|yz)?$"},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 3.5}, "types": {"type": ["integer", "null", "boolean"]},
    "one": {"oneOf": [{"type": "integer"}, {"type": "array", "items": {"const": "x"}, "maxItems": 2}]},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": [None, "é"]}], "items": False, "minItems": 2},
    "named": {"type": "object", "patternProperties": {"^n[0-9]$": {"type": "integer"}}, "additionalProperties": False},
    "names": {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,2}$"}, "additionalProperties": {"type": "boolean"}},
    "date": {"type": "string", "format": "date"}, "const": {"const": {"a": [1, {"b": None}]}}, "open": {**OBJECT, "additionalProperties": {"type": "integer"}},
    "sized": {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "null"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def backend(tokenizer: ChatTokenizer) -> XGrammarBackend:
    backend = XGrammarBackend(tokenizer.folder, VOCAB, [END])
    backend.load()
    assert backend.words == -(-VOCAB // 32)
    return backend


@pytest.mark.parametrize("size", [VOCAB - 300, VOCAB + 300])
def test_a_model_may_have_more_or_fewer_tokens_than_its_tokenizer(tokenizer: ChatTokenizer, size: int) -> None:
    backend = XGrammarBackend(tokenizer.folder, size, [END] if size > END else [])
    matcher = backend.matcher(backend.compile(json_schema_grammar({"type": "string"})), [END] if size > END else [0])
    row = np.zeros(-(-size // 32), np.int32)
    assert backend.words == len(row) and matcher.accept(QUOTE)
    matcher.fill(row)
    assert allowed_tokens(row).max() == min(size, END - 1) - 1


def answers(backend: XGrammarBackend, tokenizer: ChatTokenizer, grammar: Grammar, count: int) -> list[str]:
    walks = [walk(backend, grammar, END, seed, (QUOTE, BRACKET, BRACE)) for seed in range(count)]
    whole = [tokenizer.decode(tokens) for tokens in walks if tokens is not None]
    assert len(whole) >= count * 0.7
    return whole


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_allowed_is_valid(backend: XGrammarBackend, tokenizer: ChatTokenizer, name: str, strict: bool) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    texts = answers(backend, tokenizer, json_schema_grammar(schema, strict), 20)
    for text in texts:
        validator.validate(json.loads(text))
        assert name != "date" or re.fullmatch(r'"\d{4}-\d\d-\d\d"', text), "its form, not the calendar"
    assert len(set(texts)) > 1 or name == "const"


def test_json_object_is_any_object(backend: XGrammarBackend, tokenizer: ChatTokenizer) -> None:
    assert all(isinstance(json.loads(text), dict) for text in answers(backend, tokenizer, json_object_grammar(), 20))


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_are_required(backend: XGrammarBackend, tokenizer: ChatTokenizer, parallel: bool) -> None:
    tools = [Tool("first", json.dumps(OBJECT)), Tool("second")]
    numbers = set()
    for text in answers(backend, tokenizer, tool_grammar(tools, "required", parallel), 30):
        reader = ToolCallReader()
        calls: list[list[str]] = []
        for event in [*reader.push(text), *reader.finish()]:
            if isinstance(event, CallBegun):
                calls.append([event.name, ""])
            else:
                assert isinstance(event, CallArguments)
                calls[-1][1] += event.text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), OBJECT if name == "first" else {"type": "object"})
        numbers.add(len(calls))
    assert 0 not in numbers and (max(numbers) > 1) == parallel


def accepts(backend: XGrammarBackend, grammar: Grammar, text: str) -> bool:
    matcher = backend.matcher(backend.compile(grammar), [END])
    return all(matcher.accept(token) for token in text.encode()) and matcher.accept(END)


def test_calls_that_may_come_within_text(backend: XGrammarBackend) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    auto = tool_grammar([Tool("f")], "auto")
    assert all(accepts(backend, auto, text) for text in ("", "Hi.", "1 < 2 <tool", f"So: {call}", f"{call}\n{call} done"))
    assert not any(accepts(backend, auto, text) for text in ("<tool_call>", call.replace('"f"', '"g"'), call[:-1], "<tool_call> x"))
    assert not accepts(backend, tool_grammar([Tool("f")], "auto", False), f"{call}\n{call}")
    events = ToolCallReader().push(f"So: {call}")
    assert events == [Text("So: "), CallBegun(0, "f"), CallArguments(0, "{}")]


def test_special_tokens_are_no_text(backend: XGrammarBackend) -> None:
    """<|im_start|> stands for no letters: a string of twelve is not made of it."""
    matcher = backend.matcher(backend.compile(json_schema_grammar({"type": "string"})), [END])
    assert matcher.accept(QUOTE) and not matcher.accept(END - 1) and not matcher.accept(END) and matcher.accept(QUOTE) and matcher.accept(END)
    assert not matcher.accept(QUOTE), "it has ended"


@pytest.mark.parametrize(("schema", "told"), [
    ({"$ref": "#"}, "Circular"), ({"$ref": "#/$defs/x"}, "Cannot find field"), ({"type": "nope"}, "Unsupported type"), ({"enum": []}, "must not be empty"),
    ({"type": "string", "pattern": "("}, "parenthesis is not closed"), ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum greater"),
])  # fmt: skip
def test_what_the_library_refuses_it_names(backend: XGrammarBackend, schema: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot be compiled: .*{told}") as caught:
        backend.compile(json_schema_grammar(schema))
    assert ".cc" not in str(caught.value)


# -- a model of random weights ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'vla-runtime[chat]'")
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    from vla_cloud.engine.torch_runner import TorchRunner
    from vla_models.chat_model import load_chat_model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices on several threads wait for each other
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    yield TorchRunner(load_chat_model(folder), num_blocks=256)
    torch.set_num_threads(threads)


def test_rows_without_a_grammar_are_the_same_to_the_bit(runner: Any) -> None:
    from vla_models.sampling import SamplingRule

    rule = SamplingRule(temperature=0.8, seed=3, logprobs=5)
    allowed = np.zeros(-(-VOCAB // 32), np.int32)
    allowed[3] = 0b101
    prompts = {"a": [5, 6, 7], "b": [8, 9, 10, 11], "c": [12]}

    def run(masked: tuple[str, ...]) -> dict[str, Any]:
        chunks = [Chunk(name, tokens, 0, [index], rule, (), allowed if name in masked else None) for index, (name, tokens) in enumerate(prompts.items())]
        return {one.request_id: one for one in runner.run(Batch(prefill=chunks))}

    plain, mixed = run(()), run(("b",))
    assert plain["a"] == mixed["a"] and plain["c"] == mixed["c"] and plain["b"] != mixed["b"]
    b = mixed["b"]
    assert b.token_id in (96, 98) and [token for token, _ in sorted(b.top_logprobs)] == [96, 98]
    assert sum(np.exp(logprob) for _, logprob in b.top_logprobs) == pytest.approx(1.0)


def test_random_weights_write_valid_json(runner: Any, backend: XGrammarBackend, tokenizer: ChatTokenizer) -> None:
    from engine_bench import make_work

    bench = Bench()
    w = bench.add("w", Role.BOTH, runner=runner, grammars=backend, max_running=16, max_admitted=32, max_waiting=64, max_model_len=512)
    grammars = {"object": json_schema_grammar(OBJECT), "tree": json_schema_grammar(TREE), "number": json_schema_grammar(SCHEMAS["number"])}
    works = {}
    for seed in range(8):
        for name, grammar in grammars.items():
            temperature = (0.0, 1.0, 3.0)[seed % 3]
            works[f"{name} {seed}"] = make_work(
                list(f"{name} {seed}".encode()), 200, temperature=temperature, seed=seed, stop_token_ids=frozenset([END]), grammar=grammar
            )
    plain = make_work(list(b"plain"), 30, temperature=1.0, seed=5)
    bench.generate("w", "alone", plain)
    bench.settle()
    for request_id, work in works.items():
        bench.generate("w", request_id, work)
    bench.generate("w", "beside", plain)
    while w.engine._intake.holds_any or any(w.of(request_id).final is None for request_id in (*works, "beside")):
        bench.step()
    assert w.of("beside").tokens == w.of("alone").tokens
    whole = 0
    for request_id in works:
        told, name = w.of(request_id), request_id.split()[0]
        if told.final.reason == "stop":
            whole += 1
            jsonschema.validate(json.loads(tokenizer.decode(told.tokens)), SCHEMAS[name])
    assert whole >= 12
    w.engine.close()
