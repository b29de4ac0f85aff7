"""How one goal goes: an instruction until its end is seen, or until the robot stopped for another reason.

The edge cannot see whether a task is done. An end is seen when the robot stands in its ready pose after "go home", or
when a judge (a simulator, a cell controller) says so. Everything else goes on until it is cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from vla_common.wire import normalise_instruction
from vla_edge.core.local_motion import is_home_phrase
from vla_edge.core.shield_words import State

NS: Final = 1_000_000_000
AT_READY: Final = 1e-3
"""rad (closure): the command is this near to the ready pose."""
OTHER_INSTRUCTION_NS: Final = NS
"""Another instruction may still be under way when the goal begins; heard for longer, it counts."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GoalView:
    """What a goal is judged by.

    Attributes:
        now_ns: robot's CLOCK_MONOTONIC. state, reason: of the shield, the reason in words.
        position, velocity: the last command, float64[n]; None before the first.
        heard: the instruction as it is on the bus.
        judged: instruction and phase of the newest word of a judge, or empty.
        stops: how often the shield has stopped the robot so far.
    """

    now_ns: int
    state: State
    reason: str
    position: Array | None
    velocity: Array | None
    heard: str
    judged: tuple[str, str] = ("", "")
    stops: int = 0


@dataclass(frozen=True)
class Outcome:
    """End of a goal."""

    success: bool
    message: str


class TaskGoal:
    """One goal.

    Attributes:
        instruction: as it was given. progress: 0 .. 1, or -1 where it is not known.
    """

    def __init__(self, instruction: str, home_phrases: tuple[str, ...], ready: Array) -> None:
        """``home_phrases``: instructions that the robot serves itself. ``ready``: its ready pose, float64[n]."""
        self.instruction = instruction
        self.progress = -1.0
        self._text = normalise_instruction(instruction)
        self._is_home = is_home_phrase(self._text, home_phrases)
        self._ready = ready
        self._way: float | None = None
        self._acted = False
        self._stops: int | None = None
        self._other_since_ns: int | None = None

    def look(self, view: GoalView) -> Outcome | None:
        """The end of the goal if it is there, else None. An end without success is to be made a damped stop."""
        other = normalise_instruction(view.heard)
        if other == self._text:
            self._other_since_ns = None
        elif self._other_since_ns is None:
            self._other_since_ns = view.now_ns
        elif view.now_ns - self._other_since_ns > OTHER_INSTRUCTION_NS:
            return Outcome(False, f"another instruction was given on the topic: {view.heard!r}" if other else
                           "the instruction was taken back on the topic")
        # A short act may begin and end between two looks.
        self._stops = view.stops if self._stops is None else self._stops
        if view.state in (State.NOMINAL, State.COASTING) or view.stops != self._stops:
            self._acted = True
        if self._acted and view.state is State.HOLDING:
            return Outcome(False, f"the robot stopped: {view.reason}")
        if normalise_instruction(view.judged[0]) == self._text and view.judged[1] in ("success", "failure"):
            return Outcome(view.judged[1] == "success", f"judged a {view.judged[1]}")
        return self._look_home(view) if self._is_home and self._acted else None

    def _look_home(self, view: GoalView) -> Outcome | None:
        if view.position is None or view.velocity is None:
            return None
        way = float(np.abs(view.position - self._ready).max())
        self._way = max(self._way or 0.0, way)
        self.progress = 1.0 - way / self._way if self._way > AT_READY else 1.0
        if way <= AT_READY and not np.any(view.velocity) and view.state is State.NOMINAL:
            self.progress = 1.0
            return Outcome(True, "the ready pose is reached")
        return None
