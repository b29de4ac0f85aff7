"""What a robot shows of itself: its metrics page on loopback, and the shield's status on its way to the cloud."""

import logging
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from io_rig import MS, NS, Edge

from vla_common import messages, wire
from vla_common.config import ConfigError
from vla_edge.config import load_edge_config
from vla_edge.io_metrics import EDGE_METRICS, MAX_CAUSES, EdgeCollector, metrics_page
from vla_edge.metrics_address import metrics_address

prometheus = pytest.importorskip("prometheus_client", reason="pip install 'vla-runtime[metrics]'")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402


def page(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return {one.name: one for one in text_string_to_metric_families(answer.read().decode())}


def values(families, name):
    return {tuple(sample.labels.values()): sample.value for sample in families[name].samples}


def with_motor(edge, **fields):
    record = edge.memory.blank("motor")
    for name, value in {"tick": 5, "state": 0, "reason": 0, "missed": 3, "limited": 2, "accepted": 9, **fields}.items():
        record[name] = value
    edge.memory.write("motor", record)
    edge.turn(100 * MS)


def test_the_page_holds_what_its_table_says():
    edge = Edge()
    with metrics_page(edge.io, "127.0.0.1:0") as port:
        before = page(port)
        assert set(before) == set(EDGE_METRICS), "no metric of the table is missing, whatever is known"
        assert not before["vla_edge_shield_state"].samples
        edge.turn(100 * MS)
        assert values(page(port), "vla_edge_motor_tick") == {(): -1} and values(page(port), "vla_edge_motor_ticking") == {(): 0}
        with_motor(edge)
        with_motor(edge, tick=6, state=2)
        edge.joints(names=("panda_joint1",))
        edge.turn()
        got = page(port)
        for name, (kind, labels, told) in EDGE_METRICS.items():
            assert (got[name].type, got[name].documentation) == (kind, told)
            assert name == "vla_edge_refused_messages" or got[name].samples
            assert all(tuple(sample.labels) == labels for sample in got[name].samples)
        assert values(got, "vla_edge_shield_state") == {("NOMINAL",): 0, ("COASTING",): 0, ("BRAKING",): 1, ("HOLDING",): 0}
        assert values(got, "vla_edge_motor_ticking") == {(): 1} and values(got, "vla_edge_motor_tick") == {(): 6}
        assert values(got, "vla_edge_motor_missed_ticks") == {(): 3} and values(got, "vla_edge_limit_interventions") == {(): 2}
        assert values(got, "vla_edge_chunks") == {("accepted",): 9, ("rejected",): 0}
        assert values(got, "vla_edge_refused_messages") == {("joint_states_missing_gripper",): 1} or len(
            values(got, "vla_edge_refused_messages")) == 1


def test_refusals_are_few_however_many_names_come():
    class Source:
        shield, is_ticking, observations = None, True, 0

        def rejects(self):
            return {f"image_encoding_{number}": number for number in range(1000)}

    (family,) = [one for one in EdgeCollector(Source()).collect() if one.name == "vla_edge_refused_messages"]
    assert len(family.samples) == MAX_CAUSES + 1
    assert sum(sample.value for sample in family.samples) == sum(range(1000))


def test_a_robot_works_without_its_page(caplog):
    caplog.set_level(logging.ERROR)
    edge = Edge()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with metrics_page(edge.io, f"127.0.0.1:{taken.getsockname()[1]}") as port:
            assert port == 0
            edge.turn()
    assert "no metrics" in caplog.text and "choose another port" in caplog.text
    with metrics_page(edge.io, "") as port:
        assert port == 0


def test_without_the_package_the_log_names_the_remedy(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with metrics_page(Edge().io, "127.0.0.1:0") as port:
        assert port == 0
    assert "pip install 'vla-runtime[metrics]'" in caplog.text


@pytest.mark.parametrize("listen", ["0.0.0.0:9107", "192.168.1.5:9107", "[::]:9107", "9107", "127.0.0.1", "host:1", "127.0.0.1:x",
                                    "127.0.0.1:70000", ":9107"])
def test_the_page_is_on_loopback_only(listen):
    with pytest.raises(ValueError, match="metrics_listen"):
        metrics_address(listen)
    with pytest.raises(ConfigError, match="metrics_listen"):
        load_edge_config(None, [f"io.metrics_listen={listen}"])


def test_loopback_addresses():
    assert metrics_address("") is None and metrics_address("localhost:9107") == ("127.0.0.1", 9107)
    assert metrics_address("[::1]:9107") == ("::1", 9107)


def test_the_shields_status_goes_to_the_cloud_once_a_second():
    edge = Edge()
    with_motor(edge, state=1)
    for _ in range(1000):
        edge.turn(5 * MS)
    sent = edge.cloud.sent["shield_report"]
    assert 5 <= len(sent) <= 6
    assert wire.decode("ShieldStatus", sent[-1]).state == 1
    assert sent[-1] in edge.bus.sent["shield_status"], "the same message as on the robot bus"


def test_reports_can_be_switched_off():
    edge = Edge("io.report_hz=0")
    for _ in range(400):
        edge.turn(5 * MS)
    assert edge.bus.sent["shield_status"] and not edge.cloud.sent["shield_report"]
    with pytest.raises(ConfigError, match="report_hz"):
        load_edge_config(None, ["io.report_hz=-1"])
    with pytest.raises(ConfigError, match="report_hz"):
        load_edge_config(None, ["io.report_hz=.nan"])


def test_a_report_is_no_larger_than_a_status_may_be():
    message = messages.new("ShieldStatus", header=wire.make_header(NS), state=3, reason="x" * 1000)
    assert len(wire.encode(message)) < messages.MAX_BYTES["vla_runtime/msg/ShieldStatus"]
