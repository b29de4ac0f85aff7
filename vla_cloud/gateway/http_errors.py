"""Errors as clients of the OpenAI API know them: a JSON body, an HTTP status, Retry-After where waiting helps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from vla_cloud.core.generate import RequestError

# gRPC status name -> HTTP status and the API's type of error. 499 (client closed the request) is nginx's; the others
# follow google.rpc.Code's own table.
_STATUS: Final[dict[str, tuple[int, str]]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "invalid_request_error"),
    "PERMISSION_DENIED": (403, "invalid_request_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "ALREADY_EXISTS": (409, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "request_cancelled"),
    "INTERNAL": (500, "server_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
_NAMES: Final = {"NOT_FOUND": "model_not_found", "UNAUTHENTICATED": "invalid_api_key"}
"""Codes of the JSON body that clients know by other names."""
_RETRIED: Final = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
_DEFAULT_RETRY_S: Final = 1.0
_MAX_TEXT: Final = 1000
"""Characters of a message: it may quote what the client sent."""


@dataclass
class HttpError(Exception):
    """What a client is told. ``code`` is a gRPC status name, for metrics; ``name`` is the ``code`` of the JSON body."""

    status: int
    type: str
    message: str
    code: str = "INVALID_ARGUMENT"
    name: str | None = None
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    closes: bool = field(default=False)  # the connection cannot be used again

    def body(self) -> bytes:
        """The JSON body, also the data of an error event."""
        text = self.message if len(self.message) <= _MAX_TEXT else self.message[:_MAX_TEXT] + " ..."
        error: dict[str, Any] = {"message": text, "type": self.type, "param": self.param, "code": self.name}
        return msgspec.json.encode({"error": error})


def bad_request(message: str, param: str | None = None, name: str | None = None) -> HttpError:
    """400: never served as it is."""
    return HttpError(400, "invalid_request_error", message, param=param, name=name)


def http_error(error: RequestError) -> HttpError:
    """The engine's error for this door."""
    status, kind = _STATUS.get(error.code, _STATUS["INTERNAL"])
    headers: tuple[tuple[str, str], ...] = ()
    if error.code in _RETRIED:
        retry_s = float(getattr(error, "retry_after_s", 0.0)) or _DEFAULT_RETRY_S
        # Whole seconds by RFC 9110; the API's own clients read the finer header first.
        headers = (("retry-after", str(max(1, math.ceil(retry_s)))), ("retry-after-ms", str(round(retry_s * 1000))))
    if error.code == "UNAUTHENTICATED":
        is_missing = getattr(error, "cause", "") == "missing"  # RFC 6750, 3.1: then no error is named
        headers = (("www-authenticate", 'Bearer realm="vla"' + ("" if is_missing else ', error="invalid_token"')),)
    name = _NAMES.get(error.code, error.code.lower())
    param = "model" if error.code == "NOT_FOUND" else None
    return HttpError(status, kind, str(error), error.code, name, param, headers)


def internal_error() -> HttpError:
    """A fault of ours; the log has the details, the client gets none."""
    return HttpError(500, "server_error", "the server failed; its log says why", "INTERNAL", "internal")
