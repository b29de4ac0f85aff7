"""Generate the Python modules of vla_cloud/gateway/proto from its .proto files. Run it after changing one.

    pip install -e '.[gateway,dev]' && python tools/make_proto.py

``--check`` writes nothing and exits with 1 if a committed module is not what the .proto file gives.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path("vla_cloud/gateway/proto")


def generate(target: Path) -> list[Path]:
    """Write the modules below ``target``, at the same relative paths as in the repository; returns those paths."""
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted((ROOT / FOLDER).glob("*.proto"))
    arguments = [
        "protoc", f"-I{ROOT}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}", f"--python_out={target}",
        f"--pyi_out={target}", f"--grpc_python_out={target}", *(str(source) for source in sources),
    ]  # fmt: skip
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed: see above")
    suffixes = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    return [FOLDER / f"{source.stem}{suffix}" for source in sources for suffix in suffixes]


def changed(target: Path) -> list[Path]:
    """Modules below ``target`` that are not what the .proto files give."""
    with tempfile.TemporaryDirectory() as folder:
        paths = generate(Path(folder))
        return [path for path in paths if _text(Path(folder) / path) != _text(target / path)]


def _text(path: Path) -> list[str] | None:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else None


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only tell which modules are not current")
    if not parser.parse_args(argv).check:
        print(*generate(ROOT), sep="\n")
        return 0
    stale = changed(ROOT)
    for path in stale:
        print(f"{path} is not current: run python tools/make_proto.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
