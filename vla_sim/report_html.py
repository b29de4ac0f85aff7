"""Fills the report's template: cards, tables and inline figures. No external resource is referred to."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

TEMPLATE: Final = Path(__file__).parent / "assets" / "report" / "report.html"


def page(summary: dict[str, Any], figures: dict[str, bytes]) -> str:
    """The whole page from ``summary.json``'s content and PNGs by name."""
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    images = {name: "data:image/png;base64," + base64.b64encode(png).decode() for name, png in figures.items()}
    return template.substitute(images, **_texts(summary))


def _texts(summary: dict[str, Any]) -> dict[str, str]:
    run, motor = summary["run"], summary["motor"]
    return {
        "title": escape(run.get("title") or "vla demo"),
        "lead": escape(_lead(summary)),
        "warnings": "".join(f'<p class="warn">{escape(text)}</p>' for text in _warnings(summary)),
        "cards": "".join(_cards(summary)),
        "tasks": task_table_html(summary["tasks"]),
        "tasks_note": escape(_tasks_note(summary)),
        "shield_note": escape(
            f"The shield braked {summary['shield']['brakings']} times and held {summary['shield']['holds']} times; "
            f"the operator re-armed {summary['shield']['operator_rearms']} times."),
        "limits_note": escape(_limits_note(motor)),
        "peaks": peaks_html(motor["peak_of_limit"]),
        "timing": timing_html(summary),
        "refusals": refusals_html(summary),
        "episodes": episodes_html(summary["episodes"]),
        "footer": escape(" · ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())),
    }


def _lead(summary: dict[str, Any]) -> str:
    run = summary["run"]
    parts = [run.get("started", ""), f"faults: {run['faults']}" if run.get("faults") else "no faults",
             f"model {run.get('model', '?')}", f"seed {summary['seed']}"]
    if summary["mode"] == "shuffled":
        parts.append("control with shuffled instructions: each names another object than the one that counts")
    return " · ".join(part for part in parts if part)


def _warnings(summary: dict[str, Any]) -> list[str]:
    motor, found = summary["motor"], []
    if summary["aborted"]:
        found.append(f"The run ended early: {summary['aborted']}.")
    if motor["limit_violations_total"]:
        found.append(f"Limits were violated: {motor['first_violation']}.")
    if motor["ticks_missing"]:
        found.append(f"{motor['ticks_missing']} motor ticks are missing from the stream: {motor['missed_deadlines']} "
                     f"deadlines were missed, the rest was sent but not recorded, in {motor['holes_in_recording']} "
                     "places.")
    if summary["robot_side"].get("slips"):
        found.append(f"The simulator fell behind real time {summary['robot_side']['slips']} times, by "
                     f"{number(summary['robot_side']['slipped_s'], 2)} s in all: the machine was too busy.")
    return found


def _cards(summary: dict[str, Any]) -> Iterable[str]:
    total = summary["tasks"][-1]
    motor, context, denoise = summary["motor"], summary["context"], summary["denoise_s"]
    lateness = motor["lateness_s"]
    yield _card(percent(total["success_rate"]), f"success, {total['successes']} of {total['episodes']} episodes")
    yield _card(str(motor["limit_violations_total"]), "limit violations in the commands as sent",
                "good" if not motor["limit_violations_total"] else "bad")
    yield _card(f"{number(context['rate_hz'], 1)} Hz", "contexts used while episodes ran")
    yield _card(f"{ms(context['age_s']['p50'], 0)}", f"context age p50; p99 {ms(context['age_s']['p99'], 0)}")
    yield _card(f"{ms(denoise['p50'])}", f"denoise p50; p99 {ms(denoise['p99'])}")
    yield _card(f"{ms(lateness['p50'], 2)}", f"clock lateness p50; p99 {ms(lateness['p99'], 2)}, "
                                             f"p99.9 {ms(lateness['p99.9'], 2)}")


def _card(figure: str, words: str, tone: str = "") -> str:
    return f'<div class="card {tone}"><b>{escape(figure)}</b><span>{escape(words)}</span></div>'


def _tasks_note(summary: dict[str, Any]) -> str:
    extended = "longer by the time the shield was holding" if summary["timeout_extended_by_outages"] else \
        "outages included"
    return ("Success is judged by physics. Intervals are Wilson's at 95 %. "
            f"Time-out {summary['episode_timeout_s']:g} s after the instruction, {extended}.")


def _limits_note(motor: dict[str, Any]) -> str:
    text = f"{motor['ticks']} commands, {motor['limit_violations_total']} beyond a limit (tolerance 1e-6 of it)."
    if motor["reentries"]:
        text += (f" {motor['reentries']} re-arms began a new segment at a measured pose up to "
                 f"{number(motor['largest_reentry'], 3)} rad from the last command.")
    if motor["stalls"]:
        text += (f" The motor process stalled {motor['stalls']} times; the stream began anew up to "
                 f"{number(motor['largest_stall_step'], 3)} rad from the last command.")
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]], total_last: bool = False) -> str:
    """HTML table of escaped cells."""
    rows = list(rows)
    out = ["<table><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr>"]
    for index, row in enumerate(rows):
        out.append('<tr class="total">' if total_last and index == len(rows) - 1 else "<tr>")
        out += [f"<td>{escape(cell)}</td>" for cell in row]
        out.append("</tr>")
    return "".join([*out, "</table>"])


def task_table_html(rows: Sequence[dict[str, Any]]) -> str:
    """Success per task with its interval."""
    head = ("task", "episodes", "success", "95 % interval", "wrong object", "time-out", "not started",
            "median time to success")
    return table(head, [(
        f"{row['task']} {row['motion']}".strip(), str(row["episodes"]),
        f"{row['successes']}  ({percent(row['success_rate'])})",
        f"{percent(row['success_low'])} – {percent(row['success_high'])}",
        f"{row['wrong_object']}  ({percent(row['wrong_object_rate'])})", str(row["timeouts"]), str(row["not_started"]),
        f"{number(row['median_success_s'], 2)} s") for row in rows], total_last=True)


def peaks_html(peaks: dict[str, dict[str, float]]) -> str:
    """Largest share of each limit per joint."""
    names = list(next(iter(peaks.values()), {}))
    return table(("largest share of the limit", *names),
                 [(quantity, *(percent(values[name], 1) for name in names)) for quantity, values in peaks.items()])


def timing_html(summary: dict[str, Any]) -> str:
    """Percentiles of everything that was timed."""
    motor = summary["motor"]
    rows = [("motor clock lateness", motor["lateness_s"], 3), ("context age", summary["context"]["age_s"], 1),
            ("denoise", summary["denoise_s"], 2)]
    body = [(name, str(values["count"]), *(ms(values[key], digits) for key in ("p50", "p99", "p99.9", "max")))
            for name, values, digits in rows]
    robot = summary["robot_side"]
    extra = (f'<p class="note">Motor scheduling: {escape(motor["scheduling"] or "?")}; '
             f'{motor["missed_deadlines"]} deadlines missed, {motor["limit_interventions"]} ticks in which a limit '
             f'changed the command. Longest time between '
             f'contexts within an episode {number(summary["context"]["longest_gap_s"], 2)} s. Denoiser: '
             f'{escape(summary["engine"] or "?")}. Robot side: {robot.get("command_timeouts", 0)} command time-outs, '
             f'{sum(robot.get("commands_refused", {}).values())} commands refused, physics at most '
             f'{ms(robot.get("worst_lag_s"), 1)} behind.</p>')
    return table(("", "samples", "p50", "p99", "p99.9", "max"), body) + extra


def refusals_html(summary: dict[str, Any]) -> str:
    """What was refused, by name, and what the link did."""
    out = []
    if summary["rejected"]:
        out.append(table(("contexts and chunks refused by the edge", "count"),
                         [(name, str(count)) for name, count in summary["rejected"].items()]))
    else:
        out.append('<p class="note">No context or chunk was refused.</p>')
    if summary["link"]:
        names = list(next(iter(summary["link"].values())))
        out.append(table(("messages on the link", *names),
                         [({"up": "observations", "down": "contexts"}.get(direction, direction),
                           *(str(counts[name]) for name in names)) for direction, counts in summary["link"].items()]))
    steps = [event for event in summary["fault_events"] if event["kind"] == "process"]
    if steps:
        out.append(table(("process fault", "step"), [(event["process"], event["step"]) for event in steps]))
    return "".join(out)


def episodes_html(episodes: Sequence[dict[str, Any]]) -> str:
    """One row per episode."""
    return table(("#", "instruction", "counts", "objects", "outcome", "time", "re-arms", "shield holding"), [(
        str(e["index"]), e["instruction"], e["target"], "moving" if e["moving"] else "still",
        e["outcome"].replace("_", " "),
        f"{number(e['elapsed_s'], 2)} s", str(e["rearms"]), f"{number(e['outage_s'], 1)} s") for e in episodes])


def number(value: float | None, digits: int) -> str:
    """Fixed digits; a dash for what was not measured."""
    return "–" if value is None or value != value else f"{value:.{digits}f}"


def percent(fraction: float | None, digits: int = 0) -> str:
    """Fraction as per cent."""
    return "–" if fraction is None or fraction != fraction else f"{100 * fraction:.{digits}f} %"


def ms(seconds: float | None, digits: int = 1) -> str:
    """Seconds as milliseconds."""
    return "–" if seconds is None or seconds != seconds else f"{1e3 * seconds:.{digits}f} ms"
