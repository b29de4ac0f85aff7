"""Every metric of the cloud's page, in one table: what is not in it cannot be shown, and the documents are made of it.

Labels have few, fixed values. ``robot`` has at most ``context.max_robots``, and a robot that is forgotten is gone here,
too. ``worker`` and ``lane`` are configured names, not processes: one that is started again goes on under its own, and
its counters begin at 0 again, as Prometheus' ``rate()`` expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class MetricRow:
    """One metric. ``name`` without ``_total``, ``_bucket`` and so on."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    told: str

    @property
    def shown(self) -> str:
        """The name as samples have it; that of a histogram without its three endings."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _rows(kind: Kind, *rows: tuple[str, str, str]) -> list[MetricRow]:
    return [MetricRow(name, kind, tuple(labels.split()), told) for name, labels, told in rows]


_WORKER: Final = "model worker"
_ROWS: Final = [
    # Chat: what clients see.
    *_rows("counter",
        ("vla_requests", "door outcome code", "Chat requests that ended: served, refused before the first token, "
         "failed after it, or cancelled by their client; code is a gRPC status name."),
        ("vla_tokens", "kind", "Tokens of served requests: prompt, completion, and cached (part of the prompt's)."),
    ),
    *_rows("histogram",
        ("vla_time_to_first_token_seconds", "", "From the request to its first token (TTFT)."),
        ("vla_time_between_tokens_seconds", "", "Between tokens after the first (ITL); several that come together "
         "share their time."),
        ("vla_time_per_output_token_seconds", "", "Mean time of a served request's tokens after the first (TPOT)."),
        ("vla_request_seconds", "", "Of served requests, from the request to the end of the answer."),
    ),
    *_rows("gauge", ("vla_http_connections", "", "Open connections of the HTTP door.")),
    *_rows("counter",
        ("vla_http_connection_events", "event", "Connections of the HTTP door by what befell them."),
        ("vla_client_events", "event", "What befell API keys: refused by cause, limits reached by name, readings of "
         "their file."),
    ),
    # Chat: pools.
    *_rows("gauge",
        ("vla_serving", "model", "1 while a request would be taken."),
        ("vla_requests_present", "model state", "Requests here: active (on workers), queued (in the gateway), "
         "unsettled (ended ones whose writer is awaited included)."),
        ("vla_queued_tokens", "model", "Prompt tokens of queued requests."),
        ("vla_router_known", "model kind", "What the router remembers: blocks, sessions."),
    ),
    *_rows("histogram", ("vla_queue_seconds", "model", "Time in the gateway's queue, of requests that left it for the "
                         "workers.")),
    *_rows("counter",
        ("vla_retries", "model cause", "Attempts that ended without an answer and were followed by another, by cause."),
        ("vla_router", "model event", "What the router did, by name: choices, hits and misses of each stage, blocks "
         "and events of its index."),
        ("vla_reprefills", "model", "Attempts after a request's first that got workers: they compute the prompt again, "
         "save what they have cached."),
    ),
    *_rows("gauge",
        ("vla_worker_up", f"{_WORKER} role", "1 while it takes requests."),
        ("vla_worker_requests", f"{_WORKER} state", "Requests on it: running, waiting, preempted, reserved (D: KV is "
         "awaited), pushing (P: KV is leaving)."),
        ("vla_kv_blocks", f"{_WORKER} state", "KV blocks of 16 tokens: free, cached (free if need be), used, "
         "quarantined (a writer may still touch them)."),
        ("vla_kv_leases", _WORKER, "Leases that run on D: reservations that wait for blocks or for KV."),
        ("vla_kv_awaited_writers", _WORKER, "Ended transfers on D whose writers may still write."),
    ),
    *_rows("counter",
        ("vla_worker_restarts", _WORKER, "Starts after the first."),
        ("vla_worker_role_switches", _WORKER, "Changes of role of a running worker."),
        ("vla_preemptions", _WORKER, "Requests that gave way to others for want of blocks."),
        ("vla_prefix_tokens", f"{_WORKER} kind", "Prompt tokens: cached (found in the prefix tree as a request came "
         "in), computed."),
        ("vla_kv_leases_expired", _WORKER, "Reservations that nobody extended in time."),
        ("vla_transfers", _WORKER, "KV transfers that were complete: pushed (P), arrived and verified (D)."),
        ("vla_transfer_bytes", _WORKER, "Bytes of these."),
        ("vla_transfer_seconds", _WORKER, "Time of these, together; layer by layer it is that of the computation."),
        ("vla_transfer_failures", f"{_WORKER} cause", "KV transfers that ended without KV, by cause."),
    ),
    # Robots.
    *_rows("gauge",
        ("vla_robots", "", "Robots known now."),
        ("vla_robot_context_age_seconds", "robot", "Since the arrival of the newest observation that was answered; "
         "grows while contexts fail to come."),
        ("vla_robot_context_rate_hz", "robot", "Contexts sent to it, over 2 s."),
        ("vla_robot_observation_age_seconds", "robot", "Since its newest observation."),
        ("vla_robot_observation_rate_hz", "robot", "Observations taken from it, over 2 s."),
        ("vla_robot_shield_state", "robot state", "1 for the state its shield is in, 0 for the others, as it says "
         "itself once a second."),
        ("vla_robot_shield_age_seconds", "robot", "Since it told of its shield."),
        ("vla_robot_motor_lateness_seconds", "robot", "p99 of the wake-up lateness of its motor clock."),
    ),
    *_rows("counter",
        ("vla_robot_contexts", "robot", "Contexts sent to it."),
        ("vla_robot_observations_replaced", "robot", "Its observations that were given up for a newer one."),
        ("vla_robot_observations_refused", "robot", "Its observations that were refused by name."),
        ("vla_robot_missed_ticks", "robot", "Deadlines its motor clock missed by a period or more."),
        ("vla_robot_limit_interventions", "robot", "Ticks in which a limit changed its command."),
    ),
    *_rows("histogram", ("vla_context_seconds", "", "From an observation's arrival to its context.")),
    *_rows("counter",
        ("vla_contexts", "outcome", "Observations of all robots: published; late (its deadline passed before its "
         "turn); replaced by a newer one; stale (older than one seen before)."),
        ("vla_context_refusals", "cause", "Observations and answers that were refused, by name."),
        ("vla_context_batches", "", "Batches computed."),
        ("vla_context_text_tokens", "kind", "Instruction tokens of contexts: all, cached (not computed again)."),
        ("vla_context_images_cached", "", "Images that were not encoded again."),
        ("vla_lane_restarts", "lane", "Starts of a robot lane after the first."),
        ("vla_lane_flights", "event", "Batches to robot lanes: sent, hedged (overdue: another lane got the newest), "
         "lost with their lane."),
        ("vla_lane_answers_dropped", "cause", "Answers of robot lanes that came late, or after a newer one (old)."),
    ),
    *_rows("gauge", ("vla_lane_up", "lane", "1 while a robot lane can be given work.")),
]  # fmt: skip

METRICS: Final[dict[str, MetricRow]] = {row.name: row for row in _ROWS}


class Families:
    """The metrics of one page. All are there, also those without a sample."""

    def __init__(self) -> None:
        """No samples."""
        self._made: dict[str, Any] = {row.name: _family(row) for row in METRICS.values()}

    def add(self, name: str, value: float, *labels: str) -> None:
        """A sample. KeyError: the metric is not in the table."""
        self._made[name].add_metric(labels, value)

    def histogram(self, name: str, snapshot: Mapping[str, Any], *labels: str) -> None:
        """All buckets, from ``Buckets.snapshot()``."""
        total, rows = 0, []
        for bound, count in zip((*map(str, snapshot["bounds"]), "+Inf"), snapshot["counts"], strict=True):
            total += count
            rows.append((bound, float(total)))
        self._made[name].add_metric(labels, rows, snapshot["sum"])

    def __iter__(self) -> Iterator[Metric]:
        """As Prometheus has them, in the order of the table."""
        return iter(self._made.values())


def _family(row: MetricRow) -> Metric:
    match row.kind:
        case "counter":
            return CounterMetricFamily(row.name, row.told, labels=row.labels)
        case "gauge":
            return GaugeMetricFamily(row.name, row.told, labels=row.labels)
    return HistogramMetricFamily(row.name, row.told, labels=row.labels)
