"""Who asks, what they may, and the errors that tell them so."""

from __future__ import annotations

from dataclasses import dataclass

from vla_cloud.core.generate import Priority, RequestError


class Unauthenticated(RequestError):
    """Nobody knows who asks. ``cause`` is a stable short name for counters; the text is for the client."""

    code = "UNAUTHENTICATED"

    def __init__(self, message: str, cause: str) -> None:
        """``cause``: missing, malformed, unknown or expired."""
        super().__init__(message)
        self.cause = cause


class PermissionDenied(RequestError):
    """It is known who asks, and that they may not."""

    code = "PERMISSION_DENIED"


class LimitReached(RequestError):
    """A client's own limit: the same request is taken after ``retry_after_s``. ``limit`` is the setting's name."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, limit: str, retry_after_s: float) -> None:
        """All three are told to the client."""
        super().__init__(message)
        self.limit, self.retry_after_s = limit, retry_after_s


@dataclass(frozen=True, slots=True)
class ClientRules:
    """What one client may use; None is no limit.

    Attributes:
        requests_per_minute: begun, whatever becomes of them; so many may begin at once.
        tokens_per_minute, tokens_per_day: of prompts and answers together.
        max_tokens: longest answer; a request that asks for more gets this.
        max_concurrent: requests begun and not ended, those that wait included.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_tokens: int | None = None
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        """Refuse limits that let nothing through."""
        for name in ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_tokens", "max_concurrent"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; leave it out for no limit")


@dataclass(frozen=True, slots=True)
class Client:
    """One holder of a key, as the gateway knows it; made by the gateway only.

    Attributes:
        name: of the key; "" for everybody where no keys are asked for.
        tenant: keys of one tenant share its cached prompts, and its request ids.
        salt: separates the prefix cache of this tenant (32 bytes); b"" without keys.
        ceiling: the most urgent priority it may ask for.
        usual: the priority of a request that asks for none.
        models: names it may use; empty for all.
    """

    name: str = ""
    tenant: str = ""
    salt: bytes = b""
    rules: ClientRules = ClientRules()
    ceiling: Priority = Priority.HIGH
    usual: Priority = Priority.NORMAL
    models: frozenset[str] = frozenset()
    is_operator: bool = False

    def may_use(self, model: str) -> bool:
        """Whether a model is for this client."""
        return not self.models or model in self.models

    def scoped(self, request_id: str) -> str:
        """An id that no other tenant's request can have."""
        return f"{request_id}@{self.tenant}" if self.tenant else request_id

    def priority(self, asked: Priority | None) -> Priority:
        """What a request gets: what it asks for, but nothing more urgent than the ceiling."""
        return max(self.usual if asked is None else asked, self.ceiling)


ANYBODY = Client(is_operator=True)
"""Everybody, where no keys are asked for: no limits, one cache."""
