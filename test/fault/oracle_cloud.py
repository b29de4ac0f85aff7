"""A stand-in for ``vla cloud`` that knows the truth: its contexts hold the expert's next motion, read from the robot bus.

It lets the whole slice run, and succeed, without a trained policy. Used with ``edge_rig.make_model``, whose denoiser
follows context token 0 linearly over the chunk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from vla_common.clock import SystemClock, sleep_s
from vla_common.manifest import load_manifest
from vla_common.messages import new
from vla_common.process import end_with_parent, stop_on_signals
from vla_common.tensors import token_fields
from vla_common.wire import WireError, decode, encode, instruction_hash
from vla_common.zenoh_session import QueueSubscriber, open_bus
from vla_sim.expert import rollout_chunk
from vla_sim.tasks import parse_instruction
from vla_sim.world import TabletopWorld

# The delta is followed open loop for up to two contexts: the expert's own gain would overshoot.
CAUTION = 0.45


class Oracle:
    def __init__(self) -> None:
        self.world = TabletopWorld()
        self.positions: list[tuple[int, np.ndarray]] = []

    def see(self, state: Any) -> None:
        self.world.show(state.qpos)
        at_ns = state.header.stamp.sec * 10**9 + state.header.stamp.nanosec
        self.positions = [*self.positions[-5:], (at_ns, self.world.cube_positions())]

    def delta(self, instruction: str, q_cmd: np.ndarray, closure: float) -> np.ndarray:
        spec = parse_instruction(instruction)
        (first_ns, first), (last_ns, last) = self.positions[0], self.positions[-1]
        target = last[spec.target]
        velocity = (target - first[spec.target]) / max((last_ns - first_ns) * 1e-9, 0.04)
        if np.linalg.norm(velocity) > 0.2 or target[2] > 0.03:  # just placed, or held
            velocity = np.zeros(3)
        chunk = rollout_chunk(q_cmd[None], np.array([closure]), target[None], velocity[None], np.array([spec.task_id]))
        delta = chunk[0, -1] - q_cmd
        delta[:7] *= CAUTION
        return delta


def newest(subscriber: QueueSubscriber) -> Any | None:
    received = subscriber.try_recv()
    if received is None:
        return None
    try:
        return decode(subscriber.spec.type_name, received.payload)
    except WireError:
        return None


def main() -> int:
    end_with_parent()
    stop = stop_on_signals()
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--bus", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--robot", default="arm1")
    options, _ = parser.parse_known_args()
    manifest, oracle, clock = load_manifest(options.model), Oracle(), SystemClock()
    shape = (manifest.context.num_tokens, manifest.context.dim)
    with open_bus(options.listen, "router", node="oracle") as cloud, open_bus(options.bus, node="oracle_eye") as bus:
        observations, contexts = cloud.latest("observation", options.robot), cloud.publisher("context", options.robot)
        states, commands = bus.latest("sim_state", options.robot), bus.latest("joint_command", options.robot)
        q_cmd: np.ndarray | None = None
        print(f"READY {options.listen}", flush=True)
        while not stop.is_set():
            sleep_s(clock, 0.004)
            state, command, observation = newest(states), newest(commands), newest(observations)
            if state is not None:
                oracle.see(state)
            q_cmd = q_cmd if command is None else np.array(command.position)
            if observation is None or q_cmd is None or not oracle.positions:
                continue
            tokens = np.zeros(shape, np.float32)
            tokens[0, :8] = oracle.delta(observation.instruction, q_cmd, float(observation.joint_positions[-1]))
            contexts.put(encode(new(
                "ContextTokens", header=observation.header, session=observation.session, sequence=observation.sequence,
                model_id=manifest.name, model_hash=manifest.model_hash,
                instruction_hash=instruction_hash(observation.instruction), **token_fields(tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
