"""Schemas are compiled apart: a hostile one is refused in bounded time, and a process that fails is replaced."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed: pip install 'vla-runtime[structured]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vla-runtime[chat]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from tiny_chat_tokenizer import END, tiny_tokenizer

from vla_cloud.core.generate import InvalidRequest, QueueFull, RequestError
from vla_cloud.core.grammar import Tool, canonical, json_object_grammar, json_schema_grammar, tool_grammar
from vla_cloud.core.grammar_spec import Grammar
from vla_cloud.gateway import grammar_checker
from vla_cloud.gateway.grammar_checker import CheckerFailed, GrammarChecker
from vla_cloud.gateway.settings import GrammarRules

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    checker = GrammarChecker(folder, [END], GrammarRules(cpu_s=0.5))
    checker._child._answer_s = 60.0  # what is looked at is the processor time
    yield checker
    checker.close()
    checker.close()


def raw(schema: Any) -> Grammar:
    """Past the checks that need no library."""
    return Grammar("json_schema", canonical({"schema": schema, "strict": False}))


def error(checker: GrammarChecker, grammar: Grammar) -> str:
    try:
        asyncio.run(checker.check(grammar))
    except InvalidRequest as caught:
        return str(caught)
    return ""


def doubled(levels: int, word: str) -> dict[str, Any]:
    """Each definition names the next one twice: 2 ** levels paths."""
    part = lambda i: {"$ref": f"#/$defs/d{i + 1}"}  # noqa: E731
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": part(i), "b": part(i)}} if word == "properties" else {word: [part(i), part(i)]}
        for i in range(levels)
    }  # fmt: skip
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "string"}}}


def test_good_ones_are_taken_and_known_ones_at_once(checker: GrammarChecker) -> None:
    good = [json_object_grammar(), json_schema_grammar({"type": "integer"}), tool_grammar([Tool("f")], "auto"), tool_grammar([Tool("f")], "required")]
    assert [error(checker, grammar) for grammar in good] == [""] * 4
    asked = checker._child.ask
    checker._child.ask = None  # type: ignore[method-assign, assignment]
    assert [error(checker, grammar) for grammar in good] == [""] * 4
    checker._child.ask = asked  # type: ignore[method-assign]


HOSTILE = {
    "a circle": {"$ref": "#"}, "a circle of choices": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "a regular expression": {"pattern": "^.{0,5000}$", "type": "string"},
    "many optional": {"type": "object", "properties": {f"p{i}": {"type": "array", "items": {"type": "string"}} for i in range(1000)}},
    "nothing": {"enum": []}, "no type": {"type": "x"},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_ones_are_refused_in_bounded_time(checker: GrammarChecker, name: str) -> None:
    told = error(checker, raw(HOSTILE[name]))
    assert told and (told.startswith("the schema")), told
    assert error(checker, raw({"type": "integer", "title": name})) == "", "the process serves on"


@pytest.mark.parametrize("word", ["properties", "anyOf", "allOf"])
def test_doubled_references_are_bounded(checker: GrammarChecker, word: str) -> None:
    error(checker, raw(doubled(22, word)))  # taken or not
    assert error(checker, json_object_grammar()) == ""


def test_a_process_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    assert error(checker, json_object_grammar()) == ""
    process = checker._child._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(CheckerFailed):
        asyncio.run(checker.check(json_schema_grammar({"const": 1})))
    assert error(checker, json_schema_grammar({"const": 1})) == ""
    assert checker._child._process is not process


# -- with a program of the test in place of the real one --------------------------------------------------------------


def scripted(program: str, **rules: Any) -> GrammarChecker:
    checker = GrammarChecker(Path("/nowhere"), [1], GrammarRules(**rules))
    checker._child._command = [sys.executable, "-c", program]
    return checker


READY = "import sys, time, json\nprint('{\"error\": \"\"}', flush=True)\n"


def test_many_that_ask_for_the_same_wait_for_one_answer_and_others_are_bounded() -> None:
    checker = scripted(READY + "for n, line in enumerate(sys.stdin):\n time.sleep(0.2)\n print(json.dumps({'error': str(n)}), flush=True)", max_waiting=2)

    async def go() -> None:
        one, two, three = (json_schema_grammar({"const": n}) for n in range(3))
        leaves = asyncio.create_task(checker.check(one))
        waiting = [asyncio.create_task(checker.check(one)) for _ in range(3)] + [asyncio.create_task(checker.check(two))]
        await asyncio.sleep(0)
        leaves.cancel()
        with pytest.raises(QueueFull, match="2 schemas wait"):
            await checker.check(three)
        told = [str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)]
        assert sorted(told) == ["0", "0", "0", "1"] or sorted(told) == ["", "", "", "1"]
        with pytest.raises(InvalidRequest, match="2"):
            await checker.check(three)

    asyncio.run(go())
    checker.close()


@pytest.mark.parametrize(("program", "told"), [
    ("print('{\"error\": \"no tokenizer\"}', flush=True)", "no tokenizer"), ("raise SystemExit(1)", "does not answer"),
    (READY + "sys.stdin.readline()", "does not answer"), (READY + "sys.stdin.readline()\ntime.sleep(60)", "does not answer"),
])  # fmt: skip
def test_a_process_that_fails_is_told_and_waited_for_no_longer(program: str, told: str) -> None:
    checker = scripted(program, cpu_s=0.02)
    with pytest.raises(RequestError, match=told) as caught:
        asyncio.run(checker.check(json_object_grammar()))
    assert caught.value.code == "UNAVAILABLE"
    checker.close()


def test_closing_ends_a_check_under_way() -> None:
    checker = scripted(READY + "sys.stdin.readline()\ntime.sleep(60)", cpu_s=60.0)

    async def go() -> None:
        task = asyncio.create_task(checker.check(json_object_grammar()))
        while checker._child._process is None:
            await asyncio.sleep(0.01)
        checker.close()
        with pytest.raises(CheckerFailed):
            await task
        with pytest.raises(CheckerFailed, match="the server ends"):
            await checker.check(json_object_grammar())

    asyncio.run(go())


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = scripted("")
    monkeypatch.setattr(grammar_checker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"pip install 'vla-runtime\[structured\]'"):
        asyncio.run(checker.check(json_object_grammar()))
    checker.close()
