"""What the serving benchmark saw, as numbers for JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vla_cloud.core.transfer_plan import TransferConfig

NS_PER_MS = 1e6
TPOT_TARGET = 1.3
CACHED_TARGET = 0.05
Records = dict[str, list[dict[str, Any]]]
WORKERS = {"disaggregated": ("p0", "d0"), "colocated x1": ("w0",), "colocated x2": ("w0", "w1")}


def percentile(values: Sequence[float], q: float) -> float:
    """NaN for none."""
    return float(np.percentile(values, q)) if len(values) else float("nan")


def report(results: dict[str, Any], logs: Records) -> dict[str, Any]:
    """Everything that was measured, reduced."""
    found: dict[str, Any] = {}
    if "tpot" in results:
        found["tpot"] = _tpot(results["tpot"], logs)
    if "ttft" in results:
        found["ttft"] = _ttft(results["ttft"])
    if "transfer" in results:
        found["transfer"] = _transfer(results["transfer"], logs)
    if "mixed" in results:
        found["mixed"] = _mixed(results["mixed"])
    found["targets"] = _targets(found)
    return found


def _tpot(rows: list[dict[str, Any]], logs: Records) -> list[dict[str, Any]]:
    alone: dict[str, float] = {}
    alone_of_round: dict[tuple[str, int], float] = {}
    out = []
    for pool, meeting in dict.fromkeys((row["pool"], row["meeting"]) for row in rows):
        mine = [row for row in rows if (row["pool"], row["meeting"]) == (pool, meeting)]
        gaps = [gap for row in mine for gap in row["gaps_ms"]]
        p99 = percentile(gaps, 99)
        rounds = {row["round"]: percentile(row["gaps_ms"], 99) for row in mine}
        if meeting == "alone":
            alone[pool] = p99
            alone_of_round |= {(pool, number): value for number, value in rounds.items()}
        seconds = sum(row["end_ns"] - row["begin_ns"] for row in mine) / 1e9
        out.append({
            "pool": pool, "meeting": meeting, "gaps": len(gaps), "p50_ms": percentile(gaps, 50),
            "p90_ms": percentile(gaps, 90), "p99_ms": p99, "max_ms": percentile(gaps, 100),
            "tokens_per_s": sum(row["tokens"] for row in mine) / seconds,
            "prompts_done": sum(row["prompts"] for row in mine),
            "p99_to_alone": p99 / alone[pool],
            "p99_to_alone_of_rounds": [value / alone_of_round[pool, number] for number, value in rounds.items()],
            "prompt_ttft_ms": percentile([ms for row in mine for ms in row["prompt_ttft_ms"]], 50),
            "load": max(row["load"] for row in mine), **_unused(pool, mine, logs), **_steps(pool, mine, logs),
        })  # fmt: skip
    return out


def _within(steps: Iterable[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in steps if any(row["begin_ns"] <= one["t_ns"] <= row["end_ns"] for row in rows)]


def _unused(pool: str, rows: list[dict[str, Any]], logs: Records) -> dict[str, float]:
    steps = _within((one for name in WORKERS[pool] for one in logs.get(name, []) if one["kind"] == "step"), rows)
    held = sum(one["held"] for one in steps)
    return {"unused_kv_percent": 100 * sum(one["unused"] for one in steps) / held if held else float("nan")}


def _steps(pool: str, rows: list[dict[str, Any]], logs: Records) -> dict[str, float]:
    """Steps with decode rows: the forward pass alone, without gateway and links, and its processor time."""
    all_steps = (one for name in WORKERS[pool] for one in logs.get(name, []) if one["kind"] == "step")
    steps = _within((one for one in all_steps if one["decode"]), rows)
    took = [one["ns"] / NS_PER_MS for one in steps]
    cpu = [one["cpu_ns"] / NS_PER_MS for one in steps]
    return {"steps": len(steps), "step_p50_ms": percentile(took, 50), "step_p99_ms": percentile(took, 99),
            "step_cpu_p50_ms": percentile(cpu, 50), "step_cpu_p99_ms": percentile(cpu, 99)}  # fmt: skip


def _ttft(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for pool, case in dict.fromkeys((row["pool"], row["case"]) for row in rows):
        mine = [row for row in rows if (row["pool"], row["case"]) == (pool, case)]
        p50 = percentile([row["ms"] for row in mine], 50)
        cold = percentile([row["ms"] for row in rows if (row["pool"], row["case"]) == (pool, "cold")], 50)
        out.append({
            "pool": pool, "case": case, "p50_ms": p50, "requests": len(mine), "to_cold": p50 / cold,
            "cached_tokens": mine[0]["cached_tokens"], "attempts": max(row["attempts"] for row in mine),
        })  # fmt: skip
    return out


_TRANSFER = (
    "ttft_ms", "compute_ms", "push_in_step_ms", "push_in_step_cpu_ms", "pushed_ms", "tail_ms", "cost_ms",
    "to_client_ms",
)  # fmt: skip


def _transfer(rows: list[dict[str, Any]], logs: Records) -> list[dict[str, Any]]:
    for row in rows:
        _join(row, logs)
    out = []
    for tokens, way in dict.fromkeys((row["tokens"], row["way"]) for row in rows):
        mine = [row for row in rows if (row["tokens"], row["way"]) == (tokens, way)]
        median = {name: percentile([row[name] for row in mine if name in row], 50) for name in _TRANSFER}
        megabytes = mine[0].get("bytes", 0) / 1e6
        rate = megabytes / median["pushed_ms"] if way == "at end" else None
        row = {"tokens": tokens, "way": way, "requests": len(mine), "megabytes": megabytes, "gb_per_s": rate, **median}
        out.append(row)
    return out


def _join(row: dict[str, Any], logs: Records) -> None:
    """Add to one request what P and D wrote of it; nothing else was under way."""
    mine = {
        name: [one for one in logs.get(name, []) if row["begin_ns"] <= one["t_ns"] <= row["end_ns"]]
        for name in ("p0", "d0")
    }
    steps = [one for one in mine["p0"] if one["kind"] == "step"]
    pushed = [one for one in mine["p0"] if one["kind"] == "pushed"]
    arrived = [one for one in mine["d0"] if one["kind"] == "arrived"]
    if not (steps and pushed and arrived):
        return
    row |= {
        "compute_ms": sum(one["ns"] - one["push_ns"] for one in steps) / NS_PER_MS,
        "push_in_step_ms": sum(one["push_ns"] for one in steps) / NS_PER_MS,
        "push_in_step_cpu_ms": sum(one["push_cpu_ns"] for one in steps) / NS_PER_MS,
        "bytes": pushed[0]["bytes"], "pushed_ms": pushed[0]["ns"] / NS_PER_MS,
        "tail_ms": (arrived[0]["t_ns"] - steps[-1]["t_ns"]) / NS_PER_MS,
        "cost_ms": (sum(one["push_ns"] for one in steps) + arrived[0]["t_ns"] - steps[-1]["t_ns"]) / NS_PER_MS,
        "to_client_ms": (row["first_ns"] - arrived[0]["t_ns"]) / NS_PER_MS,
    }  # fmt: skip


def _mixed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for pool in dict.fromkeys(row["pool"] for row in rows):
        mine = [row for row in rows if row["pool"] == pool]
        seconds = sum(row["seconds"] for row in mine)
        reduced: dict[str, Any] = {
            "pool": pool, "requests": sum(row["requests"] for row in mine), "seconds": seconds,
            "prompt_tokens_per_s": sum(row["prompt_tokens"] for row in mine) / seconds,
            "output_tokens_per_s": sum(row["output_tokens"] for row in mine) / seconds,
        }  # fmt: skip
        for name in ("ttft_ms", "tpot_ms", "gaps_ms"):
            values = [value for row in mine for value in row[name]]
            reduced |= {f"{name[:-3]}_p{q}_ms": percentile(values, q) for q in (50, 90, 99)}
        out.append(reduced)
    return out


def _targets(found: dict[str, Any]) -> dict[str, Any]:
    targets = {}
    for row in found.get("tpot", []):
        if (row["pool"], row["meeting"]) == ("disaggregated", "prompts"):
            targets["p99_tpot_to_alone"] = {"found": row["p99_to_alone"], "wanted": TPOT_TARGET,
                                            "met": row["p99_to_alone"] <= TPOT_TARGET}  # fmt: skip
    for row in found.get("ttft", []):
        if row["case"] == "cached":
            name = f"cached_ttft_to_cold, {row['pool']}"
            targets[name] = {"found": row["to_cold"], "wanted": CACHED_TARGET, "met": row["to_cold"] <= CACHED_TARGET}
    return targets


def text(found: dict[str, Any]) -> str:
    """Tables for people."""
    parts = []
    if "tpot" in found:
        parts.append(_table("Time between tokens of an answer (TPOT)", found["tpot"], {
            "pool": "pool", "meeting": "meanwhile", "p50_ms": "p50 ms", "p90_ms": "p90 ms", "p99_ms": "p99 ms",
            "p99_to_alone": "p99 / alone", "tokens_per_s": "tok/s", "step_p99_ms": "step p99 ms",
            "step_cpu_p99_ms": "its CPU ms", "prompts_done": "prompts", "unused_kv_percent": "unused KV %",
        }))  # fmt: skip
    if "ttft" in found:
        parts.append(_table("First token (TTFT)", found["ttft"], {
            "pool": "pool", "case": "prompt", "cached_tokens": "cached", "p50_ms": "p50 ms", "to_cold": "/ cold",
        }))  # fmt: skip
    if "transfer" in found:
        title = f"KV from P to D (by default layer by layer from {TransferConfig().layerwise_tokens} tokens on)"
        parts.append(_table(title, found["transfer"], {
            "tokens": "tokens", "way": "pushed", "megabytes": "MB", "pushed_ms": "push ms", "gb_per_s": "GB/s",
            "ttft_ms": "TTFT ms", "compute_ms": "prompt ms", "push_in_step_ms": "in prompt ms",
            "push_in_step_cpu_ms": "of it CPU", "tail_ms": "after prompt ms", "cost_ms": "in + after ms",
        }))  # fmt: skip
    if "mixed" in found:
        parts.append(_table("Mixed load", found["mixed"], {
            "pool": "pool", "prompt_tokens_per_s": "in tok/s", "output_tokens_per_s": "out tok/s",
            "ttft_p50_ms": "TTFT p50", "ttft_p90_ms": "p90", "ttft_p99_ms": "p99 ms", "tpot_p50_ms": "TPOT p50",
            "tpot_p90_ms": "p90", "gaps_p99_ms": "gap p99 ms",
        }))  # fmt: skip
    for name, target in found["targets"].items():
        parts.append(
            f"{name}: {target['found']:.3g}, wanted <= {target['wanted']}: {'met' if target['met'] else 'MISSED'}"
        )
    return "\n\n".join(parts)


def plain(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and value != value else value


def _table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    lines = [title, "| " + " | ".join(columns.values()) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return "" if value is None else str(value)
