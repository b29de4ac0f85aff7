import subprocess
import sys
import types
from pathlib import Path

import pytest

from vla_cli import doctor
from vla_cli.main import COMMANDS, main
from vla_common.config import ConfigError

ROOT = Path(__file__).parents[2]


def test_help_lists_every_subcommand(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command.summary in text for command in COMMANDS.values())
    assert main([]) == 2
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0


def test_unknown_subcommand_names_the_nearest(capsys):
    assert main(["demp"]) == 2
    assert "did you mean 'vla demo'?" in capsys.readouterr().err
    assert main(["xyzzy"]) == 2
    assert "'vla --help' lists them" in capsys.readouterr().err


def fake(monkeypatch, function):
    monkeypatch.setitem(sys.modules, COMMANDS["edge"].module, types.SimpleNamespace(main=function))


def test_arguments_and_exit_code_pass_through(monkeypatch):
    seen = []
    fake(monkeypatch, lambda argv: seen.extend(argv) or 7)
    assert main(["edge", "--set", "a.b=c", "--help", "-x"]) == 7
    assert seen == ["--set", "a.b=c", "--help", "-x"]


def test_mendable_errors_are_one_line(monkeypatch, capsys):
    def refuse(argv):
        raise ConfigError("unknown key 'rate_hs'; did you mean 'rate_hz'?")

    fake(monkeypatch, refuse)
    assert main(["edge"]) == 2
    assert capsys.readouterr().err == "vla edge: unknown key 'rate_hs'; did you mean 'rate_hz'?\n"


def test_missing_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    module = types.ModuleType("vla_cloud.cloud_main")
    monkeypatch.delitem(sys.modules, module.__name__, raising=False)

    def load(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("vla_cli.main.importlib.import_module", load)
    assert main(["cloud"]) == 2
    assert "torch is not installed: pip install 'vla-runtime[cloud]'" in capsys.readouterr().err


def test_the_command_imports_nothing_heavy():
    code = (
        "import sys, vla_cli.main; vla_cli.main.main(['--help']);"
        "print(sorted({'torch', 'mujoco', 'onnxruntime', 'zenoh', 'rosbags'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_doctor_reports_each_subject_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "working_backend", lambda: None)
    code = doctor.main(["--models", str(tmp_path)])
    lines = capsys.readouterr().out
    assert code == 1 or "rendering      not tried" in lines
    for subject in ("python", "extra base", "rendering", "real time", "memory lock", "cpu governor", "swap", "kernel",
                    "engine", "gpu", "tensorrt", "zenoh", "ros 2", "models"):
        assert lines.count(f"  {subject} ") == 1
    assert "no model folder" in lines


def test_doctor_remedies(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.check_extra("base").level == "fail"
    assert doctor.check_extra("edge").remedy == "pip install 'vla-runtime[edge]'"
    assert doctor.check_graphics().level == "note"
    governor = tmp_path / "cpu0" / "cpufreq" / "scaling_governor"
    governor.parent.mkdir(parents=True)
    governor.write_text("powersave\n")
    assert doctor.check_governor(tmp_path).remedy.startswith("cpupower frequency-set -g performance")
    governor.write_text("performance\n")
    assert doctor.check_governor(tmp_path).level == "ok"
    assert doctor.check_shared_memory(tmp_path / "none").level == "fail"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    (finding,) = doctor.check_models(tmp_path)
    assert finding.level == "fail" and finding.subject == "model broken"
