"""Contexts of robots beside chat: rate and age, with chat off and with chat that saturates its pools, in turns.

    python benchmarks/serving_robots.py [--robots 1,4,8] [--rounds 3] [--seconds 6] [--compute lanes]
                                        [--set serving.nice=0 ...] [--json runs/bench/serving_robots.json]

The gateway with its workers (SmolLM2, one P and one D) runs here, the robots in a process of their own, over Zenoh on
loopback: each sends a fresh image at 10 Hz, all evenly out of step. *Age* is from the observation's stamp to the
arrival of its context, on the robots' clock. A round measures every number of robots with chat off and with chat
on, in random order; the table holds all rounds together, the ratio of the p99 ages, and the median over rounds of that
ratio within a round. Half the chat clients keep P busy (long
prompts, short answers), half D. Loads of the machine are in the output: on a busy one, compare the columns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vla_cloud.cloud_main import _Outlet, chat_pools, context_service
from vla_cloud.config import CloudConfig
from vla_cloud.core.generate import GenerateRequest, RequestError, SamplingParams
from vla_cloud.pools.events import TokenEvent
from vla_cloud.pools.serving_thread import ServingThread
from vla_common import messages, wire
from vla_common.clock import SystemClock, sleep_s
from vla_common.config import load_config
from vla_common.manifest import load_manifest
from vla_common.process import StopFlag
from vla_common.topics import ANY_ROBOT, robot_of, topic_spec
from vla_common.zenoh_session import Received, open_bus

PERIOD_S = 0.1
IMAGES = 512  # far more than a lane caches
CLOCK = SystemClock()
WORDS = ["touch the red block", "pick up the blue block", "go to the green cube", "lift the yellow block"]


# --- the robots' process ---


class Robots:
    """Robots on one bus."""

    def __init__(self, endpoint: str, model: str) -> None:
        self.manifest = load_manifest(model)
        self.bus = open_bus(endpoint, node="robots", isolated=True)
        self.publishers = {f"robot{i}": self.bus.publisher("observation", f"robot{i}") for i in range(64)}
        self.ages: dict[str, list[float]] = {}
        self.sequence = 0
        camera = self.manifest.cameras[0]
        rng = np.random.default_rng(0)
        self.images = []
        for _ in range(IMAGES):
            buffer = io.BytesIO()
            pixels = rng.integers(0, 256, (camera.height, camera.width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(buffer, "JPEG")
            self.images.append(buffer.getvalue())
        self.contexts = self.bus.queue("context", ANY_ROBOT, capacity=1024)
        threading.Thread(target=self.contexts.serve, args=(self.receive,), daemon=True).start()
        self.bus.wait_connected(10.0)
        sleep_s(CLOCK, 0.5)

    def receive(self, sample: Received) -> None:
        now_ns = CLOCK.monotonic_ns()
        context = wire.decode("ContextTokens", sample.payload)
        age_s = (now_ns - wire.stamp_ns(context.header)) / 1e9
        self.ages.setdefault(robot_of(topic_spec("context"), sample.key), []).append(age_s)

    def send(self, i: int) -> None:
        self.sequence += 1
        stamp_ns, camera = CLOCK.monotonic_ns(), self.manifest.cameras[0].name
        image = messages.new("sensor_msgs/CompressedImage", header=wire.make_header(stamp_ns, camera), format="jpeg",
                             data=self.images[self.sequence % IMAGES])  # fmt: skip
        names = self.manifest.joint_names
        observation = messages.new(
            "Observation", header=wire.make_header(stamp_ns), session="s", sequence=self.sequence,
            instruction=WORDS[i % len(WORDS)], joint_names=names, joint_positions=[0.0] * len(names), images=[image],
        )  # fmt: skip
        self.publishers[f"robot{i}"].put(wire.encode(observation))

    def drive(self, count: int, seconds: float) -> dict[str, Any]:
        """Ages by robot, and how many observations each sent."""
        self.ages = {}
        start_ns = CLOCK.monotonic_ns()
        periods = round(seconds / PERIOD_S)
        for k in range(periods * count):
            CLOCK.sleep_until_ns(start_ns + round(k * PERIOD_S / count * 1e9))
            self.send(k % count)
        sleep_s(CLOCK, 0.4)
        return {"sent": periods, "seconds": periods * PERIOD_S, "ages": self.ages}


def robots_main(endpoint: str, model: str) -> None:
    """Lines "count seconds" in, results as JSON lines out, until the end of input."""
    robots = Robots(endpoint, model)
    print("ready", flush=True)
    for line in sys.stdin:
        count, seconds = line.split()
        print(json.dumps(robots.drive(int(count), float(seconds))), flush=True)
    robots.bus.close()


# --- chat ---


class Chat:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, pools: ServingThread | None, clients: int) -> None:
        self.pools, self.clients = pools, clients
        self.tokens = self.prompts = self.number = 0
        self.end: threading.Event | None = None
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        self.tokens = self.prompts = 0
        if self.pools is not None:
            self.end = threading.Event()
            self.thread = threading.Thread(target=self.pools.call, args=(self._all(self.end),))
            self.thread.start()

    def wait_flowing(self, timeout_s: float) -> None:
        """Until D decodes: then P has its next prompts already, and both pools are full of work."""
        end = time.perf_counter() + timeout_s
        while self.tokens < self.clients and time.perf_counter() < end:
            time.sleep(0.05)

    def stop(self) -> None:
        if self.thread is not None and self.end is not None:
            self.end.set()
            self.thread.join()
            self.thread = None

    async def _all(self, end: threading.Event) -> None:
        tasks = [asyncio.create_task(self._one(i)) for i in range(self.clients)]
        while not end.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise RuntimeError("a chat client ended") from (result if isinstance(result, Exception) else None)
        assert self.pools is not None
        while self.pools.service.health()["unsettled"]:
            await asyncio.sleep(0.02)

    async def _one(self, client: int) -> None:
        assert self.pools is not None
        rng = random.Random(client)
        prompt, answer = (384, 4) if client % 2 else (64, 96)
        while True:
            tokens = tuple(rng.randrange(100, 40_000) for _ in range(prompt))
            params = SamplingParams(max_new_tokens=answer)
            self.number += 1
            request = GenerateRequest(f"{client}.{self.number}", tokens, params)
            try:
                async with contextlib.aclosing(self.pools.service.generate(request)) as events:
                    async for event in events:
                        self.tokens += len(event.tokens) if isinstance(event, TokenEvent) else 0
                self.prompts += prompt
            except RequestError as error:
                print(f"chat: {type(error).__name__}: {error}", file=sys.stderr)
                await asyncio.sleep(0.5)


# --- the measurement ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--compute", default="lanes", choices=["lanes", "in_process"])
    parser.add_argument("--chat-model", default="smollm2")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.endpoint:
        robots_main(options.endpoint, str(CloudConfig().model))
        return
    counts = [int(word) for word in options.robots.split(",")]
    overrides = [
        f"listen={free_endpoint()}", f"serving.model={options.chat_model}", "serving.colocated=false",
        f"context.compute={options.compute}", "serving.blocks=1024", *options.set,
    ]  # fmt: skip
    config = load_config(CloudConfig, None, overrides)
    samples = measure(config, counts, options)
    report = {"settings": overrides, "cpus": os.cpu_count(), "cases": summary(samples, counts)}
    show(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report | {"samples": samples}, indent=1))


def measure(config: CloudConfig, counts: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    outlet, stop, samples = _Outlet(), StopFlag(), []
    with (
        context_service(config, outlet.publish) as (service, _),
        chat_pools(config) as pools,
        open_bus(config.listen, "router", node="vla_cloud") as bus,
    ):
        outlet.bus = bus
        source = bus.queue("observation", ANY_ROBOT, capacity=config.context.receive_queue)
        serving = threading.Thread(target=service.run, args=(source, stop, 1000.0))
        serving.start()
        robots = RobotsProcess(config.listen)
        chat = Chat(pools, options.clients)
        try:
            robots.drive(max(counts), 1.0)  # everything has run once
            rng = random.Random(0)
            for number in range(options.rounds):
                for is_on in rng.sample([False, True], 2):
                    if is_on:
                        chat.start()
                        chat.wait_flowing(120.0)
                    for count in rng.sample(counts, len(counts)):
                        samples.append(one(robots, chat, count, is_on, options.seconds) | {"round": number})
                    chat.stop()
        finally:
            chat.stop()
            robots.close()
            stop.set()
            serving.join()
        print(service.report(), file=sys.stderr)
    return samples


def one(robots: RobotsProcess, chat: Chat, count: int, is_on: bool, seconds: float) -> dict[str, Any]:
    tokens, prompts, start = chat.tokens, chat.prompts, time.perf_counter()
    result = robots.drive(count, seconds)
    took_s = time.perf_counter() - start
    new_tokens, new_prompts = chat.tokens - tokens, chat.prompts - prompts
    rates = {"chat_tokens_per_s": new_tokens / took_s, "chat_prompt_tokens_per_s": new_prompts / took_s}
    if is_on and not new_tokens:
        raise RuntimeError("chat gave no token: nothing was measured")
    load = os.getloadavg()[0]
    print(f"robots {count} chat {'on ' if is_on else 'off'} load {load:.1f}", file=sys.stderr)
    return {"robots": count, "chat": is_on, "load": load, **result, **(rates if is_on else {})}


class RobotsProcess:
    """The other process."""

    def __init__(self, endpoint: str) -> None:
        command = [sys.executable, __file__, "--endpoint", endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line("ready")

    def drive(self, count: int, seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count} {seconds}\n")
        self.process.stdin.flush()
        return dict(json.loads(self._line()))

    def _line(self, expected: str | None = None) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line or expected not in (None, line):
            raise RuntimeError(f"the robots' process said {line!r}")
        return line

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp/127.0.0.1:{probe.getsockname()[1]}"


def summary(samples: list[dict[str, Any]], counts: list[int]) -> list[dict[str, Any]]:
    cases = []
    for count in counts:
        case: dict[str, Any] = {"robots": count}
        for is_on in (False, True):
            mine = [sample for sample in samples if (sample["robots"], sample["chat"]) == (count, is_on)]
            ages = np.array([age for sample in mine for robot in sample["ages"].values() for age in robot]) * 1e3
            rates = [
                len(sample["ages"].get(f"robot{i}", [])) / sample["seconds"] for sample in mine for i in range(count)
            ]
            each = [[age for robot in sample["ages"].values() for age in robot] for sample in mine]
            p99s = [float(np.quantile(one, 0.99)) * 1e3 for one in each]
            case["on" if is_on else "off"] = {
                "rate_hz": float(np.mean(rates)), "worst_rate_hz": min(rates), "p50_ms": float(np.quantile(ages, 0.5)),
                "p99_ms": float(np.quantile(ages, 0.99)), "median_p99_ms": float(np.median(p99s)),
                "p99s": p99s,
            }  # fmt: skip
            for name in ("load", "chat_tokens_per_s", "chat_prompt_tokens_per_s"):
                case["on" if is_on else "off"][name] = float(np.mean([sample.get(name, 0.0) for sample in mine]))
        case["p99_ratio"] = case["on"]["p99_ms"] / case["off"]["p99_ms"]
        ratios = [on / off for on, off in zip(case["on"]["p99s"], case["off"]["p99s"], strict=True)]
        case["round_ratio"] = float(np.median(ratios))
        cases.append(case)
    return cases


def show(report: dict[str, Any]) -> None:
    print("robots chat  rate Hz (worst)  age p50 ms  p99 ms  median of p99s  load  chat tokens/s  prompt tokens/s")
    for case in report["cases"]:
        for name in ("off", "on"):
            one = case[name]
            rate = f"{one['rate_hz']:8.2f} ({one['worst_rate_hz']:5.2f})"
            ages = f"{one['p50_ms']:11.1f} {one['p99_ms']:7.1f} {one['median_p99_ms']:15.1f}"
            chat = f"{one['chat_tokens_per_s']:14.1f} {one['chat_prompt_tokens_per_s']:16.1f}"
            print(f"{case['robots']:6} {name:4} {rate} {ages} {one['load']:5.1f} {chat}")
        print(f"       on / off: p99 {case['p99_ratio']:.2f}, within a round {case['round_ratio']:.2f}")


if __name__ == "__main__":
    main()
