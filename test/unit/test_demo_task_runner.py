"""The operator's state machine and the arithmetic of its results."""

from __future__ import annotations

import math

import pytest

from vla_common.clock import ManualClock
from vla_sim.episodes import (
    NOT_STARTED,
    SUCCESS,
    TIMEOUT,
    WRONG_OBJECT,
    EpisodeResult,
    RunResults,
    plan_episodes,
    task_table,
    wilson_interval,
)
from vla_sim.task_runner import HOME_INSTRUCTION, RunnerConfig, RunnerInput, RunnerOutput, ShieldView, TaskRunner
from vla_sim.tasks import parse_instruction

TICK_NS = 10_000_000
NOMINAL = ShieldView(is_holding=False, rearm_ready=False)
HOLDING = ShieldView(is_holding=True, rearm_ready=False)
READY = ShieldView(is_holding=True, rearm_ready=True)


class Operator:
    """A runner with a clock; keeps what it did."""

    def __init__(self, episodes: int = 2, **config: float | bool) -> None:
        self.clock = ManualClock(5_000_000_000)
        self.results = RunResults(0, "normal", 8.0, False, episodes)
        self.runner = TaskRunner(plan_episodes(episodes, 3), self.results, RunnerConfig(**config))  # type: ignore[arg-type]
        self.outputs: list[RunnerOutput] = []

    def run(self, duration_s: float, *, home: bool = True, slow: bool = True, shield: ShieldView | None = NOMINAL,
            outcome: str = "running") -> list[RunnerOutput]:
        """Tick for a while with constant input; returns the outputs."""
        outputs = []
        for _ in range(round(duration_s * 100)):
            self.clock.advance_ns(TICK_NS)
            outputs.append(self.runner.step(RunnerInput(self.clock.monotonic_ns(), home, slow, shield, outcome)))
        self.outputs += outputs
        return outputs

    def start(self) -> None:
        """Get an episode going."""
        self.run(0.3)
        assert self.runner.phase == "running"


def test_runs_all_episodes_and_ends() -> None:
    operator = Operator(2)
    operator.start()
    assert operator.outputs[0].instruction == HOME_INSTRUCTION
    operator.run(1.0, home=False)
    operator.run(0.01, outcome=SUCCESS)
    assert operator.runner.phase == "success" and operator.runner.instruction == HOME_INSTRUCTION
    operator.run(0.4, home=False)
    assert operator.runner.phase == "homing"
    operator.run(0.3)
    operator.run(0.01, outcome=WRONG_OBJECT)
    assert operator.runner.phase == "failure" and operator.runner.wrong_object == 1
    operator.run(0.4)
    assert operator.runner.is_done
    placed = [output.place for output in operator.outputs if output.place]
    assert [episode.index for episode in placed] == [0, 1]
    assert [result.outcome for result in operator.results.episodes] == [SUCCESS, WRONG_OBJECT]
    assert operator.results.episodes[0].elapsed_s == pytest.approx(1.09, abs=0.05)
    assert (operator.runner.successes, operator.runner.failures) == (1, 1)


def test_scene_is_placed_only_when_home_slow_and_not_holding() -> None:
    operator = Operator()
    for unready in ({"home": False}, {"slow": False}, {"shield": HOLDING}, {"shield": None}):
        operator.run(1.0, **unready)  # type: ignore[arg-type]
        assert operator.runner.phase == "homing"
    operator.run(0.1)
    operator.run(0.1, slow=False)  # must be home for a moment, not by chance
    operator.run(0.1)
    assert operator.runner.phase == "homing"
    operator.run(0.2)
    assert operator.runner.phase == "running"


def test_instruction_is_given_at_once_on_change_and_repeated_at_2_hz() -> None:
    operator = Operator()
    given = [output.instruction for output in operator.run(0.2) if output.instruction]
    assert given == [HOME_INSTRUCTION]
    operator.run(0.1)
    text = operator.runner.episode.instruction
    assert operator.runner.phase == "running"
    assert [o.instruction for o in operator.outputs[20:] if o.instruction] == [text]
    assert [o.instruction for o in operator.run(2.0) if o.instruction] == [text] * 4


def test_timeout_counts_outages_unless_told_otherwise() -> None:
    operator = Operator(timeout_s=3.0)
    operator.start()
    operator.run(2.0, shield=HOLDING)
    assert operator.runner.phase == "running"
    operator.run(1.1)
    assert operator.results.episodes[0].outcome == TIMEOUT
    assert operator.results.episodes[0].outage_s == pytest.approx(2.0, abs=0.02)

    patient = Operator(timeout_s=3.0, timeout_extended_by_outages=True)
    patient.start()
    patient.run(2.0, shield=None)
    patient.run(2.5)
    assert patient.runner.phase == "running"
    patient.run(0.6)
    assert patient.results.episodes[0].outcome == TIMEOUT


def test_rearms_only_when_holding_and_ready_at_most_twice_a_second() -> None:
    operator = Operator()
    assert not any(output.rearm for output in operator.run(1.0, shield=HOLDING))
    rearms = [i for i, output in enumerate(operator.run(1.6, shield=READY)) if output.rearm]
    assert rearms == [0, 50, 100, 150]
    assert operator.results.rearms == 4
    operator.start()
    assert not any(output.rearm for output in operator.run(1.0, shield=NOMINAL))
    assert any(output.rearm for output in operator.run(0.1, shield=READY))
    operator.run(0.01, outcome=SUCCESS)
    assert operator.results.episodes[0].rearms == 1
    operator.run(0.4)
    assert operator.results.rearms == 5


def test_homing_that_never_ends_aborts_the_run_by_name() -> None:
    operator = Operator(3, homing_timeout_s=5.0, start_timeout_s=10.0)
    operator.run(9.5, home=False, shield=None)
    operator.start()
    operator.run(0.1, outcome=SUCCESS)
    operator.run(0.4)
    operator.run(5.1, home=False, shield=HOLDING)
    assert operator.runner.is_done
    assert "is the cloud up?" in operator.results.aborted
    assert [result.outcome for result in operator.results.episodes] == [SUCCESS, NOT_STARTED]
    assert not any(output.rearm or output.place for output in operator.run(1.0, shield=READY))


def test_needs_an_episode() -> None:
    with pytest.raises(ValueError, match="at least one"):
        TaskRunner([], RunResults(0, "normal", 8.0, False, 0), RunnerConfig())


def test_plan_is_seeded_balanced_and_prefix_stable() -> None:
    plan = plan_episodes(40, 7, motion="both")
    assert plan == plan_episodes(40, 7, motion="both")
    assert plan[:10] == plan_episodes(10, 7, motion="both")
    assert len({episode.seed for episode in plan}) == 40
    kinds = [(episode.spec.task, episode.spec.moving) for episode in plan]
    assert all(kinds.count(kind) == 10 for kind in set(kinds)) and len(set(kinds)) == 4
    assert not {e.seed for e in plan} & {e.seed for e in plan_episodes(40, 8, motion="both")}
    for episode in plan:
        assert parse_instruction(episode.instruction).target == episode.spec.target
        assert parse_instruction(episode.instruction).task == episode.spec.task


def test_shuffled_control_names_another_object_with_the_same_task() -> None:
    plan = plan_episodes(60, 1, mode="shuffled")
    named = [parse_instruction(episode.instruction) for episode in plan]
    assert all(n.target != e.spec.target and n.task == e.spec.task for n, e in zip(named, plan, strict=True))
    normal = plan_episodes(60, 1)
    assert [e.spec for e in plan] == [e.spec for e in normal] and [e.seed for e in plan] == [e.seed for e in normal]


@pytest.mark.parametrize("arguments", [(0, 0), (1, -1), (1, 10**6), (1, 0, ("push",)), (1, 0, ())])
def test_plan_refuses_nonsense(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        plan_episodes(*arguments)  # type: ignore[arg-type]


def test_wilson_interval_matches_known_values() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(90, 100)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert wilson_interval(0, 10)[0] == pytest.approx(0.0)


def test_table_and_json_round_trip() -> None:
    outcomes = [("touch", SUCCESS), ("touch", WRONG_OBJECT), ("pick", TIMEOUT), ("pick", NOT_STARTED)]
    results = RunResults(0, "normal", 8.0, False, 4, rearms=2)
    results.episodes = [EpisodeResult(i, i, task, "red cube", False, "x", outcome, 0, 10**9, 1.0, 0, 0.0)
                        for i, (task, outcome) in enumerate(outcomes)]
    touch, pick, everything = task_table(results.episodes)
    assert (touch.successes, touch.wrong_object, touch.success_rate, touch.median_success_s) == (1, 1, 0.5, 1.0)
    assert (pick.timeouts, pick.not_started) == (1, 1) and math.isnan(pick.median_success_s)
    assert (everything.task, everything.episodes, everything.successes) == ("all", 4, 1)
    data = results.to_json()
    assert data["table"][1]["median_success_s"] is None
    assert RunResults.from_json(data) == results
