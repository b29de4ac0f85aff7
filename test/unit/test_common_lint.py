"""Rules of the code base that linters do not know."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("vla_common", "vla_models", "vla_cloud", "vla_edge", "vla_sim", "vla_cli")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
CLOCK_FILE = ROOT / "vla_common" / "clock.py"
# The wall clock and the sleeps of every module that has them; threading and select timeouts wait for events, not time.
FORBIDDEN_TIME = {
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "sleep",
    "clock_gettime",
    "clock_gettime_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
}
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def clock_reads(tree: ast.AST) -> list[str]:
    """Uses of the time module's clocks and of datetime.now, however imported."""
    modules, functions = {}, {}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            functions |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = modules.get(node.value.id) or functions.get(node.value.id)
            if (owner == "time" and node.attr in FORBIDDEN_TIME) or (
                owner in ("datetime.datetime", "datetime.date") and node.attr in ("now", "utcnow", "today")
            ):
                found.append(f"line {node.lineno}: {owner}.{node.attr}")
            if owner == "asyncio" and node.attr == "sleep":
                found.append(f"line {node.lineno}: asyncio.sleep")
        elif isinstance(node, ast.Name) and functions.get(node.id, "").startswith("time."):
            if functions[node.id].split(".")[1] in FORBIDDEN_TIME:
                found.append(f"line {node.lineno}: {functions[node.id]}")
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_clock_reads_a_clock(path):
    if path != CLOCK_FILE:
        found = clock_reads(ast.parse(path.read_text(encoding="utf-8")))
        assert not found, f"{name_of(path)}: take a vla_common.clock.Clock instead of {found}"


def test_the_rule_sees_every_spelling():
    spellings = (
        "import time\ntime.sleep(1)",
        "import time as t\nt.monotonic()",
        "from time import sleep\nsleep(1)",
        "from time import perf_counter as p\np()",
        "from datetime import datetime\ndatetime.now()",
        "import asyncio\nasyncio.sleep(1)",
        "import time\nf = time.time",
    )
    assert all(clock_reads(ast.parse(text)) for text in spellings)
    assert not clock_reads(ast.parse("import time\ntime.strftime('%H', time.gmtime(0))\nclock.sleep(1)"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_code_from_data(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{name_of(path)}:{node.lineno}"
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not FORBIDDEN_MODULES & {name.split(".")[0] for name in names}, f"{name_of(path)}:{node.lineno}"
