"""A shield with two joints of simple numbers."""

import numpy as np

from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.shield import EstopInput, Rearm, Shield, ShieldConfig

T = 0.0625  # a binary fraction
GAP = 0.125
LIMITS = JointLimits(("arm", "gripper"), *(np.array(row) for row in (
    [-2.0, 0.0], [2.0, 1.0], [1.0, 1.0], [4.0, 4.0], [64.0, 64.0], [0.0, 0.0], [GAP, 1.0])))
CONFIG = ShieldConfig(fresh_ticks=3, first_chunk_ticks=4, measurement_max_age_s=0.25, outside_tolerance=0.25, stall_ticks=6)
HOME = np.array([0.5, 0.25])
RELEASED, PRESSED, SILENT = EstopInput.RELEASED, EstopInput.PRESSED, EstopInput.SILENT


def started(q=HOME, config=CONFIG):
    shield = Shield(LIMITS, T, config)
    assert shield.start(np.array(q)) is Rearm.ACCEPTED
    return shield


def armed(q=HOME, config=CONFIG):
    shield = started(q, config)
    assert shield.rearm(np.array(q), 0.0) is Rearm.ACCEPTED
    return shield


def moving(ticks=6):
    """The arm moves, the gripper stands."""
    shield = armed()
    for k in range(ticks):
        shield.step(HOME + [0.02 * (k + 1), 0.0], np.array([0.32, 0.0]), 0)
    assert shield.velocity[0] > 0.0 and shield.velocity[1] == 0.0
    return shield


def known(shield):
    return shield.state, shield.reason


def counts(shield):
    return shield.segment, shield.stops, shield.stalls, shield.limit_interventions
