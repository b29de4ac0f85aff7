"""One side of a KV transfer as a process of its own: JSON commands on stdin, one JSON answer each on stdout."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("UCX_TLS", "tcp,cma,self")

from vla_cloud.kv_transfer.connector import Failed, Pushed, Reservation, TransferError
from vla_cloud.kv_transfer.factory import make_receiver, make_sender
from vla_cloud.kv_transfer.layout import KvLayout, LayoutMismatch
from vla_cloud.kv_transfer.memory import KvMemory
from vla_cloud.kv_transfer.sender import SenderOptions
from vla_common.clock import SystemClock


def event(item: object) -> dict:
    known = {"what": type(item).__name__, "token": item.token}
    if isinstance(item, Failed):
        known |= {"cause": item.cause.value, "detail": item.detail}
    if isinstance(item, Pushed):
        known |= {"bytes": item.num_bytes}
    return known


def main() -> None:
    role, kind, layout, blocks, seed = json.loads(sys.argv[1])
    import numpy as np
    memory = KvMemory(KvLayout.from_json(layout), blocks)
    memory.array[:] = np.random.default_rng(seed).integers(0, 256, memory.array.shape, np.uint8)
    clock = SystemClock()
    end = (make_receiver(kind, memory, clock) if role == "receiver"
           else make_sender(kind, memory, clock, SenderOptions(connect_s=2.0)))
    print(json.dumps({"ready": getattr(end, "address", "")}), flush=True)
    kept: list[dict] = []
    for line in sys.stdin:
        do, *args = json.loads(line)
        answer: object = None
        try:
            if do == "connect":
                end.connect(args[0])
            elif do == "open":
                end.open(args[0], args[1], clock.monotonic_ns() + int(args[2] * 1e9))
            elif do == "push":
                end.push(args[0], range(*args[1]), args[2], args[3])
            elif do == "finish":
                end.finish(args[0], args[1].encode())
            elif do == "abort":
                end.abort(args[0])
            elif do == "expect":
                end.expect(Reservation(args[0], tuple(args[1]), args[2]))
            elif do == "wait":  # for an event of the token, or None
                until = time.monotonic() + args[1]
                while answer is None and time.monotonic() < until:
                    kept += [event(item) for item in end.poll()]
                    answer = next((item for item in kept if item["token"] == args[0]), None)
                    time.sleep(0.001)
            elif do == "scribble":  # the process changes its own blocks
                memory.array[:, args[0]] ^= 0xFF
        except (TransferError, LayoutMismatch, ValueError) as error:
            answer = {"error": type(error).__name__, "field": getattr(error, "field", None), "text": str(error)}
        print(json.dumps(answer), flush=True)
    end.close()


if __name__ == "__main__":
    main()
