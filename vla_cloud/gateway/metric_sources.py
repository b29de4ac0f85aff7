"""Samples from what the pools and the robots' part tell of themselves in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vla_cloud.core.placement import ROUTER_GAUGES
from vla_cloud.gateway.metric_table import Families

SHIELD_STATES: Final = ("NOMINAL", "COASTING", "BRAKING", "HOLDING")
_WORKER_COUNTERS: Final = {
    "vla_preemptions": "preemptions", "vla_kv_leases_expired": "leases_expired", "vla_transfers": "transfers",
    "vla_transfer_bytes": "transfer_bytes", "vla_transfer_seconds": "transfer_s",
}  # fmt: skip


def add_models(families: Families, models: Mapping[str, Mapping[str, Any]]) -> None:
    """``models``: name to ``ServingService.health()``."""
    for model, health in models.items():
        families.add("vla_serving", float(health["serving"]), model)
        for state in ("active", "queued", "unsettled"):
            families.add("vla_requests_present", health[state], model, state)
        families.add("vla_queued_tokens", health.get("queued_tokens", 0), model)
        families.add("vla_reprefills", health.get("reprefills", 0), model)
        for name, count in health.get("router", {}).items():
            families.add("vla_router_known" if name in ROUTER_GAUGES else "vla_router", count, model, name)
        for cause, count in health.get("retry_causes", {}).items():
            families.add("vla_retries", count, model, cause)
        if "queue_wait" in health:
            families.histogram("vla_queue_seconds", health["queue_wait"], model)
        for worker in health["workers"]:
            _add_worker(families, model, worker)


def _add_worker(families: Families, model: str, worker: Mapping[str, Any]) -> None:
    name, load = str(worker["name"]), worker["load"]
    families.add("vla_worker_up", float(worker["state"] == "ready"), model, name, str(worker["role"]))
    families.add("vla_worker_restarts", worker["restarts"], model, name)
    families.add("vla_worker_role_switches", worker.get("role_switches", 0), model, name)
    if load is None:  # not heard of since its last start
        return
    told: Mapping[str, Any] = {"cached_blocks": 0, "reserved": 0, "to_push": 0, "preempted": 0, **load}
    free, quarantined = told["free_blocks"], told["quarantined_blocks"]
    blocks = {
        "free": free - told["cached_blocks"], "cached": told["cached_blocks"], "quarantined": quarantined,
        "used": told["total_blocks"] - free - quarantined,
    }  # fmt: skip
    requests = {
        "running": told["running"] - told["reserved"] - told["to_push"], "reserved": told["reserved"],
        "pushing": told["to_push"], "waiting": told["waiting"] - told["preempted"], "preempted": told["preempted"],
    }  # fmt: skip
    for state, count in blocks.items():
        families.add("vla_kv_blocks", count, model, name, state)
    for state, count in requests.items():
        families.add("vla_worker_requests", count, model, name, state)
    families.add("vla_kv_leases", told.get("leases", 0), model, name)
    families.add("vla_kv_awaited_writers", told.get("awaited_writers", 0), model, name)
    for metric, key in _WORKER_COUNTERS.items():
        families.add(metric, told.get(key, 0), model, name)
    for kind in ("cached", "computed"):
        families.add("vla_prefix_tokens", told.get(f"{kind}_tokens", 0), model, name, kind)
    for cause, count in told.get("transfer_failures", {}).items():
        families.add("vla_transfer_failures", count, model, name, cause)


def add_robots(families: Families, status: Mapping[str, Any]) -> None:
    """``status``: see ``vla_cloud.context.robots_status``."""
    families.add("vla_robots", len(status["robots"]))
    for row in status["robots"]:
        _add_robot(families, row)
    families.histogram("vla_context_seconds", status["answer_s"])
    counts = status["counts"]
    for outcome in ("published", "late", "replaced", "stale"):
        families.add("vla_contexts", counts[outcome], outcome)
    for cause, count in status["refused"].items():
        families.add("vla_context_refusals", count, cause)
    families.add("vla_context_batches", counts["batches"])
    families.add("vla_context_text_tokens", counts["text_tokens"], "all")
    families.add("vla_context_text_tokens", counts["text_tokens_reused"], "cached")
    families.add("vla_context_images_cached", counts["images_reused"])
    for lane in status["lanes"]:
        families.add("vla_lane_up", float(lane["state"] == "ready"), lane["name"])
        families.add("vla_lane_restarts", lane["restarts"], lane["name"])
    flights = status["dispatch"]
    if flights is not None:
        for event, key in (("sent", "flights"), ("hedged", "hedged_flights"), ("lost", "lost_flights")):
            families.add("vla_lane_flights", flights[key], event)
        for cause in ("late", "old"):
            families.add("vla_lane_answers_dropped", flights[f"{cause}_answers"], cause)


def _add_robot(families: Families, row: Mapping[str, Any]) -> None:
    robot = row["robot"]
    for what in ("context", "observation"):
        if row[f"{what}_age_s"] is not None:
            families.add(f"vla_robot_{what}_age_seconds", row[f"{what}_age_s"], robot)
        families.add(f"vla_robot_{what}_rate_hz", row[f"{what}_rate_hz"], robot)
    families.add("vla_robot_contexts", row["published"], robot)
    families.add("vla_robot_observations_replaced", row["replaced"], robot)
    families.add("vla_robot_observations_refused", row["refused"], robot)
    shield = row["shield"]
    if shield is None:
        return
    for state in SHIELD_STATES:
        families.add("vla_robot_shield_state", float(state == shield["state"]), robot, state)
    families.add("vla_robot_shield_age_seconds", shield["age_s"], robot)
    families.add("vla_robot_motor_lateness_seconds", shield["lateness_p99_s"], robot)
    families.add("vla_robot_missed_ticks", shield["missed_ticks"], robot)
    families.add("vla_robot_limit_interventions", shield["limit_interventions"], robot)
