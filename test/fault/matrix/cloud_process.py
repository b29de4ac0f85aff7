"""A small cloud: answers each observation with a context that makes the arm swing, rightly or with a fault."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from edge_rig import CLOCK, DIM, LIMITS, TOKENS
from mangle import AMPLITUDE, DELTA, SWING, Fault, Orders, Outbox, Pendulum, Share

from vla_common import messages, tensors, wire
from vla_common.clock import sleep_s
from vla_common.manifest import load_manifest
from vla_common.process import end_with_parent
from vla_common.zenoh_session import open_bus


def answer(observation: Any, tokens: np.ndarray, model: tuple[str, bytes], fault: str) -> bytes:
    """A context for an observation, with the content fault asked for."""
    stamp = wire.stamp_ns(observation.header)
    fields: dict[str, Any] = {
        "session": observation.session, "sequence": observation.sequence, "model_id": model[0], "model_hash": model[1],
        "instruction_hash": wire.instruction_hash(observation.instruction), "header": observation.header}
    if fault in ("nan", "inf"):
        tokens = tokens.copy()
        tokens[1, 2] = {"nan": np.nan, "inf": np.inf}[fault]
    elif fault == "width":
        tokens = np.concatenate([tokens, tokens[:, :1]], axis=1)
    elif fault == "model":  # of a model whose joints come in another order, say
        fields["model_hash"] = model[1][::-1]
    elif fault == "future":
        fields["header"] = wire.make_header(stamp + 3_600_000_000_000)
    elif fault == "past":
        fields["header"] = wire.make_header(max(0, stamp - 5_000_000_000))
    return wire.encode(messages.new("ContextTokens", **fields, **tensors.token_fields(tokens)))


def main() -> None:
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--robot", required=True)
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    manifest = load_manifest(options.model)
    orders, share, fault = Orders(), Share(), Fault()
    swing = Pendulum(LIMITS.ready, SWING, AMPLITUDE)
    with open_bus(options.endpoint, "router", node="matrix_cloud") as bus:
        observations = bus.queue("observation", options.robot, capacity=8)
        outbox = Outbox(bus.publisher("context", options.robot))
        while orders.open:
            for order in orders.poll():
                fault = Fault(**order["fault"])
            while (received := observations.try_recv()) is not None:
                try:
                    observation = wire.decode("Observation", received.payload)
                except wire.WireError:
                    continue
                tokens = np.zeros((TOKENS, DIM), np.float32)
                tokens[0] = DELTA * swing.direction(observation.joint_positions)
                is_hit = share.hit(fault.share)
                payload = answer(observation, tokens, (manifest.name, manifest.model_hash),
                                 fault.kind if is_hit else "none")
                outbox.send(CLOCK.monotonic_ns(), payload, fault, is_hit)
            outbox.flush(CLOCK.monotonic_ns())
            sleep_s(CLOCK, 0.002)


if __name__ == "__main__":
    main()
