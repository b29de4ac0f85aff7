"""docs/ros2.md says what the code does: its tables are made from it, its names exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from vla_common.config import from_mapping
from vla_common.messages import definition_texts
from vla_common.topics import TOPICS
from vla_edge.config import EdgeConfig

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("docs_tables", ROOT / "tools" / "docs_tables.py")
docs_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_tables)
PAGE = (ROOT / "docs" / "ros2.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date():
    assert docs_tables.renewed(PAGE) == PAGE, "python tools/docs_tables.py renews it"
    assert docs_tables.main(["--check"]) == 0


def test_a_stale_table_is_noticed():
    stale = PAGE.replace("| 100 |", "| 99 |", 1)
    assert stale != PAGE and docs_tables.renewed(stale) == PAGE
    with pytest.raises(SystemExit, match="topics"):
        docs_tables.renewed(PAGE.replace("<!-- table: topics -->", ""))


def test_every_topic_of_the_bus_and_every_setting_is_there():
    for spec in TOPICS.values():
        if spec.network == "bus":
            assert f"| `{docs_tables.shown(spec.pattern)}` |" in PAGE
    names = [name for name, _, _ in docs_tables.settings(EdgeConfig)]
    assert len(names) == len(set(names)) > 40
    assert re.findall(r"^\| `([\w.]+)` \|", docs_tables.parameters_table(), re.MULTILINE) == names


def test_the_directions_are_those_of_the_edges_processes():
    for name in ("joint_states", "image", "instruction", "shield_command", "estop"):
        assert docs_tables.direction(name) == "reads"
    for name in ("joint_command", "shield_status", "motor_ticks", "policy_status", "action_chunk"):
        assert docs_tables.direction(name) == "publishes"
    assert docs_tables.direction("sim_state") == "does not use"


def test_settings_in_the_text_exist():
    prose = re.sub(r"<!-- table.*?<!-- end -->", "", PAGE, flags=re.DOTALL)
    known = {name for name, _, _ in docs_tables.settings(EdgeConfig)}
    used = re.findall(r"`(\w+\.\w+)(?:: (\w+))?`", prose)
    used = [(name, value) for name, value in used if name.split(".")[0] in {entry.split(".")[0] for entry in known}]
    assert used
    for name, value in used:
        assert name in known, name
        if value:
            section, key = name.split(".")
            from_mapping(EdgeConfig, {section: {key: value}})


def test_names_in_the_text_exist():
    for path in re.findall(r"\]\((\w+\.md)[)#]", PAGE):
        assert (ROOT / "docs" / path).is_file(), path
    for path in re.findall(r"`((?:config|test|launch)/[\w/.]+\.\w+)`", PAGE):
        assert (ROOT / path).exists(), path
    for file in re.findall(r"(\w+\.launch\.py)", PAGE):
        assert (ROOT / "launch" / file).is_file(), file
    arguments = re.findall(r"(?<=\s)(\w+):=", re.sub(r"^\|.*$", "", PAGE, flags=re.MULTILINE))
    assert len(arguments) > 4
    for name in arguments:
        assert f"| `{name}` |" in docs_tables.TABLES["edge.launch.py"](), name
    for short in re.findall(r"vla_runtime/msg/(\w+)", PAGE):
        assert f"vla_runtime/msg/{short}" in definition_texts()
    for short in re.findall(r"vla_runtime/action/(\w+)", PAGE):
        assert (ROOT / "action" / f"{short}.action").is_file()


def test_comments_of_yaml_are_read_with_their_continuation():
    text = 'a: 1   # first\n       # goes on\nb:      # section\n  c: "x # y"   # of c\n  d: [p, q]\n'
    assert docs_tables.yaml_comments(text) == {"a": "first goes on", "b": "section", "b.c": "of c", "b.d": ""}
