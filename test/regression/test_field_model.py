"""Models that do not fit: refused when the edge starts, by name and with a remedy; never at the first motion."""

import dataclasses
import json
import logging

import field_rig
import numpy as np
import pytest
from edge_rig import make_model
from field_rig import LIMITS, ROBOT_FILE, ROOT, T

from vla_common.manifest import ModelMismatch, load_manifest
from vla_edge import edge_main
from vla_edge.adapters.denoiser_onnx import OnnxDenoiser
from vla_edge.core.denoiser import DenoiserError
from vla_edge.core.model_check import check_horizon, check_normalisation

TABLETOP = ROOT / "models/tabletop"
DEGREES = 180.0 / np.pi


def start(folder, *overrides, caplog):
    """Exit code of `vla edge` and what it says; it must not get as far as making shared memory."""
    arguments = ["--model", str(folder), "--set", f"robot_file={ROBOT_FILE}"]
    for override in overrides:
        arguments += ["--set", override]
    with caplog.at_level(logging.ERROR):
        code = edge_main.main(arguments)
    return code, caplog.text


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def started(*_, **__):
        raise AssertionError("the edge went on")

    monkeypatch.setattr(edge_main, "setup_logging", lambda *_: None)
    monkeypatch.setattr(edge_main, "end_with_parent", lambda *_: None)
    monkeypatch.setattr(edge_main, "stop_on_signals", started)


@pytest.mark.parametrize("order", [
    pytest.param(LIMITS.names[::-1], id="reversed"),
    pytest.param(("gripper", *LIMITS.names[:7]), id="gripper first"),
    pytest.param(tuple(f"joint{i}" for i in range(8)), id="other names"),
])
def test_11_a_model_with_joints_in_another_order_is_refused_at_start(tmp_path, caplog, order):
    """lerobot#4452: a policy trained with another joint order drove the wrong joints, without any message."""
    make_model(tmp_path, joint_names=order)
    code, text = start(tmp_path, caplog=caplog)
    assert code == 2 and "drives joints" in text and "the order counts" in text and order[0] in text


# ------------------------------------------------------------------ normalisation


def with_statistics(change):
    """The shipped model's manifest with other statistics."""
    manifest = load_manifest(TABLETOP)
    statistics = {key: np.array(value) for key, value in manifest.normalisation.items() if key != "pixel_mean"}
    change(statistics)
    return dataclasses.replace(manifest, normalisation={k: v.tolist() for k, v in statistics.items()})


def test_17_the_shipped_model_fits_its_robot():
    """The check of the next tests must not refuse what is right, nor a robot that was slowed down to a tenth."""
    manifest = load_manifest(TABLETOP)
    check_normalisation(manifest, LIMITS)
    arm = np.array([0.1 / 0.9] * 7 + [1.0])
    check_normalisation(manifest, dataclasses.replace(LIMITS, velocity=LIMITS.velocity * arm))
    assert {"action_std", "proprio_mean", "proprio_std"} <= set(manifest.normalisation)
    check_normalisation(dataclasses.replace(manifest, normalisation={}), LIMITS)
    foreign = dataclasses.replace(manifest, proprio_names=[*manifest.proprio_names[:8], "wrist_force_n"])
    foreign.normalisation["proprio_mean"][8], foreign.normalisation["proprio_std"][8] = -40.0, 12.0
    check_normalisation(foreign, LIMITS)  # an input that is no joint has no limits


def scale(key, factor):
    def change(statistics):
        statistics[key] = statistics[key] * factor

    return change


def put(key, value):
    def change(statistics):
        statistics[key] = np.asarray(value)

    return change


def put_at(key, at, value):
    def change(statistics):
        statistics[key][at] = value

    return change


@pytest.mark.parametrize("change, message", [
    (scale("action_std", DEGREES), r"action_std of panda_joint1 at step 0 is 0\.0986"),
    (put_at("action_std", (3, 7), 100.0), r"action_std of gripper at step 3 is 100"),  # percent
    (scale("proprio_mean", DEGREES), "proprio_mean of command:panda_joint2 is 10.2"),
    (put_at("proprio_mean", 3, 0.5), "proprio_mean of command:panda_joint4 is 0.5, which lies outside"),
    (put_at("proprio_mean", 8, 63.5), "proprio_mean of measured:gripper is 63.5"),
    (scale("proprio_std", DEGREES), "proprio_std of command:panda_joint1 is 8.8"),
    (put_at("proprio_std", 7, 0.6), "proprio_std of command:gripper is 0.6, which is more than any motion"),
    (put_at("proprio_std", 2, 0.0), "proprio_std of command:panda_joint3 is 0, which must be positive"),
    (put_at("action_std", (0, 0), 0.0), "action_std of panda_joint1 at step 0 is 0, which must be positive"),
    (put_at("action_std", (0, 0), -0.01), "must be positive"),
    (put_at("action_std", (5, 2), np.nan), r"action_std\[5, 2\] is nan, not a finite number"),
    (put_at("proprio_std", 4, np.inf), r"proprio_std\[4\] is inf"),
    (put("action_std", np.ones((16, 7)) * 1e-3), r"action_std has shape \[16, 7\], expected \[16, 8\]"),
    (put("proprio_mean", np.zeros(8)), r"proprio_mean has shape \[8\], expected \[9\]"),
    (put("proprio_mean", np.array(["a"] * 9)), "proprio_mean is not numbers"),
    (put("proprio_q99", np.array([0.0] * 3 + [0.5] + [0.0] * 5)), "proprio_q99 of command:panda_joint4 is 0.5"),
    (put("action_q01", np.full((16, 8), -1.0)), "action_q01 of panda_joint1 at step 0 is -1"),
])
def test_17_statistics_that_the_joints_cannot_have_are_refused(change, message):
    """Statistics of another robot, in degrees or in percent un-normalise to poses that the arm cannot reach (asked for in
    reviews of lerobot#3804, where averaged quantiles stood for 39.3° instead of 13.6°)."""
    with pytest.raises(ModelMismatch, match=message) as caught:
        check_normalisation(with_statistics(change), LIMITS)
    assert "use a model trained for this robot" in str(caught.value)


def test_17_quantiles_in_the_wrong_order_are_refused():
    """As above: exchanged quantiles mirror every motion."""
    def exchange(statistics):
        half = np.full((16, 8), 0.001)
        statistics["action_q01"], statistics["action_q99"] = half, -half

    with pytest.raises(ModelMismatch, match="action_q99 of panda_joint1 at step 0 is -0.001, which is below action_q01"):
        check_normalisation(with_statistics(exchange), LIMITS)


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_17_at_the_start_of_the_edge(tmp_path, caplog):
    """As above, with the command that an operator gives: exit code 2, joint and number in the message."""
    make_model(tmp_path)
    edit_manifest(tmp_path, lambda data: data.update(normalisation={"action_std": [[57.3] * 8] * 16}))
    code, text = start(tmp_path, caplog=caplog)
    assert code == 2 and "action_std of panda_joint1 at step 0 is 57.3" in text and "export it again" in text


# ------------------------------------------------------------------ horizon


@pytest.mark.parametrize("horizon, override, message", [
    (16, "gate.max_horizon=15", "plans 16 steps, but the edge takes 15 at most"),
    (65, "gate.max_horizon=80", "plans 65 steps, but the edge takes 64 at most"),  # the shared memory's
    (8, "policy.replan_ticks=8", "plans 8 steps, but policy.replan_ticks is 8"),
    (16, "ensemble.ramp_ticks=17", "plans 16 steps, but ensemble.ramp_ticks is 17"),
])
def test_18_settings_that_do_not_fit_the_horizon_are_refused_at_start(tmp_path, caplog, horizon, override, message):
    """Horizon of the model and of the client set in two places (LeRobot async actions_per_chunk, openpi action_horizon):
    chunks were cut, repeated or refused one by one while the robot stood there armed."""
    make_model(tmp_path, horizon)
    code, text = start(tmp_path, override, caplog=caplog)
    assert code == 2 and message in text


def test_18_the_bounds_themselves_are_allowed(tmp_path):
    """The bounds belong to what is allowed; the ramp counts only for rules that have one."""
    make_model(tmp_path, 64)
    manifest = load_manifest(tmp_path)
    check_horizon(manifest, longest=64, replan_ticks=63, ramp_ticks=64)
    make_model(tmp_path, 4)
    with pytest.raises(ModelMismatch, match="ensemble.prefix_ticks is 64: every row would be frozen"):
        check_horizon(manifest, longest=64, replan_ticks=5, prefix_ticks=64)
    check_horizon(manifest, longest=64, replan_ticks=5, prefix_ticks=63)
    for override in ("ensemble.rule=replace", "ensemble.ramp_ticks=4"):
        edge_main.check(edge_main.parse(["--model", str(tmp_path), "--set", f"robot_file={ROBOT_FILE}",
                                         "--set", "policy.replan_ticks=3", "--set", override]))


def test_18_a_graph_of_another_horizon_than_the_manifest_is_refused(tmp_path, caplog):
    """As above, inside the model folder: by the shapes that the manifest lists, and by the graph itself when loaded."""
    make_model(tmp_path)
    shapes = {"denoise.onnx": {"actions": [1, 16, 8]}}
    edit_manifest(tmp_path, lambda data: data.update(horizon=12, shapes=shapes))
    code, text = start(tmp_path, caplog=caplog)
    assert code == 2 and "denoise.onnx answers actions [1, 16, 8], the manifest says [1, 12, 8]" in text
    with pytest.raises(DenoiserError, match="not of one export"):
        OnnxDenoiser(tmp_path, load_manifest(tmp_path))


def test_18_the_planner_uses_the_models_horizon(make_edge):
    """As above, at run time: what is planned is as long as the model says, whatever the settings' defaults are."""
    edge = make_edge().start()
    assert {chunk.horizon for chunk in edge.chunks} == {field_rig.MANIFEST.horizon}
    assert {chunk.period_s for chunk in edge.chunks} == {T}
