"""``vla doctor``: certificates that end."""

from __future__ import annotations

from pathlib import Path

from vla_cli.finding import Finding
from vla_common.certificate_file import SOON_DAYS
from vla_common.clock import Clock


def check_certificates(folder: Path | None, clock: Clock) -> Finding:
    """Of the folder of ``vla keys``; None: the usual one."""
    try:
        from vla_cli.key_folder import KeyFolder, KeyFolderError, default_folder
    except ModuleNotFoundError:
        return Finding("ok", "certificates", "not looked at (optional: pip install 'vla-runtime[keys]')")
    keys = KeyFolder(folder or default_folder(), clock)
    if not keys.ca.exists():
        return Finding("ok", "certificates", f"none in {keys.root} (optional: vla keys init)")
    try:
        entries = keys.entries()
    except KeyFolderError as error:
        return Finding("note", "certificates", str(error), "vla keys list")
    first = min(entries, key=lambda entry: entry.facts.not_after)
    left = first.facts.days_left(clock.wall_ns())
    name = f"{first.kind} {first.name}".strip()
    if left < SOON_DAYS:
        when = f"expired on {first.facts.not_after:%Y-%m-%d}" if left < 0 else f"expires in {left:.0f} days"
        renew = "vla keys init --force, and all others after it" if first.kind == "ca" else f"vla keys {name} --force"
        return Finding("note", "certificates", f"{name} {when} ({keys.root})", renew)
    return Finding("ok", "certificates", f"{len(entries)} in {keys.root}, the first ends in {left:.0f} days")
