"""Mutation test of the safety files: how many small changes of the code the tests notice.

mutmut makes the mutants and runs them, each in a fork, with the tests that reach the changed function. It works in a
copy of the tree under build/mutation, so the checkout may change meanwhile. The files are those of ``[tool.mutmut]`` in
pyproject.toml. Mutants that no test can tell from the original are listed in equivalent.yaml, each with its reason;
they are counted apart, and an entry that fits no surviving mutant is an error.

    score = (killed + timed out) / (mutants - equivalent)
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; mutmut needs it there too
    import toml as tomllib

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build/mutation"
SOURCES = ("vla_common", "vla_edge", "config", "pyproject.toml")
TESTS = (
    "test/safety", "test/unit/test_edge_chunk_queue.py", "test/unit/test_edge_mailbox.py",
    "test/unit/test_edge_motor.py", "test/unit/test_edge_shared_buffer.py", "test/unit/test_edge_shield.py",
    "test/unit/test_edge_tracking.py", "test/conformance/test_edge_ensembler.py",
)
GOAL = 0.95
COLUMNS = ("mutants", "killed", "timeout", "survived", "equivalent")


@dataclass(frozen=True)
class Mutant:
    """A changed function: ``key`` is mutmut's name, ``removed`` and ``added`` the lines that differ, stripped."""

    file: str
    key: str
    status: str
    removed: str
    added: str

    @property
    def function(self) -> str:
        """Where it is, as ``module.Class.function``."""
        from mutmut.utils.format_utils import orig_function_and_class_names_from_key

        name, owner = orig_function_and_class_names_from_key(self.key)
        module = self.file.removesuffix(".py").replace("/", ".")
        return ".".join(part for part in (module, owner, name) if part)


def safety_files() -> list[str]:
    """Paths from the root, as in pyproject.toml."""
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]["only_mutate"])


def copy_tree() -> None:
    """Bring the copy up to date; unchanged files keep their time, by which mutmut knows them."""
    wanted: dict[Path, Path] = {}
    for name in (*SOURCES, *TESTS):
        source = ROOT / name
        for path in [source] if source.is_file() else source.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted[path.relative_to(ROOT)] = path
    for folder in (WORK, WORK / "mutants"):
        for top in ("vla_common", "vla_edge", "test"):
            for path in (folder / top).rglob("*.py"):
                if path.relative_to(folder) not in wanted:
                    path.unlink()
    for relative, source in wanted.items():
        target = WORK / relative
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def forget_survivors(patterns: list[str]) -> list[str]:
    """What was killed stays killed when tests were only added; returns those of the rest that match a pattern."""
    rest = []
    (WORK / "mutants/mutmut-stats.json").unlink(missing_ok=True)  # which test reaches what may have changed
    for path in WORK.glob("mutants/**/*.meta"):
        data = json.loads(path.read_text(encoding="utf-8"))
        data["exit_code_by_key"] = {key: code if code == 1 else None for key, code in data["exit_code_by_key"].items()}
        path.write_text(json.dumps(data), encoding="utf-8")
        rest += [key for key, code in data["exit_code_by_key"].items()
                 if code is None and any(fnmatch.fnmatch(key, pattern) for pattern in patterns)]
    return rest


def timed_out() -> list[str]:
    """Mutants whose tests did not end in time."""
    return [key for path in WORK.glob("mutants/**/*.meta")
            for key, code in json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"].items()
            if status_of(code) == "timeout"]


def run_mutmut(workers: int, patterns: list[str]) -> None:
    """Raises SystemExit if the tests fail without any mutation."""
    temporary = WORK / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # CI: hypothesis draws the same examples every time. One thread: forks share the cores already.
    environment = {**os.environ, "CI": "1", "PYTEST_DEBUG_TEMPROOT": str(temporary), "OMP_NUM_THREADS": "1",
                   "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(Path(sysconfig.get_path("scripts")) / "mutmut"), "run", "--max-children", str(workers), *patterns]
    done = subprocess.run(command, cwd=WORK, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    (WORK / "mutmut.log").write_bytes(done.stdout)
    shutil.rmtree(temporary, ignore_errors=True)
    if done.returncode != 0:
        sys.stderr.write(done.stdout.decode(errors="replace")[-6000:])
        raise SystemExit(f"mutmut ended with {done.returncode}: see {WORK / 'mutmut.log'}")


def status_of(exit_code: int | None) -> str:
    """pytest's exit code, or minus the signal that ended it; only what a test noticed counts as killed."""
    if exit_code in (-24, 24, 152, 36, -9):  # SIGXCPU, SIGKILL: out of time
        return "timeout"
    if exit_code in (1, 2, 3) or (exit_code is not None and exit_code < 0):  # failed, not importable, crashed
        return "killed"
    if exit_code in (0, 5, 33):  # all passed, or no test reaches the function
        return "survived"
    return "not run"


def collect() -> list[Mutant]:
    """All mutants of the last run."""
    os.chdir(WORK)
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    mutants = []
    for file in safety_files():
        codes = json.loads((WORK / "mutants" / f"{file}.meta").read_text(encoding="utf-8"))["exit_code_by_key"]
        for key, code in codes.items():
            status, removed, added = status_of(code), "", ""
            if status != "killed":
                lines = get_diff_for_mutant(key, path=file).split("\n")[2:]
                removed, added = (" ".join(line[1:].strip() for line in lines if line.startswith(mark)) for mark in "-+")
            mutants.append(Mutant(file, key, status, removed, added))
    return mutants


def judge(mutants: list[Mutant], entries: list[dict[str, str]]) -> tuple[dict[str, Counter[str]], list[Mutant], list[str]]:
    """Counts per file, the survivors that are not excused, and complaints about the list of equivalents."""
    counts: dict[str, Counter[str]] = {file: Counter() for file in safety_files()}
    known = {(entry["function"], entry["line"], entry["mutant"]): entry["reason"].strip() for entry in entries}
    complaints = [f"no reason given: {key}" for key, reason in known.items() if not reason]
    used: set[tuple[str, str, str]] = set()
    survivors = []
    for mutant in mutants:
        status = mutant.status
        key = (mutant.function, mutant.removed, mutant.added)
        if status == "survived" and key in known:
            used.add(key)
            status = "equivalent"
        if status in ("survived", "not run"):
            survivors.append(mutant)
            status = "survived"
        counts[mutant.file].update((status, "mutants"))
    complaints += [f"fits no surviving mutant, remove it: {key}" for key in known if key not in used]
    return counts, survivors, complaints


def score(count: Counter[str]) -> float:
    """Share of the mutants noticed, equivalent ones left out."""
    noticeable = count["mutants"] - count["equivalent"]
    return (count["killed"] + count["timeout"]) / noticeable if noticeable else 1.0


def print_table(counts: dict[str, Counter[str]], total: Counter[str]) -> None:
    """One row per file."""
    print(f"{'file':<36}" + "".join(f"{name:>12}" for name in (*COLUMNS, "score")))
    for name, count in [*counts.items(), ("total", total)]:
        print(f"{name:<36}" + "".join(f"{count[column]:>12}" for column in COLUMNS) + f"{int(1000 * score(count)) / 10:>11.1f}%")


def main() -> int:
    """Exit code 1 below the goal or with a wrong list of equivalents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="keep what was killed before, try the rest again")
    parser.add_argument("--report", action="store_true", help="only report on the last run")
    parser.add_argument("--survivors", action="store_true", help="show the difference that each survivor makes")
    parser.add_argument("--files", action="store_true", help="print the safety files, comma-separated, and end")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench/mutation.json")
    parser.add_argument("patterns", nargs="*", help="mutants to run, e.g. 'vla_edge.core.braking.*'; default all")
    options = parser.parse_args()
    if options.files:
        print(",".join(safety_files()))
        return 0
    start = time.perf_counter()
    if not options.report:
        if not options.again:
            shutil.rmtree(WORK, ignore_errors=True)
        copy_tree()
        rest = forget_survivors(options.patterns)
        run_mutmut(options.workers, rest if options.again else options.patterns)
        if late := timed_out():  # a busy machine may be the reason: only what times out twice counts
            run_mutmut(options.workers, late)
    seconds = time.perf_counter() - start
    entries = yaml.safe_load((Path(__file__).parent / "equivalent.yaml").read_text(encoding="utf-8")) or []
    counts, survivors, complaints = judge(collect(), entries)
    total: Counter[str] = sum(counts.values(), Counter())
    if options.survivors:
        for mutant in survivors:
            print(f"{mutant.key}\n  - {mutant.removed}\n  + {mutant.added}")
    print_table(counts, total)
    for complaint in complaints:
        print(f"equivalent.yaml: {complaint}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = {name: {**{column: count[column] for column in COLUMNS}, "score": round(score(count), 4)}
            for name, count in [*counts.items(), ("total", total)]}
    options.out.write_text(json.dumps({"seconds": round(seconds, 1), "workers": options.workers, "files": rows}, indent=1)
                           + "\n", encoding="utf-8")
    print(f"{seconds:.0f} s with {options.workers} workers; written to {options.out}")
    return int(score(total) < GOAL or bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
