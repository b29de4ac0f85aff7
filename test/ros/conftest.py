"""What every test against ROS needs: the installed prefix on AMENT_PREFIX_PATH, a home, a ROS domain of its own, and a
runner of launch files.

Set before rclpy is imported anywhere, and only here: a user's ROS installation that is sourced stays as it is.
"""

import glob
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

# "make ros" builds the messages into the virtual environment, which is then itself a ROS prefix.
if (Path(sys.prefix) / "share" / "ament_index").is_dir() and not os.environ.get("AMENT_PREFIX_PATH"):
    os.environ["AMENT_PREFIX_PATH"] = sys.prefix
os.environ.setdefault("HOME", tempfile.gettempdir())
os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"


@pytest.fixture(autouse=True)
def ros_domain(monkeypatch, tmp_path):
    """Number of a ROS domain that no other test on this machine uses meanwhile; also set for child processes."""
    monkeypatch.setenv("ROS_LOG_DIR", str(tmp_path / "ros_log"))
    if importlib.util.find_spec("domain_coordinator") is None:
        monkeypatch.setenv("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
        yield int(os.environ["ROS_DOMAIN_ID"])
        return
    from domain_coordinator import domain_id

    with domain_id() as number:
        monkeypatch.setenv("ROS_DOMAIN_ID", str(number))
        yield number


def runner_environment():
    """What play_launch needs beside a sourced ROS: the wheels' libraries, their Python modules and libpython3.10."""
    site, found = sysconfig.get_paths()["platlib"], os.environ.get("LD_LIBRARY_PATH", "")
    # Built against this version of Python, which no wheel brings; PYTHON310_LIB names the folder where it is elsewhere.
    python310 = os.environ.get("PYTHON310_LIB") or next(
        iter(sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.10*/lib")))), "")
    libraries = [f"{sys.prefix}/lib", *glob.glob(f"{site}/ros_*.libs"), python310, found]
    # The runner has an interpreter of its own, in which the wheels' start-up code must not run.
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, libraries)), "PYTHONPATH": site,
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "_ROS_WHEELS_BOOTSTRAP_COMPLETE": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def play_launch():
    """Command of the runner of launch files; skips where it cannot run."""
    command = shutil.which("play_launch", path=f"{sys.prefix}/bin")
    if command is None:
        pytest.skip("play_launch, the runner of launch files, is not installed: pip install -e '.[ros-test]'")
    tried = subprocess.run([command, "--version"], env=runner_environment(), capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"play_launch does not start here: {(tried.stderr or tried.stdout).strip().splitlines()[-1]}")
    if not (Path(sys.prefix) / "share" / "vla_runtime" / "launch").is_dir():
        pytest.skip("the launch files are not installed in this environment: make ros")
    return command


class Launch:
    """A launch file being run; what its nodes print is in files."""

    def __init__(self, command, folder, arguments):
        self.folder = folder
        self.console = folder / "console.txt"
        with self.console.open("w") as console:
            self.process = subprocess.Popen(
                [command, "launch", "vla_runtime", *arguments, "--disable-all", "--log-dir", str(folder / "nodes")],
                env=runner_environment(), cwd=folder, stdout=console, stderr=subprocess.STDOUT, start_new_session=True)

    def output(self, node):
        """Everything a node has printed so far."""
        files = [*self.folder.rglob(f"node/{node}/out"), *self.folder.rglob(f"node/{node}/err")]
        return "".join(path.read_text(errors="replace") for path in dict.fromkeys(path.resolve() for path in files))

    def wait_for(self, node, text, timeout_s=120.0):
        """Until the node has printed the text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output(node):
            assert self.process.poll() is None and time.monotonic() < deadline, (
                f"{text!r} not in what {node} printed: {self.output(node)}\n{self.console.read_text()}")
            time.sleep(0.05)

    def family(self):
        """Process ids of everything below the runner."""
        found, wanted = set(), {self.process.pid}
        while wanted:
            parent = wanted.pop()
            for path in glob.glob(f"/proc/{parent}/task/*/children"):
                try:
                    children = set(map(int, Path(path).read_text().split()))
                except OSError:
                    continue
                wanted |= children - found
                found |= children
        return found

    def stop(self, timeout_s=120.0):
        """Ctrl-C; returns ids of processes that outlived it, which a busy machine may let end later than the runner."""
        family = self.family()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout_s)
        deadline = time.monotonic() + 60.0
        while (left := [pid for pid in family if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def is_running(pid):
    """True unless the process ended or waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def no_false_cgroups():
    """The runner takes /sys/fs/cgroup for a cgroup v2 hierarchy; where it is a plain tmpfs (v1), ordinary files would stay."""
    root = Path("/sys/fs/cgroup")
    before = set(root.iterdir()) if "tmpfs /sys/fs/cgroup tmpfs" in Path("/proc/mounts").read_text() else None
    yield
    for path in set(root.iterdir()) - before if before is not None else ():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


@pytest.fixture
def launch(play_launch, tmp_path, no_false_cgroups):
    """``launch("edge.launch.py", "robot_id:=arm2")`` runs it; everything is ended with the test."""
    started = []

    def run(*arguments):
        folder = tmp_path / f"launch{len(started)}"
        folder.mkdir()
        started.append(Launch(play_launch, folder, arguments))
        return started[-1]

    yield run
    for one in started:
        family = one.family()
        if one.process.poll() is None:
            family |= set(one.stop())
            one.process.poll() is None and one.process.kill()
        for pid in filter(is_running, family):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def resolve(play_launch, tmp_path):
    """``resolve("sim.launch.py", "robots:=a,b")``: nodes that would be started, by full name, without starting them."""
    import yaml

    def dump(*arguments):
        model = tmp_path / "model.yaml"
        done = subprocess.run([play_launch, "dump", "--output", str(model), "launch", "vla_runtime", *arguments],
                              env=runner_environment(), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return yaml.safe_load(model.read_text())["structure"]["nodes"]

    return dump
