"""Settings and robot files: what is wrong is named before anything moves."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from vla_common.config import ConfigError
from vla_edge.config import EdgeConfig, load_edge_config, load_limits, make_queue
from vla_edge.core.joint_limits import JointLimits, LimitsError

ROOT = Path(__file__).parents[2]
ROBOTS = sorted((ROOT / "config/robots").glob("*.yaml"))


def test_the_file_shows_the_defaults():
    assert load_edge_config(ROOT / "config/edge.yaml", []) == EdgeConfig()


def test_every_setting_is_explained_in_the_file():
    text = (ROOT / "config/edge.yaml").read_text()

    def keys(data):
        for key, value in data.items():
            yield key
            if isinstance(value, dict):
                yield from keys(value)

    import dataclasses
    import json

    wanted = set(keys(json.loads(EdgeConfig().to_json())))
    assert wanted == set(keys(yaml.safe_load(text)))
    assert {field.name for field in dataclasses.fields(EdgeConfig)} <= wanted


def test_children_get_the_same_settings():
    config = load_edge_config(None, ["robot_id=r2", "record=x/y.mcap", "motor.cpu=1", "policy.home_phrases=[a, b]"])
    assert EdgeConfig.from_json(config.to_json()) == config
    assert config.policy.home_phrases == ("a", "b") and config.record == Path("x/y.mcap")


@pytest.mark.parametrize("override, message", [
    ("policy.replan_tick=3", "replan_ticks"), ("motor.period_s=fast", "period_s"), ("motor.period_s=3", "0.001"),
    ("ensemble.rule=latest", "rule"), ("policy.replan_ticks=0", "at least 1"), ("motor.fifo_priority=100", "0"),
    ("policy.home_limit_share=1.0", "home_limit_share"), ("io.estop_topic=on", "'off', 'watch', 'require'"),
    ("io.estop_silence_s=0", "positive"), ("supervisor.motor_hang_s=0", "positive"), ("shield.stall_ticks=0", "stall_ticks"),
])
def test_wrong_settings_are_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_edge_config(None, [override])


def test_only_a_required_emergency_stop_input_must_be_heard():
    within = {mode: load_edge_config(None, [f"io.estop_topic={mode}", "io.estop_silence_s=0.3"]).io.estop_required_within_s
              for mode in ("off", "watch", "require")}  # an unquoted off is false in YAML
    assert within == {"off": None, "watch": None, "require": 0.3}


@pytest.mark.parametrize("override", ["ensemble.ramp_ticks=0", "ensemble.alpha=2.0"])
def test_wrong_parameters_of_a_rule_are_named(override):
    rule = "ramp" if "ramp" in override else "constant"
    with pytest.raises(ConfigError, match="ensemble"):
        make_queue(load_edge_config(None, [override, f"ensemble.rule={rule}"]), 8)


# ------------------------------------------------------------------ robot files


@pytest.mark.parametrize("path", ROBOTS, ids=lambda path: path.stem)
def test_robot_files_are_usable_and_name_their_source(path):
    limits = load_limits(path, 0.01)
    assert len(limits) >= 6
    assert "https://" in path.read_text()
    assert (limits.ready >= limits.position_lower).all() and (limits.ready <= limits.position_upper).all()


def test_the_panda_keeps_below_its_published_limits():
    limits = load_limits(ROOT / "config/robots/panda_2f85.yaml", 0.01)
    assert limits.names[:7] == tuple(f"panda_joint{i}" for i in range(1, 8))
    published = np.array([[2.175] * 4 + [2.61] * 3, [15, 7.5, 10, 12.5, 15, 20, 20],
                          [7500, 3750, 5000, 6250, 7500, 10000, 10000]])
    assert (limits.velocity[:7] == pytest.approx(0.9 * published[0]))
    assert (limits.acceleration[:7] <= published[1]).all() and (limits.jerk[:7] <= published[2]).all()
    assert limits.velocity[7] == 4.5  # not scaled


def robot(**changes):
    joint = {"name": "j", "lower": -1.0, "upper": 1.0, "velocity": 2.0, "acceleration": 10.0, "jerk": 500.0,
             "ready": 0.0, "reentry_gap": 0.05, **changes}
    return {"scale": {"velocity": 0.5, "acceleration": 1.0, "jerk": 1.0},
            "joints": [{k: v for k, v in joint.items() if v is not None}]}


def test_factors_lower_the_limits():
    assert JointLimits.from_mapping(robot()).velocity[0] == 1.0
    assert JointLimits.from_mapping(robot(scaled=False)).velocity[0] == 2.0


@pytest.mark.parametrize("changes, message", [
    ({"velocity": 0.0}, "velocity must be positive"), ({"jerk": -1.0}, "jerk must be positive"),
    ({"acceleration": float("nan")}, "acceleration needs 1 finite"), ({"lower": 1.0}, "lower must be below upper"),
    ({"ready": 1.1}, "ready pose must lie inside"), ({"reentry_gap": 0.0}, "reentry_gap"),
    ({"velocity": None}, "missing \\['velocity'\\]"), ({"speed": 1.0}, "unknown \\['speed'\\]"),
])
def test_robot_files_that_cannot_be_are_refused(changes, message):
    with pytest.raises(LimitsError, match=message):
        JointLimits.from_mapping(robot(**changes))


@pytest.mark.parametrize("scale", [0.0, 1.1, -1, "half", None])
def test_a_factor_never_raises_a_limit(scale):
    data = robot()
    data["scale"]["jerk"] = scale
    with pytest.raises(LimitsError, match="may only lower"):
        JointLimits.from_mapping(data)


@pytest.mark.parametrize("data", [[], {"joints": []}, {**robot(), "extra": 1}, {"joints": [], "scale": 3}])
def test_files_of_another_form_are_refused(data):
    with pytest.raises(LimitsError):
        JointLimits.from_mapping(data)


def test_names_must_differ():
    data = robot()
    data["joints"] = data["joints"] * 2
    with pytest.raises(LimitsError, match="distinct"):
        JointLimits.from_mapping(data)


def test_limits_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        JointLimits.from_mapping(robot()).velocity[0] = 9.0


@pytest.mark.parametrize("period_s", [0.0, -1.0, float("nan"), 0.0005])
def test_periods_that_do_not_fit(period_s):
    with pytest.raises(LimitsError):
        JointLimits.from_mapping(robot()).check_period(period_s)


def test_a_robot_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="config/robots"):
        load_limits(tmp_path / "none.yaml", 0.01)
    (tmp_path / "bad.yaml").write_text("joints: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_limits(tmp_path / "bad.yaml", 0.01)
