"""Prometheus metrics of a robot, served by the io process on loopback. The motor process knows nothing of it.

Collected in a thread of the server from values that the io loop keeps anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from vla_edge.core.shield_words import State
from vla_edge.metrics_address import metrics_address

LOG = logging.getLogger(__name__)

MAX_CAUSES: Final = 64
"""Different refusals shown by name; the rest is ``other``: messages on the robot bus can bring names of their own."""

EDGE_METRICS: Final[dict[str, tuple[str, tuple[str, ...], str]]] = {
    "vla_edge_shield_state": ("gauge", ("state",), "1 for the state the shield is in, 0 for the others."),
    "vla_edge_rearm_ready": ("gauge", (), "1 while a re-arm would be accepted."),
    "vla_edge_motor_ticking": ("gauge", (), "1 while the motor process ticks."),
    "vla_edge_motor_tick": ("gauge", (), "Number of the motor's last tick; -1 before the first."),
    "vla_edge_motor_missed_ticks": ("counter", (), "Deadlines of the motor clock missed by a period or more."),
    "vla_edge_motor_lateness_seconds": ("gauge", ("quantile",), "Wake-up lateness of the motor clock, last 3000 ticks; "
                                        "1 is the largest ever."),
    "vla_edge_limit_interventions": ("counter", (), "Ticks in which a limit changed the command."),
    "vla_edge_chunks": ("counter", ("verdict",), "Chunks by what became of them: accepted, rejected."),
    "vla_edge_observations": ("counter", (), "Observations sent to the cloud."),
    "vla_edge_refused_messages": ("counter", ("cause",), "Messages that the io process refused."),
}  # fmt: skip
"""Kind, labels and meaning by name; the table of docs/observability.md is made of it."""


class Source(Protocol):
    """The io loop, as far as its metrics need it."""

    @property
    def shield(self) -> Any | None:
        """The newest ShieldStatus, None before the first."""
        ...

    @property
    def is_ticking(self) -> bool:
        """Whether the motor process ticks."""
        ...

    @property
    def observations(self) -> int:
        """Observations sent."""
        ...

    def rejects(self) -> dict[str, int]:
        """What was refused so far, by name."""
        ...


class EdgeCollector:
    """Registered with a registry of prometheus_client; one robot, so that no label names it."""

    def __init__(self, source: Source) -> None:
        """Read whenever the page is."""
        self._source = source

    def collect(self) -> Iterator[Any]:
        """All families, with samples as far as they are known."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds: dict[str, Callable[..., Any]] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        samples = list(self._samples())
        for name, (kind, labels, told) in EDGE_METRICS.items():
            family = kinds[kind](name, told, labels=labels)
            for sample, values, value in samples:
                if sample == name:
                    family.add_metric(values, value)
            yield family

    def _samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        source = self._source
        yield "vla_edge_motor_ticking", (), float(source.is_ticking)
        yield "vla_edge_observations", (), source.observations
        rejects = sorted(source.rejects().items(), key=lambda item: -item[1])
        for cause, count in rejects[:MAX_CAUSES]:
            yield "vla_edge_refused_messages", (cause,), count
        if len(rejects) > MAX_CAUSES:
            yield "vla_edge_refused_messages", ("other",), sum(count for _, count in rejects[MAX_CAUSES:])
        shield = source.shield
        if shield is None:
            return
        for state in State:
            yield "vla_edge_shield_state", (state.name,), float(state == int(shield.state))
        yield "vla_edge_rearm_ready", (), float(shield.rearm_ready)
        yield "vla_edge_motor_tick", (), int(shield.tick)
        yield "vla_edge_motor_missed_ticks", (), int(shield.missed_ticks)
        for quantile, value in (("0.5", shield.lateness_p50_s), ("0.99", shield.lateness_p99_s),
                                ("1", shield.lateness_max_s)):  # fmt: skip
            yield "vla_edge_motor_lateness_seconds", (quantile,), float(value)
        yield "vla_edge_limit_interventions", (), int(shield.limit_interventions)
        yield "vla_edge_chunks", ("accepted",), int(shield.chunks_accepted)
        yield "vla_edge_chunks", ("rejected",), int(shield.chunks_rejected)


@contextmanager
def metrics_page(source: Source, listen: str) -> Iterator[int]:
    """Serve the page while the body runs; gives its port, 0 if there is none.

    A robot must not stand still because nobody can look at it: what keeps the page from opening is only logged.
    """
    address = metrics_address(listen)
    if address is None:
        yield 0
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(EdgeCollector(source))
        server, thread = start_http_server(address[1], address[0], registry)
    except ImportError:
        LOG.error("io.metrics_listen: no metrics, prometheus_client is not installed: pip install "
                  "'vla-runtime[metrics]'")  # fmt: skip
        yield 0
        return
    except OSError as error:
        LOG.error("io.metrics_listen %s: no metrics: %s; choose another port, or end what has it", listen, error)
        yield 0
        return
    LOG.info("metrics on http://%s:%d/metrics", address[0], server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(1.0)
