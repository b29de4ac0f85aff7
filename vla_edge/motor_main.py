"""The motor process: one safe command per tick. It listens to no network; what it needs comes through shared memory."""

from __future__ import annotations

import logging
import os

import numpy as np
import numpy.typing as npt

from vla_common.clock import Clock
from vla_common.joint_command import command_template
from vla_common.process import StopFlag
from vla_edge.adapters.realtime import enter_realtime, start_outlet_threads
from vla_edge.child import Child, main_exit, run
from vla_edge.config import make_queue
from vla_edge.core.chunk import ChunkGate
from vla_edge.core.motor_clock import MotorClock
from vla_edge.core.motor_loop import MotorLoop, Send
from vla_edge.core.shield import Shield, State
from vla_edge.robot_bus import command_spec, open_robot_bus

LOG = logging.getLogger(__name__)

_EXTRA_TICKS_AT_REST = 3


def build_loop(child: Child, send: Send, scheduling: str) -> MotorLoop:
    """The loop with the configured parts."""
    config, limits = child.config, child.limits
    return MotorLoop(child.memory, limits, ChunkGate(limits, config.motor.period_s, config.gate),
                     make_queue(config, len(limits)), Shield(limits, config.motor.period_s, config.shield),
                     child.clock, send, scheduling, os.getpid(), config.io.estop_required_within_s)


def run_clock(loop: MotorLoop, clock: Clock, period_ns: int, stop: StopFlag) -> MotorClock:
    """Serve ticks until ``stop`` is set, then until the robot is at rest.

    Returns:
        The clock with its counts.
    """
    motor_clock = MotorClock(period_ns, clock.monotonic_ns() + period_ns)
    tick = 0
    rest_ticks = 0
    while rest_ticks < _EXTRA_TICKS_AT_REST:
        clock.sleep_until_ns(motor_clock.deadline_ns(tick))
        woke_ns = clock.monotonic_ns()
        tick = motor_clock.on_wake(tick, woke_ns)
        if stop.is_set():
            if rest_ticks == 0:
                loop.shield.shut_down()
            rest_ticks += loop.shield.state is State.HOLDING
        loop.serve(tick, motor_clock.deadline_ns(tick), woke_ns, motor_clock.missed)
        tick = motor_clock.after(tick, clock.monotonic_ns())
    return motor_clock


def body(child: Child) -> None:
    """Open the outlet, ask for punctuality, serve."""
    config = child.config
    start_outlet_threads(config.motor.fifo_priority)
    with open_robot_bus(config, "vla_motor", child.clock, never_wait=True) as bus:
        template = command_template(config.ros.command_output, child.limits.names, config.motor.period_s)
        publisher = bus.publisher(command_spec(config, template.type_name), config.robot_id)

        def send(stamp_ns: int, position: npt.NDArray[np.float64], velocity: npt.NDArray[np.float64]) -> None:
            publisher.put(template.pack(stamp_ns, position, velocity))

        scheduling = enter_realtime(config.motor.fifo_priority, config.motor.lock_memory, config.motor.cpu)
        LOG.info("motor clock: %.0f Hz, %s", 1.0 / config.motor.period_s, scheduling)
        loop = build_loop(child, send, scheduling)
        run_clock(loop, child.clock, round(config.motor.period_s * 1e9), child.stop)
        LOG.info("at rest, motor clock stopped")


if __name__ == "__main__":
    main_exit(run("motor", body))
