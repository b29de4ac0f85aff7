"""A robot file is taken as it is meant or refused with joint, field and remedy; nothing in between."""

import copy
import re

import numpy as np
import pytest

from vla_edge.core.joint_limits import MAX_RAMP_TICKS, JointLimits, LimitsError

ROBOT = {
    "robot": "two joints",
    "scale": {"velocity": 0.5, "acceleration": 0.25, "jerk": 0.125},
    "joints": [
        {"name": "shoulder", "lower": -1.0, "upper": 2.0, "velocity": 4.0, "acceleration": 8.0, "jerk": 160.0,
         "ready": 0.25, "reentry_gap": 0.0625},
        {"name": "gripper", "lower": 0, "upper": 1, "velocity": 3, "acceleration": 5, "jerk": 70, "ready": 0.75,
         "reentry_gap": 0.5, "scaled": False},
    ],
}


def robot(**changes):
    """A copy of ROBOT; ``shoulder`` and ``scale`` are updated, other keys replaced."""
    made = copy.deepcopy(ROBOT)
    made["joints"][0].update(changes.pop("shoulder", {}))
    made["scale"].update(changes.pop("scale", {}))
    return {**made, **changes}


def refused(data):
    with pytest.raises(LimitsError) as error:
        JointLimits.from_mapping(data)
    return str(error.value)


def test_a_robot_file_is_read_joint_by_joint():
    limits = JointLimits.from_mapping(ROBOT)
    assert limits.names == ("shoulder", "gripper") and len(limits) == 2
    expected = {"position_lower": [-1, 0], "position_upper": [2, 1], "velocity": [2, 3], "acceleration": [2, 5],
                "jerk": [20, 70], "ready": [0.25, 0.75], "reentry_gap": [0.0625, 0.5]}
    for field, values in expected.items():
        array = getattr(limits, field)
        assert array.tolist() == values, field
        assert array.dtype == np.float64 and not array.flags.writeable


def test_whole_numbers_become_floats():
    whole = {"lower": -1, "upper": 1, "velocity": 1, "acceleration": 1, "jerk": 1, "ready": 0, "reentry_gap": 1}
    limits = JointLimits.from_mapping({"scale": {"velocity": 1, "acceleration": 1, "jerk": 1},
                                       "joints": [{"name": 7, **whole}]})
    assert limits.names == ("7",) and limits.velocity.dtype == np.float64 and limits.velocity.tolist() == [1.0]


def test_the_name_of_the_robot_is_optional():
    data = robot()
    del data["robot"]
    assert JointLimits.from_mapping(data).names == ("shoulder", "gripper")


def test_a_joint_is_scaled_unless_it_says_otherwise():
    assert JointLimits.from_mapping(robot(shoulder={"scaled": True})).velocity[0] == 2.0
    assert JointLimits.from_mapping(robot(shoulder={"scaled": False})).velocity[0] == 4.0


@pytest.mark.parametrize("value", [1e-9, 0.999, 1.0, 1])
def test_a_scale_may_be_anything_above_0_up_to_1(value):
    assert JointLimits.from_mapping(robot(scale={"velocity": value})).velocity[0] == 4.0 * value


@pytest.mark.parametrize("value", [0.0, -0.5, 1.000001, 1.5, 2, "0.5", None, float("nan")])
def test_a_scale_may_only_lower_a_limit(value):
    assert refused(robot(scale={"velocity": value})) == (
        f"scale.velocity must be in (0, 1], got {value!r}: it may only lower a limit")


@pytest.mark.parametrize("data, message", [
    ([], "robot file must be a mapping, got list"),
    ({"joints": []}, "robot file: missing ['scale'], unknown []; valid keys are ['joints', 'robot', 'scale']"),
    (robot(speed=1), "robot file: missing [], unknown ['speed']; valid keys are ['joints', 'robot', 'scale']"),
    (robot(scale={"torque": 1}),
     "scale: missing [], unknown ['torque']; valid keys are ['acceleration', 'jerk', 'velocity']"),
    (robot(joints=[{"lower": 0}]),
     "joint ?: missing ['acceleration', 'jerk', 'name', 'ready', 'reentry_gap', 'upper', 'velocity'], unknown []; valid "
     "keys are ['acceleration', 'jerk', 'lower', 'name', 'ready', 'reentry_gap', 'scaled', 'upper', 'velocity']"),
    (robot(shoulder={"lowr": 1}),
     "joint shoulder: missing [], unknown ['lowr']; valid keys are ['acceleration', 'jerk', 'lower', 'name', 'ready', "
     "'reentry_gap', 'scaled', 'upper', 'velocity']"),
])
def test_missing_and_unknown_fields_are_named_with_the_valid_ones(data, message):
    assert refused(data) == message


def test_a_misspelt_field_is_both_missing_and_unknown():
    data = robot()
    data["scale"]["Jerk"] = data["scale"].pop("jerk")
    assert refused(data).startswith("scale: missing ['jerk'], unknown ['Jerk']; ")


# ------------------------------------------------------------------ numbers


def limits(**changes):
    fields = {"names": ("a", "b"), "position_lower": [-1.0, -2.0], "position_upper": [1.0, 2.0], "velocity": [1.0, 1.0],
              "acceleration": [2.0, 2.0], "jerk": [50.0, 50.0], "ready": [0.0, 0.0], "reentry_gap": [0.1, 0.1]}
    return JointLimits(**{**fields, **changes})


VECTORS = ("position_lower", "position_upper", "velocity", "acceleration", "jerk", "ready", "reentry_gap")


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_joints_have_distinct_names(names):
    with pytest.raises(LimitsError) as error:
        limits(names=names)
    assert str(error.value) == f"joint names must be distinct and at least one, got {names}"


@pytest.mark.parametrize("field", VECTORS)
@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [0.5, np.nan], [np.inf, 0.5], [[0.5, 0.5]]])
def test_every_vector_has_one_finite_number_per_joint(field, values):
    with pytest.raises(LimitsError) as error:
        limits(**{field: values})
    assert str(error.value) == (
        f"{field} needs 2 finite numbers, one for each of ('a', 'b'); got {np.array(values)}")


@pytest.mark.parametrize("field", ["velocity", "acceleration", "jerk", "reentry_gap"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_magnitudes_are_positive(field, value):
    with pytest.raises(LimitsError) as error:
        limits(**{field: [1.0, value]})
    assert str(error.value) == f"{field} must be positive: see b in the robot file"
    assert getattr(limits(**{field: [1.0, 1e-6]}), field)[1] == 1e-6


@pytest.mark.parametrize("lower, upper, bad", [
    ([1.0, -2.0], [1.0, 2.0], "a"), ([-1.0, 3.0], [1.0, 2.0], "b"), ([1.5, 2.0], [1.0, 2.0], "a, b")])
def test_lower_lies_below_upper(lower, upper, bad):
    with pytest.raises(LimitsError) as error:
        limits(position_lower=lower, position_upper=upper)
    assert str(error.value) == f"lower must be below upper position limit: see {bad} in the robot file"


@pytest.mark.parametrize("ready, bad", [([-1.1, 0.0], "a"), ([0.0, 2.1], "b"), ([1.1, -2.1], "a, b")])
def test_the_ready_pose_lies_inside(ready, bad):
    with pytest.raises(LimitsError) as error:
        limits(ready=ready)
    assert str(error.value) == f"ready pose must lie inside the position limits: see {bad} in the robot file"


def test_the_ready_pose_may_stand_on_a_limit():
    assert limits(ready=[-1.0, 2.0]).ready.tolist() == [-1.0, 2.0]


def test_the_arrays_given_are_copied_and_become_floats():
    given = np.array([1, 1])
    made = limits(velocity=given)
    given[0] = 9
    assert made.velocity.tolist() == [1.0, 1.0] and made.velocity.dtype == np.float64


@pytest.mark.parametrize("period_s", [0.0, -0.01, float("nan"), float("inf")])
def test_a_period_is_a_positive_number(period_s):
    with pytest.raises(LimitsError) as error:
        limits().check_period(period_s)
    assert str(error.value) == f"period must be positive, got {period_s} s"


def test_full_acceleration_is_reached_within_25_ticks():
    """The stop's closed form loops once per tick of that ramp, so it bounds the work of a tick."""
    assert MAX_RAMP_TICKS == 25
    limits(acceleration=[25.0, 1.0], jerk=[8.0, 8.0]).check_period(0.125)  # exactly 25 ticks, in binary fractions
    with pytest.raises(LimitsError, match=re.escape(
            "acceleration must be reachable within 25 ticks of 0.125 s: raise jerk or lower acceleration: "
            "see a in the robot file")):
        limits(acceleration=[25.001, 1.0], jerk=[8.0, 8.0]).check_period(0.125)
    with pytest.raises(LimitsError, match=": see a, b in the robot file"):
        limits().check_period(1e-6)
