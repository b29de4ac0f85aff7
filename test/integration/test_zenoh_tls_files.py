"""The Zenoh configuration files for encrypted links: equal to what our own sessions use, and a link that carries data."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import zenoh

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'vla-runtime[keys]'")
from free_port import free_port
from tls_rig import Keys

from vla_common.bus_config import session_config
from vla_common.link_security import host_settings, join_settings
from vla_common.topics import data_key, topic_spec
from vla_common.zenoh_access import access_control

FOLDER = Path(__file__).parents[2] / "config" / "zenoh"
OBSERVATION = topic_spec("observation")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return Keys(tmp_path_factory.mktemp("folder"))


def config(name, keys, port):
    text = (FOLDER / f"{name}.json5").read_text().replace('"keys/', f'"{keys.root}/keys/')
    return zenoh.Config.from_json5(re.sub(r"(0\.0\.0\.0|127\.0\.0\.1):7448", f"127.0.0.1:{port}", text))


def get(config, key):
    return json.loads(config.get_json(key))


def test_the_files_say_what_our_own_sessions_use(keys):
    cloud, robot = config("cloud_tls", keys, 7448), config("robot_tls", keys, 7448)
    host = host_settings("tls/127.0.0.1:7448", keys.tls, keys.robot_link)
    join = join_settings("tls/127.0.0.1:7448", keys.link("arm1"))
    for found, role, settings in ((cloud, "router", host), (robot, "peer", join)):
        for key, value in session_config("tls/127.0.0.1:7448", role, more=settings).items():
            if key.startswith(("transport", "scouting/multicast", "scouting/gossip", "mode", "timestamping")):
                assert get(found, key) == value, key
    assert host["transport/link/tls/enable_mtls"] and join["transport/link/tls/enable_mtls"]


def test_the_rules_are_those_that_are_generated(keys):
    ours, file = access_control(["arm1", "arm2"]), get(config("cloud_tls", keys, 7448), "access_control")
    assert file["enabled"] and file["default_permission"] == ours["default_permission"] == "deny"
    for part in ("rules", "subjects", "policies"):
        written = [{key: value for key, value in entry.items() if value is not None} for entry in file[part]]
        assert written == ours[part], part


@pytest.mark.parametrize("robots", [["*"], ["arm1", "*"], ["a/b"], ["a$*"], [""]])
def test_no_rule_for_a_robot_that_would_match_others(robots):
    with pytest.raises(ValueError, match="robot|id"):
        access_control(robots)


def test_sessions_made_from_the_files_talk_and_keep_to_their_topics(keys):
    port = free_port()
    cloud, robot = zenoh.open(config("cloud_tls", keys, port)), zenoh.open(config("robot_tls", keys, port))
    try:
        heard = cloud.declare_subscriber("0/vla/*/observation/**", zenoh.handlers.RingChannel(64))
        own, foreign = (data_key(OBSERVATION.topic(name), OBSERVATION.type_name) for name in ("arm1", "arm2"))
        got, links, deadline = set(), 0, time.monotonic() + 60.0
        while (len(got) < 2 or links != 2) and time.monotonic() < deadline:
            robot.put(foreign, b"spoofed")
            robot.put(own, b"quick", priority=zenoh.Priority.REAL_TIME)
            robot.put(own, bytes(200_000), priority=zenoh.Priority.DATA_LOW)
            time.sleep(0.02)
            while (sample := heard.try_recv()) is not None:
                got.add((str(sample.key_expr), len(sample.payload)))
            links = len(list(robot.info.links()))
        assert got == {(own, 5), (own, 200_000)}
        assert links == 2
    finally:
        robot.close()
        cloud.close()
