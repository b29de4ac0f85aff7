"""The manifest of a model folder: what the files are, what they expect, and that they are the ones that were made.

A folder ``models/<name>/`` holds ``manifest.json`` and the files it lists with their sha256. Cloud and edge both verify
it before they use a file, and compare :attr:`Manifest.model_hash` on the wire.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vla_common.config import ConfigError, from_mapping

FILE_NAME: Final = "manifest.json"
FORMAT: Final = 1


class ManifestError(ValueError):
    """A model folder that is refused; the message holds the remedy."""


class ManifestMissing(ManifestError):
    """There is no manifest where one was expected."""


class ManifestInvalid(ManifestError):
    """The manifest is not JSON, or a value is missing, unknown or of the wrong type."""


class FileMissing(ManifestError):
    """A listed file is not there."""


class FileChanged(ManifestError):
    """A listed file is not the one that was made: its sha256 differs."""


class ModelMismatch(ManifestError):
    """The model is whole but not for this use: other joints, horizon or period."""


@dataclass(frozen=True)
class Camera:
    """An image input: camera name and size in pixels."""

    name: str
    width: int
    height: int


@dataclass(frozen=True)
class Instruction:
    """The language input: words in id order and the fixed number of tokens an instruction is padded or cut to."""

    vocabulary: list[str]
    num_tokens: int


@dataclass(frozen=True)
class Context:
    """Context tokens: K tokens of dimension D."""

    num_tokens: int
    dim: int


@dataclass(frozen=True)
class Manifest:
    """Contents of ``manifest.json``.

    Attributes:
        name: model id, also on the wire.
        joint_names: order of the actions' columns.
        horizon: steps of a chunk.
        period_s: time between steps.
        context: shape of the context tokens.
        proprio_names: order of the ``proprio`` input.
        cameras: image inputs in order.
        instruction: vocabulary and token length.
        files: sha256 in hexadecimal by file name.
        shapes: tensor shapes by file and tensor name.
        normalisation: named lists of numbers applied inside the model; the edge compares them with the robot's limits
            before it starts.
        seeds: random seeds by what they seeded.
        metrics: measured results, such as success rates with their counts.
        licence: SPDX id of the weights.
        training_command: what to run to make this model again.
        extra: anything else; readers ignore what they do not know.
        format: version of this layout.
    """

    name: str
    joint_names: list[str]
    horizon: int
    period_s: float
    context: Context
    proprio_names: list[str]
    cameras: list[Camera]
    instruction: Instruction
    files: dict[str, str]
    licence: str
    training_command: str
    shapes: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    normalisation: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Check what types cannot say."""
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}, this release reads {FORMAT}: export the model again")
        if self.horizon < 1 or not self.period_s > 0:
            raise ValueError(f"horizon {self.horizon} and period_s {self.period_s} must be positive")
        if len(set(self.joint_names)) != len(self.joint_names) or not self.joint_names:
            raise ValueError("joint_names must be there and differ from each other")
        for name in self.files:
            if Path(name).name != name or name in ("", ".", ".."):
                raise ValueError(f"file name {name!r} must be a plain name inside the model folder")

    @property
    def model_hash(self) -> bytes:
        """32 bytes that identify the files: sha256 over their sorted sha256."""
        return hashlib.sha256("".join(sorted(self.files.values())).encode()).digest()

    def require(self, joint_names: Sequence[str], horizon: int | None = None, period_s: float | None = None) -> None:
        """Check that the model fits a robot.

        Raises:
            ModelMismatch: joints differ in names or order, or another horizon or period.
        """
        if list(joint_names) != self.joint_names:
            raise ModelMismatch(
                f"model {self.name!r} drives joints {self.joint_names}, the robot has "
                f"{list(joint_names)}: use a model made for this robot (the order counts)"
            )
        if horizon is not None and horizon != self.horizon:
            raise ModelMismatch(f"model {self.name!r} plans {self.horizon} steps, {horizon} expected")
        if period_s is not None and abs(period_s - self.period_s) > 1e-9:
            raise ModelMismatch(f"model {self.name!r} steps every {self.period_s} s, {period_s} s expected")


def sha256_of(path: Path) -> str:
    """sha256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Value for :attr:`Manifest.files`: sha256 of each named file of the folder."""
    return {name: sha256_of(folder / name) for name in sorted(names)}


def load_manifest(folder: str | Path, *, verify: bool = True) -> Manifest:
    """Read the manifest of a model folder and, unless told otherwise, verify its files.

    Raises:
        ManifestMissing, ManifestInvalid, FileMissing, FileChanged: see there.
    """
    path = Path(folder) / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ManifestMissing(f"no {path}: give the folder of a model, or make one with 'vla train'") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ManifestInvalid(f"{path} is not readable JSON: {error}") from error
    try:
        manifest = from_mapping(Manifest, data)
    except ConfigError as error:
        raise ManifestInvalid(f"{path}: {error}") from error
    if verify:
        verify_files(Path(folder), manifest)
    return manifest


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Check every listed file.

    Raises:
        FileMissing: a file is not there.
        FileChanged: a file's sha256 differs.
    """
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise FileMissing(f"{path} is listed in the manifest but not there: fetch the model folder again")
        if (found := sha256_of(path)) != expected:
            raise FileChanged(
                f"{path} has sha256 {found}, the manifest says {expected}: restore the file, or export "
                "the model again if the change was meant"
            )


def write_manifest(folder: str | Path, manifest: Manifest) -> Path:
    """Write ``manifest.json``; the files must be there with the sha256 it lists.

    Raises:
        FileMissing, FileChanged: the manifest does not describe the folder.
    """
    verify_files(Path(folder), manifest)
    path = Path(folder) / FILE_NAME
    path.write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n", encoding="utf-8")
    return path
