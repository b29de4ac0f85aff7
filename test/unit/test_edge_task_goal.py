"""When a goal is over, and as what."""

import numpy as np
import pytest

from vla_edge.core.shield_words import State
from vla_edge.core.task_goal import NS, GoalView, TaskGoal

READY, STILL, AWAY = np.zeros(3), np.zeros(3), np.array([0.4, 0.0, -0.1])
HOME = ("go home", "ready")


def goal(text="Touch the  red cube"):
    return TaskGoal(text, HOME, READY)


def view(state=State.NOMINAL, now_s=0.0, position=AWAY, velocity=STILL, heard="touch the red cube", reason="why",
         judged=("", ""), stops=0):
    return GoalView(round(now_s * NS), state, reason, position, velocity, heard, judged, stops)


def test_it_goes_on_until_something_ends_it():
    one = goal()
    for k in range(1000):
        assert one.look(view(state=State(k % 2), now_s=k)) is None
    assert one.progress == -1.0


def test_holding_ends_it_only_after_it_acted():
    one = goal()
    for k in range(100):
        assert one.look(view(State.HOLDING, k)) is None
    assert one.look(view(State.COASTING)) is None and one.look(view(State.NOMINAL)) is None
    assert one.look(view(State.BRAKING)) is None
    end = one.look(view(State.HOLDING, reason="chunks ran out: no context"))
    assert (end.success, end.message) == (False, "the robot stopped: chunks ran out: no context")


def test_a_stop_between_two_looks_ends_it():
    one = goal()
    assert one.look(view(State.HOLDING, stops=3)) is None and one.look(view(State.HOLDING, stops=3)) is None
    end = one.look(view(State.HOLDING, stops=4, reason="emergency stop"))
    assert (end.success, end.message) == (False, "the robot stopped: emergency stop")


@pytest.mark.parametrize("heard, words", [("touch the blue cube", "another instruction was given on the topic: 'touch"),
                                          ("", "taken back on the topic")])
def test_another_instruction_ends_it_after_a_second(heard, words):
    one = goal()
    assert one.look(view(now_s=0, heard=heard)) is None and one.look(view(now_s=0.9, heard=heard)) is None
    assert one.look(view(now_s=1.1)) is None  # it was only on its way
    assert one.look(view(now_s=2.0, heard=heard)) is None and one.look(view(now_s=3.0, heard=heard)) is None
    end = one.look(view(now_s=3.01, heard=heard))
    assert not end.success and words in end.message


@pytest.mark.parametrize("phase, success", [("success", True), ("failure", False)])
def test_a_judge_ends_it(phase, success):
    one = goal()
    assert one.look(view(judged=("touch the red cube", "running"))) is None
    assert one.look(view(judged=("touch the blue cube", phase))) is None
    end = one.look(view(judged=("touch the RED cube", phase)))
    assert (end.success, end.message) == (success, f"judged a {phase}")


def test_home_is_reached_at_rest_and_with_progress():
    one = goal("Go home")
    look = lambda **changes: one.look(view(heard="go home", **changes))  # noqa: E731
    assert look(state=State.HOLDING, position=READY) is None  # not before it acted: nobody re-armed yet
    assert look() is None and one.progress == 0.0
    assert look(position=AWAY / 4, velocity=-AWAY) is None and one.progress == pytest.approx(0.75)
    assert look(position=READY, velocity=np.array([0, 1e-6, 0])) is None
    assert look(position=READY, state=State.BRAKING) is None
    end = look(position=READY + 0.9e-3)
    assert (end.success, end.message, one.progress) == (True, "the ready pose is reached", 1.0)


def test_home_from_home():
    one = goal("ready")
    assert one.look(view(heard="ready", position=READY)).success and one.progress == 1.0
    one = goal("ready")
    assert one.look(view(heard="ready", position=None, velocity=None)) is None


def test_only_home_ends_at_the_ready_pose():
    one = goal()
    assert one.look(view(position=READY)) is None
