"""What a certificate file says. Uses cryptography, which is optional: without it nothing is known."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

SOON_DAYS: Final = 30
"""Certificates that end sooner are told about."""


@dataclass(frozen=True)
class CertificateFacts:
    """Of the first certificate in a file. Instants are UTC; ``hosts`` are its alternative names and addresses."""

    common_name: str
    not_before: datetime
    not_after: datetime
    hosts: tuple[str, ...]

    def days_left(self, wall_ns: int) -> float:
        """Days from ``wall_ns``, nanoseconds since 1970 UTC, to the end of validity; negative after it."""
        return (self.not_after - utc(wall_ns)).total_seconds() / 86_400


def utc(wall_ns: int) -> datetime:
    """An instant of :meth:`vla_common.clock.Clock.wall_ns`."""
    return datetime.fromtimestamp(wall_ns / 1e9, timezone.utc)


def read_certificate(path: Path) -> CertificateFacts | None:
    """Facts of the certificate in a PEM file; None if cryptography is not installed.

    Raises:
        OSError: no such file. ValueError: it holds no certificate.
    """
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        return None
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = tuple(str(entry.value) for entry in found)
    except x509.ExtensionNotFound:
        hosts = ()
    return CertificateFacts(
        str(names[0].value) if names else "", certificate.not_valid_before_utc, certificate.not_valid_after_utc, hosts
    )


def validity_problem(path: Path, wall_ns: int, soon_days: float = SOON_DAYS) -> str:
    """What is wrong with the dates of a certificate, and the remedy; empty if nothing is, or nothing is known."""
    try:
        facts = read_certificate(path)
    except (OSError, ValueError):
        return ""  # told by who uses the file
    if facts is None:
        return ""
    left = facts.days_left(wall_ns)
    if left < 0:
        return f"certificate {path} expired on {facts.not_after:%Y-%m-%d}: issue a new one (vla keys, --force)"
    if facts.not_before > utc(wall_ns):
        return f"certificate {path} is valid from {facts.not_before:%Y-%m-%d} on: is the clock of this machine right?"
    if left < soon_days:
        return f"certificate {path} expires on {facts.not_after:%Y-%m-%d}: issue a new one soon (vla keys, --force)"
    return ""
