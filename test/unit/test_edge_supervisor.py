"""The supervisor's rules and its command line."""

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

from edge_rig import ROBOT_FILE, make_model

from vla_common.backoff import Backoff
from vla_common.config import ConfigError
from vla_common.manifest import FileChanged, ManifestMissing, ModelMismatch
from vla_common.zenoh_session import BusError
from vla_edge import edge_main
from vla_edge.edge_main import check, main, parse

NS = 1_000_000_000


def test_restarts_come_later_each_time_and_soon_again_after_a_good_run():
    restart = Backoff(0.1, 2.0, 10.0)
    now_ns, delays = 0, []
    for _ in range(7):
        restart.started(now_ns)
        delays.append(restart.ended(now_ns + NS))
        now_ns = restart.due_ns
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    restart.started(now_ns)
    assert restart.due_ns is None and restart.ended(now_ns + 11 * NS) == 0.1


def test_options_override_the_file_and_each_other(tmp_path):
    file = tmp_path / "edge.yaml"
    file.write_text("robot_id: from_file\nbus: tcp/127.0.0.1:1\npolicy: {replan_ticks: 3}\n")
    config = parse(["--config", str(file), "--set", "policy.bridge_s=2.0", "--robot-id", "r9", "--record", "a.mcap"])
    assert (config.robot_id, config.bus, config.policy.replan_ticks, config.policy.bridge_s) == (
        "r9", "tcp/127.0.0.1:1", 3, 2.0)
    assert config.record == Path("a.mcap")


def settings(tmp_path, *overrides):
    return parse(["--model", str(tmp_path), "--set", f"robot_file={ROBOT_FILE}",
                  *[part for override in overrides for part in ("--set", override)]])


def test_a_sound_set_up_passes(tmp_path):
    make_model(tmp_path)
    assert len(check(settings(tmp_path))) == 8


@pytest.mark.parametrize("override, error, message", [
    ("robot_id=a/b", ConfigError, "letters, digits"), ("bus=nonsense", BusError, "link/address"),
    ("cloud=tcp/10.0.0.1:7448", BusError, "allow_remote"), ("ensemble.ramp_ticks=0", ConfigError, "ramp"),
    ("motor.period_s=0.02", ModelMismatch, "0.02"), ("robot_file=nowhere.yaml", ConfigError, "robot_file"),
])
def test_what_is_wrong_is_found_before_a_process_starts(tmp_path, override, error, message):
    make_model(tmp_path)
    with pytest.raises(error, match=message):
        check(settings(tmp_path, override))


def test_models_that_do_not_fit(tmp_path):
    with pytest.raises(ManifestMissing):
        check(settings(tmp_path))
    make_model(tmp_path / "m", joint_names=tuple(f"joint{i}" for i in range(8)))
    with pytest.raises(ModelMismatch, match="drives joints"):
        check(settings(tmp_path / "m"))
    make_model(tmp_path / "m")
    with (tmp_path / "m" / "denoise.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(FileChanged):
        check(settings(tmp_path / "m"))


@pytest.mark.parametrize("arguments", [["--set", "nothing=1"], ["--config", "/no/such.yaml"], ["--model", "/no/model"]])
def test_wrong_settings_end_with_a_message_and_code_2(arguments, caplog, monkeypatch):
    monkeypatch.setattr(edge_main, "setup_logging", lambda *_: None)
    with caplog.at_level(logging.ERROR):
        assert main(["--set", f"robot_file={ROBOT_FILE}", *arguments]) == 2
    assert caplog.records and not any(record.exc_info for record in caplog.records)
