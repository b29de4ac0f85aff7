"""Strict reading of safetensors checkpoints: every tensor is accounted for, or the load fails by name.

A checkpoint that loads "almost" gives a model that is almost right, which nobody notices. Pickled checkpoints can
run code when they are opened and are never opened here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vla_models.loaders.errors import (  # noqa: F401 - some for those who import this module
    CheckpointError,
    MissingTensors,
    NotACheckpoint,
    ShapeMismatch,
    UnexpectedTensors,
    UnsafeCheckpoint,
    UnsupportedArchitecture,
    UnsupportedConfig,
    UnsupportedDtype,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor and the shape it must have."""

    source: str
    shape: tuple[int, ...]


TensorPlan = Mapping[str, Sequence[Part]]
"""Parameter name -> the checkpoint tensors whose concatenation along axis 0, reshaped to the parameter, fills it."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``, or NotACheckpoint."""
    if not path.is_file():
        raise NotACheckpoint(f"{path}: no such file; a Hugging Face model folder has one")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotACheckpoint(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise NotACheckpoint(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


class Checkpoint:
    """The tensors of a folder with model.safetensors, or with shards and their index. Read one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _tensor_files(folder)
        self._handles: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def read(self, name: str) -> Tensor:
        """The tensor called ``name``, on the CPU in its stored dtype."""
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = _open(self.folder / file)
        try:
            return self._handles[file].get_tensor(name)
        except SafetensorError as error:
            raise NotACheckpoint(f"{self.folder / file}: tensor {name}: {error}") from error

    def fill(self, module: nn.Module, plan: TensorPlan, ignore: Iterable[str], dtype: torch.dtype) -> None:
        """Assigns every parameter of ``module`` (it may be on the meta device) from the checkpoint.

        ``plan`` covers exactly the module's parameters. ``ignore`` holds prefixes of tensors that belong to parts of
        the checkpoint outside the module (a text tower, a pooling head); anything else left over is an error.
        """
        wanted = {part.source for parts in plan.values() for part in parts}
        missing = wanted - self.names
        if missing:
            raise MissingTensors(f"{self.folder}: {_listing(missing)} missing")
        ignored = tuple(ignore)
        unexpected = {name for name in self.names - wanted if not name.startswith(ignored)}
        if unexpected:
            raise UnexpectedTensors(f"{self.folder}: {_listing(unexpected)} not part of the model in config.json")
        state = {}
        for target, parameter in module.state_dict().items():
            state[target] = self._assemble(plan[target], dtype).reshape(parameter.shape)
        module.load_state_dict(state, strict=True, assign=True)

    def _assemble(self, parts: Sequence[Part], dtype: torch.dtype) -> Tensor:
        tensors = []
        for part in parts:
            tensor = self.read(part.source)
            if tuple(tensor.shape) != part.shape:
                raise ShapeMismatch(f"{part.source}: shape {tuple(tensor.shape)}, config.json implies {part.shape}")
            if not tensor.dtype.is_floating_point:
                raise UnsupportedDtype(f"{part.source}: {tensor.dtype}; save the model de-quantised, in bfloat16")
            tensors.append(tensor.to(dtype))
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name inside ``folder``."""
    if (folder / INDEX_FILE).is_file():
        return _sharded_files(folder)
    if (folder / SINGLE_FILE).is_file():
        return dict.fromkeys(_open(folder / SINGLE_FILE).keys(), SINGLE_FILE)
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise _unsafe(folder, pickled[0])
    raise NotACheckpoint(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _sharded_files(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise NotACheckpoint(f"{folder / INDEX_FILE}: no weight_map")
    present: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise NotACheckpoint(f"{folder / INDEX_FILE}: {name}: {file!r} is not a file name in this folder")
        if Path(file).suffix != ".safetensors":
            raise _unsafe(folder, file)
        if file not in present:
            present[file] = set(_open(folder / file).keys())
        if name not in present[file]:
            raise MissingTensors(f"{folder / file}: {name}, listed in {INDEX_FILE}, missing")
    unlisted = set().union(*present.values()) - weight_map.keys() if present else set()
    if unlisted:
        raise UnexpectedTensors(f"{folder}: {_listing(unlisted)} in the shards but not in {INDEX_FILE}")
    return dict(weight_map)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise NotACheckpoint(f"{path}: no such file")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except SafetensorError as error:
        raise NotACheckpoint(f"{path}: not a complete safetensors file: {error}") from error


def _unsafe(folder: Path, file: str) -> UnsafeCheckpoint:
    return UnsafeCheckpoint(
        f"{folder / file}: pickled weights can run code when opened and are not loaded. Convert them once, where you "
        "trust their origin: AutoModel.from_pretrained(folder).save_pretrained(new_folder, safe_serialization=True)"
    )


def _listing(names: Iterable[str], limit: int = 8) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return f"{len(ordered)} tensor{'s' if len(ordered) != 1 else ''}: {', '.join(ordered[:limit])}{rest}"
