"""ROS 2 between two processes: the 100 Hz command stream as it arrives, and camera images counted.

    python benchmarks/ros_stream.py [--seconds 10] [--rounds 3] [--image-seconds 20] [--json runs/bench/ros_stream.json]

Needs ROS 2 and the built messages ("make ros"); without them it says that it is skipped and ends with 0.

Commands: the motor process on ROS topics (publish-only outlet) beside an rclpy node that publishes the same message
from a 100 Hz timer, under the load of motor_clock.py. What is given is the time between arrivals in a reader in another
process, which stands for the robot's controller: real-time priority where permitted, instants taken by the middleware
on arrival. Beside it a thread of the highest priority on each core measures how long the machine itself stood still, as
virtual machines do. Rounds are interleaved in shuffled order.

Images: a driver sends a JPEG of 600 kB or a raw 640 x 480 x 3 image 30 times a second. One reader keeps ten and counts
every number that arrives; what it lacks was lost on the way. Beside it runs the edge's own reader, which by design
takes the newest image 10 times a second. The delay is from sending to having all bytes in Python, where a reader looks
every millisecond. With config/fastdds.xml and without it, best effort as cameras do, and reliable.

Every topic is below a namespace of this run, on this machine only: nothing here can move a robot.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import motor_clock  # noqa: E402

from vla_common.clock import SystemClock  # noqa: E402
from vla_common.config import load_config  # noqa: E402
from vla_common.process import stop_on_signals  # noqa: E402
from vla_common.topics import TopicSpec  # noqa: E402
from vla_common.zenoh_session import open_bus  # noqa: E402
from vla_edge.adapters.realtime import start_outlet_threads  # noqa: E402
from vla_edge.adapters.ros_bus import open_ros_bus, quality  # noqa: E402
from vla_edge.config import EdgeConfig, load_limits  # noqa: E402
from vla_edge.images import ImageIn  # noqa: E402
from vla_edge.robot_bus import image_spec  # noqa: E402

PROFILE, PROFILE_VARIABLE = ROOT / "config/fastdds.xml", "FASTDDS_DEFAULT_PROFILES_FILE"
CLOCK = SystemClock()
ROBOT, CAMERA = "arm1", "front"
STREAMS = {
    "rclpy timer, load in its process": ("timer", "inside"),
    "rclpy timer, process of its own": ("timer", "outside"),
    "vla motor process, ordinary scheduling": ("ordinary", "outside"),
    "vla motor process": ("motor", "outside"),
}
IMAGES = {"compressed": ("600 kB JPEG", 600_000), "raw": ("640x480x3 raw", 921_600)}
IMAGE_HZ = 30
READER_DEPTH = 10
EDGE_PERIOD_NS = 95_000_000  # looks for images up to 10.5 times a second, as the edge does by default for 10
DRIVER_DEPTH = {"best_effort": 5, "reliable": 10}  # as rclpy's profile for sensors, and its default
WARM_UP_NS = 1_000_000_000


# ---------------------------------------------------------------------- parts, each a process of its own


def hear(args: argparse.Namespace) -> None:
    """The controller's side of the command stream: instant, stamp and number of each arrival."""
    stop = stop_on_signals()
    start_outlet_threads(60)
    rows: list[tuple[int, int, int]] = []
    with open_ros_bus("bench_controller", prefix=args.prefix) as bus:
        reader = bus.queue("joint_command", ROBOT, capacity=200)
        print("READY", flush=True)
        while not stop.wait(0.005):
            while (received := reader.try_recv()) is not None:
                seconds, nanoseconds = struct.unpack_from("<iI", received.payload, 4)
                rows.append((received.received_ns, seconds * 1_000_000_000 + nanoseconds, received.attachment.sequence))
    args.out.write_text(json.dumps(rows))


def pause(args: argparse.Namespace) -> None:
    """Longest time that a thread of the highest priority was late on one core: what no program here can do better."""
    stop = stop_on_signals()
    start_outlet_threads(99)
    os.sched_setaffinity(0, {args.cpu})
    longest_ns, due_ns = 0, CLOCK.monotonic_ns()
    print("READY", flush=True)
    while not stop.is_set():
        due_ns += 2_000_000
        CLOCK.sleep_until_ns(due_ns)
        late_ns = CLOCK.monotonic_ns() - due_ns
        longest_ns, due_ns = max(longest_ns, late_ns), due_ns + max(0, late_ns)
    args.out.write_text(json.dumps(longest_ns))


def tick(args: argparse.Namespace) -> None:
    """The usual node: a timer, its callback publishes."""
    import rclpy
    from sensor_msgs.msg import JointState

    limits = load_limits(ROOT / "config/robots/panda_2f85.yaml", 0.01)
    load = motor_clock.Load(args.bus, args.model) if args.where == "inside" else None
    rclpy.init()
    node = rclpy.create_node("bench_timer", namespace=args.prefix)
    publisher = node.create_publisher(JointState, f"{ROBOT}/joint_command", 1)
    message = JointState(name=list(limits.names), velocity=[0.0] * len(limits))
    wait_until(lambda: publisher.get_subscription_count() > 0, "reader")
    begin_ns = CLOCK.monotonic_ns()

    def publish() -> None:
        now_ns = CLOCK.monotonic_ns()
        message.header.stamp.sec, message.header.stamp.nanosec = divmod(now_ns, 1_000_000_000)
        message.position = (limits.ready + 0.1 * np.sin(6e-9 * (now_ns - begin_ns)) * (limits.velocity > 0)).tolist()
        publisher.publish(message)

    node.create_timer(0.01, publish)
    while CLOCK.monotonic_ns() < begin_ns + round(args.seconds * 1e9) + WARM_UP_NS:
        rclpy.spin_once(node, timeout_sec=0.1)
    if load is not None:
        load.close()
    rclpy.shutdown()


def edge_config(prefix: str, transport: str = "compressed") -> EdgeConfig:
    """Settings of an edge on ROS topics below the namespace."""
    return load_config(EdgeConfig, None, [f"bus=ros:{prefix.strip('/')}", f"ros.image_transport={transport}"])


def reader_spec(args: argparse.Namespace) -> TopicSpec:
    return replace(image_spec(edge_config(args.prefix, args.transport)), reliability=args.reliability)


def drive(args: argparse.Namespace) -> None:
    """A camera driver: the same image again and again, numbered in the seconds of its stamp."""
    from rclpy.serialization import serialize_message
    from sensor_msgs.msg import CompressedImage, Image

    data = array.array("B", np.random.default_rng(0).integers(0, 256, IMAGES[args.transport][1], np.uint8).tobytes())
    image = (CompressedImage(format="jpeg", data=data) if args.transport == "compressed" else
             Image(height=480, width=640, encoding="rgb8", step=1920, data=data))
    payload = bytearray(serialize_message(image))
    with open_ros_bus("bench_camera", prefix=args.prefix) as bus:
        spec = replace(reader_spec(args), depth=DRIVER_DEPTH[args.reliability])
        publisher = bus._node.create_publisher(type(image), args.prefix + spec.topic(ROBOT, CAMERA),
                                               quality(spec, spec.depth))
        wait_until(lambda: publisher.get_subscription_count() >= 2, "readers")
        time.sleep(1.0)
        count, begin_ns = round(args.seconds * IMAGE_HZ), CLOCK.monotonic_ns()
        for number in range(count):
            CLOCK.sleep_until_ns(begin_ns + number * 1_000_000_000 // IMAGE_HZ)
            struct.pack_into("<i", payload, 4, number + 1)
            publisher.publish(bytes(payload))
        time.sleep(1.0)


def view(args: argparse.Namespace) -> None:
    """The edge's side of the images, until told to stop."""
    stop = stop_on_signals()
    spec = reader_spec(args)
    seen: list[int] = []
    delays_ns: list[int] = []
    taken = wrong = 0
    with open_ros_bus("bench_edge", prefix=args.prefix) as bus:
        every = bus.queue(spec, ROBOT, CAMERA, capacity=READER_DEPTH)
        newest = ImageIn(edge_config(args.prefix, args.transport), bus, CAMERA)
        due_ns = 0
        print("READY", flush=True)
        while not stop.wait(0.001):
            while (received := every.try_recv()) is not None:
                seen.append(struct.unpack_from("<i", received.payload, 4)[0])
                wrong += len(received.payload) < IMAGES[args.transport][1]
                delays_ns.append(CLOCK.wall_ns() - received.attachment.source_time_ns)
            if CLOCK.monotonic_ns() >= due_ns and newest.try_recv() is not None:
                taken, due_ns = taken + 1, CLOCK.monotonic_ns() + EDGE_PERIOD_NS
    args.out.write_text(json.dumps({"seen": seen, "delays_ns": delays_ns, "taken": taken, "wrong": wrong}))


def wait_until(condition: Any, what: str, timeout_s: float = 20.0) -> None:
    deadline_ns = CLOCK.monotonic_ns() + round(timeout_s * 1e9)
    while not condition():
        if CLOCK.monotonic_ns() > deadline_ns:
            raise RuntimeError(f"no {what} within {timeout_s:.0f} s: is UDP on the loopback interface allowed?")
        time.sleep(0.02)


PARTS = {"hear": hear, "pause": pause, "tick": tick, "drive": drive, "view": view}


# ---------------------------------------------------------------------- cases


def start(part: str, args: argparse.Namespace, environment: dict[str, str] | None = None,
          **options: object) -> subprocess.Popen[bytes]:
    given = {"prefix": args.prefix, "bus": args.bus, "model": args.model, **options}
    return subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--part", part,
                             *(f"--{name}={value}" for name, value in given.items())], stdout=subprocess.PIPE,
                            env=environment)


def result_of(process: subprocess.Popen[bytes], out: Path) -> Any:
    """What a reader wrote when told to stop."""
    process.terminate()
    if process.wait(20.0) != 0:
        raise RuntimeError("a reader failed: see its error above")
    return json.loads(out.read_text())


def ready(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is None or process.stdout.readline() != b"READY\n":
        raise RuntimeError("a part did not start: see its error above")


def run_stream(kind: str, where: str, args: argparse.Namespace) -> tuple[list[Any], int]:
    """Arrivals of one round of one case, and the longest pause of the machine meanwhile, ns."""
    out = args.json.with_suffix(".part.json")
    listener, load = start("hear", args, out=out), None
    pauses = {start("pause", args, out=path, cpu=cpu): path for cpu in sorted(os.sched_getaffinity(0))[:4]
              for path in [args.json.with_suffix(f".cpu{cpu}.json")]}
    try:
        for process in (listener, *pauses):
            ready(process)
        if where == "outside":
            load = subprocess.Popen([sys.executable, str(Path(motor_clock.__file__)), "--part", "load", "--bus",
                                     args.bus, "--model", str(args.model)], stdout=subprocess.PIPE)
            ready(load)
        if kind == "timer":
            if start("tick", args, where=where, seconds=args.seconds).wait() != 0:
                raise RuntimeError("the rclpy node failed: see its error above")
        else:
            settings = ["motor.fifo_priority=0"] if kind == "ordinary" else []
            motor_clock.motor_process(f"ros:{args.prefix.strip('/')}", args.seconds, settings)
        longest_ns = max(result_of(process, path) for process, path in pauses.items())
        return result_of(listener, out), longest_ns
    finally:
        for process in (listener, *pauses, *([] if load is None else [load])):
            process.kill()
            process.wait()
        for path in (out, *pauses.values()):
            path.unlink(missing_ok=True)


def run_images(transport: str, profile: bool, reliability: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case of images; both processes with the profile or both without."""
    environment = {name: value for name, value in os.environ.items() if profile or name != PROFILE_VARIABLE}
    out = args.json.with_suffix(".part.json")
    case = {"transport": transport, "reliability": reliability}
    viewer = start("view", args, environment, out=out, **case)
    try:
        ready(viewer)
        if start("drive", args, environment, seconds=args.image_seconds, **case).wait() != 0:
            raise RuntimeError("the driver failed: see its error above")
        found = result_of(viewer, out)
    finally:
        viewer.kill()
        viewer.wait()
        out.unlink(missing_ok=True)
    sent = round(args.image_seconds * IMAGE_HZ)
    delays_ms = np.array(found["delays_ns"] or [np.nan]) * 1e-6
    return {"image": IMAGES[transport][0], "bytes": IMAGES[transport][1], "profile": profile,
            "reliability": reliability, "sent": sent, "lost": sent - len(set(found["seen"])),
            "incomplete": found["wrong"], "delay_p50_ms": float(np.median(delays_ms)),
            "delay_p99_ms": float(np.quantile(delays_ms, 0.99)),
            "edge_took_per_s": found["taken"] / args.image_seconds, "load": os.getloadavg()[0]}


def stream_row(rounds: list[tuple[list[Any], int]]) -> dict[str, Any]:
    """Figures over all rounds of a case; the first second of each is left out."""
    gaps, lost, count = [], 0, 0
    for rows, _ in rounds:
        table = np.array(rows, np.int64).reshape(-1, 3)
        table = table[table[:, 0] > table[0, 0] + WARM_UP_NS]
        gaps.append(np.diff(table[:, 0]) * 1e-6)
        lost += int(table[-1, 2] - table[0, 2]) + 1 - len(table)
        count += len(table)
    all_ms = np.concatenate(gaps)
    return {"arrived": count, "lost": lost, **{f"p{str(q).replace('.', '')}_ms": float(np.percentile(all_ms, q))
                                               for q in (1, 50, 99, 99.9)}, "max_ms": float(all_ms.max()),
            "machine_pause_max_ms": max(longest_ns for _, longest_ns in rounds) * 1e-6}


# ---------------------------------------------------------------------- report


def report(result: dict[str, Any], path: Path) -> None:
    rows = result["commands"]
    width = max(map(len, rows))
    print(f"{'100 Hz commands, ms between arrivals':{width}s}     p1    p50    p99   p99.9     max  arrived  lost  "
          "machine paused up to")
    for name, row in rows.items():
        print(f"{name:{width}s} {row['p1_ms']:6.2f} {row['p50_ms']:6.2f} {row['p99_ms']:6.2f} {row['p999_ms']:7.2f} "
              f"{row['max_ms']:7.2f} {row['arrived']:8d} {row['lost']:5d}  {row['machine_pause_max_ms']:7.2f}")
    print(f"\n{'images at 30 Hz':16s} {'Fast DDS':12s} {'reliability':12s}   sent   lost  delay p50    p99   edge took")
    for row in result["images"]:
        print(f"{row['image']:16s} {'fastdds.xml' if row['profile'] else 'its defaults':12s} {row['reliability']:12s} "
              f"{row['sent']:6d} {row['lost']:6d} {row['delay_p50_ms']:7.2f} {row['delay_p99_ms']:7.2f} ms "
              f"{row['edge_took_per_s']:5.1f} a second")
    print("{rmw}, {cores} cores, load before {load[0]:.2f}, at the end {load[1]:.2f}".format(**result))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def missing() -> str:
    """Why it cannot run; empty if it can."""
    try:
        import rclpy  # noqa: F401
        import sensor_msgs.msg  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of commands, per case and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--image-seconds", type=float, default=20.0, help="of images, per case")
    parser.add_argument("--model", type=Path, default=ROOT / "models/tabletop")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/ros_stream.json"))
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", type=int, help=argparse.SUPPRESS)
    for hidden in ("part", "where", "bus", "prefix", "transport", "reliability"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        PARTS[args.part](args)
        return
    if why := missing():
        print(f"skipped: ROS is not installed ({why}); 'make ros' sets it up, docs/ros2.md says how elsewhere")
        return
    import rclpy

    os.environ.update({"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", PROFILE_VARIABLE: str(PROFILE)})
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.prefix = f"/bench{os.getpid()}"
    load = os.getloadavg()[0]
    streams: dict[str, list[Any]] = {name: [] for name in STREAMS}
    shuffle = random.Random(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        args.bus = f"tcp/127.0.0.1:{probe.getsockname()[1]}"
    with open_bus(args.bus, "router", node="bench_router"):
        for number in range(args.rounds):
            for name in shuffle.sample(list(STREAMS), len(STREAMS)):
                print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr, flush=True)
                streams[name].append(run_stream(*STREAMS[name], args))
    images = []
    for transport in IMAGES:
        for reliability in DRIVER_DEPTH:
            for profile in (True, False):
                print(f"images: {transport}, {reliability}, profile {profile}", file=sys.stderr, flush=True)
                images.append(run_images(transport, profile, reliability, args))
    report({"commands": {name: stream_row(found) for name, found in streams.items()}, "images": images,
            "rmw": rclpy.get_rmw_implementation_identifier(), "cores": os.cpu_count(),
            "load": [load, os.getloadavg()[0]]}, args.json)


if __name__ == "__main__":
    main()
