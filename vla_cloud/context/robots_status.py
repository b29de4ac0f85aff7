"""The state of the robots' part of the cloud in plain values: what ``GET /vla/status`` and the metrics page show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vla_cloud.config import ContextConfig
from vla_cloud.context.front import ContextFront
from vla_cloud.core.context_dispatch import ContextDispatch
from vla_cloud.core.context_pacer import PacerCounts
from vla_cloud.pools.workers import Workers


def robots_status(front: ContextFront, pacer: PacerCounts, config: ContextConfig, now_ns: int) -> dict[str, Any]:
    """Without lanes. Called from any thread; counts may be one observation apart."""
    statistics = front.statistics
    return {
        "limits": {"rate_hz": config.rate_hz, "deadline_s": config.deadline_s, "max_robots": config.max_robots},
        "robots": front.board.rows(now_ns),
        "answer_s": front.board.answer_s(),
        "counts": {
            "received": statistics.received, "published": statistics.published, "late": pacer.late,
            "replaced": pacer.replaced, "stale": pacer.stale, "batches": statistics.batches,
            "text_tokens": statistics.text_tokens, "text_tokens_reused": statistics.text_tokens_reused,
            "images_reused": statistics.images_reused,
        },
        "refused": statistics.refused.snapshot(),
        "lanes": [],
        "dispatch": None,
    }  # fmt: skip


def lanes_status(workers: Workers | None, dispatch: ContextDispatch[Any]) -> Mapping[str, Any]:
    """The part that lanes add."""
    infos = [] if workers is None else workers.infos()
    names = ("name", "state", "pid", "restarts", "detail")
    return {
        "lanes": [{name: getattr(info, name) for name in names} for info in infos],
        "dispatch": asdict(dispatch.counts),
    }  # fmt: skip
