"""What the front doors count, in Prometheus' text format; the table of all metrics is in metric_table.py.

Observed in the event loop of the doors; nothing here waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from vla_cloud.core.distribution import Buckets, Recent, RecentSum
from vla_cloud.core.generate import RequestError
from vla_cloud.gateway.access_log import RequestTimes, log_request
from vla_cloud.gateway.chat_types import AnswerEvent, ChatRequest, Done, Usage
from vla_cloud.gateway.metric_sources import add_models, add_robots
from vla_cloud.gateway.metric_table import Families
from vla_common.clock import NS_PER_S, Clock

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
CODES: Final = frozenset({
    "OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED",
})  # fmt: skip
_FIRST_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_WHOLE_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Health = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Model name to ``ServingService.health()``."""


class GatewayMetrics:
    """Counts of all doors; :meth:`text` is the page."""

    def __init__(self, clock: Clock, health: Health, *, access_log: bool = False) -> None:
        """``health`` is asked as often as the page is. ``access_log``: a line for each request that ended."""
        self._clock, self._health, self._access_log = clock, health, access_log
        self._ends: dict[tuple[str, str, str], int] = {}  # door, outcome, code
        self._first, self._between = Buckets(_FIRST_S), Buckets(_BETWEEN_S)
        self._per_token, self._whole = Buckets(_BETWEEN_S), Buckets(_WHOLE_S)
        self._tokens = dict.fromkeys(("prompt", "cached", "completion"), 0)
        self.recent = {name: Recent() for name in ("first_token_s", "between_tokens_s", "per_token_s", "total_s")}
        """Of the last minute, for views."""
        self.recent_tokens = RecentSum()
        self.connections: Callable[[], Mapping[str, int]] = dict
        """Set by the HTTP door: connection events so far, and ``open`` of them now."""
        self.clients: Callable[[], Mapping[str, int]] = dict
        """Set by the doors: refusals and limits reached, of all of them."""
        self.robots: Callable[[], Mapping[str, Any] | None] = lambda: None
        """Set by the process that serves robots: see ``vla_cloud.context.robots_status``."""
        self._process = ProcessCollector(registry=None)

    async def observed(
        self, door: str, request: ChatRequest, answer: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The same answer, counted; close it as the answer itself."""
        times = RequestTimes(door, request.request_id, request.model, self._clock.monotonic_ns())
        try:
            async with aclosing(answer) as events:
                async for event in events:
                    if isinstance(event, Done):
                        times.outcome, times.code, times.usage = "served", "OK", event.usage
                    elif event.tokens:
                        self._came(times, len(event.tokens))
                    yield event
        except RequestError as error:
            # Refused: no token was given, so the client may ask again.
            times.outcome, times.code = "refused" if times.first_ns is None else "failed", error.code
            raise
        except Exception:
            times.outcome, times.code = "failed", "INTERNAL"
            raise
        finally:
            self._ended(times)

    def ended(self, door: str, outcome: str, code: str, request_id: str = "") -> None:
        """A request ended that was never observed: one that could not even be read is refused."""
        self._ended(RequestTimes(door, request_id, "", self._clock.monotonic_ns(), outcome, code))

    def text(self) -> bytes:
        """The page."""
        return self._written(list(self.collect()))

    async def page(self) -> bytes:
        """The page, written in a thread: for many robots that takes longer than a token may wait."""
        return await asyncio.to_thread(self._written, list(self.collect()))

    def _written(self, families: list[Metric]) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(families))
        registry.register(self._process)
        return generate_latest(registry)

    @property
    def ends(self) -> dict[tuple[str, str, str], int]:
        """Requests that ended, by door, outcome and code."""
        return dict(self._ends)

    def collect(self) -> Iterator[Metric]:
        """All families as they are now. In the event loop of the doors."""
        families = Families()
        for labels, count in sorted(self._ends.items()):
            families.add("vla_requests", count, *labels)
        for kind, count in self._tokens.items():
            families.add("vla_tokens", count, kind)
        families.histogram("vla_time_to_first_token_seconds", self._first.snapshot())
        families.histogram("vla_time_between_tokens_seconds", self._between.snapshot())
        families.histogram("vla_time_per_output_token_seconds", self._per_token.snapshot())
        families.histogram("vla_request_seconds", self._whole.snapshot())
        counts = dict(self.connections())
        if counts:
            families.add("vla_http_connections", counts.pop("open", 0))
        for event, count in counts.items():
            families.add("vla_http_connection_events", count, event)
        for event, count in self.clients().items():
            families.add("vla_client_events", count, event)
        add_models(families, self._health())
        robots = self.robots()
        if robots is not None:
            add_robots(families, robots)
        yield from families

    def _came(self, times: RequestTimes, count: int) -> None:
        """Tokens came, together."""
        now_ns = self._clock.monotonic_ns()
        if times.last_ns is None:
            times.first_ns = now_ns
            first_s = (now_ns - times.begun_ns) / NS_PER_S
            self._first.add(first_s)
            self.recent["first_token_s"].add(first_s, now_ns)
        else:
            each_s = (now_ns - times.last_ns) / NS_PER_S / count
            self._between.add(each_s, count)
            self.recent["between_tokens_s"].add(each_s, now_ns)
        times.last_ns = now_ns
        times.tokens += count
        self.recent_tokens.add(count, now_ns)

    def _ended(self, times: RequestTimes) -> None:
        times.ended_ns = self._clock.monotonic_ns()
        times.code = times.code if times.code in CODES else "INTERNAL"
        key = (times.door, times.outcome, times.code)
        self._ends[key] = self._ends.get(key, 0) + 1
        if times.usage is not None:
            self._served(times, times.usage)
        if self._access_log:
            log_request(times)

    def _served(self, times: RequestTimes, usage: Usage) -> None:
        self._tokens["prompt"] += usage.prompt_tokens
        self._tokens["cached"] += usage.cached_tokens or 0
        self._tokens["completion"] += usage.completion_tokens
        now_ns = self._clock.monotonic_ns()
        self._whole.add(times.total_s)
        self.recent["total_s"].add(times.total_s, now_ns)
        if times.per_token_s is not None:
            self._per_token.add(times.per_token_s)
            self.recent["per_token_s"].add(times.per_token_s, now_ns)


class _Collected(Collector):
    """Families that were collected before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
