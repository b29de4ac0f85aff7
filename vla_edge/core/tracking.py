"""One joint follows a desired trajectory as closely as its limits allow.

Every step chooses the acceleration ``a'`` of the next tick from the interval that the limits leave:

1. *Exact.* If the command was on the desired trajectory and reaching its next point needs no more than the limits
   allow, that point is sent, bit for bit.
2. *Catching up.* Otherwise ``a'`` is the one after which the stop of :mod:`vla_edge.core.braking`, applied to the
   speed relative to the target, ends exactly on the target. The distance at which a stop ends grows with ``a'``, so
   this is one root of a monotone function. On later ticks the stop's own steps keep it ending there: the approach
   takes finite time, neither overshoots a target at rest nor cycles about it.
3. *Limits of position.* No command is sent whose stop would leave the position limits or exceed the velocity limit:
   if the choice would, the target becomes the limit itself, at rest; if even that fails, the stop's own step is taken,
   which was known to be good when the last command was sent.

The work of a step is bounded: at most two root searches of MAX_EVALUATIONS evaluations, three checks.
"""

from __future__ import annotations

from vla_edge.core.braking import fadeable, stop_extent, stop_step

MAX_EVALUATIONS = 10
"""Evaluations per root search beside those of the bounds. 1 to 6 reach ROOT_TOLERANCE in more than 99 % of searches;
about one in 400 stops short of it and aims beside its target. No limit depends on that: ``_safe`` decides."""
ROOT_TOLERANCE = 1e-13
"""Rad. Well below what a tick's finite differences turn into a visible jerk (1e-13 / T³ = 1e-7 rad/s³)."""
STOP_SLACK = 2e-13
"""Rad. A stop computed to end on a position limit may exceed it by rounding; the command itself never does."""
ON_TARGET = 1e-9
"""Rad. The command counts as on the desired trajectory."""
LIMIT_MARGIN = 1e-9
"""Relative: limits are kept that much tighter inside, so that rounding never shows outside."""


class JointTracker:
    """State and limits of one joint's command.

    Attributes:
        q, v, a: last command (rad or closure) and its finite differences (per s, per s²).
        on_target: the last command was the desired position.
        limited: the last step could not send the desired position.
    """

    __slots__ = ("_a_max", "_lower", "_step", "_t", "_upper", "_v_max", "a", "limited", "on_target", "q", "v")

    def __init__(self, lower: float, upper: float, velocity: float, acceleration: float, jerk: float,
                 period_s: float) -> None:
        """At rest in the middle of the range; call :meth:`reset` before use."""
        inside = 1.0 - LIMIT_MARGIN
        self._t = period_s
        self._lower, self._upper = lower, upper
        self._v_max, self._a_max, self._step = velocity * inside, acceleration * inside, jerk * period_s * inside
        self.reset(0.5 * (lower + upper))

    def reset(self, q: float) -> None:
        """Start a stream at rest at ``q``, which is moved into the position limits."""
        self.q = min(max(q, self._lower), self._upper)
        self.v = self.a = 0.0
        self.on_target = self.limited = False

    def brake(self) -> None:
        """Send the stop's next step."""
        self.v, self.a = stop_step(self.v, self.a, self._a_max, self._step, self._t)
        self.q += self._t * self.v
        self._clamp()
        self.on_target, self.limited = False, False

    def track(self, target: float, target_speed: float) -> None:
        """Send the step that follows ``target`` best.

        Args:
            target: desired position of this tick, finite.
            target_speed: its velocity, by which a joint that is behind aims ahead, finite.
        """
        t = self._t
        wanted = min(max(target, self._lower), self._upper)
        if wanted != target:
            target_speed = 0.0
        low, high = self._reachable()
        v = (wanted - self.q) / t
        a = (v - self.v) / t
        exact = low <= a <= high and (self.on_target or self._ends_at_once(v - target_speed, a))
        if exact and self._safe(wanted, v, a):
            self.q, self.v, self.a = wanted, v, a
            self.on_target, self.limited = True, wanted != target
            return
        self.on_target, self.limited = False, True
        a = self._aim(wanted, target_speed, low, high)
        if self._send_if_safe(a):
            self.on_target = abs(self.q - wanted) <= ON_TARGET and abs(self.v - target_speed) * t <= ON_TARGET
            return
        limit = self._upper if self._leaves_above(a) else self._lower
        if not self._send_if_safe(self._aim(limit, 0.0, low, high)):
            self.brake()
            self.limited = True

    def _reachable(self) -> tuple[float, float]:
        """Accelerations of the next tick inside the acceleration, jerk and velocity limits.

        Velocity: after ``a'`` the speed still rises by what fading ``a'`` adds, and that must stay below the limit.
        """
        high = min(self._a_max, self.a + self._step, fadeable(self._v_max - self.v, self._step, self._t))
        low = max(-self._a_max, self.a - self._step, -fadeable(self._v_max + self.v, self._step, self._t))
        return low, high

    def _ends_at_once(self, v: float, a: float) -> bool:
        """A relative speed that the next tick can remove entirely."""
        following = -v / self._t
        return abs(following) <= min(self._a_max, self._step) and abs(following - a) <= self._step

    def _safe(self, q: float, v: float, a: float) -> bool:
        """The stop from (q, v, a) stays inside the position limits."""
        lowest, highest, _ = stop_extent(v, a, self._a_max, self._step, self._t)
        return q + lowest >= self._lower - STOP_SLACK and q + highest <= self._upper + STOP_SLACK

    def _leaves_above(self, a: float) -> bool:
        v = self.v + self._t * a
        return self.q + self._t * v + stop_extent(v, a, self._a_max, self._step, self._t)[1] > self._upper

    def _send_if_safe(self, a: float) -> bool:
        v = self.v + self._t * a
        q = self.q + self._t * v
        if not self._safe(q, v, a):
            return False
        self.q, self.v, self.a = q, v, a
        self._clamp()
        return True

    def _clamp(self) -> None:
        """Remove what rounding alone may have put beyond a limit (STOP_SLACK at most)."""
        self.q = min(max(self.q, self._lower), self._upper)

    def _miss(self, a: float, error: float, relative: float) -> float:
        """How far beyond the target a stop relative to it would end, if ``a`` is sent now."""
        t = self._t
        w = relative + t * a
        return error + t * w + stop_extent(w, a, self._a_max, self._step, t)[2]

    def _aim(self, target: float, target_speed: float, low: float, high: float) -> float:
        """Acceleration in [low, high] after which the stop ends on the target, or the nearest bound."""
        # In the frame of the target: it was at target - T speed one tick ago.
        error = self.q - (target - self._t * target_speed)
        relative = self.v - target_speed
        above = self._miss(high, error, relative)
        if above <= 0.0:
            return high
        below = self._miss(low, error, relative)
        if below >= 0.0:
            return low
        # The distance is piecewise linear in a: the secant of two points of one piece hits the root exactly.
        x0, f0, x1, f1 = low, below, high, above
        at_once = (-error / self._t - relative) / self._t
        x = at_once if low < at_once < high else x0 - f0 * (x1 - x0) / (f1 - f0)
        for _ in range(MAX_EVALUATIONS):
            miss = self._miss(x, error, relative)
            if abs(miss) <= ROOT_TOLERANCE:
                return x
            if miss > 0.0:
                high, above = x, miss
            else:
                low, below = x, miss
            x0, f0, x1, f1 = x1, f1, x, miss
            x = x1 - f1 * (x1 - x0) / (f1 - f0) if f1 != f0 else low
            if not low < x < high:
                x = 0.5 * (low + high)
        return x
