"""What the front doors count, in Prometheus' text format. Every label has a small, fixed set of values.

Observed in the event loop of the doors; nothing here waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from vla_cloud.core.generate import RequestError
from vla_cloud.core.placement import ROUTER_GAUGES
from vla_cloud.gateway.chat_types import AnswerEvent, ChatRequest, Done, Usage
from vla_common.clock import NS_PER_S, Clock

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
CODES: Final = frozenset({
    "OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION", "INTERNAL", "UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED",
})  # fmt: skip
_FIRST_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

Health = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Model name to ``ServingService.health()``."""


class Buckets:
    """A cumulative histogram with fixed upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """``bounds`` ascend; what is above the last is counted, too."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, told: str) -> HistogramMetricFamily:
        """As Prometheus has it."""
        total, rows = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return HistogramMetricFamily(name, told, buckets=rows, sum_value=self._sum)


class GatewayMetrics:
    """Counts of all doors; :meth:`text` is the page."""

    def __init__(self, clock: Clock, health: Health) -> None:
        """``health`` is asked as often as the page is."""
        self._clock, self._health = clock, health
        self._ends: dict[tuple[str, str, str], int] = {}  # door, outcome, code
        self._first, self._between = Buckets(_FIRST_S), Buckets(_BETWEEN_S)
        self._tokens = dict.fromkeys(("prompt", "cached", "completion"), 0)
        self.connections: Callable[[], Mapping[str, int]] = dict
        """Set by the HTTP door: connection events so far, and ``open`` of them now."""
        self.clients: Callable[[], Mapping[str, int]] = dict
        """Set by the HTTP door: refusals and limits reached, of all doors."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def observed(
        self, door: str, request: ChatRequest, answer: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The same answer, counted; close it as the answer itself."""
        begun_ns = last_ns = self._clock.monotonic_ns()
        is_first, outcome, code = True, "cancelled", "CANCELLED"
        try:
            async with aclosing(answer) as events:
                async for event in events:
                    if isinstance(event, Done):
                        outcome, code = "served", "OK"
                        self._count(event.usage)
                    elif event.tokens:
                        now_ns = self._clock.monotonic_ns()
                        if is_first:
                            self._first.add((now_ns - begun_ns) / NS_PER_S)
                        else:
                            count = len(event.tokens)
                            self._between.add((now_ns - last_ns) / NS_PER_S / count, count)
                        is_first, last_ns = False, now_ns
                    yield event
        except RequestError as error:
            # Refused: no token was given, so the client may ask again.
            outcome, code = "refused" if is_first else "failed", error.code
            raise
        except Exception:
            outcome, code = "failed", "INTERNAL"
            raise
        finally:
            self.ended(door, outcome, code)

    def ended(self, door: str, outcome: str, code: str) -> None:
        """A request ended: served, refused (before its first token), failed or cancelled (its client left)."""
        key = (door, outcome, code if code in CODES else "INTERNAL")
        self._ends[key] = self._ends.get(key, 0) + 1

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        ends = CounterMetricFamily("vla_requests", "Chat requests that ended.", labels=("door", "outcome", "code"))
        for labels, count in sorted(self._ends.items()):
            ends.add_metric(labels, count)
        yield ends
        told = "Tokens of served requests; cached ones are part of the prompt's."
        tokens = CounterMetricFamily("vla_tokens", told, labels=("kind",))
        for kind, count in self._tokens.items():
            tokens.add_metric((kind,), count)
        yield tokens
        yield self._first.family("vla_time_to_first_token_seconds", "From the request to its first token.")
        told = "Between tokens after the first; several that come together share their time."
        yield self._between.family("vla_time_between_tokens_seconds", told)
        told = "What befell API keys: refused by cause, limits reached by name, readings of their file."
        events = CounterMetricFamily("vla_client_events", told, labels=("event",))
        for event, count in self.clients().items():
            events.add_metric((event,), count)
        yield events
        yield from self._of_connections()
        yield from self._of_engines()

    def _count(self, usage: Usage) -> None:
        self._tokens["prompt"] += usage.prompt_tokens
        self._tokens["cached"] += usage.cached_tokens or 0
        self._tokens["completion"] += usage.completion_tokens

    def _of_connections(self) -> Iterator[Metric]:
        counts = dict(self.connections())
        if not counts:
            return
        yield GaugeMetricFamily("vla_http_connections", "Open connections.", value=counts.pop("open", 0))
        told = "Connections by what befell them."
        events = CounterMetricFamily("vla_http_connection_events", told, labels=("event",))
        for event, count in counts.items():
            events.add_metric((event,), count)
        yield events

    def _of_engines(self) -> Iterator[Metric]:
        serving = GaugeMetricFamily("vla_serving", "1 while a request would be taken.", labels=("model",))
        requests = GaugeMetricFamily("vla_requests_present", "Requests here.", labels=("model", "state"))
        retries = CounterMetricFamily("vla_retries", "Attempts after the first.", labels=("model",))
        router = CounterMetricFamily("vla_router", "What the router did, by name.", labels=("model", "event"))
        known = GaugeMetricFamily("vla_router_known", "What the router remembers.", labels=("model", "kind"))
        workers = _WorkerFamilies()
        for model, health in self._health().items():
            serving.add_metric((model,), float(health["serving"]))
            for state in ("active", "queued", "unsettled"):
                requests.add_metric((model, state), health[state])
            retries.add_metric((model,), health.get("retries", 0))
            for name, count in health.get("router", {}).items():
                (known if name in ROUTER_GAUGES else router).add_metric((model, name), count)
            for worker in health["workers"]:
                workers.add(model, worker)
        yield from (serving, requests, retries, router, known, *workers.families)


class _WorkerFamilies:
    """Labels are configured names, not processes: a worker that is started again goes on under its own."""

    def __init__(self) -> None:
        base = ("model", "worker")
        self._up = GaugeMetricFamily("vla_worker_up", "1 while it takes requests.", labels=(*base, "role"))
        self._restarts = CounterMetricFamily("vla_worker_restarts", "Starts after the first.", labels=base)
        self._blocks = GaugeMetricFamily("vla_kv_blocks", "KV blocks of 16 tokens.", labels=(*base, "state"))
        self._requests = GaugeMetricFamily("vla_worker_requests", "Requests on it.", labels=(*base, "state"))
        self.families: tuple[Metric, ...] = (self._up, self._restarts, self._blocks, self._requests)

    def add(self, model: str, worker: Mapping[str, Any]) -> None:
        name, load = str(worker["name"]), worker["load"]
        self._up.add_metric((model, name, str(worker["role"])), float(worker["state"] == "ready"))
        self._restarts.add_metric((model, name), worker["restarts"])
        if load is None:
            return
        free, quarantined = load["free_blocks"], load["quarantined_blocks"]
        used = load["total_blocks"] - free - quarantined
        for state, count in (("free", free), ("used", used), ("quarantined", quarantined)):
            self._blocks.add_metric((model, name, state), count)
        for state in ("running", "waiting"):
            self._requests.add_metric((model, name, state), load[state])
