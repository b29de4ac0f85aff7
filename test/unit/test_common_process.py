import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vla_common.clock import NS_PER_S, SystemClock, sleep_s
from vla_common.logging_setup import setup_logging
from vla_common.process import StopFlag, spawn, stop_all

CLOCK = SystemClock()
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}

POLITE = """
import sys
from vla_common.process import end_with_parent, stop_on_signals
end_with_parent()
flag = stop_on_signals(grace_s=GRACE)
print("up", flush=True)
flag.wait()
print("stopped", flush=True)
"""
DEAF = POLITE.replace("flag.wait()", "import threading; threading.Event().wait()").replace("GRACE", "0.5")
POLITE = POLITE.replace("GRACE", "30")
STUBBORN = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
threading.Event().wait()
"""
PARENT = """
import sys, threading
from pathlib import Path
from vla_common.process import spawn
child = spawn([sys.executable, "-c", sys.argv[1]], log_path=Path(sys.argv[2]))
print(child.pid, flush=True)
threading.Event().wait()
"""


def until(condition, timeout_s=60.0):
    deadline_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
    while not (value := condition()) and CLOCK.monotonic_ns() < deadline_ns:
        sleep_s(CLOCK, 0.02)
    return value


def start(code, log):
    child = spawn([sys.executable, "-c", code], environment=ENVIRONMENT, log_path=log)
    assert until(lambda: log.exists() and "up" in log.read_text()), log.read_text()
    return child


def signal_until_dead(child, number):
    """The first ones may still count as one with those before; the child's own patience is 60 s."""
    assert until(lambda: child.send_signal(number) or child.poll() is not None, timeout_s=30.0)
    return child.wait()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_stop_flag_wakes_waiters():
    flag = StopFlag()
    assert not flag.wait(0.01)
    threading.Timer(0.05, flag.set).start()
    assert flag.wait(60) and flag.is_set()
    flag.set()
    assert flag.wait(0)


def test_polite_children_stop_by_themselves(tmp_path):
    children = [start(POLITE, tmp_path / f"{n}.log") for n in range(2)]
    assert stop_all(children, timeout_s=60.0) == [0, 0]
    assert "stopped" in (tmp_path / "0.log").read_text()


def test_deaf_and_stubborn_children_end_too(tmp_path):
    deaf, stubborn = start(DEAF, tmp_path / "deaf.log"), start(STUBBORN, tmp_path / "stubborn.log")
    deaf.send_signal(signal.SIGTERM)
    assert deaf.wait(60) == 128 + signal.SIGTERM  # its own watchdog
    assert "did not stop within 0.5 s of SIGTERM" in (tmp_path / "deaf.log").read_text()
    assert stop_all([deaf, stubborn], timeout_s=0.2) == [128 + signal.SIGTERM, -signal.SIGKILL]


def test_second_signal_ends_at_once(tmp_path):
    child = start(DEAF.replace("grace_s=0.5", "grace_s=60"), tmp_path / "log")
    child.send_signal(signal.SIGINT)
    sleep_s(CLOCK, 1.0)
    assert child.poll() is None
    assert signal_until_dead(child, signal.SIGINT) == 128 + signal.SIGINT


def test_signals_that_come_together_count_once(tmp_path):
    """As from the kernel, when a parent of several threads dies."""
    child = start(DEAF.replace("grace_s=0.5", "grace_s=60"), tmp_path / "log")
    for _ in range(3):
        child.send_signal(signal.SIGTERM)
    sleep_s(CLOCK, 1.0)
    assert child.poll() is None
    assert signal_until_dead(child, signal.SIGTERM) == 128 + signal.SIGTERM


def test_children_die_with_a_killed_parent(tmp_path):
    log = tmp_path / "child.log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, POLITE, str(log)], stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}
    )
    child = int(parent.stdout.readline())
    assert until(lambda: log.exists() and "up" in log.read_text())
    parent.kill()
    parent.communicate()
    assert until(lambda: not alive(child))
    assert "stopped" in log.read_text()  # by SIGTERM, so that it can clean up


def test_log_line_and_levels(capsys, monkeypatch):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        monkeypatch.setenv("VLA_LOG", "warning")
        setup_logging("motor")
        logging.getLogger("x").info("unseen")
        logging.getLogger("x").warning("late by %d us", 120)
        assert capsys.readouterr().err.endswith("WARNING motor: late by 120 us\n")
        with pytest.raises(ValueError, match="did you mean 'debug'"):
            setup_logging("motor", "debgu")
    finally:
        root.handlers[:], root.level = before


LOWERED = """
import os, threading
from vla_common.process import lower_priority
lower_priority(0)
first = os.nice(0)
lower_priority(3)
lower_priority(2)
seen = []
thread = threading.Thread(target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start()
thread.join()
group = open("/proc/self/autogroup").read().split()[-1] if os.path.exists("/proc/self/autogroup") else None
print(first, os.nice(0), seen[0], group, flush=True)
lower_priority(19)
print(os.nice(0), flush=True)
"""


def test_priority_is_lowered_for_the_threads_to_come_and_for_the_session(tmp_path):
    log = tmp_path / "log"
    child = spawn([sys.executable, "-c", LOWERED], environment=ENVIRONMENT, log_path=log)
    assert child.wait(60) == 0
    first, second = log.read_text().splitlines()
    before, after, thread, group = first.split()
    lowered = min(19, int(before) + 5)
    assert int(before) == os.nice(0) and int(after) == int(thread) == lowered
    if group != "None":
        assert int(group) in (lowered, 0)  # 0: a kernel that may not be asked
    assert second == "19"
