import dataclasses
import hashlib
import json

import pytest

from vla_common import manifest as m

JOINTS = [*(f"panda_joint{number}" for number in range(1, 8)), "gripper"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "context_kv.onnx").write_bytes(b"first")
    (tmp_path / "denoise.onnx").write_bytes(b"second")
    m.write_manifest(
        tmp_path,
        m.Manifest(
            name="demo",
            joint_names=JOINTS,
            horizon=16,
            period_s=0.01,
            context=m.Context(16, 128),
            proprio_names=[*JOINTS, "gripper_measured"],
            cameras=[m.Camera("external", 96, 96)],
            instruction=m.Instruction(["touch", "red"], 8),
            files=m.hash_files(tmp_path, ["denoise.onnx", "context_kv.onnx"]),
            licence="Apache-2.0",
            training_command="vla train",
            shapes={"denoise.onnx": {"actions": [1, 16, 8]}},
            seeds={"train": 1},
            metrics={"success": {"successes": 95, "episodes": 100}},
            extra={"note": "anything"},
        ),
    )
    return tmp_path


def edit(folder, change):
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))


def test_round_trip_and_hash(folder):
    manifest = m.load_manifest(folder)
    assert manifest.context == m.Context(16, 128) and manifest.cameras[0].width == 96
    hashes = sorted(hashlib.sha256(content).hexdigest() for content in (b"first", b"second"))
    assert manifest.model_hash == hashlib.sha256("".join(hashes).encode()).digest() and len(manifest.model_hash) == 32
    renamed = dataclasses.replace(manifest, name="other")
    assert renamed.model_hash == manifest.model_hash


def test_fits_the_robot_or_says_why_not(folder):
    manifest = m.load_manifest(folder)
    manifest.require(JOINTS, horizon=16, period_s=0.01)
    for arguments in ((JOINTS[::-1],), (JOINTS[:7],), (JOINTS, 8), (JOINTS, 16, 0.02)):
        with pytest.raises(m.ModelMismatch):
            manifest.require(*arguments)


def test_changed_and_missing_files(folder):
    (folder / "denoise.onnx").write_bytes(b"tampered")
    with pytest.raises(m.FileChanged, match="denoise.onnx"):
        m.load_manifest(folder)
    assert m.load_manifest(folder, verify=False).name == "demo"
    (folder / "denoise.onnx").unlink()
    with pytest.raises(m.FileMissing, match="fetch the model folder again"):
        m.load_manifest(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("horizon"), "missing value 'horizon'"),
        (lambda data: data.update(horizn=3), "did you mean 'horizon'"),
        (lambda data: data.update(horizon="16"), "horizon: expected int"),
        (lambda data: data["cameras"][0].update(width=None), r"cameras\[0\].width: expected int"),
        (lambda data: data.update(format=2), "format 2"),
        (lambda data: data.update(horizon=0), "must be positive"),
        (lambda data: data.update(joint_names=["a", "a"]), "differ"),
        (lambda data: data["files"].update({"../escape": "00"}), "plain name"),
    ],
)
def test_invalid_manifests(folder, change, message):
    edit(folder, change)
    with pytest.raises(m.ManifestInvalid, match=message):
        m.load_manifest(folder)


def test_no_manifest_and_no_json(tmp_path):
    with pytest.raises(m.ManifestMissing, match="vla train"):
        m.load_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(m.ManifestInvalid, match="not readable JSON"):
        m.load_manifest(tmp_path)
