"""The serving engine as its clients see it: separate pools for prompts and answers beside workers that do both.

    python benchmarks/serving.py [--parts tpot,ttft,transfer,mixed] [--rounds 1] [--transfer shared_memory]
                                 [--tokens 200] [--quick] [--json runs/bench/serving.json]

Each worker process is pinned to one core: P to core 0, D to core 1; "colocated x1" is one worker on core 0 that does
both, "colocated x2" one on each core. Gateway and load generator are this process: on P's core, on the core that
colocated x1 leaves free, on core 0 beside colocated x2. The pools take turns within one run. SmolLM2-135M in float32,
one thread a worker; ``--quick`` takes a tiny random model and little work, to try the benchmark itself.

tpot      time between two tokens as the client gets them, of 8 answers: alone; while 4096-token prompts arrive at the
          same pool, the next when one has its first token; "foreign prompts": the same while the prompts go to another
          worker on core 0, without KV transfer: what two busy cores cost each other on this machine.
          "unused KV": slots of requests that hold no token, of all slots they hold, meanwhile.
ttft      first token of a 2048-token prompt: new; the same again; its tokens and 32 new ones.
transfer  KV of one prompt from P to D, pushed at the end or layer by layer while P computes.
mixed     requests of random lengths at random times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving_parts import tables
from serving_parts.load import NS_PER_MS, Prompts, Trace, decode_phase, one, open_loop, settle
from serving_parts.rig import POOLS, Rig, new_folder, records, rig

PARTS = ("tpot", "ttft", "transfer", "mixed")
SPLIT, ONE, TWO = "disaggregated", "colocated x1", "colocated x2"


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Lengths in tokens."""

    model: str
    vocabulary: int
    blocks: int
    chunk: int
    streams: int
    start: int
    count: int
    limit_s: float
    long: int
    prefix: int
    suffix: int
    transfers: dict[int, int]
    """Prompt length -> repeats of each way to push."""
    requests: int
    rate_hz: float
    scale: float


FULL = Sizes(
    "smollm2", 49152, 1024, 512, 8, 128, 200, 40.0, 4096, 2048, 32, {256: 4, 512: 3, 1024: 2, 4096: 1}, 30, 1.0, 8
)
QUICK = Sizes("tiny", 512, 128, 64, 3, 32, 8, 5.0, 256, 128, 16, {64: 1, 256: 1}, 6, 20.0, 32)


def say(text: str) -> None:
    print(
        f"[{time.perf_counter() - STARTED:5.0f} s, load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True
    )


STARTED = time.perf_counter()


async def tpot(it: Rig, prompts: Prompts, sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """One row per phase and round, gaps included."""
    starts = [prompts.new(sizes.start) for _ in range(sizes.streams)]
    meetings = {SPLIT: ("alone", "foreign prompts", "prompts"), ONE: ("alone", "prompts"), TWO: ("alone", "prompts")}
    conditions = [(pool, meeting) for pool in POOLS for meeting in meetings[pool]]
    rows = []
    for number in range(rounds):
        for pool, meeting in conditions if number % 2 == 0 else conditions[::-1]:
            service = it.use(pool)
            target = {"alone": None, "foreign prompts": it.services[ONE], "prompts": service}[meeting]
            arriving = None if target is None else (target, sizes.long)
            phase = await decode_phase(service, prompts, starts, sizes.count, sizes.limit_s, arriving)
            row = {
                "pool": pool, "meeting": meeting, "round": number, "begin_ns": phase.begin_ns, "end_ns": phase.end_ns,
                "tokens": phase.tokens, "prompts": len(phase.prompts), "gaps_ms": phase.gaps_ms,
                "prompt_ttft_ms": [trace.ttft_ms for trace in phase.prompts if trace.stamps],
                "load": os.getloadavg()[0],
            }  # fmt: skip
            rows.append(row)
            say(f"tpot: {pool}, {meeting}: p99 {tables.percentile(phase.gaps_ms, 99):.0f} ms")
    return rows


async def ttft(it: Rig, prompts: Prompts, sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """One row per request."""
    rows = []
    for _ in range(rounds):
        for pool in (SPLIT, ONE):
            service = it.use(pool)
            prompt = prompts.new(sizes.prefix)
            cases = {
                "cold": prompt,
                "cached": prompt,
                "cached again": prompt,
                "prefix + new": prompt + prompts.new(sizes.suffix),
            }
            for case, tokens in cases.items():
                trace = await one(service, prompts, tokens, 4)
                rows.append({
                    "pool": pool, "case": case.removesuffix(" again"), "ms": trace.ttft_ms,
                    "cached_tokens": trace.cached_tokens, "attempts": trace.attempts,
                })  # fmt: skip
                await settle(service)
            say(f"ttft: {pool}: " + ", ".join(f"{row['case']} {row['ms']:.0f} ms" for row in rows[-4:]))
    return rows


async def transfer(it: Rig, prompts: Prompts, sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """One row per request; what the workers wrote of it is added later."""
    service = it.use(SPLIT)
    rows = []
    for number in range(rounds):
        for length, repeats in sizes.transfers.items():
            for repeat in range(repeats):
                for way in ("at end", "by layer") if (number + repeat) % 2 == 0 else ("by layer", "at end"):
                    it.layerwise_from(1 if way == "by layer" else 1 << 30)
                    trace = await one(service, prompts, prompts.new(length), 4)  # D ends later than P
                    await settle(service)
                    await asyncio.sleep(0.05)  # the workers have noted everything
                    if trace.attempts > 1:
                        say(f"transfer: {length} tokens {way}: left out, it took {trace.attempts} attempts")
                        continue
                    rows.append({
                        "tokens": length, "way": way, "ttft_ms": trace.ttft_ms, "begin_ns": trace.begin_ns,
                        "first_ns": trace.stamps[0], "end_ns": time.monotonic_ns(),
                    })  # fmt: skip
            say(f"transfer: {length} tokens")
    it.layerwise_from(None)
    return rows


async def mixed(it: Rig, prompts: Prompts, sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """Lengths log-normal, with the medians of the Azure conversation trace of 2023 (1020 in, 129 out tokens: Patel et
    al., Splitwise, 2024) divided by ``scale``; arrivals Poisson. The same for every pool."""
    rows = []
    for _ in range(rounds):
        rng = prompts.rng
        at_s = rng.exponential(1 / sizes.rate_hz, sizes.requests).cumsum().tolist()
        lengths = rng.lognormal(0.0, 0.8, (sizes.requests, 2)) * (1020 / sizes.scale, 129 / sizes.scale)
        shapes = [(max(4, min(sizes.long, int(a))), max(2, min(512, int(b)))) for a, b in lengths]
        for pool in (SPLIT, TWO, ONE):
            arrivals = [(at, prompts.new(a), b) for at, (a, b) in zip(at_s, shapes, strict=True)]
            begin = time.perf_counter()
            traces = await open_loop(it.use(pool), prompts, arrivals)
            rows.append(mixed_row(pool, traces, time.perf_counter() - begin))
            say(f"mixed: {pool}")
    return rows


def mixed_row(pool: str, traces: list[Trace], seconds: float) -> dict[str, Any]:
    long = [trace for trace in traces if len(trace.stamps) > 1]
    return {
        "pool": pool, "seconds": seconds, "requests": len(traces),
        "prompt_tokens": sum(trace.prompt_tokens for trace in traces),
        "output_tokens": sum(len(trace.stamps) for trace in traces),
        "ttft_ms": [trace.ttft_ms for trace in traces],
        "gaps_ms": [gap for trace in traces for gap in trace.gaps_ms()],
        "tpot_ms": [(one.stamps[-1] - one.stamps[0]) / NS_PER_MS / (len(one.stamps) - 1) for one in long],
    }  # fmt: skip


async def measure(args: argparse.Namespace, sizes: Sizes, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    prompts = Prompts(args.seed, sizes.vocabulary)
    say("starting four workers")
    async with rig(sizes.model, args.transfer, sizes.chunk, sizes.blocks, folder) as it:
        for pool in POOLS:  # first uses: links between workers, memory
            await one(it.use(pool), prompts, prompts.new(3 * sizes.chunk), 4)
        for part, run in (("tpot", tpot), ("ttft", ttft), ("transfer", transfer), ("mixed", mixed)):
            if part in args.parts.split(","):
                results[part] = await run(it, prompts, sizes, args.rounds)
        if it.restarts():
            raise RuntimeError(f"{it.restarts()} workers died: nothing of this counts")
        results["pinned"] = it.pinned
    return results


def is_missing(sizes: Sizes) -> str:
    """Why the model is not there, or nothing."""
    if sizes.model == QUICK.model:
        return ""
    from vla_models.chat_model import chat_model_folder
    from vla_models.loaders.checkpoint import CheckpointError

    try:
        chat_model_folder(sizes.model)
    except CheckpointError as error:
        return str(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, help="per answer and phase of tpot")
    parser.add_argument("--transfer", default="shared_memory", choices=("shared_memory", "tcp", "nixl"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/serving.json"))
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    sizes = QUICK if args.quick else FULL
    if args.tokens:
        sizes = replace(sizes, count=args.tokens, limit_s=args.tokens / 4)
    if why := is_missing(sizes):
        print(f"skipped: {why}")
        return 0
    load = os.getloadavg()
    with new_folder() as folder:
        results = asyncio.run(measure(args, sizes, Path(folder)))
        report = tables.report(results, records(Path(folder)))
    report |= {
        "model": sizes.model, "transfer_kind": args.transfer, "rounds": args.rounds,
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "pinned": results["pinned"],
        "load_before": load, "load_after": os.getloadavg(),
    }  # fmt: skip
    print(f"{sizes.model}, float32, {args.transfer}, load {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    print(tables.text(report))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(tables.plain(report), indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
