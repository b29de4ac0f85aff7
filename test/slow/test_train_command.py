"""`vla train` from nothing to a model folder, with everything tiny: it must run, resume and export; it cannot be good."""

from __future__ import annotations

import json

import pytest

from vla_cli.train_main import main
from vla_common.manifest import load_manifest

TINY = [
    "data.episodes=4", "data.grounding_frames=12", "data.workers=1", "vision.steps=4", "vision.batch=4", "head.steps=4",
    "head.batch=16", "head.samples_per_frame=2", "threads=1", "evaluate_episodes=1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_train_from_nothing(tmp_path, capsys) -> None:
    argv = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "tiny")]
    for setting in TINY:
        argv += ["--set", setting]
    assert main([*argv, "--stage", "data"]) == 0
    assert main([*argv, "--stage", "vision"]) == 0
    assert main(argv) == 0  # resumes: data and vision are done
    out = capsys.readouterr().out
    assert "data: present" in out and "vision: present" in out
    manifest = load_manifest(tmp_path / "tiny")
    assert manifest.horizon == 16 and manifest.metrics["onnx_max_difference"] < 1e-4
    assert set(manifest.metrics["closed_loop"]) >= {"touch_still", "pick_moving", "touch_still_shuffled"}
    assert json.loads((tmp_path / "tiny" / "manifest.json").read_text())["joint_names"][-1] == "gripper"
