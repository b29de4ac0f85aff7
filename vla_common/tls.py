"""TLS by the standard library: contexts from PEM files, and failed handshakes in words that name the remedy."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final


class TlsError(ValueError):
    """Certificates or keys that cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class ServerTls:
    """Section ``tls`` of a server's settings. Files are PEM; none: no TLS.

    Attributes:
        certificate: of the server, followed by those between it and its CA.
        key: private, of the certificate.
        client_ca: clients must show a certificate of this CA; None: they need none.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        """Refuse halves."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together: set both, or none")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca needs certificate and key: without TLS no client can show a certificate")

    @property
    def is_on(self) -> bool:
        """Whether there is a certificate to serve with."""
        return self.certificate is not None


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """For a listening socket; clients must authenticate if ``client_ca`` is set.

    Raises:
        TlsError: a file is missing, unreadable, or does not fit.
    """
    if tls.certificate is None or tls.key is None:
        raise TlsError("tls.certificate and tls.key are not set")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load_pair(context, tls.certificate, tls.key)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_ca(context, tls.client_ca)
    return context


def client_context(
    ca: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """For a connection to a server whose name is checked.

    Args:
        ca: trusted alone; None: those of the system. certificate, key: of this client, if the server asks for one.

    Raises:
        TlsError: a file is missing, unreadable, or does not fit.
    """
    context = ssl.create_default_context(cafile=None) if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        _load_ca(context, ca)
    if certificate is not None and key is not None:
        _load_pair(context, certificate, key)
    elif certificate is not None or key is not None:
        raise TlsError("a client's certificate and key belong together: give both, or none")
    return context


def readable(path: Path, what: str) -> bytes:
    """Bytes of a file.

    Raises:
        TlsError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise TlsError(f"no {what} {path}: check the path, or make one with 'vla keys'") from error
    except OSError as error:
        raise TlsError(f"cannot read the {what} {path}: {error.strerror}") from error


def secret_problem(path: Path) -> str:
    """Whether others than its owner can read a file of secrets, and the remedy; empty if not, or if it is not there."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return f"{path} can be read by other users of this machine: chmod 600 {path}" if mode & 0o077 else ""


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    readable(certificate, "certificate")
    readable(key, "private key")
    try:
        # An encrypted key would otherwise be asked for on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        told = f"certificate {certificate} and key {key} cannot be used"
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{told}: they do not belong together") from error
        raise TlsError(f"{told}: they must be PEM, and the key not encrypted ({error})") from error


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    readable(ca, "CA certificate")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise TlsError(f"{ca} holds no CA certificate in PEM form ({error.reason})") from error


_SERVER_CERTIFICATE: Final = {
    9: "the server's certificate is not valid yet: is the clock of this machine right?",
    10: "the server's certificate has expired: issue a new one there (vla keys server --force)",
    62: "the server's certificate is for other names than {host}: issue one with "
    "'vla keys server --force --host {host}'",
    64: "the server's certificate is for other addresses than {host}: issue one with "
    "'vla keys server --force --host {host}'",
}
"""By OpenSSL's X509_V_ERR codes."""

_NOT_OF_THIS_CA: Final = "the server's certificate is not of the CA given: use the ca.pem that belongs to this server"

_ALERTS: Final = (
    ("CERTIFICATE_REQUIRED", "the server demands a client certificate: give one of its CA (vla keys robot or client)"),
    ("ALERT_HANDSHAKE_FAILURE", "the server refused the handshake: it may demand a client certificate of its CA"),
    ("ALERT_CERTIFICATE_EXPIRED", "the client certificate has expired: issue a new one (vla keys, --force)"),
    ("ALERT_UNKNOWN_CA", "the server does not know the CA of the client certificate: use one of its own CA"),
    ("ALERT_DECRYPT_ERROR", "the server does not know the CA of the client certificate: use one of its own CA"),
    ("ALERT_BAD_CERTIFICATE", "the server refused the client certificate: use one of its own CA"),
    ("ALERT_CERTIFICATE_UNKNOWN", "the server refused the client certificate: use one of its own CA"),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "the server refused the client certificate: it is not one of a client"),
    ("ALERT_CERTIFICATE_REVOKED", "the client certificate was revoked"),
    ("WRONG_VERSION_NUMBER", "what answers there does not speak TLS: is it plain HTTP, or another port?"),
    ("RECORD_LAYER_FAILURE", "what answers there does not speak TLS: is it plain HTTP, or another port?"),
    ("HTTP_REQUEST", "what answers there does not speak TLS: is it plain HTTP, or another port?"),
    ("PACKET_LENGTH_TOO_LONG", "what answers there does not speak TLS: is it plain HTTP, or another port?"),
)  # fmt: skip

_SEEN: Final = (
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "a client showed no certificate: it needs one of tls.client_ca"),
    ("CERTIFICATE_VERIFY_FAILED", "a client's certificate was refused ({why}): it needs a valid one of tls.client_ca"),
    ("ALERT_UNKNOWN_CA", "a client does not trust this server's certificate: it needs the ca.pem that belongs to it"),
    ("ALERT_CERTIFICATE_EXPIRED", "a client says that this server's certificate has expired"),
    ("ALERT_BAD_CERTIFICATE", "a client refused this server's certificate: does it hold the name the client uses?"),
    ("ALERT_CERTIFICATE_UNKNOWN", "a client refused this server's certificate"),
    ("HTTP_REQUEST", "a client spoke plain HTTP: it needs https://"),
    ("WRONG_VERSION_NUMBER", "a client did not speak TLS"),
)


def client_failure(error: BaseException, host: str) -> str:
    """What a client saw go wrong in a handshake with ``host``, and the remedy; empty if it is no matter of TLS.

    Args:
        error: any exception; those that caused it are looked at too.
        host: the name or address that was asked for.
    """
    found = _ssl_error(error)
    if found is None:
        return ""
    if isinstance(found, ssl.SSLCertVerificationError):
        told = _SERVER_CERTIFICATE.get(found.verify_code, "")
        if told or found.verify_code in (18, 19, 20, 21):
            return told.replace("{host}", host) or _NOT_OF_THIS_CA
        return f"the server's certificate is refused: {found.verify_message}"
    reason = found.reason or ""
    return next((told for name, told in _ALERTS if name in reason), f"TLS failed: {reason or found}")


def server_failure(error: ssl.SSLError) -> str:
    """What a server saw go wrong in a handshake, and what the client needs."""
    reason = error.reason or ""
    why = getattr(error, "verify_message", "")
    told = next((told for name, told in _SEEN if name in reason), f"a handshake failed: {reason or error}")
    return told.replace("{why}", why)


def _ssl_error(error: BaseException | None) -> ssl.SSLError | None:
    for _ in range(8):
        if error is None or isinstance(error, ssl.SSLError):
            return error
        error = error.__cause__ or error.__context__
    return None
