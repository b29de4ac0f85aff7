import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from vla_common.config import ConfigError, from_mapping, load_config


class Mode(enum.Enum):
    RAMP = 1
    CONSTANT = 2


@dataclass(frozen=True)
class Limits:
    speed_rad_s: tuple[float, ...] = (1.0,)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Example:
    robot: str
    rate_hz: float = 100.0
    steps: int = 16
    fast: bool = False
    mode: Mode = Mode.RAMP
    link: Literal["tcp", "udp"] = "tcp"
    folder: Path = Path("models")
    age_s: float | None = None
    pair: tuple[int, str] = (1, "a")
    weights: dict[str, float] = field(default_factory=dict)
    seen: Sequence[int] = ()
    table: Mapping[str, Limits] = field(default_factory=dict)
    limits: Limits = Limits()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rate_hz <= 0:
            raise ValueError("rate_hz must be positive")


def test_file_and_overrides(tmp_path):
    path = tmp_path / "edge.yaml"
    path.write_text(
        "robot: panda\nrate_hz: 50\nmode: constant\nage_s: null\npair: [3, x]\nweights: {a: 1}\nseen: [1, 2]\n"
        "limits: {speed_rad_s: [2, 3.5]}\ntable: {left: {names: [a]}}\nextra: {any: [1, {b: c}]}\n"
    )
    config = load_config(Example, path, ["limits.names=[x, y]", "steps=8", "fast=true", "age_s=0.5", "folder=out"])
    assert config == Example(
        "panda",
        50.0,
        8,
        True,
        Mode.CONSTANT,
        folder=Path("out"),
        age_s=0.5,
        pair=(3, "x"),
        weights={"a": 1.0},
        seen=(1, 2),
        limits=Limits((2.0, 3.5), ["x", "y"]),
        table={"left": Limits(names=["a"])},
        extra={"any": [1, {"b": "c"}]},
    )
    assert isinstance(config.rate_hz, float) and isinstance(config.weights["a"], float)


def test_empty_file_and_no_file(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(Limits, tmp_path / "empty.yaml") == load_config(Limits) == Limits()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "missing value 'robot'"),
        (["robot=a", "rate_hs=3"], "unknown key 'rate_hs'; did you mean 'rate_hz'?"),
        (["robot=a", "limits.speed_rads=[1]"], "unknown key 'limits.speed_rads'; did you mean 'speed_rad_s'?"),
        (["robot=a", "zzz=1"], "valid keys: robot, rate_hz"),
        (["robot=3"], "robot: expected str, got int 3"),
        (["robot=a", "rate_hz=fast"], "rate_hz: expected float, got str 'fast'"),
        (["robot=a", "rate_hz=true"], "rate_hz: expected float, got bool True"),
        (["robot=a", "steps=1.5"], "steps: expected int"),
        (["robot=a", "fast=1"], "fast: expected bool"),
        (["robot=a", "mode=rmap"], "mode: 'rmap' is none of ramp, constant"),
        (["robot=a", "link=tpc"], "did you mean 'tcp'?"),
        (["robot=a", "age_s=old"], "age_s: expected float"),
        (["robot=a", "pair=[1]"], "pair: expected 2 values, got 1"),
        (["robot=a", "limits.speed_rad_s=[1, x]"], "limits.speed_rad_s[1]: expected float"),
        (["robot=a", "limits.names=x"], "limits.names: expected a list"),
        (["robot=a", "limits=[1]"], "limits: expected keys and values"),
        (["robot=a", "table.left.name=[a]"], "unknown key 'table.left.name'; did you mean 'names'?"),
        (["robot=a", "weights=3"], "weights: expected keys and values"),
        (["robot=a", "rate_hz=-1"], "rate_hz must be positive"),
        (["robot"], "not of the form key.sub=value"),
        (["a..b=1"], "not of the form"),
        (["robot=a", "robot.x=1"], "'robot' holds a value, not keys"),
        (["robot=[1"], "not YAML"),
    ],
)
def test_refusals(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(Example, None, overrides)
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="--config"):
        load_config(Limits, tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    for text, match in (("a: [", "cannot read"), ("- 1\n", "holds a list"), ("a: !!python/name:os.system x", "cannot")):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=match):
            load_config(Limits, bad)


def test_the_file_is_named(tmp_path):
    path = tmp_path / "edge.yaml"
    path.write_text("nmaes: []\n")
    with pytest.raises(ConfigError, match=r"edge\.yaml: unknown key 'nmaes'"):
        load_config(Limits, path)
    with pytest.raises(ConfigError, match="top level"):
        from_mapping(Limits, [1])
