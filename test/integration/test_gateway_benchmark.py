"""benchmarks/gateway.py end to end with little work: both doors, their floor and the mock server give numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")
ROOT = Path(__file__).parents[2]


def test_a_quick_run_measures_every_door_and_leaves_out_what_is_not_there(tmp_path):
    path = tmp_path / "gateway.json"
    command = [
        sys.executable, str(ROOT / "benchmarks" / "gateway.py"), "--quick", "--rounds", "1", "--json", str(path),
        "--peer", "sglang=/nowhere/python",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "left out: sglang: no Python at /nowhere/python" in done.stderr
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    rows = {(row["target"], row["case"]): row for row in found["rows"]}
    targets = {"ours HTTP", "ours gRPC", "ours, no door", "mock, no router"}
    assert set(rows) == {(target, case) for target in targets for case in ("short 2", "paced 2", "fast 2")}
    for (target, case), row in rows.items():
        assert row["requests"] >= 2 and row["tokens"] == 8 * row["requests"] and row["request_p50_ms"] > 0
        assert (row["cpu_us_per_request"] is None) == (target == "mock, no router")
        assert (row["added_request_p50_ms"] is None) == (target in ("ours, no door", "mock, no router"))
        if case != "short 2":
            assert 0 < row["token_p50_ms"] <= row["token_p99_ms"] and row["tokens_per_chunk"] >= 1
    assert "CPU of the gateway" in done.stdout and set(found["idle_cpu_s_per_s"]) == targets - {"mock, no router"}
