"""Figures of the report, as PNG bytes. Pure functions of a :class:`RunData`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vla_sim.motion_metrics import QUANTITIES, differentiate, segment_starts
from vla_sim.report_data import PERIOD_S, STATE_NAMES, RunData, denoise_times_s

STATE_COLOURS: Final = ("#2a9d8f", "#e9c46a", "#f4a261", "#c1121f")
OUTCOME_COLOURS: Final = {"success": "#2a9d8f", "wrong_object": "#7b2cbf", "timeout": "#8d99ae",
                          "not_started": "#dee2e6"}
INK, BLUE, FAULT, FAULT_BAND, GRID = "#22303c", "#2b6cb0", "#c1121f", "#f2b5a7", "#e3e8ee"
MAX_POINTS: Final = 3000
DETAIL_S: Final = 30.0
CLOSE_UP_S: Final = 8.0
_STYLE: Final[Any] = {
    "font.size": 9, "axes.edgecolor": "#9aa7b4", "axes.labelcolor": INK, "text.color": INK, "xtick.color": "#52606d",
    "ytick.color": "#52606d", "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "legend.frameon": False, "figure.facecolor": "white",
}


def render(draw: Callable[[RunData, Figure], None], data: RunData, width_in: float, height_in: float) -> bytes:
    """PNG of one figure."""
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(width_in, height_in), layout="constrained")
        draw(data, figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        plt.close(figure)
    return buffer.getvalue()


def fault_bands(data: RunData) -> list[tuple[float, float, str]]:
    """(start, end, name) of the faults, in seconds since the first tick.

    A process that was frozen or killed is a band until it was resumed or started again by the demo; the edge starts
    its own children again at once, so those are mere instants.
    """
    bands: list[tuple[float, float, str]] = []
    down: dict[str, float] = {}
    for event in data.events:
        if event["kind"] == "outage":
            start_s, end_s = data.seconds([event["start_ns"], event["end_ns"]])
            bands.append((float(start_s), float(end_s), "outage"))
        elif event["kind"] == "process":
            name, step, at_s = event["process"], event["step"], float(data.seconds(event["at_ns"]))
            if step in ("resume", "restart"):
                bands.append((down.pop(name, at_s), at_s, f"{name} down"))
            elif step == "stop" or name == "cloud":
                down[name] = at_s
            else:
                bands.append((at_s, at_s, f"{name} {step}"))
    return bands + [(at_s, _end_s(data), f"{name} down") for name, at_s in down.items()]


def _shade(axes: Axes, data: RunData) -> None:
    for start_s, end_s, _ in fault_bands(data):
        if end_s > start_s:
            axes.axvspan(start_s, end_s, color=FAULT_BAND, alpha=0.45, lw=0, zorder=0)
        axes.axvline(start_s, color=FAULT, lw=0.8, zorder=1)


def _at_least(axes: Axes, span: float) -> None:
    """Widen the vertical range, so that a joint at rest does not show its noise at full height."""
    low, high = axes.get_ylim()
    missing = span - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def _end_s(data: RunData) -> float:
    return float(data.seconds(data.stream.stamp_ns[-1])) if len(data.stream.tick) else 1.0


def draw_timeline(data: RunData, figure: Figure) -> None:
    """Episodes, shield states and context age over the whole run."""
    episodes, shield, age = figure.subplots(3, 1, sharex=True, height_ratios=(0.6, 0.6, 2.2))
    for episode in data.results.episodes:
        start_s, end_s = data.seconds([episode.start_ns, episode.end_ns])
        episodes.broken_barh([(start_s, max(end_s - start_s, 0.05))], (0, 1), color=OUTCOME_COLOURS[episode.outcome])
        if len(data.results.episodes) <= 16:
            episodes.text((start_s + end_s) / 2, 0.5, f"{episode.task}\n{episode.target.split()[0]}", ha="center",
                          va="center", fontsize=7, color="white")
    for interval in data.intervals:
        start_s, end_s = data.seconds([interval.start_ns, interval.end_ns])
        shield.broken_barh([(start_s, end_s - start_s)], (0, 1), color=STATE_COLOURS[interval.state])
    seconds, ages = data.seconds(data.context_age.stamp_ns), data.context_age.array() * 1e3
    age.plot(seconds, ages, ".", ms=2, color=BLUE)
    age.set(ylabel="context age, ms", xlabel="time, s", ylim=(0, max(400.0, float(np.max(ages, initial=0)) * 1.05)))
    for axes, name in ((episodes, "episodes"), (shield, "shield")):
        axes.set_yticks([])
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.grid(False)
    for axes in (episodes, shield, age):
        _shade(axes, data)
    age.set_xlim(0, _end_s(data))
    used = sorted({interval.state for interval in data.intervals})
    handles = [Patch(color=STATE_COLOURS[state], label=STATE_NAMES[state].lower()) for state in used]
    handles += [Patch(color=colour, label=f"episode: {name.replace('_', ' ')}")
                for name, colour in OUTCOME_COLOURS.items()
                if any(episode.outcome == name for episode in data.results.episodes)]
    if fault_bands(data):
        handles.append(Patch(color=FAULT_BAND, label="fault"))
    figure.legend(handles=handles, loc="outside upper center", ncols=8, fontsize=8)


def detail_window(data: RunData) -> tuple[float, float]:
    """Seconds since the first tick that the joint plots show: from the first episode on."""
    start_s = 0.0
    if data.results.episodes:
        start_s = max(0.0, float(data.seconds(data.results.episodes[0].start_ns)) - 1.0)
    return start_s, min(start_s + DETAIL_S, _end_s(data))


def draw_tracking(data: RunData, figure: Figure) -> None:
    """Command and measurement of every joint over the first episodes."""
    low_s, high_s = detail_window(data)
    seconds = data.seconds(data.stream.stamp_ns)
    rows = np.flatnonzero((seconds >= low_s) & (seconds <= high_s))
    measured_s = data.seconds(data.measured.stamp_ns)
    command = data.stream.command.reshape(-1, len(data.limits))
    kept = np.flatnonzero((measured_s >= low_s) & (measured_s <= high_s))
    measured = np.array([data.measured.values[i] for i in kept]).reshape(len(kept), len(data.limits))
    for joint, axes in enumerate(figure.subplots(4, 2, sharex=True).T.ravel()):
        name = data.limits.names[joint]
        axes.plot(measured_s[kept], measured[:, joint], color="#f4a261", lw=2.2, label="measured")
        axes.plot(seconds[rows], command[rows, joint], color=INK, lw=0.9, label="command as sent")
        axes.set_title(f"{name}, {'closure' if name == 'gripper' else 'rad'}")
        _at_least(axes, 0.1)
        _shade(axes, data)
        axes.set_xlim(low_s, high_s)
        if joint == 0:
            axes.legend(fontsize=8, loc="best")
        if joint % 4 == 3:
            axes.set_xlabel("time, s")


def _envelope(values: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> tuple[Any, Any]:
    """Largest value per bin, at most MAX_POINTS bins: no peak is lost to thinning."""
    step = max(1, -(-len(values) // MAX_POINTS))
    starts = np.arange(0, len(values), step)
    return seconds[starts], np.maximum.reduceat(values, starts, axis=0)


def draw_limits(data: RunData, figure: Figure) -> None:
    """Speed, acceleration and jerk as fractions of their limits: the whole run, and each joint for some seconds."""
    found = differentiate(data.stream.command.reshape(-1, len(data.limits)), PERIOD_S)
    seconds = data.seconds(data.stream.stamp_ns)
    panels = figure.subplots(3, 2, sharex="col", sharey=True)
    low_s = detail_window(data)[0]
    # Across a start of the stream (commands not recorded, a re-entry) a difference means nothing.
    starts = np.concatenate(segment_starts(data.stream, data.missed_ticks)).astype(np.int64)
    for order, ((whole, detail), name) in enumerate(zip(panels, QUANTITIES, strict=True), start=1):
        fraction = np.abs(getattr(found, name)) / getattr(data.limits, name)
        for back in range(order):
            fraction[np.clip(starts - 1 - back, 0, max(0, len(fraction) - 1))] = 0.0
        if len(fraction):
            at_s = seconds[-len(fraction):]
            whole.fill_between(*_envelope(fraction.max(axis=1), at_s), color=BLUE, alpha=0.75, lw=0)
            rows = (at_s >= low_s) & (at_s <= low_s + CLOSE_UP_S)
            for joint, colour in enumerate(plt.get_cmap("viridis")(np.linspace(0, 0.9, len(data.limits)))):
                detail.plot(at_s[rows], fraction[rows, joint], lw=0.9, color=colour, label=data.limits.names[joint])
        for axes in (whole, detail):
            axes.axhline(1.0, color=FAULT, lw=1.2)
            axes.set_ylim(0, 1.12)
            _shade(axes, data)
        whole.set_ylabel(f"|{name}| / limit")
    panels[0, 0].set_title("whole run, largest of all joints")
    panels[0, 1].set_title(f"each joint, {CLOSE_UP_S:g} s from the first episode on")
    panels[2, 0].set(xlabel="time, s", xlim=(0, _end_s(data)))
    panels[2, 1].set(xlabel="time, s", xlim=(low_s, low_s + CLOSE_UP_S))
    handles, labels = panels[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8)


def draw_lateness(data: RunData, figure: Figure) -> None:
    """Histogram of the motor clock's wake-up lateness."""
    axes = figure.subplots()
    late_ms = np.maximum(data.stream.lateness_s * 1e3, 1e-3)
    if len(late_ms):
        axes.hist(late_ms, bins=np.logspace(-3, max(1.5, np.log10(late_ms.max()) + 0.1), 70).tolist(), color=BLUE)
        for percent, style in ((50, ":"), (99, "--"), (99.9, "-")):
            value = float(np.percentile(late_ms, percent))
            axes.axvline(value, color=FAULT, lw=1.2, ls=style, label=f"p{percent:g}  {value:.3f} ms")
        axes.legend(fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="wake-up lateness, ms", ylabel="ticks", title="motor clock, 100 Hz")


def draw_cpu(data: RunData, figure: Figure) -> None:
    """Mean and largest share of one core per process."""
    axes = figure.subplots()
    names = [name for name, values in data.cpu.items() if values][::-1]
    means = [100 * float(np.mean(data.cpu[name])) for name in names]
    peaks = [100 * float(np.max(data.cpu[name])) for name in names]
    axes.barh(names, peaks, color="#cfe0f1", label="largest second")
    axes.barh(names, means, color=BLUE, label="mean")
    for row, mean in enumerate(means):
        axes.text(mean + 1, row, f"{mean:.0f} %", va="center", fontsize=8)
    axes.set(xlabel="share of one core, %", title="CPU per process")
    axes.grid(axis="y", visible=False)
    if names:
        axes.legend(fontsize=8, loc="lower right")


def draw_denoise(data: RunData, figure: Figure) -> None:
    """Histograms of denoise time and of context age."""
    left, right = figure.subplots(1, 2)
    left.hist(denoise_times_s(data) * 1e3, bins=60, color="#2a9d8f")
    left.set(xlabel="denoise, ms", ylabel="samples", title="denoiser (4 Euler steps)")
    right.hist(data.context_age.array() * 1e3, bins=60, color=BLUE)
    right.set(xlabel="age of the observation behind a chunk, ms", ylabel="chunks", title="context age")


FIGURES: Final[dict[str, tuple[Callable[[RunData, Figure], None], float, float]]] = {
    "timeline": (draw_timeline, 11.0, 3.6),
    "tracking": (draw_tracking, 11.0, 8.0),
    "limits": (draw_limits, 11.0, 5.4),
    "lateness": (draw_lateness, 5.4, 3.2),
    "cpu": (draw_cpu, 5.4, 3.2),
    "denoise": (draw_denoise, 11.0, 2.8),
}
