"""Certificates and private keys for development: a CA of one's own, and what it issues. P-256 throughout.

Beside ``vla_common/certificate_file.py``, which reads them, the only file that imports cryptography.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Purpose = Literal["server", "client"]

BACKDATE: Final = timedelta(hours=1)
"""Certificates count from a little before now: the clock of a robot may be behind."""

_USAGE: Final = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


def make_authority(common_name: str, until: datetime, since: datetime) -> Issued:
    """A CA that signs leaf certificates only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = (
        _builder(name, name, key.public_key(), since, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return _pem(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Issued, common_name: str, purpose: Purpose, until: datetime, since: datetime, hosts: Sequence[str] = ()
) -> Issued:
    """A certificate signed by ``authority``.

    Args:
        authority: from :func:`make_authority`.
        common_name: who it is for.
        purpose: a server's cannot be used by a client, nor the other way round.
        until: end of validity, UTC. since: its beginning, moved back by :data:`BACKDATE`.
        hosts: names and IP addresses of a server.

    Raises:
        ValueError: the authority cannot be read, or a host is neither a name nor an address.
    """
    ca = x509.load_pem_x509_certificate(authority.certificate)
    ca_key = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key of the CA is not of an elliptic curve")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = (
        _builder(name, ca.subject, key.public_key(), since, min(until, ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_USAGE[purpose]]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), False)
    return _pem(builder.sign(ca_key, hashes.SHA256()), key)


def is_issued_by(certificate: bytes, authority: bytes) -> bool:
    """Whether a PEM certificate carries the signature of a PEM CA certificate."""
    try:
        issuer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _builder(
    name: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, since: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before((since - BACKDATE).astimezone(timezone.utc))
        .not_valid_after(until.astimezone(timezone.utc))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        pass
    if not host.isascii() or not host.replace("-", "a").replace(".", "a").replace("*", "a").isalnum():
        raise ValueError(f"host {host!r} is neither a name nor an IP address; give it without port or scheme")
    return x509.DNSName(host)


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    return Issued(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
