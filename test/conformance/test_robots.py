"""Every robot file against its source, and against what the shield makes of it."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "property"))

from test_edge_shield_properties import run_schedule

from vla_edge.config import load_limits
from vla_edge.core.braking import stop_extent, unavoidable_speed
from vla_edge.core.shield import Rearm, Shield, State

T = 0.01
FOLDER = Path(__file__).parents[2] / "config/robots"
ROBOTS = sorted(FOLDER.glob("*.yaml"))
FR3 = load_limits(FOLDER / "fr3.yaml", T)


@pytest.mark.parametrize("path", ROBOTS, ids=lambda path: path.stem)
def test_every_robot_file_loads_names_its_source_and_keeps_what_the_shield_promises(path):
    limits = load_limits(path, T)  # checks the period too
    assert any(line.startswith("#") and "https://" in line for line in path.read_text().splitlines())
    states = set()
    for seed in range(6):
        states |= run_schedule(5000 + seed, 400, limits)
    assert states == set(State)


@pytest.mark.slow
@pytest.mark.parametrize("path", ROBOTS, ids=lambda path: path.stem)
def test_hundred_thousand_ticks_on_every_robot(path):
    for seed in range(20):
        run_schedule(6000 + seed, 5000, load_limits(path, T))


def test_the_ur5e_keeps_below_its_published_limits():
    limits = load_limits(FOLDER / "ur5e.yaml", T)
    assert limits.names == ("shoulder_pan_joint", "shoulder_lift_joint", "elbow_joint", "wrist_1_joint",
                            "wrist_2_joint", "wrist_3_joint")
    reach = np.deg2rad([360, 360, 180, 360, 360, 360])
    assert (limits.position_upper < reach).all() and (limits.position_lower > -reach).all()
    assert (limits.velocity <= np.pi).all() and (limits.acceleration <= np.pi).all()


# ------------------------------------------------------------------ Franka Research 3: speed depends on position

# libfranka, include/franka/rate_limiting.h: computeUpperLimitsJointVelocity and computeLowerLimitsJointVelocity.
V_MAX = np.array([2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26])
C = np.array([0.30, 0.20, 0.20, 0.30, 0.35, 0.35, 0.35])
TWO_D = np.array([12.0, 5.17, 7.00, 8.00, 34.0, 11.0, 34.0])
Q0_UPPER = np.array([2.75010, 1.79180, 2.90650, -0.1458, 2.81010, 4.52050, 3.01960])
Q0_LOWER = -np.array([2.75010, 1.79180, 2.90650, 3.0481, 2.81010, -0.54092, 3.01960])
TOLERANCE = 1e-3  # kJointVelocityLimitsTolerance


def upper_velocity(q):
    return np.minimum(V_MAX, np.maximum(0.0, -C + np.sqrt(np.maximum(0.0, TWO_D * (Q0_UPPER - q))))) - TOLERANCE


def lower_velocity(q):
    return np.maximum(-V_MAX, np.minimum(0.0, C - np.sqrt(np.maximum(0.0, TWO_D * (q - Q0_LOWER))))) + TOLERANCE


def worst_excess(limits, speeds=161, accelerations=21):
    """Largest excess over the published curve of any state that stops inside the position limits, rad/s.

    For a pair of speed and acceleration the stop reaches a known distance ahead, so the state nearest to the end that
    the shield may send is known exactly; the curve falls towards the end, so no other position is worse.
    """
    worst = np.full(len(limits), -np.inf)
    for i in range(len(limits)):
        a_max, step, v_max = limits.acceleration[i], limits.jerk[i] * T, limits.velocity[i]
        for v in np.linspace(0.0, v_max, speeds):
            for a in np.linspace(-a_max, a_max, accelerations):
                if abs(unavoidable_speed(v, a, step, T)) > v_max:
                    continue
                _, highest, _ = stop_extent(v, a, a_max, step, T)
                q_up = np.minimum(limits.position_upper[i] - highest, limits.position_upper)
                q_low = np.maximum(limits.position_lower[i] + highest, limits.position_lower)
                worst[i] = max(worst[i], v - upper_velocity(q_up)[i], v + lower_velocity(q_low)[i])
    return worst


def test_every_fr3_state_with_a_known_stop_lies_under_the_published_speed_curve():
    assert (worst_excess(FR3) <= 0.0).all()


def test_the_curve_would_be_broken_with_the_published_acceleration_or_range():
    """The check above can fail: each of the two choices in the file is needed."""
    import dataclasses

    fast = dataclasses.replace(FR3, acceleration=np.full(7, 9.0))
    assert (worst_excess(fast, 41, 5)[[0, 1, 2, 3, 5]] > 0.0).all()
    wide = dataclasses.replace(FR3, position_upper=Q0_UPPER - 1e-3, position_lower=Q0_LOWER + 1e-3)
    assert (worst_excess(wide, 41, 5) > 0.0).all()


def test_the_fr3_file_leaves_the_margins_that_it_states():
    d = TWO_D / 2
    a = FR3.acceleration
    margin = (C + TOLERANCE + a * T / 2) ** 2 / (2 * (d - a)) + a * T**2 / 8
    assert (a < d).all() and (a <= 10.0).all() and (FR3.jerk <= 5000.0).all() and (FR3.velocity <= V_MAX).all()
    assert (FR3.position_upper <= Q0_UPPER - margin).all() and (FR3.position_lower >= Q0_LOWER + margin).all()


def test_an_fr3_stream_driven_into_its_limits_stays_under_the_curve():
    rng = np.random.default_rng(3)
    shield = Shield(FR3, T)
    assert shield.start(FR3.ready) is Rearm.ACCEPTED
    closest = np.inf
    for _ in range(60):
        shield.rearm(shield.position.copy(), 0.0)
        target = np.where(rng.random(7) < 0.5, FR3.position_lower - 0.3, FR3.position_upper + 0.3)
        for _ in range(int(rng.integers(50, 300))):
            shield.step(target if rng.random() < 0.995 else None, None, 0)
            assert (shield.velocity <= upper_velocity(shield.position)).all()
            assert (shield.velocity >= lower_velocity(shield.position)).all()
            closest = min(closest, float((FR3.position_upper - shield.position).min()))
    assert closest == 0.0  # the ends were reached
