"""The router of chat requests: time of a decision with a million blocks in its index, and what it saves.

    python benchmarks/router.py [--trace conversation_trace.jsonl] [--quick] [--json runs/bench/router.json]

First: microseconds per decision (hashing the prompt once, then placing it on a P and a D), events per second and bytes
per node. Then: a trace replayed with 16 prefill and 16 decode workers in simulated time (bounded caches, KV events that
arrive late, one prompt at a time per P), by our router, least load and round robin. Blocks are those of the trace, 512
tokens, of which the last of a prompt may be a part, as its publishers count. The trace is public:
conversation_trace.jsonl in FAST25-release/traces of https://github.com/kvcache-ai/Mooncake (Apache-2.0). Without
--trace a synthetic one is used, whose numbers say nothing about real conversations.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from router_parts import latency, trace
from router_parts.cluster import Rules, replay

from vla_cloud.core.router.settings import PlacementConfig


def configs() -> dict[str, PlacementConfig]:
    """The router as it is by default, and what it is compared with."""
    ours = PlacementConfig()
    return {
        "ours (cost)": ours,
        "least load": replace(ours, scorer="least_load"),
        "round robin": replace(ours, scorer="round_robin"),
    }


def report(found: dict[str, Any]) -> str:
    """Tables."""
    lines = []
    if "latency" in found:
        row = found["latency"]
        lines.append(
            f"Index of {row['nodes']:,} blocks, {row['workers']} workers; prompts of {row['prompt_tokens_p50']:,.0f} "
            f"tokens (median), {row['prompt_tokens_mean']:,.0f} (mean)\n"
        )
        lines.append(f"  {'microseconds: wall p50, p99, CPU p50, p99':34s}")
        for name, told in (
            ("hash_once", "hash the prompt, once for P and D"), ("place", "place it on P and D"),
            ("release", "release it"), ("decision", "all of it"),
        ):  # fmt: skip
            times = [f"{row[f'{name}_p{q}_{kind}_us']:8,.0f}" for kind in ("wall", "cpu") for q in (50, 99)]
            lines.append(f"  {told:34s} {' '.join(times)}")
        resident = row["resident_bytes_per_node"]
        resident = "not known" if resident is None else f"{resident:.0f} B resident"
        lines.append(f"  {row['events_per_s']:,.0f} events/s; {row['bytes_per_node']:.0f} B a node, {resident}")
        lines.append(
            f"  a worker's death {row['worker_removed_us']:.0f} us, then 256 steps of at most "
            f"{row['sweep_step_max_us']:,.0f} us (CPU)\n"
        )
    if "replay" in found:
        lines.extend(_replayed(found["replay"]))
    return "\n".join(lines)


def _replayed(found: dict[str, Any]) -> list[str]:
    machines = found["machines"]
    lines = [
        f"{found['requests']:,} requests ({found['trace']}), {machines['prefills']} P + {machines['decodes']} D, "
        f"{machines['cache_blocks']:,} blocks of 512 tokens cached per worker, "
        f"{machines['prefill_tokens_s']:,.0f} prompt tokens/s per P",
        f"one cache without bound would reuse {found['most_reuse']:.4f} of all prompt blocks\n",
        "| router | reuse, blocks | tokens | P max/mean | D max/mean | queue p99 s | TTFT mean s | p95 s | p99 s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in found["runs"].items():
        lines.append(
            f"| {name} | {run['reuse_blocks']:.4f} | {run['reuse_tokens']:.4f} | {run['prefill_max_to_mean']:.2f} "
            f"| {run['decode_max_to_mean']:.2f} | {run['queue_p99_s']:.2f} | {run['ttft_mean_s']:.2f} "
            f"| {run['ttft_p95_s']:.2f} | {run['ttft_p99_s']:.2f} |"
        )
    return lines


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is asked for."""
    if options.trace is not None:
        requests, told = trace.read(options.trace), options.trace.name
    else:
        requests, told = trace.synthetic(300 if options.quick else 4000, options.seed), "synthetic, not a real trace"
        print(f"no --trace: a synthetic one is used. The public one is {trace.SOURCE}", file=sys.stderr)
    found: dict[str, Any] = {"cores": os.cpu_count(), "seed": options.seed}
    if "latency" not in options.skip:
        nodes, decisions = (20_000, 50) if options.quick else (1_000_000, 2000)
        sizes = [request.input_tokens for request in requests] if options.trace is not None else ()
        found["latency"] = latency.measure(nodes, decisions, sizes, options.seed)
    if "replay" not in options.skip:
        rules = Rules(
            options.prefills, options.decodes, options.cache_blocks, options.prefill_tokens_s,
            event_delay_s=options.event_delay_s,
        )  # fmt: skip
        found["replay"] = {
            "trace": told, "requests": len(requests), "most_reuse": trace.most_reuse(requests),
            **replay(requests, rules, configs()),
        }  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation_trace.jsonl; without it a synthetic one")
    parser.add_argument("--skip", action="append", choices=("latency", "replay"), default=[])
    parser.add_argument("--prefills", type=int, default=16)
    parser.add_argument("--decodes", type=int, default=16)
    parser.add_argument("--cache-blocks", type=int, default=12_000, help="of 512 tokens, per worker")
    parser.add_argument("--prefill-tokens-s", type=float, default=10_000.0, help="per P")
    parser.add_argument("--event-delay-s", type=float, default=0.05, help="from a change of a cache to the router")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        found = run(options)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    print(report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
