"""How long the router takes with a large index: decisions, events, a worker's death; and what a node costs."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_cloud.core.kv_events import KvChange
from vla_cloud.core.placement import Demand, Placement
from vla_cloud.core.router.prompt_hashes import PromptHashes
from vla_cloud.core.router.settings import PlacementConfig
from vla_cloud.pools.messages import KvEventRow
from vla_common.clock import ManualClock

ROW = 512
BLOCK = 16
SYSTEM_TOKENS = 1024


def lengths(count: int, seed: int, of_trace: Sequence[int] = ()) -> list[int]:
    """Prompt lengths, tokens: drawn from a trace, else as skewed as that of Mooncake (median 7,000, mean 12,000)."""
    rng = random.Random(seed)
    if of_trace:
        return [rng.choice(of_trace) for _ in range(count)]
    return [min(126_000, max(16, int(rng.lognormvariate(8.85, 1.04)))) for _ in range(count)]


def prompts(sizes: Sequence[int], seed: int) -> list[bytes]:
    """Packed tokens; all begin with the same 1024."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 32_000, SYSTEM_TOKENS, dtype=np.int32)
    return [
        np.concatenate([system, rng.integers(0, 32_000, size, dtype=np.int32)])[:size].astype("<i4").tobytes()
        for size in sizes
    ]


class Rig:
    """16 + 16 workers that hold ``nodes`` blocks together, among them the beginnings of ``asked`` prompts."""

    def __init__(self, nodes: int, asked: Sequence[bytes], workers: int = 32, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock(1)
        self.placement = Placement(PlacementConfig(imbalance_tokens=1 << 40), self.clock)
        self.names = [f"p{i}" for i in range(workers // 2)] + [f"d{i}" for i in range(workers // 2)]
        self.next = dict.fromkeys(self.names, 0)
        self.recent: list[tuple[str, bytes]] = []
        for name in self.names:
            self.placement.add(name, "prefill" if name[0] == "p" else "decode", nodes)
        for prompt in asked:
            hashes = PromptHashes(b"").extend(prompt)
            held = hashes[: self.rng.randint(min(len(hashes), 64), len(hashes))]
            for names in (self.names[: workers // 2], self.names[workers // 2 :]):
                self.send(self.rng.choice(names), KvChange.STORED, held)
        while (missing := nodes - len(self.placement.index)) > 0:
            name = self.rng.choice(self.names)
            values = [self.rng.randbytes(32) for _ in range(min(ROW, missing))]
            self.recent.append((name, values[0]))
            self.send(name, KvChange.STORED, values)

    def send(self, name: str, change: KvChange, values: Sequence[bytes]) -> float:
        """One message of events; the CPU seconds that it took."""
        rows = [KvEventRow(change, value) for value in values]
        begun = time.thread_time()
        asked = self.placement.take_events(name, self.next[name], rows)
        took_s = time.thread_time() - begun
        assert not asked
        self.next[name] += len(rows)
        return took_s


def resident_bytes() -> int | None:
    """Of this process; None where the system does not tell."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else None


def measure(nodes: int, decisions: int, of_trace: Sequence[int] = (), seed: int = 1) -> dict[str, Any]:
    """Microseconds, and bytes per node."""
    asked = prompts(lengths(min(400, decisions), seed, of_trace), seed)
    gc.collect()
    before = resident_bytes()
    rig = Rig(nodes, asked, seed=seed)
    gc.collect()
    after = resident_bytes()
    found: dict[str, Any] = {"nodes": len(rig.placement.index), "workers": len(rig.names), "decisions": decisions}
    found["bytes_per_node"] = _bytes_per_node(rig.placement)
    found["resident_bytes_per_node"] = None if before is None or after is None else (after - before) / nodes
    found["prompt_tokens_p50"] = float(np.median([len(prompt) // 4 for prompt in asked]))
    found["prompt_tokens_mean"] = float(np.mean([len(prompt) // 4 for prompt in asked]))
    found.update(_decide(rig, asked, decisions))
    found["events_per_s"] = _events(rig)
    found.update(_death(rig))
    return found


def _decide(rig: Rig, asked: Sequence[bytes], decisions: int) -> dict[str, float]:
    """Wall time, and CPU time: where other processes want the cores, their difference is theirs."""
    placement = rig.placement
    found: dict[str, float] = {}
    for kind, now in (("wall", time.perf_counter), ("cpu", time.thread_time)):
        times = []
        for number in range(decisions):
            prompt = asked[number % len(asked)]
            begun = now()
            hashes = PromptHashes(b"").extend(prompt)
            hashed = now()
            placement.place("r", number, Demand(hashes, len(prompt) // 4, 256))
            placed = now()
            placement.release("r", number)
            released = now()
            times.append((hashed - begun, placed - hashed, released - placed, released - begun))
            # In service events confirm what is expected; here its time is over, outside the measurement.
            rig.clock.advance_ns(60 * 10**9)
            placement.index.expire(rig.clock.monotonic_ns())
        micros = np.array(times) * 1e6
        for i, name in enumerate(("hash_once", "place", "release", "decision")):
            found |= {f"{name}_p{q}_{kind}_us": float(np.percentile(micros[:, i], q)) for q in (50, 99)}
    return found


def _events(rig: Rig, messages: int = 200) -> float:
    """As many blocks go as come, so that the index keeps its size."""
    took_s, count = 0.0, 0
    for _ in range(messages):
        name = rig.rng.choice(rig.names)
        values = [rig.rng.randbytes(32) for _ in range(ROW)]
        took_s += rig.send(name, KvChange.STORED, values) + rig.send(name, KvChange.REMOVED, values)
        count += 2 * ROW
    return count / took_s


def _death(rig: Rig) -> dict[str, float]:
    now = time.thread_time
    begun = now()
    rig.placement.remove(rig.names[0])
    gone = now()
    steps = []
    for _ in range(256):
        step = now()
        rig.placement.index.sweep(1)
        steps.append(now() - step)
    return {"worker_removed_us": (gone - begun) * 1e6, "sweep_step_max_us": max(steps) * 1e6}


def _bytes_per_node(placement: Placement) -> float:
    tables = placement.index._shards
    keys = sum(sys.getsizeof(value) for table in tables for value in table)
    return (keys + sum(map(sys.getsizeof, tables))) / max(1, len(placement.index))
