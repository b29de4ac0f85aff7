"""The package as a ROS workspace builds it: colcon, from the source tree, into an install folder of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed: make ros")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("vla_common", "vla_models", "vla_cloud", "vla_edge", "vla_sim", "vla_cli")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder that colcon installed into."""
    colcon = shutil.which("colcon", path=f"{sys.prefix}/bin:{os.environ['PATH']}")
    if colcon is None:
        pytest.skip("colcon is not installed: pip install -e '.[ros-test]'")
    folder = tmp_path_factory.mktemp("workspace")
    command = [colcon, "--log-base", f"{folder}/log", "build", "--merge-install", "--base-paths", str(ROOT),
               "--build-base", f"{folder}/build", "--install-base", f"{folder}/install", "--event-handlers", "console_cohesion+",
               "--cmake-args", "-GNinja", "-DBUILD_TESTING=OFF", "--no-warn-unused-cli"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert "1 package finished" in done.stdout, "nested packages must stay out of the workspace: " + done.stdout[-500:]
    return folder / "install"


def sourced(installed, command):
    """Output of a shell command after the workspace's set-up file was sourced, run from another folder."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(["bash", "-c", f". {installed}/local_setup.bash && {command}"], cwd=installed.parent,
                          env=environment | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_python_packages_messages_and_action_come_from_the_install_folder(installed):
    names = [*PACKAGES, "vla_runtime.msg", "vla_runtime.action"]
    code = f"import importlib; [print(importlib.import_module(name).__file__) for name in {names}]"
    lines = sourced(installed, f'python -c "{code}"').splitlines()
    assert len(lines) == len(names) and all(line.startswith(f"{installed}/") for line in lines), lines
    code = ("from rclpy.serialization import serialize_message as s; from vla_runtime.action import RunTask; "
            "from vla_runtime.msg import ShieldStatus; print(len(s(RunTask.Goal(instruction='go home'))), ShieldStatus.HOLDING)")
    assert sourced(installed, f'python -c "{code}"').split() == ["16", "3"]


def test_definitions_assets_launch_files_and_settings_are_installed(installed):
    site = next(installed.glob("lib/python*/site-packages"))
    assert sorted(path.name for path in (site / "vla_common" / "msg").iterdir()) == sorted(
        path.name for path in (ROOT / "msg").glob("*.msg"))
    for package in ("vla_sim", "vla_common"):
        sources = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*")
                   if path.is_file() and "__pycache__" not in path.parts}
        assert not {path for path in sources if not (site / path).is_file()}
    share = installed / "share" / "vla_runtime"
    for folder in ("config", "launch", "models"):
        sources = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*")
                   if path.is_file() and "__pycache__" not in path.parts}
        assert sources and not {path for path in sources if not (share / path).is_file()}


@pytest.mark.parametrize("name, text", [("vla", "usage: vla"), ("vla_cloud", "usage: vla cloud"),
                                        ("vla_sim", "usage: vla sim")])
def test_executables_run_as_ros2_run_and_launch_call_them(installed, name, text):
    program = installed / "lib" / "vla_runtime" / name
    # What launch appends must not confuse programs that are no ROS nodes.
    extra = "" if name == "vla" else " --ros-args -r __node:=x"
    assert text in sourced(installed, f"{program} --help{extra}")


def test_edge_node_is_an_executable(installed):
    program = installed / "lib" / "vla_runtime" / "vla_edge_node"
    assert os.access(program, os.X_OK) and "vla_edge.ros_main" in program.read_text()
