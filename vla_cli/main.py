"""The ``vla`` command: one name for every program of the project.

A subcommand's module is imported only when it is called: ``vla edge`` on a robot must not need torch or MuJoCo.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Final

from vla_common.config import ConfigError
from vla_common.manifest import ManifestError
from vla_common.process import end_with_parent


@dataclass(frozen=True)
class Command:
    """One subcommand: what it does, where its ``main(argv) -> int`` is, and the extra that brings what it needs."""

    name: str
    summary: str
    module: str
    extra: str


COMMANDS: Final[dict[str, Command]] = {
    command.name: command
    for command in (
        Command(
            "demo",
            "run cloud, edge and simulator together, with a live view and a report",
            "vla_sim.demo_main",
            "cloud,edge,sim",
        ),
        Command("cloud", "serve context tokens for robots", "vla_cloud.cloud_main", "cloud"),
        Command("generate", "answer prompts with the serving engine, without a server", "vla_cloud.generate_main",
                "cloud,chat"),
        Command("chat", "talk to a chat server in the terminal", "vla_cli.chat_main", "gateway"),
        Command("keys", "make and list certificates and passwords for encrypted links", "vla_cli.keys_main", "keys"),
        Command("api-keys", "make, list and revoke keys of chat clients", "vla_cli.api_keys_main", ""),
        Command("top", "show robots, workers and latencies of a running cloud, live", "vla_cli.top_main", "gateway"),
        Command("edge", "drive a robot: motor clock, policy, input and output", "vla_edge.edge_main", "edge"),
        Command("sim", "simulate the robot and its tasks in real time", "vla_sim.sim_main", "sim"),
        Command("train", "make demonstrations and train a policy from them", "vla_cli.train_main", "sim,train"),
        Command("export", "export a trained policy to a model folder", "vla_cli.export_main", "train"),
        Command("record", "record the topics of a running robot, without an edge", "vla_edge.record_main", "edge"),
        Command("replay", "run a recording through the motor loop again and compare every command",
                "vla_cli.replay_main", "edge"),
        Command("trace", "show a chat request or a robot's observation as a tree of spans", "vla_cli.trace_main", ""),
        Command("doctor", "check this machine and say what to do about what is missing", "vla_cli.doctor", ""),
    )
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS.values())
    return f"subcommands:\n{rows}\n\n'vla SUBCOMMAND --help' explains each."


def _version() -> str:
    try:
        return importlib.metadata.version("vla-runtime")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from the source tree"


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        The subcommand's exit code; 2 for a wrong command line or configuration; 130 after Ctrl-C.
    """
    end_with_parent()
    parser = argparse.ArgumentParser(
        prog="vla",
        description="Split inference for robots: the cloud thinks at 10 Hz, the edge acts at 100 Hz.",
        epilog=_usage(),
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("--version", action="version", version=f"vla {_version()}")
    parser.add_argument("subcommand", nargs="?", metavar="SUBCOMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    given = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if given.subcommand is None:
        parser.print_help()
        return 0 if given.help else 2
    if given.subcommand not in COMMANDS:
        near = difflib.get_close_matches(given.subcommand, COMMANDS, n=1)
        hint = f"did you mean 'vla {near[0]}'?" if near else "'vla --help' lists them"
        print(f"vla: unknown subcommand {given.subcommand!r}; {hint}", file=sys.stderr)
        return 2
    return _run(COMMANDS[given.subcommand], given.arguments)


def _run(command: Command, arguments: list[str]) -> int:
    """Import and call; errors that a user can mend are one line, all others keep their traceback."""
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0].startswith("vla_"):
            print(f"vla {command.name}: {error.name} is not part of this installation", file=sys.stderr)
        else:
            extra = f"[{command.extra}]" if command.extra else ""
            print(
                f"vla {command.name}: {error.name} is not installed: pip install 'vla-runtime{extra}'", file=sys.stderr
            )
        return 2
    try:
        return int(module.main(arguments))
    except (ConfigError, ManifestError) as error:
        print(f"vla {command.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
