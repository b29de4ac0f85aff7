"""Punctuality of a 100 Hz clock: the motor process beside the loops that robot scripts usually have, under one load.

    python benchmarks/motor_clock.py [--seconds 20] [--rounds 3] [--json runs/bench/motor_clock.json]

The load is the same for all: policy inference at 20 Hz (ONNX Runtime), Zenoh traffic in and out, and a busy Python
thread. A script that does everything in one process has it as threads beside its clock; the motor process has it in
another process on the same cores. Rounds are interleaved in shuffled order. Lateness of a tick:

* absolute deadlines: waking minus start + k T;
* sleep loop: waking minus (previous waking + T). Kind to it, as its drift is left out and given apart.

Ticks that were overslept by whole periods count as late by that much, and are given as missed.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vla_common.clock import SystemClock  # noqa: E402
from vla_common.manifest import load_manifest  # noqa: E402
from vla_common.process import spawn, stop_all, stop_on_signals  # noqa: E402
from vla_common.zenoh_session import open_bus  # noqa: E402
from vla_edge.adapters.realtime import enter_realtime  # noqa: E402
from vla_edge.child import arguments  # noqa: E402
from vla_edge.config import EdgeConfig, load_edge_config, load_limits  # noqa: E402
from vla_edge.core.chunk import ActionChunk  # noqa: E402
from vla_edge.core.denoiser import FloatArray  # noqa: E402
from vla_edge.core.motor_clock import MotorClock  # noqa: E402
from vla_edge.core.records import EdgeMemory, fill_chunk  # noqa: E402

PERIOD_NS = 10_000_000
CASES = {
    "sleep loop, load in its process": ("sleep", "inside"),
    "absolute deadlines, load in its process": ("deadline", "inside"),
    "sleep loop, process of its own": ("sleep", "outside"),
    "absolute deadlines, process of its own": ("deadline", "outside"),
    "absolute deadlines, process of its own, FIFO": ("fifo", "outside"),
    "vla motor process (with all its work)": ("motor", "outside"),
}
CLOCK = SystemClock()


class Load:
    """Inference, Zenoh and a busy thread, as daemon threads of the calling process."""

    def __init__(self, bus_endpoint: str, model: Path) -> None:
        self._stop = threading.Event()
        self._bus = open_bus(bus_endpoint, node="load")
        from vla_edge.adapters.denoiser_onnx import OnnxDenoiser

        manifest = load_manifest(model)
        self._denoiser = OnnxDenoiser(model, manifest)
        self._tokens: FloatArray = np.zeros((manifest.context.num_tokens, manifest.context.dim), np.float32)
        self._proprio: FloatArray = np.zeros(len(manifest.proprio_names), np.float32)
        self._noise: FloatArray = np.zeros((manifest.horizon, len(manifest.joint_names)), np.float32)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._infer, self._talk, self._spin)]
        for thread in self._threads:
            thread.start()

    def _infer(self) -> None:
        while not self._stop.wait(0.05):
            handle = self._denoiser.encode_context(self._tokens, self._tokens)
            self._denoiser.denoise(handle, self._proprio, 0.1, 0.5, self._noise)

    def _talk(self) -> None:
        out = self._bus.publisher("joint_states", "bench")
        back = self._bus.queue("joint_states", "bench", capacity=64)
        while not self._stop.wait(0.01):
            out.put(bytes(400))
            while back.try_recv() is not None:
                pass

    def _spin(self) -> None:
        data = {"values": list(range(200))}
        while not self._stop.is_set():
            json.loads(json.dumps(data))

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(1.0)
        self._bus.close()


def clock_loop(kind: str, ticks: int) -> dict[str, Any]:
    """Lateness in ns per tick, missed ticks and drift of one loop in this process."""
    if kind == "fifo":
        enter_realtime(80, True, None)
    late = np.zeros(ticks, np.int64)
    begin_ns = CLOCK.monotonic_ns()
    missed = 0
    if kind == "sleep":
        before = begin_ns
        for k in range(ticks):
            time.sleep(max(0.0, (before + PERIOD_NS - CLOCK.monotonic_ns()) * 1e-9))
            now = CLOCK.monotonic_ns()
            late[k], before = now - before - PERIOD_NS, now
        missed = int((late // PERIOD_NS).sum())
    else:
        clock = MotorClock(PERIOD_NS, begin_ns)
        tick = 1
        for k in range(ticks):
            CLOCK.sleep_until_ns(clock.deadline_ns(tick))
            now = CLOCK.monotonic_ns()
            late[k] = now - clock.deadline_ns(tick)
            tick = clock.after(clock.on_wake(tick, now), now)
        missed = clock.missed
        # Where the next deadline lies, against the ideal grid: only whole missed periods may separate them.
        drift_ms = (clock.deadline_ns(tick) - begin_ns - (ticks + missed + 1) * PERIOD_NS) * 1e-6
        return {"late_ns": late.tolist(), "missed": missed, "drift_ms": drift_ms}
    drift_ms = (CLOCK.monotonic_ns() - begin_ns - ticks * PERIOD_NS) * 1e-6
    return {"late_ns": late.tolist(), "missed": missed, "drift_ms": drift_ms}


def motor_process(bus_endpoint: str, seconds: float, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The real motor process: it follows chunks written here, publishes its commands and logs every tick."""
    config = load_edge_config(None, [f"robot_file={ROOT / 'config/robots/panda_2f85.yaml'}", f"bus={bus_endpoint}",
                                     *settings])
    limits = load_limits(config.robot_file, config.motor.period_s)
    memory = EdgeMemory.create("bench", len(limits))
    child = spawn([sys.executable, "-m", "vla_edge.motor_main", *arguments(config, memory.file.path)],
                  environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    try:
        return _drive(memory, limits, config, seconds)
    finally:
        stop_all([child], 2.0)
        memory.file.unlink()
        memory.close()


def _drive(memory: EdgeMemory, limits: Any, config: EdgeConfig, seconds: float) -> dict[str, Any]:
    joints, control, chunk = memory.blank("joints"), memory.blank("control"), memory.blank("chunk")
    end_ns = CLOCK.monotonic_ns() + round((seconds + 1.5) * 1e9)
    cursor, rows, sequence, settled = 0, [], 0, False
    while CLOCK.monotonic_ns() < end_ns:
        joints["sequence"] += 1
        joints["stamp_ns"], joints["position"] = CLOCK.monotonic_ns(), limits.ready
        memory.write("joints", joints)
        found = memory.read("motor")
        if found is not None:
            motor = found[1]
            if not settled:  # the interpreter's start is not part of the figure
                settled, end_ns = True, CLOCK.monotonic_ns() + round(seconds * 1e9)
                control["rearm"] = 1
                memory.write("control", control)
                cursor = memory.ticks.count()
            sequence += 1
            base = int(motor["tick"])
            phase = 0.02 * (base + 1 + np.arange(16))[:, None] * 0.3
            fill_chunk(chunk, ActionChunk("bench", sequence, base, int(motor["stamp_ns"]), config.motor.period_s,
                                          limits.names, limits.ready + 0.1 * np.sin(phase) * (limits.velocity > 0)
                                          * (np.arange(len(limits)) < len(limits) - 1)))
            memory.write("chunk", chunk)
        cursor, records, lost = memory.ticks.drain(cursor, 1024)
        if settled:
            rows += records
        if lost:
            raise RuntimeError(f"{lost} ticks lost by the benchmark: it was stopped for too long")
        time.sleep(0.05)
    ticks = np.frombuffer(b"".join(rows), dtype=memory.dtypes["ticks"])
    if len(ticks) == 0:
        raise RuntimeError("the motor process sent nothing: see its log above")
    gaps = np.diff(ticks["tick"]) - 1
    period = np.diff(ticks["stamp_ns"]) - np.diff(ticks["tick"]) * PERIOD_NS
    moved = float(np.ptp(ticks["position"][:, 0]))
    # A skipped tick is one that was served late by that many periods.
    late = ticks["lateness_ns"].astype(np.int64).copy()
    late[1:] += gaps * PERIOD_NS
    return {"late_ns": late.tolist(), "missed": int(gaps.sum()), "drift_ms": float(np.abs(period).max()) * 1e-6,
            "work_p50_us": float(np.median(ticks["work_ns"])) * 1e-3,
            "work_p999_us": float(np.percentile(ticks["work_ns"], 99.9)) * 1e-3, "moved_rad": moved,
            "scheduling": memory.read("motor")[1]["scheduling"].item().decode()}  # type: ignore[index]


def run_case(kind: str, where: str, seconds: float, bus_endpoint: str, model: Path) -> dict[str, Any]:
    """One round of one case, each in processes of its own."""
    me = [sys.executable, str(Path(__file__).resolve()), "--model", str(model), "--bus", bus_endpoint]
    load = None
    if where == "outside":
        load = subprocess.Popen([*me, "--part", "load"], stdout=subprocess.PIPE)
        assert load.stdout is not None and load.stdout.readline() == b"READY\n"
    try:
        if kind == "motor":
            return motor_process(bus_endpoint, seconds)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            subprocess.run([*me, "--part", kind, "--where", where, "--seconds", str(seconds), "--json", str(out)],
                           check=True)
            result: dict[str, Any] = json.loads(out.read_text())
            return result
    finally:
        if load is not None:
            load.kill()
            load.wait()


def part(args: argparse.Namespace) -> None:
    """What the benchmark starts of itself."""
    if args.part == "load":
        stop = stop_on_signals()
        load = Load(args.bus, args.model)
        print("READY", flush=True)
        stop.wait()
        load.close()
        return
    inside = Load(args.bus, args.model) if args.where == "inside" else None
    time.sleep(0.5)
    result = clock_loop(args.part, round(args.seconds * 1e9 / PERIOD_NS))
    args.json.write_text(json.dumps(result))
    if inside is not None:
        inside.close()


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles over all rounds of a case, ms."""
    late = np.concatenate([np.array(result["late_ns"]) for result in results]) * 1e-6
    row: dict[str, Any] = {f"p{str(q).replace('.', '')}_ms": float(np.percentile(late, q)) for q in (50, 99, 99.9)}
    row.update(max_ms=float(late.max()), ticks=len(late), missed=sum(result["missed"] for result in results),
               drift_ms_per_round=max(abs(result["drift_ms"]) for result in results))
    for key in ("work_p50_us", "work_p999_us", "scheduling", "moved_rad"):
        if key in results[0]:
            row[key] = results[0][key]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="per case and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=ROOT / "models/tabletop")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/motor_clock.json"))
    for hidden in ("--part", "--where", "--bus"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part(args)
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    shuffle = random.Random(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp/127.0.0.1:{probe.getsockname()[1]}"
    with open_bus(endpoint, "router", node="bench_router") as router:
        for number in range(args.rounds):
            order = list(CASES)
            shuffle.shuffle(order)
            for name in order:
                print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr, flush=True)
                results[name].append(run_case(*CASES[name], args.seconds, router.endpoint, args.model))
    report(results, args.json)


def report(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    rows = {name: summary(found) for name, found in results.items()}
    width = max(map(len, rows))
    print(f"{'lateness of a 100 Hz clock, ms':{width}s}    p50     p99   p99.9     max  missed  drift per round")
    for name, row in rows.items():
        print(f"{name:{width}s} {row['p50_ms']:6.3f} {row['p99_ms']:7.3f} {row['p999_ms']:7.3f} {row['max_ms']:7.2f} "
              f"{row['missed']:7d}  {row['drift_ms_per_round']:8.2f} ms")
    motor, sleep = rows["vla motor process (with all its work)"], rows["sleep loop, load in its process"]
    own = rows["sleep loop, process of its own"]
    print(f"motor process: {motor['scheduling']}; work per tick p50 {motor['work_p50_us']:.0f} us, "
          f"p99.9 {motor['work_p999_us']:.0f} us\np99.9 of the sleep loop / the motor process: "
          f"{sleep['p999_ms'] / motor['p999_ms']:.0f} x (in a process of its own: "
          f"{own['p999_ms'] / motor['p999_ms']:.1f} x)")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
