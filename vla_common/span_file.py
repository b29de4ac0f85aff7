"""Spans in files: one OTLP trace request a line, in its JSON form, as the OpenTelemetry collector reads and writes it.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding. Needs no package, so that traces work offline.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vla_common.tracing import Span, Value

SUFFIX: Final = ".jsonl"
_INTERNAL: Final = 1  # SpanKind
_ERROR: Final = 2  # StatusCode


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A span as it was written: ids in hexadecimal, times in ns since 1970 by the clock of its machine."""

    trace: str
    id: str
    parent: str
    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    error: str
    service: str
    instance: str


class SpanFile:
    """A :class:`vla_common.span_queue.SpanExporter` that appends to a file."""

    def __init__(self, path: Path, service: str, instance: str, max_bytes: int) -> None:
        """Opens the file. OSError if that fails."""
        self.path, self._max_bytes = path, max_bytes
        self._resource = {"attributes": _pairs({"service.name": service, "service.instance.id": instance,
                                                "process.pid": os.getpid()})}
        self._file = path.open("ab")

    @classmethod
    def create(cls, folder: str | Path, service: str, instance: str, max_bytes: int) -> SpanFile:
        """A file of its own for this process. OSError if the folder cannot be written."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{service}-{instance}-{os.getpid()}")
        return cls(Path(folder) / f"{name}{SUFFIX}", service, instance, max_bytes)

    def export(self, spans: Sequence[Span], offset_ns: int) -> None:
        """One line for all. OSError if they cannot be written."""
        if self._file.tell() > self._max_bytes:
            self._file.close()
            os.replace(self.path, self.path.with_suffix(f"{SUFFIX}.1"))
            self._file = self.path.open("ab")
        scope = {"scope": {"name": "vla-runtime"}, "spans": [_to_json(span, offset_ns) for span in spans]}
        request = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        self._file.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_spans(paths: Iterable[Path]) -> tuple[list[StoredSpan], int]:
    """The spans of files, and of all such files in folders; each span once.

    Returns:
        Spans, and how many lines could not be read: the last one of a killed process may be cut.

    Raises:
        OSError: no such file.
    """
    spans: dict[tuple[str, str], StoredSpan] = {}
    unread = 0
    for path in paths:
        for file in sorted(path.glob(f"*{SUFFIX}*")) if path.is_dir() else [path]:
            for line in file.read_bytes().splitlines():
                try:
                    spans.update({(span.trace, span.id): span for span in _from_json(json.loads(line))})
                except (ValueError, KeyError, TypeError, AttributeError):
                    unread += 1
    return list(spans.values()), unread


def _to_json(span: Span, offset_ns: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": span.trace.hex(), "spanId": span.id.hex(), "name": span.name, "kind": _INTERNAL,
        "startTimeUnixNano": str(span.begin_ns + offset_ns), "endTimeUnixNano": str(span.end_ns + offset_ns),
        "attributes": _pairs(span.attributes), "status": {},
    }  # fmt: skip
    if span.parent:
        found["parentSpanId"] = span.parent.hex()
    if span.error:
        found["status"] = {"code": _ERROR, "message": span.error}
    return found


def _from_json(request: dict[str, Any]) -> list[StoredSpan]:
    spans = []
    for resource in request["resourceSpans"]:
        origin = _mapping(resource["resource"]["attributes"])
        service, instance = str(origin["service.name"]), str(origin.get("service.instance.id", ""))
        for scope in resource["scopeSpans"]:
            spans += [
                StoredSpan(
                    one["traceId"], one["spanId"], one.get("parentSpanId", ""), one["name"],
                    int(one["startTimeUnixNano"]), int(one["endTimeUnixNano"]), _mapping(one.get("attributes", [])),
                    _error(one.get("status", {})), service, instance,
                )
                for one in scope["spans"]
            ]  # fmt: skip
    return spans


def _error(status: dict[str, Any]) -> str:
    return str(status.get("message") or "error") if status.get("code") == _ERROR else ""


def _pairs(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def _mapping(pairs: list[dict[str, Any]]) -> dict[str, Value]:
    result: dict[str, Value] = {}
    for pair in pairs:
        ((kind, value),) = pair["value"].items()
        result[pair["key"]] = int(value) if kind == "intValue" else value
    return result
