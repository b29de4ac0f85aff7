"""The operator of a list of episodes, as a pure state machine.

    homing ──arm at the ready pose, open, slow──▶ running ──judged──▶ success | failure ──a moment──▶ homing ...
       └──too long──▶ done (aborted, by name)                                    └──last one──▶ done

:meth:`TaskRunner.step` is called at the control rate with what an operator would see and answers with what an
operator would do. It never moves the arm: only the instruction and an explicit re-arm reach the robot, so the stream
of commands stays continuous over a whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vla_sim.episodes import NOT_STARTED, SUCCESS, TIMEOUT, WRONG_OBJECT, Episode, EpisodeResult, RunResults

NS_PER_S: Final = 1_000_000_000
HOME_INSTRUCTION: Final = "go home"
RUNNING: Final = "running"

Phase = Literal["homing", "running", "success", "failure", "done"]


@dataclass(frozen=True)
class RunnerConfig:
    """How the operator behaves; times in seconds."""

    timeout_s: float = 8.0
    timeout_extended_by_outages: bool = False
    homing_timeout_s: float = 60.0
    start_timeout_s: float = 120.0  # homing for the first episode, which includes the start of all processes
    home_settle_s: float = 0.2  # the arm must stay at the ready pose for this long
    verdict_s: float = 0.3  # the verdict stays visible for this long
    rearm_period_s: float = 0.5
    instruction_period_s: float = 0.5


@dataclass(frozen=True)
class ShieldView:
    """What the operator sees of the shield."""

    is_holding: bool
    rearm_ready: bool


@dataclass(frozen=True)
class RunnerInput:
    """What the operator sees at one instant.

    Attributes:
        now_ns: robot's monotonic clock.
        is_home: the arm is at the ready pose with the gripper open.
        is_slow: no joint moves faster than a crawl.
        shield: newest status, None while none has been heard lately.
        outcome: the judge's verdict on the running episode, ``running`` until there is one.
    """

    now_ns: int
    is_home: bool
    is_slow: bool
    shield: ShieldView | None
    outcome: str = RUNNING


@dataclass(frozen=True)
class RunnerOutput:
    """What the operator does now; the default is to watch."""

    instruction: str | None = None
    rearm: bool = False
    place: Episode | None = None
    finished: EpisodeResult | None = None


class TaskRunner:
    """Plays the operator. Not thread-safe; owns no clock."""

    def __init__(self, episodes: Sequence[Episode], results: RunResults, config: RunnerConfig) -> None:
        """Start with homing for the first episode; results are appended to ``results``."""
        if not episodes:
            raise ValueError("a run needs at least one episode")
        self.episodes = list(episodes)
        self.results = results
        self.config = config
        self.phase: Phase = "homing"
        self.instruction = HOME_INSTRUCTION
        self.wrong_object = 0
        self._position = 0
        self._phase_start_ns: int | None = None
        self._home_since_ns: int | None = None
        self._last_ns: int | None = None
        self._last_rearm_ns: int | None = None
        self._last_instruction_ns: int | None = None
        self._outage_ns = 0
        self._episode_rearms = 0

    @property
    def episode(self) -> Episode:
        """The current episode; the last one when done."""
        return self.episodes[min(self._position, len(self.episodes) - 1)]

    @property
    def is_done(self) -> bool:
        """True when nothing is left to do."""
        return self.phase == "done"

    @property
    def successes(self) -> int:
        """Episodes won so far."""
        return sum(result.outcome == SUCCESS for result in self.results.episodes)

    @property
    def failures(self) -> int:
        """Episodes lost so far, whatever the reason."""
        return len(self.results.episodes) - self.successes

    def elapsed_s(self, now_ns: int) -> float:
        """Time in the current phase."""
        return 0.0 if self._phase_start_ns is None else (now_ns - self._phase_start_ns) / NS_PER_S

    def step(self, seen: RunnerInput) -> RunnerOutput:
        """Advance to ``seen.now_ns``."""
        if self._phase_start_ns is None:
            self._phase_start_ns = seen.now_ns
        place = finished = None
        if self.phase == "homing":
            place, finished = self._step_homing(seen)
        elif self.phase == "running":
            finished = self._step_running(seen)
        elif self.phase != "done" and self.elapsed_s(seen.now_ns) >= self.config.verdict_s:
            self._next_episode(seen.now_ns)
        rearm = self._wants_rearm(seen)
        self._last_ns = seen.now_ns
        return RunnerOutput(self._instruction_due(seen.now_ns), rearm, place, finished)

    # ------------------------------------------------------------------ phases

    def _step_homing(self, seen: RunnerInput) -> tuple[Episode | None, EpisodeResult | None]:
        ready = seen.is_home and seen.is_slow and seen.shield is not None and not seen.shield.is_holding
        if not ready:
            self._home_since_ns = None
        elif self._home_since_ns is None:
            self._home_since_ns = seen.now_ns
        if self._home_since_ns is not None and _s(seen.now_ns - self._home_since_ns) >= self.config.home_settle_s:
            self._enter("running", seen.now_ns)
            self.instruction = self.episode.instruction
            self._outage_ns = 0
            self._episode_rearms = 0
            return self.episode, None
        limit_s = self.config.homing_timeout_s if self._position else self.config.start_timeout_s
        if self.elapsed_s(seen.now_ns) >= limit_s:
            self.results.aborted = (f"episode {self.episode.index}: the arm did not reach its ready pose within "
                                    f"{limit_s:g} s ({_why(seen)})")
            result = self._record(NOT_STARTED, seen.now_ns)
            self._enter("done", seen.now_ns)
            return None, result
        return None, None

    def _step_running(self, seen: RunnerInput) -> EpisodeResult | None:
        if seen.shield is None or seen.shield.is_holding:
            self._outage_ns += seen.now_ns - (seen.now_ns if self._last_ns is None else self._last_ns)
        outcome = seen.outcome
        if outcome == RUNNING and self._clock_s(seen.now_ns) >= self.config.timeout_s:
            outcome = TIMEOUT
        if outcome == RUNNING:
            return None
        result = self._record(outcome, seen.now_ns)
        self.wrong_object += outcome == WRONG_OBJECT
        self._enter("success" if outcome == SUCCESS else "failure", seen.now_ns)
        self.instruction = HOME_INSTRUCTION
        return result

    def _next_episode(self, now_ns: int) -> None:
        self._position += 1
        self._home_since_ns = None
        self._enter("homing" if self._position < len(self.episodes) else "done", now_ns)

    # ------------------------------------------------------------------ helpers

    def _clock_s(self, now_ns: int) -> float:
        """Time that counts towards the time-out."""
        excused_s = _s(self._outage_ns) if self.config.timeout_extended_by_outages else 0.0
        return self.elapsed_s(now_ns) - excused_s

    def _enter(self, phase: Phase, now_ns: int) -> None:
        self.phase = phase
        self._phase_start_ns = now_ns
        self._last_instruction_ns = None  # say the new instruction at once

    def _record(self, outcome: str, now_ns: int) -> EpisodeResult:
        episode = self.episode
        start_ns = now_ns if self._phase_start_ns is None else self._phase_start_ns
        result = EpisodeResult(episode.index, episode.seed, episode.spec.task, episode.target, episode.spec.moving,
                               episode.instruction, outcome, start_ns, now_ns, _s(now_ns - start_ns),
                               self._episode_rearms, _s(self._outage_ns))
        self.results.episodes.append(result)
        return result

    def _wants_rearm(self, seen: RunnerInput) -> bool:
        shield = seen.shield
        if self.phase == "done" or shield is None or not (shield.is_holding and shield.rearm_ready):
            return False
        last_ns = self._last_rearm_ns
        if last_ns is not None and _s(seen.now_ns - last_ns) < self.config.rearm_period_s:
            return False
        self._last_rearm_ns = seen.now_ns
        self._episode_rearms += 1
        self.results.rearms += 1
        return True

    def _instruction_due(self, now_ns: int) -> str | None:
        last_ns = self._last_instruction_ns
        if last_ns is not None and _s(now_ns - last_ns) < self.config.instruction_period_s:
            return None
        self._last_instruction_ns = now_ns
        return self.instruction


def _s(duration_ns: int) -> float:
    return duration_ns / NS_PER_S


def _why(seen: RunnerInput) -> str:
    """What kept the arm from being ready, for the message."""
    if seen.shield is None:
        return "no shield status heard: is the edge running?"
    if seen.shield.is_holding:
        ready = "ready for a re-arm" if seen.shield.rearm_ready else "no fresh chunks, so no re-arm: is the cloud up?"
        return f"the shield is holding, {ready}"
    return "the arm is elsewhere" if not seen.is_home else "the arm is still moving"
