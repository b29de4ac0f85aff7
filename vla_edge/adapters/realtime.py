"""Asking the operating system for punctuality, and saying loudly what was refused."""

from __future__ import annotations

import ctypes
import gc
import logging
import os

LOG = logging.getLogger(__name__)

_MCL_CURRENT = 1
_MCL_FUTURE = 2


OUTLET_STEP = 10
"""How far the threads that carry the command out stand below the clock. Below, so that they never delay it; above
everything ordinary, so that a busy machine does not hold a finished command back."""


def start_outlet_threads(fifo_priority: int) -> None:
    """Threads that the calling thread starts from here until :func:`enter_realtime` run at SCHED_FIFO below the clock.

    Does nothing where that is not permitted; :func:`enter_realtime` says so.
    """
    if fifo_priority > OUTLET_STEP and hasattr(os, "sched_setscheduler"):
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(fifo_priority - OUTLET_STEP))
        except OSError as error:
            LOG.debug("outlet threads keep ordinary scheduling: %s", error)


def enter_realtime(fifo_priority: int, lock_memory: bool, cpu: int | None) -> str:
    """Make the calling thread punctual: SCHED_FIFO, locked memory, no garbage collection, a core of its own.

    Threads it starts later have ordinary scheduling. What the system refuses is logged with the remedy and left out.

    Args:
        fifo_priority: 1 .. 99; 0 keeps ordinary scheduling.
        lock_memory: keep all pages in memory.
        cpu: core to stay on; None for any.

    Returns:
        What was obtained, such as ``fifo 80, mlockall, gc off``.
    """
    obtained = [_set_fifo(fifo_priority)]
    if lock_memory and _lock_memory():
        obtained.append("mlockall")
    if cpu is not None and _pin(cpu):
        obtained.append(f"cpu {cpu}")
    gc.collect()
    gc.freeze()
    gc.disable()
    obtained.append("gc off")
    return ", ".join(obtained)


def _set_fifo(priority: int) -> str:
    if priority <= 0:
        return "ordinary"
    if not hasattr(os, "sched_setscheduler"):
        LOG.warning("DEGRADED: this system has no SCHED_FIFO; the motor clock runs with ordinary scheduling")
        return "ordinary"
    try:
        # Reset on fork: threads started later must not compete with the clock.
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except (PermissionError, OSError) as error:
        LOG.warning("DEGRADED: no SCHED_FIFO %d for the motor clock (%s): commands may be some ms late under load; "
                    "allow it with 'rtprio 99' in /etc/security/limits.d/ or CAP_SYS_NICE", priority, error.strerror)
        return "ordinary"
    return f"fifo {priority}"


def _lock_memory() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mlockall") or libc.mlockall(_MCL_CURRENT | _MCL_FUTURE) != 0:
        LOG.warning("DEGRADED: memory of the motor process is not locked (%s): a page fault can delay a command; allow "
                    "it with 'memlock unlimited' in /etc/security/limits.d/ or CAP_IPC_LOCK",
                    os.strerror(ctypes.get_errno()))
        return False
    return True


def _pin(cpu: int) -> bool:
    try:
        os.sched_setaffinity(0, {cpu})
    except (AttributeError, OSError) as error:
        LOG.warning("DEGRADED: the motor clock is not pinned to cpu %d (%s): set motor.cpu to one of %s", cpu, error,
                    sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "none")
        return False
    return True
