"""Writes the tables of docs/ros2.md from the code that they describe: ``python tools/docs_tables.py``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; the rest of the page is written by hand. With
``--check`` nothing is written, and the exit code is 1 if the page is not up to date.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vla_common.joint_command import CommandOutput, command_template  # noqa: E402
from vla_common.topics import TOPICS  # noqa: E402
from vla_edge.config import COMMAND_TOPICS, EdgeConfig  # noqa: E402

PAGE: Final = ROOT / "docs" / "ros2.md"
PARTS_OF_THE_EDGE: Final = ("io", "motor", "policy")
AGE_IS_CHECKED: Final = ("joint_states", "image", "shield_command")
"""By the io process on receipt; of shield_command the re-arm only."""


def row(*cells: object) -> str:
    """A line of a table. Outside of code, what looks like a tag or emphasis is escaped."""
    return "| " + " | ".join("`".join(part if odd else re.sub(r"[<*_]", r"\\\g<0>", part)
                                      for odd, part in _alternating(str(cell).replace("|", "\\|").split("`")))
                             for cell in cells) + " |"


def _alternating(parts: list[str]) -> Iterator[tuple[bool, str]]:
    return ((bool(number % 2), part) for number, part in enumerate(parts))


def table(heads: Sequence[str], rows: Iterator[str]) -> str:
    """A table with its head."""
    return "\n".join([row(*heads), "|" + "---|" * len(heads), *rows])


def topics_table() -> str:
    """Topics of the robot bus with type, direction and quality of service."""
    return table(("topic", "type", "the edge", "reliability", "depth", "Hz", "refused when older than"), (
        row(f"`{shown(spec.pattern)}`", f"`{spec.type_name.replace('/msg/', '/')}`", direction(name),
            spec.reliability.replace("_", " "), spec.depth, f"{spec.rate_hz:g}" if spec.rate_hz else "on event",
            f"{spec.max_age_s:g} s" if name in AGE_IS_CHECKED else "")
        for name, spec in TOPICS.items() if spec.network == "bus"))


def shown(pattern: str) -> str:
    """A topic with placeholders as people write them."""
    return pattern.replace("{robot}", "<robot>").replace("{camera}", "<camera>")


def direction(name: str) -> str:
    """Whether the edge reads or publishes a topic, by the table of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {name} \|[^|]*\|[^|]*\|([^|]*)→([^|]*)\|", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"docs/architecture.md has no row for the topic {name}")
    source, target = (set(re.findall(r"\w+", side)) for side in found.groups())
    if source & set(PARTS_OF_THE_EDGE):
        return "publishes"
    return "reads" if target & set(PARTS_OF_THE_EDGE) else "does not use"


def commands_table() -> str:
    """Forms of the command."""
    return table(("`ros.command_output`", "type", "topic unless `ros.command_topic` is set"), (
        row(f"`{name}`", f"`{command_template(name, ['any'], 0.01).type_name.replace('/msg/', '/')}`",
            f"`{COMMAND_TOPICS.get(name) or shown(TOPICS['joint_command'].pattern)}`")
        for name in typing.get_args(CommandOutput)))


def parameters_table() -> str:
    """Settings, which are the node's parameters, with the comments of config/edge.yaml."""
    comments = yaml_comments((ROOT / "config" / "edge.yaml").read_text(encoding="utf-8"))
    missing = [name for name, _, _ in settings(EdgeConfig) if not comments.get(name)]
    if missing:
        raise SystemExit(f"config/edge.yaml does not explain {', '.join(missing)}")
    ranges, fixed = ranges_of_parameters()
    return table(("parameter", "type", "default", "range", "meaning"), (
        row(f"`{name}`", kind, f"`{default}`", ranges.get(name, ""),
            comments[name] + (" (read-only)" if name in fixed else ""))
        for name, kind, default in settings(EdgeConfig)))


def ranges_of_parameters() -> tuple[dict[str, str], frozenset[str]]:
    """Ranges of the node's parameters, and the names of those that cannot be set while it runs; read without ROS."""
    tree = ast.parse((ROOT / "vla_edge" / "adapters" / "ros_parameters.py").read_text(encoding="utf-8"))
    values = {ast.unparse(node.target): node.value for node in tree.body if isinstance(node, ast.AnnAssign)}
    described: Any = values["DESCRIPTIONS"]
    names = (ast.literal_eval(key) for key in described.keys)
    bounds = {name: [ast.unparse(part) for part in value.elts[1:]]
              for name, value in zip(names, described.values, strict=True)}
    return ({name: " .. ".join(ends) for name, ends in bounds.items() if len(ends) == 2},
            frozenset(ast.literal_eval(values["READ_ONLY"].args[0])))  # type: ignore[union-attr]


def settings(cls: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Dotted name, type and default of every setting."""
    hints, default = typing.get_type_hints(cls), cls()
    for field in dataclasses.fields(cls):
        hint, value = hints[field.name], getattr(default, field.name)
        if dataclasses.is_dataclass(hint):
            yield from settings(hint, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, kind_of(hint), written(value)


def kind_of(hint: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if arg is type(None) else kind_of(arg) for arg in args)
    if origin is tuple:
        return f"list of {kind_of(args[0])}"
    return {bool: "bool", int: "int", float: "double", str: "string", Path: "path"}[hint]


def written(value: Any) -> str:
    """A value as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value) or '""'


def yaml_comments(text: str) -> dict[str, str]:
    """Comment of every key by its dotted name; lines of comment alone go on with the one before."""
    found: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        key = re.match(r"( *)(\w+):(?: (?:\"[^\"]*\"|[^#\"])*)?(?:# ?(.*))?$", line)
        if key:
            path = [*path[: len(key[1]) // 2], key[2]]
            found[".".join(path)] = (key[3] or "").strip()
        elif path and line.strip().startswith("#"):
            found[".".join(path)] += " " + line.strip("# ")
    return found


def launch_table(file: str) -> Callable[[], str]:
    """Arguments of a launch file, read without ROS."""
    def make() -> str:
        tree = ast.parse((ROOT / "launch" / file).read_text(encoding="utf-8"))
        (value,) = [node.value for node in tree.body if isinstance(node, ast.Assign)
                    and ast.unparse(node.targets[0]) == "ARGUMENTS"]
        return table(("argument", "default", "meaning"), (
            row(f"`{ast.literal_eval(name)}`", f"`{argument_default(default)}`", ast.literal_eval(meaning))
            for name, default, meaning in (entry.elts for entry in value.elts)))  # type: ignore[attr-defined]
    return make


def argument_default(node: ast.expr) -> str:
    """A constant, or a path below the package's share folder."""
    if isinstance(node, ast.Constant):
        return str(node.value) or '""'
    return "/".join(["share/vla_runtime", *re.findall(r"'([^']*)'", ast.unparse(node))])


TABLES: Final[dict[str, Callable[[], str]]] = {
    "topics": topics_table, "commands": commands_table, "parameters": parameters_table,
    "edge.launch.py": launch_table("edge.launch.py"), "sim.launch.py": launch_table("sim.launch.py"),
}


def renewed(text: str) -> str:
    """The page with every table made anew.

    Raises:
        SystemExit: a table that is not known, or not used.
    """
    used = re.findall(r"<!-- table: (\S+) -->", text)
    if sorted(used) != sorted(TABLES):
        raise SystemExit(f"{PAGE.name} has the tables {sorted(used)}, this script makes {sorted(TABLES)}")
    return re.sub(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)",
                  lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Renew or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(description="Renew the tables of docs/ros2.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    options = parser.parse_args(argv)
    text = PAGE.read_text(encoding="utf-8")
    new = renewed(text)
    if options.check:
        if new != text:
            print("docs/ros2.md is not up to date: python tools/docs_tables.py", file=sys.stderr)
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
