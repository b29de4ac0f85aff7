"""The state of a cloud as tables for the terminal. Pure: no clock, no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

Json = dict[str, Any]

MIN_HZ: Final = 9.0
OLD_S, LATE_S = 0.3, 0.6
_SHIELD: Final = {"NOMINAL": "green", "COASTING": "yellow", "BRAKING": "red", "HOLDING": "yellow"}
_STATE: Final = {"ready": "green", "starting": "yellow", "draining": "yellow"}
_BAR: Final = 12
_LATENCIES: Final = {
    "first_token_s": "first token", "between_tokens_s": "between tokens", "per_token_s": "per token",
    "total_s": "whole answers",
}  # fmt: skip


def view(status: Mapping[str, Any], url: str, gone: str = "") -> RenderableType:
    """Everything; ``gone``: why the server cannot be reached, while an older state is shown.

    Names and reasons come from robots and workers: they are shown as text, never as markup.
    """
    parts: list[RenderableType] = [_head(status, url)]
    if gone:
        parts.append(Text(f"disconnected: {gone}; what is shown is old", style="bold red"))
    robots = status["robots"]
    if robots is not None:
        parts += _robots(robots)
    if robots is not None and robots["lanes"]:
        parts += _lanes(robots)
    if status["models"]:
        parts += [*_workers(status["models"]), *_latencies(status)]
    return Group(*parts)


def _head(status: Mapping[str, Any], url: str) -> Text:
    health = list(status["models"].values())
    state = "draining" if any(one["draining"] for one in health) else "serving" if status["serving"] else "no capacity"
    requests = status["requests"]
    head = Text.assemble(
        ("vla ", "bold"), (f" {state} ", f"reverse {'green' if state == 'serving' else 'red'}"), f"  {url}",
        f"  up {_span(status['up_s'])}",
    )  # fmt: skip
    if health:
        active, queued, retries = (sum(one.get(key, 0) for one in health) for key in ("active", "queued", "retries"))
        head.append(
            f"\n{active} requests active, {queued} queued; {requests['served']} served, {requests['refused']} refused, "
            f"{requests['failed']} failed, {requests['cancelled']} cancelled; {retries} retries; "
            f"{status['latencies']['tokens_per_s']:.0f} tokens/s"
        )
    return head


def _robots(part: Mapping[str, Any]) -> list[RenderableType]:
    counts, limits = part["counts"], part["limits"]
    title = (
        f"robots: {len(part['robots'])} of at most {limits['max_robots']}; contexts {counts['published']}, "
        f"late {counts['late']}, replaced {counts['replaced']}"
    )
    table = _table("robot", "shield", "age>", "contexts>", "sends>", "replaced>", "refused>", "says*")
    for row in part["robots"]:
        sends = row["observation_age_s"] is not None and row["observation_age_s"] < 2.0
        age_s, rate_hz, shield = row["context_age_s"], row["context_rate_hz"], row["shield"]
        old = "red" if age_s is None or age_s > LATE_S else "yellow" if age_s > OLD_S else ""
        table.add_row(
            Text(_clean(row["robot"]), "bold"), _shield(shield),
            Text(_time(age_s) if sends else "-", old if sends else ""),
            Text(f"{rate_hz:.1f} Hz" if sends else "idle", "yellow" if sends and rate_hz < MIN_HZ else ""),
            f"{row['observation_rate_hz']:.1f} Hz", str(row["replaced"]), str(row["refused"]),
            Text(_clean(shield["reason"]) if shield else "", "dim", overflow="ellipsis", no_wrap=True),
        )  # fmt: skip
    if not part["robots"]:
        table.add_row(Text("none", "dim"))
    return [_title(title), table]


def _shield(shield: Mapping[str, Any] | None) -> Text:
    if shield is None or shield["age_s"] > 5.0:
        return Text("not told", "dim")
    return Text(shield["state"].lower(), _SHIELD.get(shield["state"], ""))


def _lanes(part: Mapping[str, Any]) -> list[RenderableType]:
    flights = part["dispatch"] or {}
    title = "robot lanes"
    if flights:
        title += f": {flights['flights']} batches, {flights['hedged_flights']} hedged, {flights['lost_flights']} lost"
    table = _table("lane", "state", "restarts>")
    for lane in part["lanes"]:
        table.add_row(Text(lane["name"], "bold"), _state(lane["state"]), str(lane["restarts"]))
    return [_title(title), table]


def _workers(models: Mapping[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for model, health in models.items():
        table = _table("worker", "role", "state", "run>", "wait>", "KV*", "quar.>", "hits>", "transfers>",
                       "restarts>")  # fmt: skip
        for one in health["workers"]:
            load, name = one["load"], (Text(_clean(one["name"]), "bold"), one["role"], _state(one["state"]))
            if load is None:
                table.add_row(*name, "-", "-", "-", "-", "-", "-", str(one["restarts"]))
                continue
            seen = load["cached_tokens"] + load["computed_tokens"]
            failed, quarantined = sum(load["transfer_failures"].values()), load["quarantined_blocks"]
            table.add_row(
                *name, str(load["running"]), str(load["waiting"]), _bar(load),
                Text(str(quarantined), "red" if quarantined else ""),
                f"{100 * load['cached_tokens'] / seen:.0f} %" if seen else "-",
                Text(f"{load['transfers']}" + (f" ({failed} failed)" if failed else ""), "yellow" if failed else ""),
                Text(str(one["restarts"]), "yellow" if one["restarts"] else ""),
            )  # fmt: skip
        parts += [_title(f"workers of {_clean(model)}"), table]
    return parts


def _bar(load: Mapping[str, Any]) -> Text:
    total = max(1, load["total_blocks"])
    used = load["total_blocks"] - load["free_blocks"] - load["quarantined_blocks"]
    marks = round(_BAR * used / total)
    style = "red" if used > 0.95 * total else "blue"
    return Text.assemble(f"{100 * used / total:3.0f} % ", ("█" * marks, style), ("░" * (_BAR - marks), "dim"),
                         overflow="crop", no_wrap=True)  # fmt: skip


def _latencies(status: Mapping[str, Any]) -> list[RenderableType]:
    latencies = status["latencies"]
    table = _table("", "p50>", "p95>", "p99>", "count>")
    for key, name in _LATENCIES.items():
        one = latencies[key]
        table.add_row(name, *(_time(one[part]) for part in ("p50", "p95", "p99")), str(one["count"]))
    return [_title(f"latencies, last {latencies['window_s']:.0f} s"), table]


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _table(*heads: str) -> Table:
    """Heads that end in > stand right; the one that ends in * gives way when the terminal is narrow."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        justify: JustifyMethod = "right" if head.endswith(">") else "left"
        table.add_column(head.rstrip(">*"), justify=justify, header_style="dim", no_wrap=not head.endswith("*"))
    return table


def _clean(text: str) -> str:
    """Without anything that a terminal would obey: a robot's words are not ours."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _state(state: str) -> Text:
    return Text(state, _STATE.get(state, "red"))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"


def _span(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    parts: Iterable[str] = (f"{hours} h", f"{minutes % 60} min") if hours else (f"{minutes} min",) if minutes else ()
    return " ".join(parts) or f"{int(seconds)} s"
