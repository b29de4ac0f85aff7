"""Keys for encrypted and authenticated links: a development CA, certificates of server, robots and chat clients.

They are plain files in one folder; nothing runs. See docs/security.md for what to do with them. A fleet may use the
certificates of its own CA instead: a robot's common name is its id.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from vla_cli.key_folder import CERTIFICATE_DAYS, Entry, KeyFolder, KeyFolderError, default_folder
from vla_common.certificate_file import SOON_DAYS
from vla_common.clock import Clock, SystemClock
from vla_common.link_diagnosis import tls_problem
from vla_common.tls import TlsError, client_context

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """Arguments of ``vla keys``."""
    result = argparse.ArgumentParser(
        prog="vla keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str, makes: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=summary, description=summary)
        one.add_argument("--out", type=Path, default=default_folder(), metavar="FOLDER", help="default: %(default)s")
        if makes:
            one.add_argument("--days", type=int, default=CERTIFICATE_DAYS, help="of validity (%(default)s)")
            one.add_argument("--force", action="store_true", help="replace what is there")
        return one

    for name, summary in (("init", "make a CA and the server's certificate"),
                          ("server", "issue the server's certificate anew, from the CA that is there")):  # fmt: skip
        command(name, summary).add_argument(
            "--host", action="append", default=[], metavar="NAME",
            help="name or IP address by which robots and clients reach the server, beside localhost; may be repeated",
        )  # fmt: skip
    command("robot", "issue a robot's certificate and password").add_argument("name", help="robot id, such as arm1")
    command("revoke", "remove a robot: vla cloud no longer admits it", makes=False).add_argument("name")
    command("client", "issue a chat client's certificate").add_argument("name")
    command("list", "show all certificates and when they expire; exit code 1 if one has", makes=False)
    check = commands.add_parser("check", help="shake hands with a server, and say what is wrong")
    check.add_argument("address", metavar="HOST:PORT")
    check.add_argument("--ca", type=Path, help="CA of the server's certificate; default: the public ones")
    check.add_argument("--cert", type=Path, help="client certificate")
    check.add_argument("--key", type=Path, help="its private key")
    return result


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Make, list or try keys.

    Returns:
        0; 1 if something has expired or a server does not take them; 2 if nothing was made.
    """
    arguments = parser().parse_args(argv)
    try:
        if arguments.command == "check":
            return _check(arguments)
        if getattr(arguments, "days", 1) < 1:
            raise KeyFolderError(f"--days must be at least 1, got {arguments.days}")
        clock = clock or SystemClock()
        return _COMMANDS[arguments.command](KeyFolder(arguments.out.expanduser().absolute(), clock), arguments, clock)
    except (KeyFolderError, TlsError) as error:
        print(f"vla keys: {error}", file=sys.stderr)
        return EXIT_USAGE


def _init(folder: KeyFolder, arguments: argparse.Namespace, clock: Clock) -> int:
    folder.init(arguments.host, arguments.days, arguments.force)
    print(f"""keys in {folder.root}; ca.key must stay there. Next: vla keys robot NAME, vla keys client NAME

# cloud.yaml
listen: tls/0.0.0.0:7448
tls:
  certificate: {folder.server}
  key: {folder.server.with_suffix(".key")}
  client_ca: {folder.ca}  # chat clients must show a certificate; null: anyone may chat
robot_link:
  client_ca: {folder.ca}
  access: {folder.access}
  # users: {folder.users}  # ask for passwords too""")
    return EXIT_OK


def _server(folder: KeyFolder, arguments: argparse.Namespace, clock: Clock) -> int:
    folder.renew_server(arguments.host, arguments.days, arguments.force)
    print(f"{folder.server}: restart vla cloud to use it")
    return EXIT_OK


def _robot(folder: KeyFolder, arguments: argparse.Namespace, clock: Clock) -> int:
    at = folder.robot(arguments.name, arguments.days, arguments.force)
    print(f"""{at}: copy this folder to the robot, and restart vla cloud, which now admits it

# edge.yaml, with the paths on the robot
robot_id: {arguments.name}
cloud: tls/HOST:7448
cloud_link:
  ca: {at}/ca.pem
  certificate: {at}/robot.pem
  key: {at}/robot.key
  # user: {arguments.name}  # if the cloud asks for passwords too
  # password_file: {at}/password""")
    return EXIT_OK


def _revoke(folder: KeyFolder, arguments: argparse.Namespace, clock: Clock) -> int:
    folder.revoke(arguments.name)
    print(f"""restart vla cloud, which then gives {arguments.name} neither topics nor a log-in. Its certificate is valid
until it expires: issue no other for this id before that. Chat doors that take certificates of this CA still take it""")
    return EXIT_OK


def _client(folder: KeyFolder, arguments: argparse.Namespace, clock: Clock) -> int:
    at = folder.client(arguments.name, arguments.days, arguments.force)
    print(f"""{at}: give this folder to the client

vla chat --url https://HOST:8000 --ca {at}/ca.pem --cert {at}/client.pem --key {at}/client.key""")
    return EXIT_OK


def _list(folder: KeyFolder, arguments: argparse.Namespace, clock: Clock) -> int:
    entries = folder.entries()
    wall_ns = clock.wall_ns()
    for entry in entries:
        left = entry.facts.days_left(wall_ns)
        hosts = f"  for {', '.join(entry.facts.hosts)}" if entry.facts.hosts else ""
        print(f"{entry.kind:<7} {entry.name:<20} {entry.facts.not_after:%Y-%m-%d}  {_state(entry, left)}{hosts}")
    return EXIT_FAILED if any(entry.facts.days_left(wall_ns) < 0 for entry in entries) else EXIT_OK


def _state(entry: Entry, days_left: float) -> str:
    if not entry.is_ours:
        return "OF ANOTHER CA: issue it again"
    if days_left < 0:
        return "EXPIRED: issue it again with --force"
    return f"{days_left:.0f} days left" + (": issue it again soon" if days_left < SOON_DAYS else "")


def _check(arguments: argparse.Namespace) -> int:
    host, _, port = arguments.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise KeyFolderError(f"{arguments.address!r} is not HOST:PORT")
    problem = tls_problem(host, int(port), client_context(arguments.ca, arguments.cert, arguments.key),
                          arguments.cert)  # fmt: skip
    print(problem or f"{arguments.address}: both sides accept each other")
    return EXIT_FAILED if problem else EXIT_OK


_COMMANDS: Final[dict[str, Callable[[KeyFolder, argparse.Namespace, Clock], int]]] = {
    "init": _init, "server": _server, "robot": _robot, "revoke": _revoke, "client": _client, "list": _list,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
