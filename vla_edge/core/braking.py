"""Stopping one joint in discrete time, exactly as the commands are sent.

A command stream with period T has, by finite differences, ``a' = a + T u``, ``v' = v + T a'``, ``q' = q + T v'`` with
``|u| <= jerk``, ``|a| <= acceleration``. The stop below is worked out for these sums, not for their continuous limit,
so what it promises holds for the stream as sent.

Words used: ``D = T jerk`` is the largest change of acceleration per tick. A deceleration ``m`` cannot vanish at once:
it fades ``m, m - D, m - 2 D, ...``. ``fade_speed(m)`` is the speed that this removes, this tick included. The stop
takes in every tick the strongest deceleration that (1) the jerk limit reaches, (2) the acceleration limit allows and
(3) can still fade before the speed turns negative, that is ``fade_speed(m) <= v``. Hence no reversal, finite time, and
``v = a = 0`` exactly at the end. If the present acceleration must carry the joint through zero speed whatever is
done, the stop lets it fade and then stops in the other direction.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def fade_speed(m: float, step: float, period: float) -> float:
    """Speed removed by a deceleration from this tick until it has faded to zero at full jerk.

    Args:
        m: deceleration of this tick; a negative one speeds up and removes ``period * m``.
        step: largest change of acceleration per tick, D.
        period: T, seconds.

    Returns:
        ``period * sum over i >= 0 of max(m - i step, 0)`` for m >= 0.
    """
    if m <= step:
        return period * m
    p = int(m / step)
    return period * ((p + 1) * m - 0.5 * step * p * (p + 1))


def fadeable(v: float, step: float, period: float) -> float:
    """Strongest deceleration of this tick that can fade without removing more than speed ``v``: fade_speed inverted."""
    x = v / period
    if x <= step:
        return x
    p = int((math.sqrt(1.0 + 8.0 * x / step) - 1.0) * 0.5)
    return (x + 0.5 * step * p * (p + 1)) / (p + 1)


def fade_distance(m: float, step: float, period: float) -> float:
    """Distance covered after this tick while deceleration ``m >= 0`` fades, if the speed before was fade_speed(m)."""
    if m <= step:
        return 0.0
    p = int(m / step)
    rest = m - p * step
    return period * period * p * (p + 1) * (0.5 * rest + step * (p - 1) / 6.0)


def unavoidable_speed(v: float, a: float, step: float, period: float) -> float:
    """Speed at which the joint arrives if its acceleration fades at full jerk from the next tick on."""
    if a > step:
        return v + fade_speed(a, step, period) - period * a
    if a < -step:
        return v - fade_speed(-a, step, period) - period * a
    return v


def stop_step(v: float, a: float, acceleration: float, step: float, period: float) -> tuple[float, float]:
    """Velocity and acceleration of the next tick of the stop.

    Args:
        v: present velocity; a: present acceleration, within the limit.
        acceleration: limit; step: D; period: T.

    Returns:
        ``(v', a')`` with ``v' = v + T a'``; zero velocity is exactly zero.
    """
    sign = 1.0 if unavoidable_speed(v, a, step, period) >= 0.0 else -1.0
    v *= sign
    before = -a * sign
    m = before + step
    if m > 0.0:
        strongest = fadeable(v, step, period)
        if m > acceleration:
            m = acceleration
        if m >= strongest:
            m = strongest
            # The bound below holds for every state that fades in time; it only guards the last bits of rounding.
            if m < before - step:
                m = before - step
            if m <= step:
                return 0.0, -m * sign
    return (v - period * m) * sign, -m * sign


def stop_extent(v: float, a: float, acceleration: float, step: float, period: float) -> tuple[float, float, float]:
    """Where the stop from (v, a) leads, relative to the present position.

    Args:
        v, a, acceleration, step, period: as in :func:`stop_step`.

    Returns:
        ``(lowest, highest, final)`` positions over the whole stop, present one (0) included. Work is bounded by
        ``2 acceleration / step`` turns of a short loop.
    """
    sign = 1.0 if unavoidable_speed(v, a, step, period) >= 0.0 else -1.0
    v *= sign
    m = -a * sign
    distance = 0.0
    lowest = 0.0
    while True:
        following = m + step
        if following > acceleration:
            full = fade_speed(acceleration, step, period)
            if v >= full:  # ticks at full deceleration, in one go
                n = int((v - full) / (period * acceleration)) + 1
                distance += period * (n * v - 0.5 * period * acceleration * n * (n + 1))
                v -= n * period * acceleration
            break
        if following > 0.0 and v < fade_speed(following, step, period):
            break
        m = following
        v -= period * m
        distance += period * v
        if distance < lowest:
            lowest = distance
    if v > 0.0:
        distance += fade_distance(fadeable(v, step, period), step, period)
    if sign > 0.0:
        return lowest, max(distance, 0.0), distance
    return min(-distance, 0.0), -lowest, -distance


def stop_trajectory(v: Array, a: Array, acceleration: Array, jerk: Array, period: float,
                    ticks: int) -> tuple[Array, Array, Array]:
    """The stop of many joints at once, tick by tick: the definition that the closed forms above are held against.

    Args:
        v, a: float64[n] present velocities and accelerations.
        acceleration, jerk: float64[n] limits.
        period: seconds. ticks: how many to compute.

    Returns:
        position offsets, velocities, accelerations, each float64[ticks + 1, n], row 0 the present state.
    """
    step = jerk * period
    q_out, v_out, a_out = (np.zeros((ticks + 1, v.size)) for _ in range(3))
    v_out[0], a_out[0] = v, a
    for k in range(ticks):
        v_out[k + 1], a_out[k + 1] = _stop_step_array(v_out[k], a_out[k], acceleration, step, period)
        q_out[k + 1] = q_out[k] + period * v_out[k + 1]
    return q_out, v_out, a_out


def _fade_speed_array(m: Array, step: Array, period: float) -> Array:
    """fade_speed for m >= 0."""
    p = np.floor(m / step)
    return np.asarray(period * ((p + 1) * m - 0.5 * step * p * (p + 1)))


def _stop_step_array(v: Array, a: Array, acceleration: Array, step: Array, period: float) -> tuple[Array, Array]:
    magnitude = np.abs(a)
    rise = _fade_speed_array(magnitude, step, period) - period * magnitude
    sign = np.where(v + np.sign(a) * rise >= 0.0, 1.0, -1.0)
    speed, before = v * sign, -a * sign
    reach = before + step
    x = speed / period
    p = np.floor((np.sqrt(1.0 + 8.0 * np.maximum(x, 0.0) / step) - 1.0) * 0.5)
    strongest = (x + 0.5 * step * p * (p + 1)) / (p + 1)
    capped = np.minimum(reach, acceleration)
    fades = (reach > 0.0) & (capped >= strongest)
    m = np.where(fades, np.maximum(strongest, before - step), capped)
    after = np.where(fades & (m <= step), 0.0, speed - period * m)
    return np.asarray(after * sign), np.asarray(-m * sign)
