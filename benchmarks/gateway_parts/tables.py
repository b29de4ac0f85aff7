"""What the rounds of the gateway benchmark come to, for people and as plain values."""

from __future__ import annotations

from typing import Any

Results = dict[str, dict[str, list[dict[str, Any]]]]
"""Of each target and case, the rounds."""


def percentile(values: list[float], q: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))]


def report(results: Results, floors: dict[str, str | None], idle_s: dict[str, float]) -> dict[str, Any]:
    """One row per target and case; sums and percentiles over all rounds."""
    rows = [reduced(target, case, rounds) for target, cases in results.items() for case, rounds in cases.items()]
    found = {(row["target"], row["case"]): row for row in rows}
    for row in rows:
        floor = found.get((floors.get(row["target"]) or "", row["case"]))
        for name in ("request_p50_ms", "request_p99_ms", "token_p50_ms", "token_p99_ms"):
            has_both = floor is not None and row[name] is not None and floor[name] is not None
            row[f"added_{name}"] = row[name] - floor[name] if floor is not None and has_both else None
    return {"rows": rows, "idle_cpu_s_per_s": idle_s, "floors": floors}


def reduced(target: str, case: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """All rounds of one case."""
    requests, tokens, chunks = (sum(took[name] for took in rounds) for name in ("requests", "tokens", "chunks"))
    seconds = sum(took["seconds"] for took in rounds)
    cpus = [took["gateway_cpu_s"] for took in rounds]
    cpu_us = None if None in cpus else 1e6 * sum(cpus)
    request_ms = [value for took in rounds for value in took["request_ms"]]
    token_ms = [value for took in rounds for value in took["token_ms"]]
    return {
        "target": target, "case": case, "requests": requests, "tokens": tokens, "seconds": seconds,
        "cpu_us_per_request": None if cpu_us is None else cpu_us / requests,
        "cpu_us_per_token": None if cpu_us is None or not chunks else cpu_us / tokens,
        "cpu_us_per_chunk": None if cpu_us is None or not chunks else cpu_us / chunks,
        "requests_per_s": requests / seconds, "tokens_per_s": tokens / seconds,
        "tokens_per_chunk": tokens / chunks if chunks else None,
        "request_p50_ms": percentile(request_ms, 50), "request_p99_ms": percentile(request_ms, 99),
        "token_p50_ms": percentile(token_ms, 50), "token_p99_ms": percentile(token_ms, 99),
        "load_generator_cpu_us_per_request": 1e6 * sum(took["cpu_s"] for took in rounds) / requests,
    }  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """Tables."""
    rows = {(row["target"], row["case"]): row for row in found["rows"]}
    targets, cases = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))

    def table(title: str, columns: list[tuple[str, str, str]], of: list[str]) -> str:
        """``columns``: title, case, name of the value."""
        lines = [title, "| | " + " | ".join(column[0] for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for target in of:
            cells = [_cell(rows[target, case][name]) for _, case, name in columns]
            lines.append(f"| {target} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    short = [case for case in cases if case.startswith("short")]
    streams = [case for case in cases if not case.startswith("short")]
    counted = [target for target in targets if target in found["idle_cpu_s_per_s"]]
    through = [target for target in targets if found["floors"][target] is not None]
    cpu = [(case, case, "cpu_us_per_request") for case in short]
    cpu += [(case, case, "cpu_us_per_token") for case in streams]
    added = [
        (f"{case} {q}", case, f"added_{kind}_{q}_ms")
        for case in cases if not case.startswith("fast")
        for kind in (("request",) if case in short else ("token",)) for q in ("p50", "p99")
    ]  # fmt: skip
    rate = [(case, case, "requests_per_s") for case in short]
    rate += [(case, case, "tokens_per_s") for case in streams if case.startswith("fast")]
    parts = [
        table("CPU of the gateway, us per request (short) or per token (streams); case and clients", cpu, counted),
        "idle, CPU ms per s: " + ", ".join(f"{name} {1e3 * s:.1f}" for name, s in found["idle_cpu_s_per_s"].items()),
        table("Added latency, ms, per request (short) or token (paced): through it less its floor", added, through),
        table("Throughput of all processes together: requests/s (short), tokens/s (fast)", rate, targets),
    ]
    return "\n\n".join(parts)


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
