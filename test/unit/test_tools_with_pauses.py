"""tools/with_pauses.py: a command and its children stand still together, and what a test has stopped stays stopped."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "with_pauses.py"
CHILD = """
import os, signal, subprocess, sys, time
stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
stopped.send_signal(signal.SIGSTOP)
pauses, last_s = 0, time.monotonic()
while pauses < 3:
    time.sleep(0.01)
    now_s, before_s = time.monotonic(), last_s
    last_s = now_s
    pauses += now_s - before_s > 0.15
state = open(f"/proc/{stopped.pid}/stat").read().rpartition(")")[2].split()[0]
stopped.kill()
stopped.wait()
sys.exit(7 if state == "T" else 1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc")
def test_processes_stand_still_and_the_status_is_passed_on():
    options = ["--every", "0.2", "--shortest", "0.2", "--longest", "0.3", "--seed", "5"]
    command = [sys.executable, str(TOOL), *options, "--", "sh", "-c", f"{sys.executable} -c '{CHILD}'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert int(done.stderr.split()[0]) >= 3
