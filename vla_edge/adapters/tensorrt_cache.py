"""TensorRT engines on disk: each fits one ONNX file, one TensorRT version and one kind of GPU, and takes long to build.

A file holds a line of magic, a line of JSON (what it was built for, sha256 of the engine), and the engine. Whatever
does not match is not used: an engine of another version would be refused by TensorRT at best, and one of another model
moves the robot elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

LOG = logging.getLogger(__name__)

MAGIC: Final = b"vla-runtime tensorrt engine 1\n"
SUFFIX: Final = ".engine"
_MAX_HEADER: Final = 4096


@dataclass(frozen=True)
class EngineKey:
    """What an engine was built for."""

    graph: str
    onnx_sha256: str
    tensorrt: str
    gpu: str
    compute: str
    precision: str

    @classmethod
    def of(cls, graph: str, onnx: bytes, tensorrt: str, gpu: str, compute: str, precision: str) -> EngineKey:
        """``graph``: name for people; ``onnx``: content of the file."""
        return cls(graph, hashlib.sha256(onnx).hexdigest(), tensorrt, gpu, compute, precision)

    @property
    def file_name(self) -> str:
        """Differs when anything of the key differs."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.graph}-{hashlib.sha256(text.encode()).hexdigest()[:24]}{SUFFIX}"


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/vla-runtime/tensorrt``, by default below ``~/.cache`` (XDG Base Directory Specification)."""
    base = environment.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is invalid and must be ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "vla-runtime" / "tensorrt"


class EngineCache:
    """Engines in one folder, which only its user may read: loading an engine runs it."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is made when something is stored."""
        self._folder = folder

    def load(self, key: EngineKey) -> bytes | None:
        """The engine for ``key``; None, with the reason in the log, if there is none that can be used."""
        path = self._folder / key.file_name
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    return _refused(path, "it belongs to another user")
                if file.read(len(MAGIC)) != MAGIC:
                    return _refused(path, "it is no engine of this release")
                header = json.loads(file.readline(_MAX_HEADER))
                plan = file.read()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return _refused(path, str(error))
        if not isinstance(header, dict) or header.get("key") != asdict(key):
            return _refused(path, "it was built for something else")
        if header.get("sha256") != hashlib.sha256(plan).hexdigest():
            return _refused(path, "it is damaged")
        return plan

    def store(self, key: EngineKey, plan: bytes) -> None:
        """Write an engine, whole or not at all. A folder that cannot be written costs a build per start, said once."""
        header = json.dumps({"key": asdict(key), "sha256": hashlib.sha256(plan).hexdigest()}).encode() + b"\n"
        part = ""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
                part = file.name
                file.write(MAGIC + header + plan)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._folder / key.file_name)
        except OSError as error:
            LOG.warning("cannot keep the TensorRT engine in %s (%s): it is built again at every start; make the folder "
                        "writable or set XDG_CACHE_HOME", self._folder, error)
            if part:
                Path(part).unlink(missing_ok=True)

    def discard(self, key: EngineKey) -> None:
        """Remove an engine that TensorRT refused."""
        (self._folder / key.file_name).unlink(missing_ok=True)


def _refused(path: Path, why: str) -> None:
    LOG.warning("not using %s: %s; building the TensorRT engine again", path, why)
