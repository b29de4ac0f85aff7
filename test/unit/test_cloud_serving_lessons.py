"""docs/serving.md names the lessons of other serving engines and the test of each."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("## Lessons from the field\n")[2]
LESSONS = (
    "vllm#46283", "sglang#24527", "vllm#41269", "vllm#29906", "vllm#52234", "dynamo#13691", "dynamo#13088",
    "sglang#30233", "sglang#10110", "sglang#6857", "sglang#6215", "vllm#57413", "LMCache#4086", "vllm#20261",
    "openvino.genai#3722", "GHSA-rm76-4mrf-v9r8", "router#179", "llm-d#2433", "production-stack#687", "dynamo#10774",
    "vllm#57157", "router#193", "sglang#14305",
)  # fmt: skip


def functions() -> set[str]:
    """Names of all test functions."""
    found = set()
    for path in (ROOT / "test").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


def test_documented_lessons_have_their_tests():
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 40 and not named - functions()
    rows = [line for line in TEXT.splitlines() if re.match(r"\| .*\|$", line) and not line.startswith(("| where", "| promise"))]
    without = [row for row in rows if "`test_" not in row and "`benchmarks/" not in row]
    assert len(rows) > 20 and not without
    assert all((ROOT / path).is_file() for path in re.findall(r"`(benchmarks/\w+\.py)`", TEXT))


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_lesson_is_documented(lesson):
    assert re.search(rf"(?<!\w){re.escape(lesson)}(?!\d)", TEXT)
