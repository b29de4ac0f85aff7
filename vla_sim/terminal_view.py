"""The live view of a demo on a terminal, drawn with rich from a :class:`LiveState`. Pure: state in, renderable out."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vla_common.clock import NS_PER_S
from vla_sim.demo_watch import LiveState

STATES: Final = ("NOMINAL", "COASTING", "BRAKING", "HOLDING")
STATE_STYLES: Final = ("bold white on dark_green", "bold black on yellow3", "bold black on dark_orange",
                       "bold white on red3")
OUTCOME_MARKS: Final = {"success": ("●", "green3"), "wrong_object": ("▲", "magenta"), "timeout": ("○", "grey58"),
                        "not_started": ("–", "grey42")}
STALE_AFTER_S: Final = 1.0


def draw(state: LiveState, now_ns: int) -> RenderableType:
    """The whole view."""
    elapsed_s = (now_ns - state.start_ns) / NS_PER_S
    faults = f"   {state.faults}" if state.faults else ""
    head = Text.assemble((state.title, "bold"), f"   {elapsed_s:.0f} s", (faults, "red3"))
    panels = Table.grid(expand=True)
    for ratio in (4, 5):
        panels.add_column(ratio=ratio)
    panels.add_row(_task_panel(state), _control_panel(state, now_ns))
    events = [Text(f"· {event}", "grey62") for event in state.events]
    return Panel(Group(head, panels, _results_line(state), _cpu_line(state), *events), border_style="grey42",
                 padding=(0, 1))


def _grid(rows: list[tuple[str, RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="grey62", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _task_panel(state: LiveState) -> RenderableType:
    task = state.task
    if task is None:
        return Panel(Text("waiting for the simulator", "grey62"), title="task", border_style="grey30")
    done = task.successes + task.failures
    rate = f"{100 * task.successes / done:.0f} %" if done else "–"
    motion = "moving" if task.moving else "still"
    return Panel(_grid([
        ("instruction", Text(f"“{task.instruction}”", "bold")),
        ("episode", Text(f"{task.episode + 1} of {task.episodes_total}: {task.task} the {task.target}, {motion}")),
        ("phase", Text(f"{task.phase}  {task.elapsed_s:.1f} s", _phase_style(task.phase))),
        ("success", Text(f"{task.successes} of {done}  ({rate}), wrong object {task.wrong_object}")),
    ]), title="task", border_style="grey30")


def _phase_style(phase: str) -> str:
    return {"success": "green3", "failure": "red3", "running": "deep_sky_blue1"}.get(phase, "grey70")


def _control_panel(state: LiveState, now_ns: int) -> RenderableType:
    rows: list[tuple[str, RenderableType]] = [("shield", _shield_text(state, now_ns))]
    policy = state.policy
    if policy is not None and state.stale_s("policy", now_ns) < STALE_AFTER_S:
        age = "no context" if policy.context_age_s < 0 else f"age {1e3 * policy.context_age_s:4.0f} ms"
        rows += [("context", Text(f"{policy.context_rate_hz:4.1f} Hz, {age}")),
                 ("denoise", Text(f"{_ms(policy.denoise_s)}, p50 {_ms(policy.denoise_p50_s)}, "
                                  f"p99 {_ms(policy.denoise_p99_s)}"))]
    else:
        rows.append(("policy", Text("not heard", "red3")))
    late = state.lateness
    rows.append(("commands", Text(f"{state.tick_rate_hz:5.1f} Hz" + (
        f", lateness p50 {_ms(late.p50, 2)}, p99 {_ms(late.p99, 2)}, p99.9 {_ms(late.p999, 2)}" if late else ""))))
    return Panel(_grid(rows), title="control", border_style="grey30")


def _shield_text(state: LiveState, now_ns: int) -> Text:
    shield: Any = state.shield
    if shield is None or state.stale_s("shield", now_ns) > STALE_AFTER_S:
        return Text("not heard", "red3")
    return Text.assemble((f" {STATES[shield.state]} ", STATE_STYLES[shield.state]), f" {shield.reason}")


def _results_line(state: LiveState) -> Text:
    line = Text("results  ", "grey62")
    for outcome, _ in state.results[-60:]:
        mark, style = OUTCOME_MARKS.get(outcome, ("?", "white"))
        line.append(mark, style)
    return line


def _cpu_line(state: LiveState) -> Text:
    line = Text("cpu      ", "grey62")
    for name, share in state.cpu.items():
        line.append(f"{name} ", "grey62")
        line.append(f"{100 * share:.0f} %  ", "white")
    return line


def _ms(seconds: float, digits: int = 1) -> str:
    return "–" if seconds != seconds else f"{1e3 * seconds:.{digits}f} ms"
