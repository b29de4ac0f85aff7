"""Spans as trees in text: which traces there are, and one of them with its durations. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from vla_common.span_file import StoredSpan

MS: Final = 1e6
CHAT, OBSERVATION, COMMAND = "chat", "observation", "command"
"""Names of the first span of a request, of that of a robot's observation, and of the last stage of that."""
_HIDDEN: Final = frozenset({"request_id", "robot", "door", "sequence"})
"""Attributes that the head line shows, or that the tree's order does."""


@dataclass(frozen=True)
class Trace:
    """All spans of one id, in order of their begin. ``begin_ns`` is that of its first span."""

    id: str
    spans: tuple[StoredSpan, ...]

    @property
    def begin_ns(self) -> int:
        """Wall clock of the machine whose span comes first."""
        return self.spans[0].begin_ns

    @property
    def root(self) -> StoredSpan:
        """The span that says what it is a trace of; the first one where that is missing."""
        return next((span for span in self.spans if span.name in (CHAT, OBSERVATION)), self.spans[0])

    @property
    def about(self) -> str:
        """What it is a trace of."""
        attributes = self.root.attributes
        if self.root.name == CHAT:
            return f"chat {attributes.get('request_id', '?')} over {attributes.get('door', '?')}"
        if self.root.name == OBSERVATION:
            return f"robot {attributes.get('robot', '?')}, observation {attributes.get('sequence', '?')}"
        return f"without its first span, from {self.root.name}"

    def has(self, name: str) -> bool:
        """Whether it came to a stage."""
        return any(span.name == name for span in self.spans)


def traces_of(spans: Iterable[StoredSpan]) -> list[Trace]:
    """All traces, oldest first."""
    by_id: dict[str, list[StoredSpan]] = defaultdict(list)
    for span in spans:
        by_id[span.trace].append(span)
    found = [Trace(key, tuple(sorted(group, key=lambda span: (span.begin_ns, -span.end_ns))))
             for key, group in by_id.items()]
    return sorted(found, key=lambda trace: trace.begin_ns)


def of_request(traces: Iterable[Trace], request_id: str) -> list[Trace]:
    """The traces of a chat request's id: several if it was used again."""
    return [trace for trace in traces if trace.root.attributes.get("request_id") == request_id]


def of_robot(traces: Iterable[Trace], robot: str, whole: bool) -> list[Trace]:
    """The traces of a robot; ``whole``: those that came to a command."""
    return [trace for trace in traces
            if trace.root.attributes.get("robot") == robot and (not whole or trace.has(COMMAND))]


def render(trace: Trace) -> str:
    """The tree: when each span began after the first one, how long it took, its name, its process, what it says."""
    processes = {(span.service, span.instance) for span in trace.spans}
    end_ns = max(span.end_ns for span in trace.spans)
    total_ms = (end_ns - trace.begin_ns) / MS
    head = f"trace {trace.id}: {trace.about}; {len(trace.spans)} spans of {len(processes)} processes, {total_ms:.1f} ms"
    rows = list(_rows(trace))
    width = max(len(label) for label, _ in rows)
    origins = max(len(_origin(span)) for _, span in rows)
    lines = [head, f"{'at ms':>9} {'took ms':>9}"]
    for label, span in rows:
        at_ms, took_ms = (span.begin_ns - trace.begin_ns) / MS, (span.end_ns - span.begin_ns) / MS
        said = " ".join(f"{key}={_shown(value)}" for key, value in span.attributes.items() if key not in _HIDDEN)
        times, origin = f"{at_ms:9.2f} {took_ms:9.2f}", f"{_origin(span):<{origins}}"
        error = f"  FAILED: {span.error}" if span.error else ""
        lines.append(f"{times}  {label:<{width}}  {origin}  {said}{error}".rstrip())
    return "\n".join(lines)


def summary(trace: Trace) -> str:
    """One line."""
    took_ms = (max(span.end_ns for span in trace.spans) - trace.begin_ns) / MS
    failed = "  FAILED" if trace.root.error else ""
    return f"{trace.id}  {len(trace.spans):4} spans {took_ms:9.1f} ms  {trace.about}{failed}"


def _rows(trace: Trace) -> Iterator[tuple[str, StoredSpan]]:
    """Depth first. A span whose parent is in none of the files stands at the top."""
    known = {span.id for span in trace.spans}
    children: dict[str, list[StoredSpan]] = defaultdict(list)
    for span in trace.spans:
        children[span.parent if span.parent in known else ""].append(span)

    def walk(parent: str, stem: str) -> Iterator[tuple[str, StoredSpan]]:
        group = children[parent]
        for index, span in enumerate(group):
            is_last = index == len(group) - 1
            branch = "" if not parent else "└─ " if is_last else "├─ "
            yield f"{stem}{branch}{span.name}", span
            yield from walk(span.id, stem + ("" if not parent else "   " if is_last else "│  "))

    yield from walk("", "")


def _origin(span: StoredSpan) -> str:
    return f"{span.service.removeprefix('vla-')} {span.instance}".strip()


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
