"""Golden traces of the motor loop: the same chunks at the same instants make the same commands, bit by bit.

They were recorded from the real edge's processes. A change of what is sent to a robot must be meant: then run with
VLA_UPDATE_GOLDEN=1, which records them anew, and look at the difference.

Equal bits on any machine: between a chunk and a command there are only additions, products, quotients, square roots,
comparisons and roundings of float64, which IEEE 754 fixes to the last bit; sums run in a fixed order (``cumsum`` over
rows), there is no matrix product (BLAS), no fused multiply-add (one ufunc per operation) and, with these settings, no
power, exponential or trigonometric function.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import edge_trace
from edge_trace import BRAKING, COASTING, HOLDING, NOMINAL

from vla_cli.replay_main import limits_of, loop_maker
from vla_edge.config import EdgeConfig
from vla_edge.core import tracking
from vla_edge.core.chunk import REJECTS, Reject
from vla_edge.core.motor_loop import OFFER_REFUSED
from vla_edge.core.replay import replay
from vla_edge.core.shield import Reason

FOLDER = Path(__file__).parent / "edge"


def golden(name, tmp_path=None):
    path = FOLDER / f"{name}.npz"
    if tmp_path is not None and os.environ.get("VLA_UPDATE_GOLDEN"):
        edge_trace.record(name, path, tmp_path)
    trace, settings, robot_text = edge_trace.load(path)
    config = EdgeConfig.from_json(settings)
    return trace, loop_maker(config, limits_of(robot_text, config.motor.period_s))


@pytest.mark.parametrize("name", edge_trace.RUNS)
def test_the_commands_are_the_golden_ones(name, tmp_path):
    trace, make_loop = golden(name, tmp_path)
    result = replay(trace, make_loop)
    assert result.identical, str(result.first)
    assert result.begun == 1 and not result.missing and result.lost == 0
    assert 100 < result.compared == len(trace.ticks) - 1


def refused(trace):
    return {REJECTS[verdict - OFFER_REFUSED] for verdict in trace.ticks["offered_verdict"] if verdict >= OFFER_REFUSED}


def test_the_scenes_show_what_they_are_named_after():
    traces = {name: golden(name)[0] for name in edge_trace.RUNS}
    states = {name: set(trace.ticks["state"].tolist()) for name, trace in traces.items()}
    reasons = {name: set(trace.ticks["reason"].tolist()) for name, trace in traces.items()}
    speeds = np.diff(traces["nominal"].ticks["command"][:, 0]) / 0.01
    assert NOMINAL in states["nominal"] and speeds.min() < -0.2 and speeds.max() > 0.2
    assert states["outage"] == {NOMINAL, COASTING, BRAKING, HOLDING} and Reason.QUEUE_EMPTY in reasons["outage"]
    assert Reason.ESTOP in reasons["emergency_stop"] and BRAKING in states["emergency_stop"]
    assert len(set(traces["emergency_stop"].ticks["segment"].tolist())) == 2
    assert {Reject.OLDER, Reject.FUTURE_TICK, Reject.NOT_FINITE} <= refused(traces["stranger_chunks"])
    late = [c for c in traces["stranger_chunks"].chunks if c.session == "stranger"
            and c.sequence in traces["stranger_chunks"].ticks["chunk_sequence"]]
    ticks = traces["stranger_chunks"].ticks
    assert any(ticks["tick"][np.argmax(ticks["chunk_sequence"] == c.sequence)] - c.base_tick > 5 for c in late)
    assert Reason.MOTOR_STALLED in reasons["stall"] and int(traces["stall"].ticks["missed"][-1]) > 10
    for trace in traces.values():  # after every stop it was armed and moved again
        assert (np.diff(np.flatnonzero(trace.ticks["state"] == NOMINAL)) > 0).any()


def test_a_changed_limit_is_found(monkeypatch):
    monkeypatch.setattr(tracking, "LIMIT_MARGIN", 1.1e-9)
    found = [replay(*golden(name)) for name in ("outage", "emergency_stop")]
    assert any(not result.identical for result in found)


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.npz")) < 300_000
    assert {path.stem for path in FOLDER.glob("*.npz")} == set(edge_trace.RUNS)


def test_storage_loses_nothing():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(50, 3)) * 10.0 ** rng.integers(-300, 300, (50, 3))
    rows[3], rows[4, 1], rows[5] = np.nan, -np.inf, -0.0
    back = edge_trace.unpack(edge_trace.pack(rows), 3)
    assert (back.view(np.uint64) == rows.view(np.uint64)).all()
