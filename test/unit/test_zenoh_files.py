"""The Zenoh configuration files: accepted by Zenoh, equal to what our own sessions use, and a link that carries data."""

import json
import sys
import time
from pathlib import Path

import pytest
import zenoh

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from free_port import free_port

from vla_common.bus_config import session_config

FOLDER = Path(__file__).parents[2] / "config" / "zenoh"


def load(name):
    return zenoh.Config.from_file(str(FOLDER / f"{name}.json5"))


def get(config, key):
    return json.loads(config.get_json(key))


@pytest.mark.parametrize("name, role", [("robot", "peer"), ("cloud", "router")])
def test_file_says_what_our_own_sessions_use(name, role):
    config = load(name)
    ours = session_config("tcp/127.0.0.1:7448", role)
    for key, value in ours.items():
        if key in ("connect/endpoints", "connect/timeout_ms", "connect/exit_on_failure", "connect/retry", "scouting/delay"):
            continue
        assert get(config, key) == value, key
    if name == "robot":
        for key in ("connect/timeout_ms", "connect/exit_on_failure", "connect/retry", "scouting/delay"):
            assert get(config, key) == ours[key], key


def test_robot_parts_its_two_links_by_priority_and_the_cloud_takes_both():
    (entry,) = get(load("robot"), "connect/endpoints")
    ranges = [locator.split("prio=")[1].split("#")[0] for locator in entry["locators"]]
    assert entry["strategy"] == "allOf"
    assert sorted(n for part in ranges for n in range(int(part[0]), int(part[-1]) + 1)) == [1, 2, 3, 4, 5, 6, 7]
    assert get(load("robot"), "transport/unicast/max_links") == get(load("cloud"), "transport/unicast/max_links") == 2


def test_sessions_made_from_the_files_talk_over_two_links():
    port = free_port()

    def session(name):
        text = (FOLDER / f"{name}.json5").read_text().replace(":7448", f":{port}")
        return zenoh.open(zenoh.Config.from_json5(text))

    cloud, robot = session("cloud"), session("robot")
    try:
        heard = cloud.declare_subscriber("test/**", zenoh.handlers.RingChannel(8))
        got, deadline = {}, time.monotonic() + 60.0
        # A pause of over 0.4 s, the lease, ends a link, which is opened again.
        while (len(got) < 2 or len(list(robot.info.links())) != 2) and time.monotonic() < deadline:
            robot.put("test/command", b"quick", priority=zenoh.Priority.REAL_TIME)
            robot.put("test/image", bytes(200_000), priority=zenoh.Priority.DATA_LOW)
            while (sample := heard.try_recv()) is not None:
                got[str(sample.key_expr)] = len(sample.payload)
            time.sleep(0.02)
        assert got == {"test/command": 5, "test/image": 200_000}
        links = list(robot.info.links())
        assert len(links) == 2, links
    finally:
        robot.close()
        cloud.close()
