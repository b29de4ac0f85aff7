"""The launch files, run by play_launch: a runner of its own, not ROS's launch (see test_launch_testing.py for that)."""

import ast
import json
import sys
import time
from pathlib import Path

import pytest
import yaml

pytest.importorskip("rclpy", reason="ROS 2 is not installed: make ros")
pytest.importorskip("vla_runtime.msg", reason="the messages are not built: make ros")

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from free_port import free_endpoint

ROOT = Path(__file__).parents[2]
SHARE = Path(sys.prefix) / "share" / "vla_runtime"
FILES = ("cloud.launch.py", "edge.launch.py", "sim.launch.py")


@pytest.mark.parametrize("name", FILES)
def test_every_argument_is_explained_and_the_installed_file_is_the_current_one(name, play_launch):
    source = (ROOT / "launch" / name).read_text()
    assert (SHARE / "launch" / name).read_text() == source, "run make ros again"
    (table,) = [node.value for node in ast.parse(source).body
                if isinstance(node, ast.Assign) and node.targets[0].id == "ARGUMENTS"]
    rows = [(row.elts[0].value, row.elts[2].value) for row in table.elts]
    assert len(dict(rows)) == len(rows) and all(len(text) > 8 for _, text in rows)


def test_edge_gets_its_settings_as_parameters(resolve):
    nodes = resolve("edge.launch.py", "robot_id:=left", "namespace:=/lab/", "command_output:=joint_trajectory",
                    "command_topic:=/jtc/joint_trajectory", "joint_states_topic:=/joint_states",
                    "image_topics:=front=/cam0/image_raw/compressed,wrist=/cam1/image_raw/compressed")
    (node,) = nodes.values()
    assert list(nodes) == ["/lab/left/vla_edge"] and node["lifecycle_autostart"] == "active"
    assert node["params"] == {
        "robot_id": "left", "bus": "ros:lab", "cloud": "tcp/127.0.0.1:7448", "allow_remote": False,
        "model": str(SHARE / "models" / "tabletop"), "robot_file": str(SHARE / "config" / "robots" / "panda_2f85.yaml"),
        "ros.command_output": "joint_trajectory", "ros.command_topic": "/jtc/joint_trajectory",
        "ros.image_transport": "compressed",
        "ros.remap": ["/lab/left/joint_states:=/joint_states",
                      "/lab/left/front/image_raw/compressed:=/cam0/image_raw/compressed",
                      "/lab/left/wrist/image_raw/compressed:=/cam1/image_raw/compressed"]}
    assert yaml.safe_load(node["params_files"][0]) == yaml.safe_load((SHARE / "config" / "edge_params.yaml").read_text())
    assert node["env"] == [{"name": "FASTDDS_DEFAULT_PROFILES_FILE", "value": str(SHARE / "config" / "fastdds.xml")}]


def test_edge_without_autostart_and_profile(resolve):
    (node,) = resolve("edge.launch.py", "autostart:=false", "fastdds_profile:=").values()
    assert node["lifecycle"] and "lifecycle_autostart" not in node and not node.get("env")
    assert node["params"]["bus"] == "ros" and "ros.remap" not in node["params"] and "record" not in node["params"]


def test_sim_starts_a_cell_and_an_edge_for_each_robot_and_one_cloud(resolve):
    nodes = resolve("sim.launch.py", "robots:=arm1, arm2", "namespace:=lab", "seed:=7", "cloud:=tcp/127.0.0.1:7999")
    assert set(nodes) == {"/vla_cloud", "/lab/arm1/vla_sim", "/lab/arm1/vla_edge", "/lab/arm2/vla_sim",
                          "/lab/arm2/vla_edge"}
    assert "--listen=tcp/127.0.0.1:7999" in nodes["/vla_cloud"]["args"]
    for number, robot in enumerate(("arm1", "arm2")):
        sim, edge = nodes[f"/lab/{robot}/vla_sim"], nodes[f"/lab/{robot}/vla_edge"]
        options = dict(zip(sim["args"][::2], sim["args"][1::2], strict=True))
        assert (options["--bus"], options["--robot"], options["--seed"]) == ("ros:lab", robot, str(7 + number))
        assert sim["on_exit"] == "shutdown" and "on_exit" not in edge
        assert (edge["params"]["robot_id"], edge["params"]["bus"]) == (robot, "ros:lab")
        assert edge["params"]["cloud"] == "tcp/127.0.0.1:7999"


def test_cloud_serves_and_ends_on_ctrl_c(launch):
    endpoint = free_endpoint()
    run = launch("cloud.launch.py", f"listen:={endpoint}")
    run.wait_for("vla_cloud", f"READY {endpoint} model tabletop")
    assert run.stop() == []
    assert "Traceback" not in run.output("vla_cloud")


def test_edge_becomes_active_by_itself_and_leaves_nothing_behind(launch, ros_domain):
    import rclpy
    from lifecycle_msgs.msg import State
    from lifecycle_msgs.srv import GetState

    run = launch("edge.launch.py", f"cloud:={free_endpoint()}", "robot_id:=left")
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=ros_domain)
    node = rclpy.create_node("asker", context=context)
    executor = rclpy.executors.SingleThreadedExecutor(context=context)
    executor.add_node(node)
    try:
        client = node.create_client(GetState, "/left/vla_edge/get_state")
        assert client.wait_for_service(120.0), run.output("vla_edge") + run.console.read_text()
        label, end = "", time.monotonic() + 120.0
        while label != State.PRIMARY_STATE_ACTIVE and time.monotonic() < end:
            answer = client.call_async(GetState.Request())
            executor.spin_until_future_complete(answer, timeout_sec=1.0)
            label = answer.result().current_state.id if answer.done() else label
            assert run.process.poll() is None
            time.sleep(0.1)
        assert label == State.PRIMARY_STATE_ACTIVE, run.output("vla_edge") + run.console.read_text()
        while len(run.family()) < 4:
            assert time.monotonic() < end, "the runner, the node, and its motor and policy processes"
            time.sleep(0.1)
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.shutdown(context=context)
    assert run.stop() == []
    assert "Traceback" not in run.output("vla_edge"), run.output("vla_edge")


def test_simulated_robot_does_its_tasks_over_ros_topics(launch, tmp_path):
    run = launch("sim.launch.py", f"cloud:={free_endpoint()}", "episodes:=50", "tasks:=touch", f"results:={tmp_path}")
    run.wait_for("vla_sim", "READY ros 50 episodes")
    results, deadline = tmp_path / "arm1.json", time.monotonic() + 150.0
    # That the loop closes, on a machine that may be too busy for more: an episode in which a process stalls runs out of
    # its time. How well it does is measured elsewhere.
    while not results.exists() or "success" not in [
            episode["outcome"] for episode in json.loads(results.read_text())["episodes"]]:
        assert run.process.poll() is None and time.monotonic() < deadline, run.output("vla_edge") + run.output("vla_sim")
        time.sleep(0.1)
    assert run.stop() == []
