"""Denoising latency of the shipped policy, side by side in one run on one thread.

    python benchmarks/denoiser.py [--model models/tabletop] [--rounds 300] [--json runs/bench/denoiser.json]

Compares torch eager with ONNX Runtime, and a context encoded once with one encoded at every denoising run. The machine
matters more than the code: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from vla_models.export_onnx import CONTEXT_KV, DENOISE, example_inputs
from vla_models.model_folder import load_head


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def cases(folder: Path) -> dict[str, Callable[[], object]]:
    head, _ = load_head(folder)
    contexts, state = example_inputs(head)
    with torch.no_grad():
        cached = head.context_kv(contexts["context"], contexts["context_prev"])
    encode, denoise = session(folder / CONTEXT_KV), session(folder / DENOISE)
    first = {name: t.numpy() for name, t in contexts.items()}
    rest = {name: t.numpy() for name, t in state.items()}
    kv = dict(zip(("k", "v", "keypoint"), encode.run(None, first), strict=True))

    def torch_run(steps: int) -> object:
        with torch.no_grad():
            return head.denoise(cached, state["proprio"], state["age_s"], state["dt_s"], state["noise"], steps)

    def onnx_whole() -> object:
        fresh = dict(zip(("k", "v", "keypoint"), encode.run(None, first), strict=True))
        return denoise.run(None, {**fresh, **rest})

    return {
        "ONNX Runtime, 4 steps, context reused": lambda: denoise.run(None, {**kv, **rest}),
        "ONNX Runtime, 4 steps, context encoded each time": onnx_whole,
        "torch eager, 1 step, context reused": lambda: torch_run(1),
        "torch eager, 4 steps, context reused": lambda: torch_run(4),
        "torch eager, 10 steps, context reused": lambda: torch_run(10),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tabletop"))
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, default=Path("runs/bench/denoiser.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    named = cases(args.model)
    taken: dict[str, list[float]] = {name: [] for name in named}
    for run in named.values():
        for _ in range(10):
            run()
    order, shuffle = list(named), random.Random(0)
    for _ in range(args.rounds):
        # Interleaved, so that a disturbance of the machine meets all alike; shuffled, so that none always runs on the
        # caches that the same other one left behind.
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            named[name]()
            taken[name].append((time.perf_counter() - start) * 1e3)
    base = float(np.median(taken[next(iter(named))]))
    table = {
        name: {
            "p50_ms": float(np.percentile(v, 50)),
            "p99_ms": float(np.percentile(v, 99)),
            "ratio": float(np.median(v)) / base,
        }
        for name, v in taken.items()
    }
    head, _ = load_head(args.model)
    parameters = sum(p.numel() for p in head.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {args.rounds} interleaved rounds\n{'case':52s} p50 ms  p99 ms  ratio")
    for name, row in table.items():
        print(f"{name:52s} {row['p50_ms']:6.2f}  {row['p99_ms']:6.2f}  {row['ratio']:5.2f}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"parameters": parameters, "rounds": args.rounds, "cases": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
