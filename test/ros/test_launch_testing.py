"""The launch files under ROS's own launch and launch_testing, which no wheel brings: skipped where ROS is not installed.

Each file of launch_tests/ runs in a process of its own, as launch_test and "colcon test" run it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

for module in ("launch_ros", "launch_testing"):
    pytest.importorskip(module, reason=f"ROS's own {module} is not installed (it comes with a ROS installation only)")

FILES = sorted((Path(__file__).parent / "launch_tests").glob("launch_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_launch(path):
    done = subprocess.run([sys.executable, "-m", "launch_testing.launch_test", str(path)], capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
