"""All cells of the fault matrix."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from cells import FAULTS, TARGETS, Cell, Step
from matrix_rig import CLEAN, CLOCK, HOLDING, MatrixRig
from recording import check_readable, fill_disk, note_fault, recorder_ended, recorder_restarted

HOUR_S = 3600.0
CONTEXT_S, CHUNK_S, REPLAN_S, JOINTS_S = 0.6, 0.16, 0.05, 0.2
"""Settings of the edge: oldest usable context, length of a chunk, time between chunks, oldest joint state."""
NO_CONTEXT_S = CONTEXT_S + REPLAN_S + CHUNK_S
NO_CHUNK_S = CHUNK_S + REPLAN_S
NO_JOINTS_S = JOINTS_S + REPLAN_S + CHUNK_S
ROBOT_COMPUTER = ("edge", "motor", "policy", "io", "recorder", "robot")


def told(target: str, kind: str, share: float = 1.0, delay_s: float = 0.0) -> dict[str, Step]:
    """Fault by an order to the process."""
    def begin(rig: MatrixRig) -> None:
        rig.tell(target, fault={"kind": kind, "share": share, "delay_s": delay_s})

    def end(rig: MatrixRig) -> None:
        rig.tell(target, fault={"kind": "none"})

    return {"begin": begin, "end": end}


def frozen(target: str) -> dict[str, Step]:
    """SIGSTOP, later SIGCONT."""
    return {"begin": lambda rig: rig.signal(target, signal.SIGSTOP),
            "end": lambda rig: rig.signal(target, signal.SIGCONT)}


def killed(target: str) -> dict[str, Step]:
    """SIGKILL; ours are started again by the rig, the edge's own by the edge."""
    def end(rig: MatrixRig) -> None:
        if target in ("cloud", "link", "robot"):
            rig.start(target)

    return {"begin": lambda rig: rig.signal(target, signal.SIGKILL), "end": end}


def stepped(names: tuple[str, ...], seconds: float) -> dict[str, Step]:
    """A step of the wall clock of some processes, and back."""
    return {"begin": lambda rig: rig.step_wall_clock(names, seconds), "end": lambda rig: rig.step_wall_clock(names, 0)}


def clock_cells(target: str, names: tuple[str, ...]) -> list[Cell]:
    """``names``: processes whose wall clock is stepped."""
    def cell(sign: str, seconds: float) -> Cell:
        seen = {"motor", "policy"}.intersection(names)
        return Cell(f"clock {sign}1 h", target, "+".join(names) if len(names) > 1 else "", **stepped(names, seconds),
                    until=lambda rig: all(abs(rig.seen.wall_s[name] - seconds) < 60 for name in seen))

    return [cell("+", HOUR_S), cell("-", -HOUR_S)]


def not_applicable(target: str, reasons: dict[str, str]) -> list[Cell]:
    return [Cell(fault, target, why=why) for fault, why in reasons.items()]


def cloud_cells() -> list[Cell]:
    stop: dict[str, Any] = {"stops": True, "within_s": NO_CONTEXT_S}
    tell = partial(told, "cloud")

    def content(fault: str, kind: str, message: str, variant: str) -> list[Cell]:
        return [Cell(fault, "cloud", f"{variant}, all", **tell(kind), **stop, message=message),
                Cell(fault, "cloud", f"{variant}, every other", **tell(kind, 0.5), message=message)]

    return [
        Cell("drop", "cloud", "answers nothing", **tell("drop"), **stop, message="no_fresh_context"),
        Cell("drop", "cloud", "answers every other", **tell("drop", 0.5)),
        Cell("duplicate", "cloud", "each context again 30 ms later", **tell("duplicate", delay_s=0.03),
             message="context_out_of_order"),
        Cell("reorder", "cloud", "every other context 150 ms later", **tell("reorder", 0.5, 0.15),
             message="context_out_of_order"),
        Cell("delay", "cloud", "300 ms", **tell("delay", delay_s=0.3)),
        Cell("delay", "cloud", "900 ms", **tell("delay", delay_s=0.9), **stop, message="context_stale"),
        Cell("freeze", "cloud", **frozen("cloud"), **stop, message="no_fresh_context"),
        Cell("kill -9", "cloud", "started again after the stop", **killed("cloud"), **stop, message="no_fresh_context"),
        *content("garbage bytes", "garbage", "context_(truncated|malformed|checksum_mismatch|oversized)", "contexts"),
        *content("NaN", "nan", "context_(malformed|not_finite)", "a token"),
        Cell("NaN", "cloud", "infinity, all", **tell("inf"), **stop, message="context_(malformed|not_finite)"),
        *content("wrong joint order", "model", "context_model_hash", "a model of other joints"),
        *content("wrong width", "width", "context_shape", "tokens 9 wide for 8"),
        *content("future stamp", "future", "context_future_stamp", "1 h ahead"),
        Cell("future stamp", "cloud", "5 s past", **tell("past"), **stop, message="context_stale"),
        *clock_cells("cloud", ("cloud",)),
        *not_applicable("cloud", {"disk full": "the cloud writes no file while it serves a robot"}),
    ]


def link_faults(down: str, up: str = "{}") -> dict[str, Step]:
    text = f"title: fault\nlink: {{up: {up}, down: {down}}}\n"
    return {"begin": lambda rig: rig.set_link(text), "end": lambda rig: rig.set_link(CLEAN)}


def link_cells() -> list[Cell]:
    stop: dict[str, Any] = {"stops": True, "within_s": NO_CONTEXT_S}
    unread = "the link does not read payloads; what it can do to them is garbage bytes"
    return [
        Cell("drop", "link", "all", **link_faults("{loss: 1.0}", "{loss: 1.0}"), **stop, message="no_fresh_context"),
        Cell("drop", "link", "20 % each way", **link_faults("{loss: 0.2}", "{loss: 0.2}"), lasts_s=1.5),
        Cell("duplicate", "link", "all, 50±50 ms", lasts_s=1.5, message="context_out_of_order",
             **link_faults("{delay_s: 0.05, jitter_s: 0.05, duplicate: 1.0}",
                           "{delay_s: 0.05, jitter_s: 0.05, duplicate: 1.0}")),
        Cell("reorder", "link", "half held for 150 ms", lasts_s=1.5, message="context_out_of_order",
             **link_faults("{reorder: 0.5, reorder_hold_s: 0.15}")),
        Cell("delay", "link", "100±50 ms each way", lasts_s=1.5,
             **link_faults("{delay_s: 0.1, jitter_s: 0.05}", "{delay_s: 0.1, jitter_s: 0.05}")),
        Cell("delay", "link", "500 ms each way", **link_faults("{delay_s: 0.5}", "{delay_s: 0.5}"), **stop,
             message="context_stale"),
        Cell("freeze", "link", **frozen("link"), **stop, message="no_fresh_context"),
        Cell("kill -9", "link", "started again after the stop", **killed("link"), **stop, message="no_fresh_context"),
        Cell("garbage bytes", "link", "8 bits flipped in all", **stop,
             **link_faults("{corrupt: 1.0}", "{corrupt: 1.0}"),
             message="no_fresh_context|context_(checksum_mismatch|truncated|malformed)"),
        Cell("garbage bytes", "link", "8 bits flipped in 30 %", **link_faults("{corrupt: 0.3}"), lasts_s=1.5,
             message="context_(checksum_mismatch|truncated|malformed)"),
        *clock_cells("link", ("link",)),
        *not_applicable("link", {**dict.fromkeys(("NaN", "wrong joint order", "wrong width", "future stamp"), unread),
                                 "disk full": "the link writes no file while it runs"}),
    ]


def rogue(kind: str, share: float = 1.0, delay_s: float = 0.0) -> dict[str, Step]:
    """The real policy frozen, a rogue writer in its place."""
    def begin(rig: MatrixRig) -> None:
        rig.tell("rogue", fault={"kind": kind, "share": share, "delay_s": delay_s})
        rig.signal("policy", signal.SIGSTOP)

    def end(rig: MatrixRig) -> None:
        rig.signal("policy", signal.SIGCONT)
        began_ns = CLOCK.monotonic_ns()
        # It lost its links if it was stopped for long: it can take over when fresh contexts reach it again. For an arm
        # that holds it makes no plan.
        rig.wait(lambda: rig.state() == HOLDING or any(
            at_ns > began_ns and 0.0 <= status.context_age_s < 0.3 for at_ns, status in rig.seen.policies[-5:]), 30.0,
            "the policy plans again")
        rig.tell("rogue", fault=None)

    return {"begin": begin, "end": end}


def policy_cells() -> list[Cell]:
    stop: dict[str, Any] = {"stops": True, "within_s": NO_CHUNK_S}

    def chunk(fault: str, kind: str, message: str, variant: str) -> list[Cell]:
        return [Cell(fault, "policy", f"{variant}, all chunks", **rogue(kind), **stop, message=message),
                Cell(fault, "policy", f"{variant}, every other chunk", **rogue(kind, 0.5), message=message)]

    return [
        Cell("drop", "policy", "rogue writer, no fault (control)", **rogue("none")),
        Cell("drop", "policy", "no chunk", **rogue("drop"), **stop, message="status: "),
        Cell("drop", "policy", "every other chunk", **rogue("drop", 0.5)),
        Cell("duplicate", "policy", "each chunk again 20 ms later", **rogue("duplicate", delay_s=0.02),
             message="chunk_older_than_newest"),
        Cell("duplicate", "policy", "one chunk for ever", **rogue("stuck"), **stop, message="chunk_older_than_newest"),
        Cell("reorder", "policy", "every other chunk 70 ms later", **rogue("reorder", 0.5, 0.07),
             message="chunk_older_than_newest"),
        Cell("delay", "policy", "50 ms", **rogue("delay", delay_s=0.05)),
        Cell("delay", "policy", "all 300 ms", **rogue("delay", delay_s=0.3), **stop, message="status: "),
        Cell("delay", "policy", "every other 300 ms", **rogue("delay", 0.5, 0.3), message="chunk_older_than_newest"),
        Cell("freeze", "policy", **frozen("policy"), **stop, message="status: .*(policy|plan)"),
        Cell("kill -9", "policy", "the edge starts it again", **killed("policy"), **stop,
             message="log: .*policy process ended"),
        Cell("garbage bytes", "policy", "a slot without a valid checksum, all", **rogue("garbage_slot"), **stop,
             message="status: "),
        Cell("garbage bytes", "policy", "a slot without a valid checksum, every other", **rogue("garbage_slot", 0.5)),
        Cell("garbage bytes", "policy", "the whole ring, all", **rogue("garbage_ring"), **stop, message="status: "),
        *chunk("garbage bytes", "garbage_record", "chunk_(horizon|joint_names|width|period)",
               "nonsense with a valid checksum"),
        *chunk("NaN", "nan", "chunk_not_finite", "a position"),
        Cell("NaN", "policy", "infinity, all chunks", **rogue("inf"), **stop, message="chunk_not_finite"),
        *chunk("wrong joint order", "order", "chunk_joint_names", "two names exchanged"),
        *chunk("wrong width", "width", "chunk_width", "7 joints for 8"),
        Cell("wrong width", "policy", "9 joints for 8, all chunks", **rogue("wider"), **stop, message="chunk_width"),
        Cell("wrong width", "policy", "500 steps, all chunks", **rogue("longer"), **stop, message="chunk_horizon"),
        *chunk("future stamp", "future", "chunk_future_stamp", "observation 1 h ahead"),
        Cell("future stamp", "policy", "base tick 0.5 s ahead, all chunks", **rogue("future_tick"), **stop,
             message="chunk_future_tick"),
        Cell("future stamp", "policy", "observation 5 s past, all chunks", **rogue("past"), **stop,
             message="chunk_stale_observation"),
        *clock_cells("policy", ("policy",)),
        *not_applicable("policy", {"disk full": "the policy writes no file"}),
    ]


def recorder_cells(full_disk: Callable[[MatrixRig], None] = fill_disk) -> list[Cell]:
    """``full_disk``: how the disk is made full; the recorder ends then, so that cell is the last."""
    silent = "the recorder sends nothing and interprets nothing: see the row of the sender"

    def flood(rig: MatrixRig) -> None:
        note_fault(rig)
        rig.signal("recorder", signal.SIGSTOP)
        rig.tell("robot", image_bytes=400_000)

    def ebb(rig: MatrixRig) -> None:
        rig.tell("robot", image_bytes=64)
        rig.signal("recorder", signal.SIGCONT)

    return [
        *clock_cells("recorder", ("recorder",)),
        Cell("garbage bytes", "recorder", "half of the joint states it records", **told("robot", "garbage", 0.5),
             message="joint_states_(truncated|malformed)"),
        Cell("kill -9", "recorder", "the edge starts it again", begin=lambda rig: (note_fault(rig), rig.signal(
            "recorder", signal.SIGKILL)), until=recorder_restarted, check=check_readable,
             message="log: .*recorder process ended"),
        Cell("freeze", "recorder", "while 4 MB/s of images wait for it", begin=flood, end=ebb, lasts_s=3.0,
             message="log: .*recorder process does not answer"),
        Cell("disk full", "recorder", "file size limited (RLIMIT_FSIZE)", begin=full_disk, until=recorder_ended,
             check=check_readable, lasting=True, message="recording to .* stopped: .*the robot goes on"),
        *not_applicable("recorder", dict.fromkeys(("drop", "duplicate", "reorder", "delay", "NaN", "wrong joint order",
                                                   "wrong width", "future stamp"), silent)),
    ]


def tmpfs_cell() -> Cell:
    """The recording lies on a file system of 1 MiB, which images of 1 MB/s fill."""
    def begin(rig: MatrixRig) -> None:
        if recorder_ended(rig):  # in an attempt before this one
            return
        note_fault(rig)
        rig.tell("robot", image_bytes=100_000)

    return Cell("disk full", "recorder", "tmpfs of 1 MiB", begin=begin, until=recorder_ended, check=check_readable, lasting=True,
                message="recording to .* stopped: No space left.*the robot goes on")


def robot_cells() -> list[Cell]:
    stop: dict[str, Any] = {"stops": True, "within_s": NO_JOINTS_S}
    tell = partial(told, "robot")

    def content(fault: str, kind: str, message: str, variant: str) -> list[Cell]:
        return [Cell(fault, "robot", f"{variant}, all", **tell(kind), **stop, message=message),
                Cell(fault, "robot", f"{variant}, every other", **tell(kind, 0.5), message=message)]

    def camera(fault: str, kind: str, message: str, variant: str) -> Cell:
        return Cell(fault, "robot", f"{variant}, all", stops=True, within_s=NO_CONTEXT_S, message=message,
                    begin=lambda rig: rig.tell("robot", image_fault={"kind": kind}),
                    end=lambda rig: rig.tell("robot", image_fault={"kind": "none"}))

    def moved_by_hand(rig: MatrixRig) -> None:
        rig.start("robot", "--position", json.dumps((rig.position + 0.2 * (np.arange(8) < 2)).tolist()),
                  "--largest-step", "0.1")

    return [
        Cell("drop", "robot", "no joint state", **tell("drop"), **stop, message="no_fresh_joint_state"),
        Cell("drop", "robot", "every other joint state", **tell("drop", 0.5)),
        Cell("duplicate", "robot", "each again 15 ms later", **tell("duplicate", delay_s=0.015),
             message="joint_states_out_of_order"),
        Cell("reorder", "robot", "every other 25 ms later", **tell("reorder", 0.5, 0.025),
             message="joint_states_out_of_order"),
        Cell("delay", "robot", "50 ms", **tell("delay", delay_s=0.05)),
        Cell("delay", "robot", "300 ms", **tell("delay", delay_s=0.3), **stop, message="joint_states_stale"),
        *content("garbage bytes", "garbage", "joint_states_(truncated|malformed|oversized)", "joint states"),
        *content("NaN", "nan", "joint_states_position", "a position"),
        *content("wrong joint order", "order", "joint_states_names", "two joints exchanged"),
        *content("wrong width", "width", "joint_states_position", "7 positions for 8 names"),
        *content("future stamp", "future", "joint_states_future_stamp", "1 h ahead"),
        camera("drop", "drop", "no_fresh_context", "camera images"),
        camera("garbage bytes", "garbage", "image_(truncated|malformed|oversized)", "camera images"),
        camera("future stamp", "future", "image_future_stamp", "camera images 1 h ahead"),
        Cell("freeze", "robot", "with the bus that it hosts", **frozen("robot"), **stop, message="joint_state"),
        Cell("kill -9", "robot", "with the bus; back where it was", **killed("robot"), **stop, message="joint_state"),
        Cell("kill -9", "robot", "back after somebody moved it by 0.2 rad", begin=killed("robot")["begin"],
             end=moved_by_hand, **stop, message="joint_state"),
        *clock_cells("robot", ROBOT_COMPUTER),
        *not_applicable("robot", {"disk full": "the robot's driver writes no file"}),
    ]


BY_TARGET: dict[str, Callable[[], list[Cell]]] = {
    "cloud": cloud_cells, "link": link_cells, "policy": policy_cells, "recorder": recorder_cells, "robot": robot_cells}


def missing() -> list[tuple[str, str]]:
    """Cells that neither exist nor say why not."""
    known = {(cell.fault, cell.target) for make in BY_TARGET.values() for cell in make()}
    return [(fault, target) for target in TARGETS for fault in FAULTS if (fault, target) not in known]
