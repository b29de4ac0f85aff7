"""The front door under load: processor time, throughput and added latency, ours and other routers in turns.

    python benchmarks/gateway.py [--peer sglang=/path/to/python] [--peer vllm=/path/to/python] [--before CHECKOUT]
                                 [--rounds 2] [--quick] [--profile FILE] [--json runs/bench/gateway.json]

On loopback, no model anywhere: an engine's step takes the time it is asked to take, and a token is the moment at which
it was given, so that each client reads off how long it was under way. A round runs every case of every target once, one
target after another. Load generator, gateway, router and servers are processes of their own, the load generator the
same for all.

ours HTTP, gRPC   the gateway with both doors, template, tokenizer and its text; two worker processes with scheduler and
                  prefix cache over their control links, without a model
ours, no door     the floor of these: the same process drives the serving engine in its own event loop
NAME              another router in front of two mock servers, policy cache_aware
mock, no router   the floor of these: the same mock servers, asked directly

short    answers of 8 tokens in one piece, as fast as they come
paced    streams of 64 tokens, one each 20 ms
fast     streams of 64 tokens, as fast as they come: what is there already may share a chunk

CPU is that of the gateway's or router's process alone, background work included (see idle); it hardly depends on what
else the machine does. A router passes bytes on; our gateway also does what a server behind a router does: template,
tokens to text, JSON, deadlines and retries. Throughput is that of all processes on this machine together, where few
cores are shared with the load generator and the servers.

A router is named by the Python of the environment it is installed in (sglang-router 0.3.2, vllm-router 0.1.17), and
left out, with a message, where it does not start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway_parts.phases import Phase
from gateway_parts.processes import ROOT, Child, PeerMissing, Router, cpu_s
from gateway_parts.tables import report, text

CLIENTS = (1, 16, 64)
MOCKS = 2
IDLE_S = 1.0
MOCK = "mock, no router"


@dataclass
class Target:
    """Who is asked, by whom, and whose processor time counts."""

    name: str
    order: dict[str, Any]
    asker: Child
    pid: int | None
    floor: str | None


def phases(quick: bool) -> dict[str, Phase]:
    """By name and clients."""
    clients, tokens, seconds = ((2,), 8, 0.05) if quick else (CLIENTS, 64, 1.0)
    pace_ms = 5 if quick else 20
    found = {f"short {count}": Phase(count, 8, False, 0, seconds) for count in clients}
    found |= {f"paced {count}": Phase(count, tokens, True, pace_ms, 0.0) for count in clients}
    return found | {f"fast {count}": Phase(count, tokens, True, 0, seconds) for count in clients if count > 1}


def start(args: argparse.Namespace, folder: Path, stack: ExitStack) -> list[Target]:
    """All processes, ready."""

    def child(program: str, *arguments: str, root: Path = ROOT) -> Child:
        process = Child(program, *arguments, log=folder / f"{program}.log", root=root)
        stack.callback(process.close)
        return process

    load = child("load.py")
    targets = []
    for name, root in (("ours", ROOT), ("before", args.before)):
        if root is None:
            continue
        profile = ("--profile", str(args.profile)) if args.profile and name == "ours" else ()
        ours = child("ours.py", "--folder", str(folder / name), *profile, root=root)
        doors = ours.read()
        floor = f"{name}, no door"
        targets += [
            Target(f"{name} HTTP", {"kind": "http", "ports": [doors["http"]]}, load, ours.pid, floor),
            Target(f"{name} gRPC", {"kind": "grpc", "ports": [doors["grpc"]]}, load, ours.pid, floor),
            Target(floor, {"kind": "direct"}, ours, ours.pid, None),
        ]
    if not args.peer:
        return targets
    mocks = [child("mock_worker.py", "--phase", str(index / MOCKS)) for index in range(MOCKS)]
    ports = [mock.read()["port"] for mock in mocks]
    for spec in args.peer:
        name, _, python = spec.partition("=")
        try:
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            router = Router(name, Path(python), urls, args.json.with_name(f"{name}-router.log"))
        except PeerMissing as missing:
            say(f"left out: {missing}")
            continue
        stack.callback(router.close)
        targets.append(Target(name, {"kind": "http", "ports": [router.port]}, load, router.pid, MOCK))
    return [*targets, Target(MOCK, {"kind": "http", "ports": ports}, load, None, None)]


def measure(target: Target, phase: Phase) -> dict[str, Any]:
    """One phase."""
    target.asker.ask({"open": target.order, "phase": asdict(phase)})
    before_s = cpu_s(target.pid) if target.pid else 0.0
    took = target.asker.ask({"go": True})
    took["gateway_cpu_s"] = cpu_s(target.pid) - before_s if target.pid else None
    return took


def idle(targets: list[Target]) -> dict[str, float]:
    """Processor time of each process per second without a request."""
    pids = {target.name: target.pid for target in targets if target.pid}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    time.sleep(IDLE_S)
    return {name: (cpu_s(pid) - before[name]) / IDLE_S for name, pid in pids.items()}


def say(text: str) -> None:
    print(f"[load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="ROUTER=PYTHON", help="sglang or vllm")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="measure its gateway, too, as 'before'")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name begins so, such as 'paced 64'")
    parser.add_argument("--quick", action="store_true", help="little work, to try the benchmark itself")
    parser.add_argument("--profile", type=Path, help="what cProfile sees of our gateway's event loop; slows it down")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/gateway.json"))
    args = parser.parse_args()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(prefix="vla-bench-") as folder, ExitStack() as stack:
        targets = start(args, Path(folder), stack)
        cases = {name: phase for name, phase in phases(args.quick).items() if name.startswith(args.only)}
        idle_s = idle(targets)
        for number in range(args.rounds):
            for name, phase in cases.items():
                for target in targets if number % 2 == 0 else targets[::-1]:
                    took = measure(target, phase)
                    results.setdefault(target.name, {}).setdefault(name, []).append(took)
            say(f"round {number + 1} of {args.rounds}")
    found = report(results, {target.name: target.floor for target in targets}, idle_s)
    print(text(found))
    found |= {
        "rounds": args.rounds, "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "load_before": load, "load_after": os.getloadavg(),
        "phases": {name: asdict(phase) for name, phase in cases.items()},
    }  # fmt: skip
    args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
