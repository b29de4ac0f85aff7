"""Who asks, and what they have left: the one place where the doors and the chat layer learn it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vla_cloud.core.client import ANYBODY, Client, LimitReached, PermissionDenied, Unauthenticated
from vla_cloud.core.client_limits import ClientLimits, Ticket
from vla_cloud.gateway.api_key_file import load_keys, read_private
from vla_cloud.gateway.key_ring import KeyFileWatch, KeyRing
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import NS_PER_S, Clock
from vla_common.metrics import Counters

LOG = logging.getLogger(__name__)
_LOG_EVERY_S: Final = 10.0
_MIN_SECRET_BYTES: Final = 32
_MAX_SECRET_BYTES: Final = 4096
_MAX_HEADER_CHARS: Final = 512


class Clients:
    """For the event loop of the doors. Without keys everybody is ANYBODY, and nothing is limited."""

    def __init__(self, clock: Clock, ring: KeyRing | None = None, watch: KeyFileWatch | None = None) -> None:
        """``watch``: of the ring's file; it runs between :meth:`start` and :meth:`close`."""
        self._clock, self._ring, self._watch = clock, ring, watch
        self._limits: dict[str, ClientLimits] = {}  # by the key's name
        self._logged_ns: int | None = None
        self._unlogged = 0
        self._refused = Counters("missing", "malformed", "unknown", "expired", "not_operator")
        self._limited = Counters("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent")

    @property
    def has_keys(self) -> bool:
        """Whether a key is asked for."""
        return self._ring is not None

    def start(self) -> None:
        """Read the file again whenever it changes."""
        if self._watch is not None:
            self._watch.start()

    def close(self) -> None:
        """End that. Safe to call twice."""
        if self._watch is not None:
            self._watch.close()

    def counts(self) -> Mapping[str, int]:
        """Totals since start: refusals by cause, limits reached by name, readings of the file."""
        counts = {f"refused_{name}": count for name, count in self._refused.snapshot().items()}
        counts |= {f"limited_{name}": count for name, count in self._limited.snapshot().items()}
        return counts | (self._watch.counts.snapshot() if self._watch is not None else {})

    # who asks

    def identify(self, authorization: str | None) -> Client:
        """Whose request this is, by its ``Authorization: Bearer KEY``.

        Raises:
            Unauthenticated: there is no good key.
        """
        if self._ring is None:
            return ANYBODY
        try:
            return self._ring.find(_token(authorization))
        except Unauthenticated as error:
            self._refused.add(error.cause)
            self._log(error.cause)
            raise

    def require(self, client: Client | None) -> Client:
        """The client that a door has found; one that forgot to look gets nothing.

        Raises:
            Unauthenticated: none.
        """
        if client is not None and (client is not ANYBODY or not self.has_keys):
            return client
        if not self.has_keys:
            return ANYBODY
        raise Unauthenticated("an API key is needed", "missing")

    def require_operator(self, client: Client) -> None:
        """Raise PermissionDenied for a key without ``operator``."""
        if not client.is_operator:
            self._refused.add("not_operator")
            raise PermissionDenied(f"key {client.name!r} is not an operator's: this is for keys with operator: true")

    def _log(self, cause: str) -> None:
        """For the operator, and no oftener than every few seconds: strangers cannot fill a disk. Never the key."""
        now_ns = self._clock.monotonic_ns()
        if self._logged_ns is not None and now_ns - self._logged_ns < _LOG_EVERY_S * NS_PER_S:
            self._unlogged += 1
            return
        LOG.warning("a request was refused, its API key is %s (and %d more since the last such line)",
                    cause, self._unlogged)  # fmt: skip
        self._logged_ns, self._unlogged = now_ns, 0

    # what they have left

    def begin(self, client: Client, least_tokens: int) -> Ticket:
        """A request of a client begins; see :meth:`ClientLimits.begin`.

        Raises:
            LimitReached: not now. InvalidRequest: never.
        """
        try:
            return self._of(client).begin(least_tokens, self._clock.monotonic_ns())
        except LimitReached as error:
            self._limited.add(error.limit)
            raise

    def reserve(self, ticket: Ticket, prompt_tokens: int, answer_tokens: int) -> None:
        """Its prompt is known; see :meth:`Ticket.reserve`.

        Raises:
            LimitReached: not now. InvalidRequest: never.
        """
        try:
            ticket.reserve(prompt_tokens, answer_tokens, self._clock.monotonic_ns())
        except LimitReached as error:
            self._limited.add(error.limit)
            raise

    def limits_of(self, client: Client) -> ClientLimits:
        """What a client has used."""
        return self._of(client)

    def _of(self, client: Client) -> ClientLimits:
        now_ns = self._clock.monotonic_ns()
        limits = self._limits.get(client.name)
        if limits is None:
            self._forget()
            limits = self._limits[client.name] = ClientLimits(client.name, client.rules, now_ns)
        elif limits.rules is not client.rules:
            if limits.rules != client.rules:
                limits.change(client.rules, now_ns)
            limits.rules = client.rules
        return limits

    def _forget(self) -> None:
        """Keys that are no more; called when a new one comes, so that what is kept is bounded by the file."""
        names = self._ring.names if self._ring is not None else frozenset((ANYBODY.name,))
        for name in self._limits.keys() - names:
            if not self._limits[name].active:
                del self._limits[name]


def open_clients(clock: Clock, api_keys: str = "", salt_secret: str = "") -> Clients:
    """From the settings of the gateway; see ``config/cloud.yaml``.

    Raises:
        GatewayError: a file is missing, open to others, or wrong.
    """
    if not api_keys:
        return Clients(clock)
    path = Path(api_keys)
    ring = KeyRing(load_keys(path), _secret(salt_secret), clock)
    watch = KeyFileWatch(path, ring)
    if not len(ring):
        LOG.warning("%s holds no key: nobody can ask anything until 'vla api-keys add' makes one", path)
    return Clients(clock, ring, watch)


def _secret(path: str) -> bytes:
    if not path:
        return secrets.token_bytes(_MIN_SECRET_BYTES)
    data = read_private(Path(path), _MAX_SECRET_BYTES)
    if len(data) < _MIN_SECRET_BYTES:
        remedy = f"head -c {_MIN_SECRET_BYTES} /dev/urandom > {path}"
        raise GatewayError(f"{path} has {len(data)} bytes, a secret needs {_MIN_SECRET_BYTES}: {remedy}")
    return data


def _token(authorization: str | None) -> str:
    if authorization is None or not authorization.strip():
        raise Unauthenticated("an API key is needed: send it as Authorization: Bearer vla_...", "missing")
    scheme, _, token = authorization[:_MAX_HEADER_CHARS].strip().partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated("Authorization must be Bearer and an API key: Bearer vla_...", "malformed")
    return token.strip()
