"""Keys of chat clients: who may use the HTTP and gRPC doors of ``vla cloud``, and how much.

A key is shown once, as it is made, and only its hash is kept. A running gateway (gateway.api_keys) sees every change of
the file within seconds; requests under way go on.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vla_cloud.gateway.api_key_file import KeyEntry, changed_keys, load_keys, new_token, token_hash
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import NS_PER_S, Clock, SystemClock

EXIT_OK, EXIT_FAILED = 0, 1
_UNITS_S: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LIMITS: Final = {
    "requests_per_minute": "requests begun in a minute",
    "tokens_per_minute": "tokens of prompts and answers in a minute",
    "tokens_per_day": "the same in 24 hours",
    "max_tokens": "longest answer; a request that asks for more gets this",
    "max_concurrent": "requests at a time, those that wait included",
}


def parser() -> argparse.ArgumentParser:
    """Arguments of ``vla api-keys``."""
    result = argparse.ArgumentParser(
        prog="vla api-keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = result.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="make a key and print it, alone, to stdout")
    add.add_argument("name", help="of the key; unique in the file")
    add.add_argument("--tenant", default="", help="keys of one tenant share cached prompts; default: the key's name")
    add.add_argument("--priority", choices=("high", "normal", "low"), default="normal",
                     help="the most urgent it may ask for, and what it gets otherwise (%(default)s)")  # fmt: skip
    for name, told in _LIMITS.items():
        add.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=f"{told}; default: no limit")
    add.add_argument("--expires", type=_duration_s, metavar="30d", help="after so many m, h, d or w; default: never")
    add.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="those it may use; default: all")
    add.add_argument("--operator", action="store_true", help="may read /metrics and call vla.v1.Control")
    listing = commands.add_parser("list", help="all keys and their limits")
    revoke = commands.add_parser("revoke", help="delete a key")
    revoke.add_argument("name")
    for command in (add, listing, revoke):
        command.add_argument("--file", type=Path, default=Path("api_keys.yaml"), help="of the keys (%(default)s)")
    return result


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Add, list or revoke.

    Returns:
        0; 1 if it could not be done; 2 for a wrong command line.
    """
    arguments = parser().parse_args(argv)
    clock = clock if clock is not None else SystemClock()
    try:
        if arguments.command == "add":
            _add(arguments, clock)
        elif arguments.command == "list":
            _list(arguments.file, clock)
        else:
            _revoke(arguments.file, arguments.name)
    except (GatewayError, ValueError) as error:
        print(f"vla api-keys: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _add(arguments: argparse.Namespace, clock: Clock) -> None:
    token = new_token()
    digest = token_hash(token)
    assert digest is not None
    expires = "" if arguments.expires is None else _utc(clock.wall_ns() // NS_PER_S + arguments.expires)
    limits = {name: getattr(arguments, name) for name in _LIMITS}
    entry = KeyEntry(
        arguments.name, digest, arguments.tenant, arguments.priority, **limits, expires=expires,
        models=tuple(arguments.models), operator=arguments.operator,
    )  # fmt: skip
    with changed_keys(arguments.file) as keys:
        if any(key.name == entry.name for key in keys):
            raise GatewayError(f"{arguments.file} has a key {entry.name!r}: take another name, or revoke it first")
        keys.append(entry)
    print(token)
    print(f"key {entry.name!r} is in {arguments.file}; it is not shown again", file=sys.stderr)


def _list(path: Path, clock: Clock) -> None:
    for key in load_keys(path).keys:
        ends_ns = key.expires_wall_ns
        has_ended = ends_ns is not None and ends_ns <= clock.wall_ns()
        words = [key.name, f"tenant={key.tenant or key.name}", f"priority={key.priority}"]
        words += [f"{name}={getattr(key, name)}" for name in _LIMITS if getattr(key, name) is not None]
        words += [f"models={','.join(key.models)}"] if key.models else []
        words += ["operator"] if key.operator else []
        words += [f"{'EXPIRED' if has_ended else 'expires'}={key.expires}"] if key.expires else []
        print("  ".join(words))


def _revoke(path: Path, name: str) -> None:
    load_keys(path)  # a file that is not there is not made
    with changed_keys(path) as keys:
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise GatewayError(f"{path} has no key {name!r}; 'vla api-keys list' shows all")
        keys[:] = left


def _duration_s(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,5})([mhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number with m, h, d or w, such as 30d")
    return int(match.group(1)) * _UNITS_S[match.group(2)]


def _utc(wall_s: int) -> str:
    at = datetime.datetime.fromtimestamp(wall_s, tz=datetime.timezone.utc)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    sys.exit(main())
