"""Clean processes: children end with their parent, signals ask politely first, nothing is left behind."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

LOG = logging.getLogger(__name__)

PARENT_VARIABLE: Final = "VLA_PARENT_PID"
_PR_SET_PDEATHSIG: Final = 1
_SAME_SIGNAL_S: Final = 0.3


class StopFlag:
    """Set once, by a signal or by code; waiters wake at once.

    Not a ``threading.Event``: its ``set()`` takes a lock, and a signal handler that runs while the same thread holds
    that lock in ``wait()`` would hang the process. Here setting is a write to a pipe.
    """

    def __init__(self) -> None:
        """Not set."""
        self._set = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)

    def is_set(self) -> bool:
        """True once set."""
        return self._set

    def set(self) -> None:
        """Set; may be called from a signal handler, any thread, more than once."""
        if not self._set:
            self._set = True
            os.write(self._write_fd, b"x")

    def fileno(self) -> int:
        """A descriptor that is readable once set, for a selector."""
        return self._read_fd

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until set or until the time is over; returns whether it is set."""
        if not self._set:
            select.select([self._read_fd], [], [], timeout_s)
        return self._set


def stop_on_signals(grace_s: float = 2.0) -> StopFlag:
    """Turn SIGINT and SIGTERM into a flag. Call from the main thread.

    A second signal ends the process at once, unless it comes with the first: the kernel reports the death of a parent
    once for each of the parent's threads. So does the end of ``grace_s`` after the first signal: a process that does
    not heed the flag must not stay behind.
    """
    flag, insist = StopFlag(), StopFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        if insist.is_set():
            os._exit(128 + number)
        if flag.is_set():
            return
        flag.set()
        for delay_s, action in ((_SAME_SIGNAL_S, insist.set), (grace_s, lambda: _give_up(grace_s, number))):
            timer = threading.Timer(delay_s, action)
            timer.daemon = True
            timer.start()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return flag


def _give_up(grace_s: float, number: int) -> None:
    sys.stderr.write(f"process {os.getpid()} did not stop within {grace_s:g} s of {signal.Signals(number).name}\n")
    sys.stderr.flush()
    os._exit(128 + number)


def end_with_parent(parent_pid: int | None = None, signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel signal this process when its parent dies, however it dies (Linux only, elsewhere nothing).

    Call it first thing in a child, on any thread; the parent must have started the child from a thread that lives as
    long as it does (the main thread), for the kernel watches that thread.

    Args:
        parent_pid: who started this process; default ``VLA_PARENT_PID``, which :func:`spawn` sets; without either
            nothing happens, so that a process started by hand outlives its shell as usual.
        signal_number: SIGTERM lets :func:`stop_on_signals` clean up.
    """
    if parent_pid is None:
        text = os.environ.pop(PARENT_VARIABLE, "")
        if not text.isdigit():
            return
        parent_pid = int(text)
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        LOG.warning("prctl(PR_SET_PDEATHSIG) failed: errno %d", ctypes.get_errno())
    if os.getppid() != parent_pid:  # it died before the call above
        os.kill(os.getpid(), signal_number)


def lower_priority(nice: int) -> None:
    """Let others go first: adds to the niceness of the calling thread, and of all it starts from now on.

    Needs no privileges; the kernel stops at 19.

    Where the kernel shares time among sessions first (autogroup), a niceness counts inside its session only; the whole
    session, which :func:`spawn` makes for each child, is lowered then too. 0 does nothing. Linux; elsewhere it holds
    for the whole process.
    """
    if nice <= 0:
        return
    niceness = os.nice(nice)
    try:
        if os.getsid(0) == os.getpid():  # a session of this process alone
            Path("/proc/self/autogroup").write_text(str(niceness))
    except OSError as error:  # a kernel without autogroups, or a /proc that may not be written
        LOG.debug("no autogroup: %s", error)


def spawn(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, log_path: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, so that Ctrl-C reaches only the parent, which stops its children.

    The child must call :func:`end_with_parent` (the ``vla`` command does). Call from the main thread.

    Args:
        arguments: program and arguments.
        environment: added to this process's environment.
        log_path: file for standard output and error; default the parent's.
    """
    variables = {**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())}
    if log_path is None:
        return subprocess.Popen(list(arguments), env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            list(arguments),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_all(children: Iterable[subprocess.Popen[bytes]], timeout_s: float = 1.5) -> list[int]:
    """Ask all children to stop, then kill the groups of those that did not.

    Returns:
        Exit codes in order; negative for a signal.
    """
    running = list(children)
    for child in running:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
    # One time for all of them: each wait is short because the others stop meanwhile.
    share_s = timeout_s / max(1, len(running))
    for child in running:
        if child.returncode is None:
            if not _wait_unreaped(child, share_s):
                LOG.warning("process %d did not stop within %g s: killed", child.pid, timeout_s)
            _kill_group(child.pid)
    return [child.wait() for child in running]


def _wait_unreaped(child: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the end of a child but leave its process id taken, so that its group can still be named safely."""
    descriptor = os.pidfd_open(child.pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def _kill_group(group: int) -> None:
    """Kill what is left of a group: the leader itself, or children that outlived it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
