"""One joint in units of D = 1 and T = 1."""


from vla_edge.core.tracking import JointTracker

INSIDE = 1.0 - 1e-9  # limits are kept that much tighter


def tracker(lower=-1000.0, upper=1000.0, velocity=10.0, acceleration=3.0, jerk=1.0, period_s=1.0, state=None,
            on_target=False):
    made = JointTracker(lower, upper, velocity, acceleration, jerk, period_s)
    if state is not None:
        made.q, made.v, made.a = state
        made.on_target = on_target
    return made


def state(joint):
    return joint.q, joint.v, joint.a


def flags(joint):
    return joint.on_target, joint.limited
