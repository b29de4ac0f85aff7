"""Denoising latency of a policy on one core: every engine that is here, 1, 4 and 10 Euler steps, in one run.

    python benchmarks/denoiser.py [--model models/tabletop] [--rounds 1000] [--cpu 1] [--json runs/bench/denoiser.json]

Context encoded once and reused, as the policy does within a context, and encoded for every chunk. The cases take turns
in random order, so a disturbance of the machine meets all alike: read the ratios. The graphs for other numbers of steps
are exported to a temporary folder first, which takes a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vla_common.manifest import Manifest, hash_files, load_manifest, write_manifest
from vla_edge.core.denoiser import Denoiser, DenoiserError
from vla_edge.core.denoiser_io import DenoiserShapes
from vla_edge.engines import EngineName, choose_engine, make_denoiser
from vla_models.export_onnx import CONTEXT_KV, DENOISE, export_head
from vla_models.model_folder import HEAD, load_head

STEPS = (1, 4, 10)
ENGINES: tuple[tuple[EngineName, str], ...] = (("onnxruntime", "ONNX Runtime"), ("torch", "torch eager"),
                                               ("tensorrt", "TensorRT"))
QUANTILES = {"p50_ms": 50.0, "p99_ms": 99.0, "p99.9_ms": 99.9, "max_ms": 100.0}
CPU_QUANTILES = {"cpu_p50_ms": 50.0, "cpu_p99_ms": 99.0}
"""Of the time that the thread was running: what is left when other programs take the core away."""


def with_steps(source: Path, steps: int, folder: Path) -> Manifest:
    """A copy of the model in ``folder`` whose graph takes so many Euler steps."""
    folder.mkdir()
    manifest = load_manifest(source)
    for name in (CONTEXT_KV, DENOISE, HEAD):
        shutil.copyfile(source / name, folder / name)
    if manifest.extra["head"]["euler_steps"] != steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's, about itself
            export_head(load_head(source)[0], folder, steps)
    extra = {**manifest.extra, "head": {**manifest.extra["head"], "euler_steps": steps}}
    files = hash_files(folder, (CONTEXT_KV, DENOISE, HEAD))
    manifest = dataclasses.replace(manifest, extra=extra, files=files)
    write_manifest(folder, manifest)
    return manifest


def jobs(engine: Denoiser, manifest: Manifest) -> dict[str, Callable[[], object]]:
    """What is timed of one engine."""
    shapes, rng = DenoiserShapes.of(manifest), np.random.default_rng(0)
    now, previous = rng.standard_normal((2, shapes.tokens, shapes.dim)).astype(np.float32)
    proprio = np.array(manifest.normalisation["proprio_mean"], np.float32)
    noise = np.zeros((shapes.horizon, shapes.joints), np.float32)
    handle = engine.encode_context(now, previous)
    return {
        "context reused": lambda: engine.denoise(handle, proprio, 0.1, 0.5, noise),
        "context encoded each time": lambda: engine.denoise(engine.encode_context(now, previous), proprio, 0.1, 0.5,
                                                            noise),
    }


def all_cases(model: Path, scratch: Path, all_steps: list[int]) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Jobs by name, and the engines with their versions."""
    cases: dict[str, Callable[[], object]] = {}
    engines: dict[str, None] = {}
    folders = {steps: (scratch / str(steps), with_steps(model, steps, scratch / str(steps)))
               for steps in all_steps}
    for setting, name in ENGINES:
        try:
            choose_engine(setting)
        except DenoiserError as error:
            print(f"without {name}: {error}")
            continue
        for steps, (folder, manifest) in folders.items():
            engine = make_denoiser(folder, manifest, setting)
            engines[engine.engine] = None
            for job, work in jobs(engine, manifest).items():
                cases[f"{name}, {steps} step{'s' if steps > 1 else ''}, {job}"] = work
    return cases, list(engines)


def measure(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Quantiles in milliseconds by case."""
    taken: dict[str, list[tuple[int, int]]] = {name: [] for name in cases}
    for work in cases.values():
        for _ in range(10):
            work()
    order, shuffle = list(cases), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)  # none always runs on the caches that the same other one left behind
        for name in order:
            start_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            cases[name]()
            cpu_ns = time.thread_time_ns() - cpu_ns
            taken[name].append((time.perf_counter_ns() - start_ns, cpu_ns))
    table = {}
    for name, pairs in taken.items():
        wall, cpu = np.asarray(pairs, np.float64).T / 1e6
        table[name] = {key: float(np.percentile(wall, q)) for key, q in QUANTILES.items()}
        table[name] |= {key: float(np.percentile(cpu, q)) for key, q in CPU_QUANTILES.items()}
    return table


def parameters(model: Path) -> dict[str, int]:
    """Numbers of the head: all, and those in the graph that runs for every chunk."""
    head, _ = load_head(model)
    once = sum(p.numel() for part in (head.kv, head.context_norm, head.keypoint) for p in part.parameters())
    count = sum(p.numel() for p in head.parameters())
    return {"head": count, "denoise_graph": count - once}


def describe_machine(cpu: int | None) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] \
        if info.exists() else []
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "pinned_to": cpu,
            "nice": os.nice(0), "load_average": os.getloadavg()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tabletop"))
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS), help="Euler steps; 4 must be among them")
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)), help="core to stay on (default: last)")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/denoiser.json"))
    args = parser.parse_args()
    if 4 not in args.steps or min(args.steps) < 1:
        parser.error("--steps must hold 4, which the others are compared with, and none below 1")
    os.sched_setaffinity(0, {args.cpu})
    with tempfile.TemporaryDirectory() as scratch:
        cases, engines = all_cases(args.model, Path(scratch), args.steps)
        before = describe_machine(args.cpu)
        table = measure(cases, args.rounds)
    counts = parameters(args.model)
    base = table["ONNX Runtime, 4 steps, context reused"]
    print(f"{counts['head'] / 1e6:.2f} M parameters, {counts['denoise_graph'] / 1e6:.2f} M of them for every chunk; "
          f"{args.rounds} interleaved rounds on one core; load {before['load_average'][0]:.1f} before, "
          f"{os.getloadavg()[0]:.1f} after\n" + "\n".join(engines))
    columns = (*QUANTILES, *CPU_QUANTILES)
    print(f"{'case':50s}" + "".join(f"{key:>12s}" for key in columns) + "  p50 ratio")
    for name, row in table.items():
        numbers = "".join(f"{row[key]:12.2f}" for key in columns)
        print(f"{name:50s}{numbers}{row['p50_ms'] / base['p50_ms']:11.2f}")
    eager = table["torch eager, 4 steps, context reused"]
    ratios = {key: eager[key] / base[key] for key in columns}
    print(f"4-step ONNX Runtime p99 {base['p99_ms']:.2f} ms, torch eager p99 {eager['p99_ms']:.2f} ms: "
          f"{ratios['p99_ms']:.2f} times; p50 {ratios['p50_ms']:.2f}, "
          f"cpu p50 {ratios['cpu_p50_ms']:.2f}, cpu p99 {ratios['cpu_p99_ms']:.2f} times")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"machine": before, "load_average_after": os.getloadavg(), "engines": engines,
                                     "parameters": counts, "rounds": args.rounds, "cases": table,
                                     "torch_eager_over_onnxruntime_4_steps": ratios}, indent=2) + "\n")


if __name__ == "__main__":
    main()
