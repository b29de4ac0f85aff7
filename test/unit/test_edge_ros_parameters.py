"""Every setting of the edge has a description as a ROS parameter, numbers with a range: seen without ROS."""

from __future__ import annotations

import ast
import dataclasses
import typing
from pathlib import Path

from vla_edge.config import EdgeConfig

SOURCE = Path(__file__).parents[2] / "vla_edge" / "adapters" / "ros_parameters.py"  # imports ROS: read, not run


def described() -> dict[str, tuple]:
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "DESCRIPTIONS":
            return eval_literals(node.value)
    raise AssertionError("no table of descriptions")


def eval_literals(table: ast.expr) -> dict[str, tuple]:
    assert isinstance(table, ast.Dict)
    found = {}
    for key, value in zip(table.keys, table.values, strict=True):
        assert isinstance(value, ast.Tuple) and all(ast.unparse(item) for item in value.elts)
        found[ast.literal_eval(key)] = tuple(ast.unparse(item) for item in value.elts)
    return found


def leaves(config: object, path: str = "") -> dict[str, tuple[object, object]]:
    hints, found = typing.get_type_hints(type(config)), {}
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{path}{field.name}"
        found.update(leaves(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: (hints[field.name], value)})
    return found


def test_all_settings_are_described_and_numbers_have_a_range() -> None:
    table, settings = described(), leaves(EdgeConfig())
    assert set(table) == set(settings)
    for key, (hint, value) in settings.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) or int in typing.get_args(hint)
        assert len(table[key]) == (3 if is_number else 1), key
