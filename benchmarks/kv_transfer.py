"""Speed of a KV transfer between two processes: push, notice and verification, beside a plain copy of the same bytes.

The blocks are scattered over the pools, each piece (one layer of one block) is 32 KiB, and successive transfers use
other blocks, so that large pools behave as they do in service. A transfer's time runs from ``push`` in the sender to
Arrived in the receiver. Plain copies of as many pieces, one by one, in the sender's process between two pools
of the same kind, alternate with the transfers;
`one run` copies as many bytes in one piece.

    python benchmarks/kv_transfer.py [--kinds shm,tcp,nixl] [--seconds 2] [--json result.json]
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

os.environ.setdefault("UCX_TLS", "tcp,cma,self")
sys.path.insert(0, str(Path(__file__).parents[1]))

from vla_cloud.kv_transfer.connector import Arrived, KvReceiver, Reservation, Verify
from vla_cloud.kv_transfer.factory import ConnectorMissing, make_receiver, make_sender
from vla_cloud.kv_transfer.layout import KvLayout
from vla_cloud.kv_transfer.memory import KvMemory, base_address, copy
from vla_cloud.kv_transfer.receiver import ReceiverOptions
from vla_common.clock import SystemClock

LAYOUT = KvLayout("benchmark", "0", layers=8, kv_heads=4, head_dim=64)
BLOCKS = 2048
SIZES = {"256 KB": 1, "4 MB": 16, "64 MB": 256, "512 MB": 2048}
STAMP = struct.Struct("<q")


def order(seed: int, count: int, contiguous: bool) -> list[int]:
    """Block ids of one transfer."""
    rng = np.random.default_rng([abs(seed), seed < 0])
    if contiguous:
        first = int(rng.integers(0, BLOCKS - count + 1))
        return list(range(first, first + count))
    return [int(block) for block in rng.permutation(BLOCKS)[:count]]


def send(kind: str) -> None:
    """The sender's process: commands on stdin."""
    clock = SystemClock()
    source, private = KvMemory(LAYOUT, BLOCKS), KvMemory(LAYOUT, BLOCKS)
    source.array[:] = np.random.default_rng(0).integers(0, 256, source.array.shape, np.uint8)
    sender = make_sender(kind, source, clock)
    poller = select.poll()
    poller.register(sender.fileno(), select.POLLIN)
    print("ready", flush=True)
    for line in sys.stdin:
        do, *args = json.loads(line)
        answer: object = None
        if do == "open":
            sender.open(args[0], args[1], clock.monotonic_ns() + 60 * 10**9)
            time.sleep(0.002)  # granted before the push, as in service where the prefill lies between
        elif do == "push":
            token, local, remote = args
            stamp = STAMP.pack(time.perf_counter_ns())
            sender.push(token, range(LAYOUT.layers), local, remote)
            sender.finish(token, stamp)
            poller.poll(30_000)
            answer = [type(event).__name__ for event in sender.poll()]
        elif do == "copy":
            answer = plain_copies(source, private, *args)
        print(json.dumps(answer), flush=True)
    sender.close()


def plain_copies(source: KvMemory, private: KvMemory, local: list[int], remote: list[int]) -> list[float]:
    """Seconds for the same pieces one by one, and for as many bytes in one run."""
    size, own, other = LAYOUT.piece_bytes, base_address(source.array), base_address(private.array)
    began = time.perf_counter()
    for layer in range(LAYOUT.layers):
        base = layer * BLOCKS
        for at, to in zip(local, remote, strict=True):
            copy(other + (base + to) * size, own + (base + at) * size, size)
    middle = time.perf_counter()
    total = len(local) * LAYOUT.block_bytes
    offset = (local[0] * LAYOUT.block_bytes) % max(1, source.array.nbytes - total + 1)
    again = time.perf_counter()
    copy(other + offset, own + offset, total)
    return [middle - began, time.perf_counter() - again]


class Peer:
    """The sender's process, as the receiver's sees it."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "--send", kind], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        while self._line() != "ready\n":
            pass

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the sender's process ended")
        return line

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, *command: object) -> object:
        self.tell(*command)
        return json.loads(self._line())

    def hear(self) -> object:
        return json.loads(self._line())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def one(receiver: KvReceiver, peer: Peer, number: int, count: int,
        contiguous: bool) -> tuple[float, float, list[float]]:
    """Seconds of a transfer, of its verification, and of the plain copies."""
    token = f"t{number}"
    local, remote = order(2 * number, count, contiguous), order(2 * number + 1, count, contiguous)
    receiver.expect(Reservation(token, tuple(remote), number))
    peer.ask("open", token, receiver.address)
    poller = select.poll()
    poller.register(receiver.fileno(), select.POLLIN)
    peer.tell("push", token, local, remote)
    poller.poll(60_000)
    events = receiver.poll()
    end_ns = time.perf_counter_ns()
    assert len(events) == 1 and isinstance(events[0], Arrived), events
    (began_ns,) = STAMP.unpack(events[0].payload)
    assert peer.hear() == ["Pushed"]
    # Other blocks: those just sent are still in the processor's cache.
    copies = peer.ask("copy", order(-2 * number - 1, count, contiguous), order(-2 * number - 2, count, contiguous))
    assert isinstance(copies, list)
    return (end_ns - began_ns) / 1e9, events[0].verify_ns / 1e9, copies


def measure(kind: str, verify: Verify, seconds: float, contiguous: bool) -> list[dict[str, object]]:
    """All sizes."""
    memory = KvMemory(LAYOUT, BLOCKS)
    receiver = make_receiver(kind, memory, SystemClock(), ReceiverOptions(verify=verify))
    peer = Peer(kind)
    rows: list[dict[str, object]] = []
    number = 0
    for name, count in SIZES.items():
        samples = []
        end = time.perf_counter() + seconds
        while len(samples) < 5 or time.perf_counter() < end:
            samples.append(one(receiver, peer, number, count, contiguous))
            number += 1
        samples = samples[2:]  # the first ones meet cold pages
        took, verifying = (statistics.median(sample[i] for sample in samples) for i in (0, 1))
        pieces, run = (statistics.median(sample[2][i] for sample in samples) for i in (0, 1))
        total = count * LAYOUT.block_bytes
        best, best_copy = min(sample[0] for sample in samples), min(sample[2][0] for sample in samples)
        rows.append({"kind": kind, "verify": verify.value, "size": name, "bytes": total, "samples": len(samples),
                     "p50_us": took * 1e6, "verify_us": verifying * 1e6, "gb_per_s": total / took / 1e9,
                     "copy_us": pieces * 1e6, "copy_gb_per_s": total / pieces / 1e9,
                     "one_run_gb_per_s": total / run / 1e9, "ratio_to_copy": pieces / took, "best_us": best * 1e6,
                     "best_copy_us": best_copy * 1e6, "best_ratio_to_copy": best_copy / best,
                     "ratio_to_one_run": run / took})
    peer.close()
    receiver.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kinds", default="shm,tcp,nixl")
    parser.add_argument("--verify", default="full,notice")
    parser.add_argument("--seconds", type=float, default=2.0, help="per size")
    parser.add_argument("--contiguous", action="store_true", help="blocks in one run instead of scattered")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        send(args.send)
        return
    rows: list[dict[str, object]] = []
    print(f"{'kind':5} {'verify':7} {'size':7} {'p50 us':>10} {'verify us':>10} {'GB/s':>6} {'copy GB/s':>10} "
          f"{'one run':>8} {'ratio':>6} {'best us':>9} {'best ratio':>10}")
    for kind in args.kinds.split(","):
        for verify in (Verify(item) for item in args.verify.split(",")):
            try:
                found = measure(kind, verify, args.seconds, args.contiguous)
            except ConnectorMissing as error:
                print(f"{kind}: {error}")
                break
            rows += found
            for row in found:
                print(f"{kind:5} {verify.value:7} {row['size']:7} {row['p50_us']:10.0f} {row['verify_us']:10.0f} "
                      f"{row['gb_per_s']:6.2f} {row['copy_gb_per_s']:10.2f} {row['one_run_gb_per_s']:8.2f} "
                      f"{row['ratio_to_copy']:6.2f} {row['best_us']:9.0f} "
                      f"{row['best_ratio_to_copy']:10.2f}", flush=True)
    if args.json:
        machine = {"load": os.getloadavg(), "cores": os.cpu_count(), "rows": rows}
        args.json.write_text(json.dumps(machine, indent=1) + "\n")


if __name__ == "__main__":
    main()
