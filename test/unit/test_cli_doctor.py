"""What ``vla doctor`` says on machines that are not this one."""

import resource
from pathlib import Path

import pytest

from vla_cli import doctor, doctor_engine, doctor_machine
from vla_cli.doctor_engine import EngineFacts, check_engine, check_gpu, check_tensorrt, gather, jetpack_of
from vla_edge.adapters.cuda_driver import Gpu
from vla_edge.engines import EngineProbe

ORIN, THOR, NONE = Gpu("Orin", "8.7", "12.6"), Gpu("Thor", "11.0", "13.0"), "no CUDA driver: libcuda.so.1"
ABSENT = "tensorrt is not installed"

# ------------------------------------------------------------------ engine


@pytest.mark.parametrize("release, version", [
    ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64", "6.1/6.2"),
    ("# R36 (release), REVISION: 3.0, GCID: 1", "6.0"), ("# R35 (release), REVISION: 4.1", "5 or older"),
    ("# R38 (release), REVISION: 2.0", "7 or newer"), ("something else", None), ("", None),
])
def test_jetpack_by_its_release_file(release, version):
    assert jetpack_of(release) == version


@pytest.mark.parametrize("facts, level, text, remedy", [
    (EngineFacts(NONE, ABSENT, None), "ok", "not needed without a GPU", ""),
    (EngineFacts(ORIN, (10, 3, 0), "6.1/6.2"), "ok", "10.3.0 (JetPack 6.1/6.2)", ""),
    (EngineFacts(THOR, (10, 13, 3), "7 or newer"), "ok", "10.13.3", ""),
    (EngineFacts(ORIN, (10, 16, 0), "7 or newer"), "ok", "10.16.0", ""),
    (EngineFacts(ORIN, (10, 13, 3), "7 or newer"), "fail", "no kernels for compute capability 8.7", "10.16"),
    (EngineFacts(ORIN, (8, 6, 2), "6.0"), "fail", "too old", "JetPack 6.1 or newer"),
    (EngineFacts(ORIN, ABSENT, "6.0"), "note", ABSENT, "flash JetPack 6.1"),
    (EngineFacts(ORIN, ABSENT, "6.1/6.2"), "note", ABSENT, "python3.10 -m venv --system-site-packages"),
    (EngineFacts(THOR, ABSENT, "7 or newer"), "note", ABSENT, "apt install python3-libnvinfer"),
    (EngineFacts(THOR, ABSENT, None), "note", ABSENT, "pip install tensorrt"),
    (EngineFacts(NONE, (10, 3, 0), None), "note", "but no GPU", "line above"),
    (EngineFacts(NONE, ABSENT, "6.1/6.2"), "note", ABSENT, "python3.10"),
])
def test_tensorrt(facts, level, text, remedy):
    finding = check_tensorrt(facts, (3, 12))
    assert finding.level == level and text in finding.text and remedy in finding.remedy
    assert bool(finding.remedy) == (level != "ok")


def test_the_python_of_jetpack_6_is_enough():
    facts = EngineFacts(ORIN, ABSENT, "6.1/6.2")
    assert "python3.10" not in check_tensorrt(facts, (3, 10)).remedy


def test_gpu():
    assert "Orin, compute capability 8.7, driver for CUDA 12.6" in check_gpu(EngineFacts(ORIN, ABSENT, None)).text
    assert check_gpu(EngineFacts(NONE, ABSENT, None)).level == "ok"
    on_jetson = check_gpu(EngineFacts(NONE, ABSENT, "6.1/6.2"))
    assert on_jetson.level == "note" and "--runtime nvidia" in on_jetson.remedy


def test_the_engine_that_would_be_used():
    def there():
        return None

    def missing():
        return "nothing here"

    assert "onnxruntime " in check_engine(EngineProbe(there, missing, missing, missing)).text
    assert check_engine(EngineProbe(missing, missing, there, there)).text.startswith("tensorrt")
    nothing = check_engine(EngineProbe(missing, there, missing, missing))
    assert nothing.level == "note" and "vla-runtime[edge]" in nothing.remedy


def test_facts_are_gathered(tmp_path, monkeypatch):
    release = tmp_path / "nv_tegra_release"
    release.write_text("# R36 (release), REVISION: 4.0, GCID: 1\n")
    monkeypatch.setattr("vla_edge.adapters.cuda_driver.find_gpu", lambda: ORIN)
    (tmp_path / "tensorrt.py").write_text("__version__ = '10.3.0.post1'")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(doctor.sys.modules, "tensorrt", raising=False)
    assert gather(release) == EngineFacts(ORIN, (10, 3, 0), "6.1/6.2")
    monkeypatch.setattr(doctor_engine, "missing_tensorrt", lambda: ABSENT)
    assert gather(tmp_path / "none") == EngineFacts(ORIN, ABSENT, None)
    monkeypatch.delitem(doctor.sys.modules, "tensorrt", raising=False)


# ------------------------------------------------------------------ operating system


@pytest.fixture
def as_user(monkeypatch):
    """An ordinary user with the given limits."""
    limits = {}
    monkeypatch.setattr(doctor_machine.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda which: (limits.get(which, 0), 0))
    return limits


def test_without_permission_for_real_time(as_user, monkeypatch):
    finding = doctor_machine.check_realtime()
    assert finding.level == "note" and "rtprio 80" in finding.remedy and "CAP_SYS_NICE" in finding.remedy
    as_user[resource.RLIMIT_RTPRIO] = 80

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(doctor_machine.os, "sched_setscheduler", refuse)
    assert doctor_machine.check_realtime().level == "note"  # the limit is there, the capability is not
    monkeypatch.setattr(doctor_machine.os, "sched_setscheduler", lambda *_: None)
    assert doctor_machine.check_realtime().level == "ok"


def test_locked_memory(as_user):
    as_user[resource.RLIMIT_MEMLOCK] = 8 << 20
    finding = doctor_machine.check_memory_lock()
    assert finding.level == "note" and "8192 KiB" in finding.text and "memlock unlimited" in finding.remedy
    for enough in (resource.RLIM_INFINITY, 1 << 30):
        as_user[resource.RLIMIT_MEMLOCK] = enough
        assert doctor_machine.check_memory_lock().level == "ok"


def test_swap(tmp_path):
    assert doctor_machine.check_swap(tmp_path).text == "none"
    (tmp_path / "proc").mkdir()
    swaps = tmp_path / "proc" / "swaps"
    head = "Filename\tType\tSize\tUsed\tPriority\n"
    swaps.write_text(head)
    assert doctor_machine.check_swap(tmp_path).text == "none"
    swaps.write_text(head + "/dev/zram0 partition 1000000 0 5\n")
    assert doctor_machine.check_swap(tmp_path) == doctor_machine.Finding("ok", "swap", "/dev/zram0, unused")
    swaps.write_text(head + "/dev/zram0 partition 1000000 4096 5\n/swapfile file 1000000 2048 -2\n")
    finding = doctor_machine.check_swap(tmp_path)
    assert finding.level == "note" and "6 MiB in use on /dev/zram0, /swapfile" in finding.text and "swapoff" in finding.remedy


def test_kernel(tmp_path):
    assert "not PREEMPT_RT, isolated cores: none" in doctor_machine.check_kernel(tmp_path).text
    for name, content in (("sys/kernel/realtime", "1\n"), ("sys/devices/system/cpu/isolated", "3\n")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert doctor_machine.check_kernel(tmp_path).text.startswith("PREEMPT_RT, isolated cores: 3; put the motor process")


# ------------------------------------------------------------------ ROS and Zenoh


def test_ros(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("ROS_DISTRO", "jazzy")
    monkeypatch.delenv("RMW_IMPLEMENTATION", raising=False)
    assert "rmw_zenoh_cpp" in doctor.check_ros().remedy
    monkeypatch.setenv("RMW_IMPLEMENTATION", "rmw_zenoh_cpp")
    assert doctor.check_ros() == doctor.Finding("ok", "ros 2", "rclpy present, jazzy, middleware rmw_zenoh_cpp")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "source /opt/ros" in doctor.check_ros().remedy


@pytest.mark.parametrize("version, level", [("1.10.2", "ok"), ("1.9.0", "note"), ("1.11.0", "note"), (None, "note")])
def test_zenoh(monkeypatch, version, level):
    def installed(_):
        if version is None:
            raise doctor.importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(doctor.importlib.metadata, "version", installed)
    assert doctor.check_zenoh().level == level
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.check_zenoh().level == "fail"


def test_without_numpy_the_rest_is_still_said(monkeypatch):
    monkeypatch.setitem(doctor.sys.modules, "vla_cli.doctor_engine", None)
    (finding,) = doctor.check_engines()
    assert finding.level == "fail" and finding.remedy == "pip install vla-runtime"


def test_every_remedy_is_printed_below_its_finding(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "findings", lambda models: iter([
        doctor.Finding("ok", "a", "fine"), doctor.Finding("note", "b", "slow", "do this")]))
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["note  b              slow", f"{'':<21}→ do this"]
    monkeypatch.setattr(doctor, "findings", lambda models: iter([doctor.Finding("fail", "c", "broken", "mend")]))
    assert doctor.main(["--models", str(Path("nowhere"))]) == 1
