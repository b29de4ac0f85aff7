"""Robots, workers and latencies of a running ``vla cloud``, live in the terminal. Ctrl-C ends.

Reads GET /vla/status of its HTTP door (gateway.http_listen) or of status_listen. With --once it prints the state once,
with --json as it came. A key goes into the environment variable VLA_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Final

import httpx
from rich.console import Console
from rich.live import Live

from vla_cli.top_view import Json, view
from vla_common.clock import NS_PER_S, Clock, SystemClock

VERSION: Final = 1
"""Of the state, as ``vla_cloud.gateway.status.VERSION``; not imported, as that needs more packages."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
KEY_VARIABLE: Final = "VLA_API_KEY"
_TIMEOUT_S: Final = 4.0
_PIPE_COLUMNS: Final = 200
_MAX_BYTES: Final = 8 * 1024 * 1024
_START: Final = (
    "start 'vla cloud' with --http 127.0.0.1:8000, or with --set status_listen=127.0.0.1:9100, and give --url"
)


class NoStatus(Exception):
    """There is nothing to show; the text is for the user."""


def parser() -> argparse.ArgumentParser:
    """Arguments of ``vla top``."""
    result = argparse.ArgumentParser(
        prog="vla top", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--url", default="http://127.0.0.1:8000", help="server (%(default)s)")
    result.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (%(default)s)")
    result.add_argument("--once", action="store_true", help="print once and end; exit code 1 if there is no answer")
    result.add_argument("--json", action="store_true", help="with --once: the state as JSON")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Show until Ctrl-C, or once.

    Returns:
        0; 1 if the server did not answer (with --once, or at the first look); 2 for a wrong command line.
    """
    arguments = parser().parse_args(argv)
    if not 0.1 <= arguments.interval <= 60.0 or (arguments.json and not arguments.once):
        told = "--json needs --once" if arguments.json else f"--interval must be 0.1 to 60, got {arguments.interval:g}"
        print(f"vla top: {told}", file=sys.stderr)
        return EXIT_USAGE
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        client = httpx.Client(base_url=arguments.url.rstrip("/"), timeout=_TIMEOUT_S, headers=headers, trust_env=False)
    except (httpx.InvalidURL, ValueError) as error:
        print(f"vla top: {arguments.url!r} is not a URL such as http://127.0.0.1:8000: {error}", file=sys.stderr)
        return EXIT_USAGE
    with client:
        try:
            status = ask(client)
            if arguments.json:
                print(json.dumps(status, indent=2))
            elif arguments.once:
                Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(view(status, arguments.url))
            else:
                _watch(client, arguments.url, status, arguments.interval, SystemClock())
        except NoStatus as error:
            print(f"vla top: {error}", file=sys.stderr)
            return EXIT_FAILED
        except KeyboardInterrupt:
            pass
    return EXIT_OK


def ask(client: httpx.Client) -> Json:
    """The server's state.

    Raises:
        NoStatus: no answer, or another than a state.
    """
    try:
        with client.stream("GET", "/vla/status") as response:
            if response.status_code in (401, 403):
                raise NoStatus(f"{client.base_url} asks for a key that may see this: set {KEY_VARIABLE}")
            if response.status_code != 200:
                told = f"answers {response.status_code} to GET /vla/status"
                raise NoStatus(f"{client.base_url} {told}: is it 'vla cloud'?")
            body = bytearray()
            for part in response.iter_bytes():
                body += part
                if len(body) > _MAX_BYTES:
                    raise NoStatus(f"{client.base_url} sends more than a state")
    except httpx.HTTPError as error:
        raise NoStatus(f"nothing answers at {client.base_url} ({error or type(error).__name__}): {_START}") from error
    try:
        status = json.loads(body)
    except ValueError as error:
        raise NoStatus(f"{client.base_url} sends no JSON: is it 'vla cloud'?") from error
    if not isinstance(status, dict) or status.get("version") != VERSION:
        raise NoStatus(f"{client.base_url} does not send the state of a 'vla cloud' of this version")
    return status


def _watch(client: httpx.Client, url: str, status: Json, interval_s: float, clock: Clock) -> None:
    """Look again and again; while the server is gone, the last state is shown with a word about it."""
    with Live(view(status, url), screen=True, auto_refresh=False) as live:
        due_ns = clock.monotonic_ns()
        while True:
            due_ns = max(due_ns + round(interval_s * NS_PER_S), clock.monotonic_ns())
            clock.sleep_until_ns(due_ns)
            gone = ""
            try:
                status = ask(client)
            except NoStatus as error:
                gone = str(error)
            live.update(view(status, url, gone), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
