"""The cloud link between real Zenoh sessions: who gets in, who may write and read what, and what is said when not."""

import logging
import socket
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'vla-runtime[keys]'")
from free_port import free_port
from tls_rig import Keys

from vla_cloud import cloud_main
from vla_cloud.config import CloudConfig, GatewayConfig, ServingConfig
from vla_cloud.link_security import link_settings, warn_of_open_doors
from vla_common.bus_config import BusError
from vla_common.clock import NS_PER_S, ManualClock, SystemClock, sleep_s
from vla_common.link_diagnosis import link_problem
from vla_common.link_security import CloudLink, RobotLink, join_settings
from vla_common.link_watch import LinkWatch
from vla_common.process import StopFlag
from vla_common.tls import ServerTls
from vla_common.topics import ANY_ROBOT
from vla_common.zenoh_session import open_bus
from vla_edge.cloud_link import check_cloud_link, open_cloud_link
from vla_edge.config import EdgeConfig

CLOCK = SystemClock()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    # A refusal is heard of at once, but on a busy machine the server may take its time with it.
    monkeypatch.setattr("vla_common.link_diagnosis._REFUSAL_S", 30.0)
    monkeypatch.setattr("vla_common.link_diagnosis._CONNECT_S", 30.0)
    monkeypatch.setattr("vla_common.link_watch._PERIOD_S", 0.02)


@pytest.fixture
def accepted(monkeypatch):
    """For links on which TLS refuses nothing: the silence after the hand-shake is waited for."""
    monkeypatch.setattr("vla_common.link_diagnosis._REFUSAL_S", 0.3)


@pytest.fixture
def port():
    return free_port()


def until(condition, timeout_s=30.0):
    deadline_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
    while not (value := condition()) and CLOCK.monotonic_ns() < deadline_ns:
        sleep_s(CLOCK, 0.01)
    return value


def host(endpoint, keys, link=None, tls=None):
    """The cloud's router, as cloud_main opens it."""
    config = CloudConfig(listen=endpoint, tls=tls or keys.tls, robot_link=link or keys.robot_link)
    return open_bus(endpoint, "router", node="vla_cloud", settings=link_settings(config))


def join(endpoint, link, node="vla_io_arm1"):
    return open_bus(endpoint, node=node, settings=join_settings(endpoint, link))


def texts(subscriber):
    found = set()
    while (received := subscriber.try_recv()) is not None:
        found.add(received.payload)
    return found


@pytest.mark.parametrize("kind", ["tls certificate", "quic certificate", "tcp login", "tls both"])
def test_a_robot_writes_and_reads_its_own_topics_only(keys, port, kind):
    endpoint = f"{kind.split()[0]}/127.0.0.1:{port}"
    by_login, by_certificate = "certificate" not in kind, "login" not in kind
    link = RobotLink(keys.ca if by_certificate else None, keys.folder.users if by_login else None, keys.folder.access)

    def robot(name):
        changes = keys.login(name) if by_login else {}
        return keys.link(name, **changes) if by_certificate else CloudLink(**changes)

    with host(endpoint, keys, link) as cloud, join(endpoint, robot("arm1")) as a, join(endpoint, robot("arm2"), "vla_io_arm2") as b:
        at_cloud = cloud.queue("observation", ANY_ROBOT, capacity=64)
        contexts = {name: cloud.publisher("context", name) for name in ("arm1", "arm2")}
        own, spoofed, other = a.publisher("observation", "arm1"), a.publisher("observation", "arm2"), b.publisher("observation", "arm2")
        false_context = a.publisher("context", "arm2")
        heard = {"a": a.queue("context", "arm1"), "b": b.queue("context", "arm2")}
        overheard = [a.queue("context", "arm2"), a.queue("context", ANY_ROBOT), b.queue("observation", "arm1"), b.queue("observation", ANY_ROBOT)]
        recorder = a.queue("observation", "arm1")  # its own: allowed
        seen = {"cloud": set(), "a": set(), "b": set()}

        def turn():
            own.put(b"a")
            other.put(b"b")
            spoofed.put(b"a, as if of b")
            false_context.put(b"context by a")
            for name, publisher in contexts.items():
                publisher.put(b"context for " + name.encode())
            while (received := at_cloud.try_recv()) is not None:
                seen["cloud"].add((received.key.split("/")[2], received.payload))
            for name, subscriber in heard.items():
                seen[name] |= texts(subscriber)
            return {("arm1", b"a"), ("arm2", b"b")} <= seen["cloud"] and seen["a"] and seen["b"]

        assert until(turn)
        for _ in range(10):  # what is refused would have arrived meanwhile
            turn()
            sleep_s(CLOCK, 0.01)
        assert seen == {"cloud": {("arm1", b"a"), ("arm2", b"b")}, "a": {b"context for arm1"}, "b": {b"context for arm2"}}
        # A session hears what it publishes itself; nothing of that went through the cloud.
        assert texts(overheard[0]) <= {b"context by a"} and texts(overheard[1]) <= {b"context by a", b"context for arm1"}
        assert not texts(overheard[2]) and texts(overheard[3]) <= {b"b"}
        assert texts(recorder) == {b"a"}


def test_a_recorder_on_the_robot_hears_both_topics_through_the_cloud(keys, port):
    endpoint = f"tls/localhost:{port}"
    with host(endpoint, keys) as cloud, join(endpoint, keys.link("arm1")) as io, join(endpoint, keys.link("arm1")) as recorder:
        observations, contexts = recorder.queue("observation", "arm1"), recorder.queue("context", "arm1")
        out, back = io.publisher("observation", "arm1"), cloud.publisher("context", "arm1")
        found = set()
        assert until(lambda: out.put(b"o") or back.put(b"c") or found.update(texts(observations), texts(contexts)) or len(found) == 2)


def test_presence_tokens_of_others_are_not_taken(keys, port):
    zenoh = pytest.importorskip("zenoh")
    endpoint = f"tls/127.0.0.1:{port}"
    with host(endpoint, keys) as cloud:
        watch = cloud._session.liveliness().declare_subscriber("@ros2_lv/**", zenoh.handlers.FifoChannel(100))
        robots = [join(endpoint, keys.link("arm1"), node) for node in ("vla_io_arm2", "vla_io_arm1")]
        for bus in robots:
            bus.publisher("observation", "arm2")
            bus.publisher("observation", "arm1")
        seen = set()

        def look():
            while (sample := watch.try_recv()) is not None:
                seen.add((sample.key_expr.__str__().split("/")[2], *str(sample.key_expr).split("/")[8:10]))
            return len(seen) >= 3

        assert until(look)
        sleep_s(CLOCK, 0.2)
        look()
        ids = [bus.node.zid for bus in robots]
        topic = "%vla%arm1%observation"
        assert seen == {(ids[1], "vla_io_arm1"), (ids[1], "vla_io_arm1", topic), (ids[0], "vla_io_arm2", topic)}
        watch.undeclare()
        for bus in robots:
            bus.close()


# Who is not let in, and what is said


def refused(keys, port, link, *, tls=None, robot_link=None, name="127.0.0.1"):
    """What the watch of the edge says; the edge itself has started all the same."""
    said = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler, log = Handler(logging.WARNING), logging.getLogger("vla_common.link_watch")
    log.addHandler(handler)
    try:
        with host(f"tls/127.0.0.1:{port}", keys, robot_link, tls) as cloud:
            endpoint = f"tls/{name}:{port}"
            start_ns = CLOCK.monotonic_ns()
            with join(endpoint, link) as robot:
                assert CLOCK.monotonic_ns() - start_ns < 10 * NS_PER_S  # 0.2 s on an idle machine
                LinkWatch(robot, lambda: link_problem(endpoint, link), CLOCK, patience_s=0.1).start()
                assert until(lambda: said)
                sleep_s(CLOCK, 0.2)
                assert not robot.connected() and len(said) == 1, "once"
            # The cloud lives on.
            if tls is None:
                login = keys.login("arm1") if robot_link is not None else {}
                with join(f"tls/127.0.0.1:{port}", keys.link("arm1", **login)) as good:
                    assert until(good.connected)
            assert not cloud.closed
    finally:
        log.removeHandler(handler)
    assert f"not connected to {endpoint}" in said[0]
    return said[0]


def test_wrong_ca(keys, port):
    assert "not of the CA given" in refused(keys, port, keys.link("arm1", ca=keys.other_ca))


def test_certificate_of_another_ca(keys, port):
    told = refused(keys, port, keys.link("arm1", certificate=keys.stranger[0], key=keys.stranger[1]))
    assert "the server does not know the CA of the client certificate" in told


def test_expired_certificate(keys, port):
    told = refused(keys, port, keys.link("arm1", certificate=keys.expired[0], key=keys.expired[1]))
    assert "the client certificate has expired" in told and "vla keys" in told


def test_no_certificate(keys, port):
    assert "demands a client certificate" in refused(keys, port, keys.link("arm1", certificate=None, key=None))


def test_expired_certificate_of_the_cloud(keys, port):
    told = refused(keys, port, keys.link("arm1"), tls=keys.expired_server)
    assert "the server's certificate has expired" in told and "vla keys server" in told


def test_certificate_for_another_host(keys, port):
    assert "--host 127.0.0.1" in refused(keys, port, keys.link("arm1"), tls=keys.elsewhere)


@pytest.mark.parametrize("right", [True, False])
def test_wrong_password_or_none(keys, port, accepted, tmp_path, right):
    (tmp_path / "password").write_text("wrong")
    link = keys.link("arm1", user="arm1", password_file=tmp_path / "password") if right else keys.link("arm1")
    told = refused(keys, port, link, robot_link=replace(keys.robot_link, users=keys.folder.users))
    assert ("user 'arm1'" if right else "does it ask for a user and password") in told


def test_a_chat_client_named_like_a_robot_is_none(keys, port):
    at = keys.folder.client("arm1")
    endpoint = f"tls/127.0.0.1:{port}"
    with host(endpoint, keys) as cloud, join(endpoint, CloudLink(keys.ca, at / "client.pem", at / "client.key")) as thief:
        heard, publisher = cloud.queue("observation", ANY_ROBOT), thief.publisher("observation", "arm1")
        assert until(thief.connected)
        for _ in range(20):
            publisher.put(b"stolen")
            sleep_s(CLOCK, 0.01)
        assert not texts(heard)


# Settings that cannot work are refused before anything starts


def test_settings_of_the_edge(keys, tmp_path, caplog):
    good = EdgeConfig(cloud="tls/cloud.example:7448", cloud_link=keys.link("arm1"))
    check_cloud_link(good)
    (tmp_path / "empty").write_text("")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for changes, told in (
        ({"cloud": "tcp/127.0.0.1:7448"}, "connect to tls/HOST:PORT"),
        ({"cloud": "tcp/cloud.example:7448", "cloud_link": CloudLink()}, "allow_remote"),
        ({"cloud_link": replace(good.cloud_link, ca=tmp_path / "none.pem")}, "no CA certificate .*none.pem"),
        ({"cloud_link": replace(good.cloud_link, ca=text)}, "holds no CA certificate"),
        ({"cloud_link": replace(good.cloud_link, certificate=text)}, "must be PEM"),
        ({"cloud_link": replace(good.cloud_link, key=keys.link("arm2").key)}, "do not belong together"),
        ({"cloud_link": replace(good.cloud_link, user="arm1", password_file=tmp_path / "empty")}, "is empty"),
        ({"cloud_link": replace(good.cloud_link, user="arm1", password_file=tmp_path / "none")}, "no password file"),
    ):
        with pytest.raises(BusError, match=told):
            check_cloud_link(replace(good, **changes))
    for half in ({"certificate": text}, {"key": text}, {"user": "arm1"}, {"password_file": text}):
        with pytest.raises(BusError, match="belong together"):
            check_cloud_link(replace(good, cloud_link=CloudLink(**half)))
    assert not caplog.records
    check_cloud_link(replace(good, cloud_link=keys.link("arm1", certificate=keys.expired[0], key=keys.expired[1])))
    assert "expired on" in caplog.text
    secret = keys.login("arm1")["password_file"].read_text().strip()
    assert secret not in replace(good, cloud_link=keys.link("arm1", **keys.login("arm1"))).to_json()


def test_settings_of_the_cloud(keys, tmp_path):
    good = CloudConfig(listen="tls/0.0.0.0:7448", tls=keys.tls, robot_link=keys.robot_link)
    link_settings(good)
    text = tmp_path / "text"
    text.write_text("arm1 no colon")
    (tmp_path / "empty").write_text("")
    (tmp_path / "off.json5").write_text("{access_control: {enabled: false}}")
    for changes, told in (
        ({"tls": ServerTls()}, "set tls.certificate"),
        ({"listen": "tcp/0.0.0.0:7448"}, "--insecure-non-loopback"),
        ({"listen": "tcp/127.0.0.1:7448"}, "client_ca has no effect"),
        ({"tls": replace(keys.tls, certificate=tmp_path / "none")}, "no certificate .*none"),
        ({"robot_link": RobotLink(access=keys.folder.access)}, "set robot_link.client_ca or .users"),
        ({"robot_link": replace(keys.robot_link, users=text)}, "line 1: it is not of the form"),
        ({"robot_link": replace(keys.robot_link, users=tmp_path / "empty")}, "names no user"),
        ({"robot_link": replace(keys.robot_link, users=tmp_path / "none")}, "no file of users"),
        ({"robot_link": replace(keys.robot_link, access=tmp_path / "off.json5")}, "not enabled"),
        ({"robot_link": replace(keys.robot_link, access=text)}, "robot_link.access"),
        ({"robot_link": replace(keys.robot_link, access=tmp_path / "none.json5")}, "none.json5"),
    ):
        with pytest.raises(BusError, match=told):
            link_settings(replace(good, **changes))
    for half in ({"certificate": text}, {"key": text}, {"client_ca": text}):
        with pytest.raises(ValueError, match="belong together|needs certificate"):
            ServerTls(**half)
    for old in ("insecure_non_loopback", "allow_non_loopback"):
        link_settings(replace(CloudConfig(listen="tcp/0.0.0.0:7448"), **{old: True}))


def test_doors_that_are_open_to_anyone_are_named(keys, caplog, tmp_path):
    def told(config, **arguments):
        caplog.clear()
        warn_of_open_doors(config, **arguments)
        return [record.getMessage() for record in caplog.records]

    listen = {"listen": "tls/0.0.0.0:7448"}
    assert told(CloudConfig()) == []
    assert "any robot" in told(CloudConfig(**listen, tls=keys.tls))[0]
    assert "robot_link.access" in told(CloudConfig(**listen, tls=keys.tls, robot_link=RobotLink(keys.ca)))[0]
    assert told(CloudConfig(**listen, tls=keys.tls, robot_link=keys.robot_link)) == []
    assert "expired on" in told(CloudConfig(tls=keys.expired_server))[0]
    public = tmp_path / "public.key"
    public.write_bytes(keys.tls.key.read_bytes())
    public.chmod(0o640)
    assert f"chmod 600 {public}" in told(CloudConfig(tls=replace(keys.tls, key=public)))[0]
    gateway = {"serving": ServingConfig(model="x"), "gateway": GatewayConfig(http_listen="0.0.0.0:1", grpc_listen="[::]:2")}
    assert ["HTTP" in line or "gRPC" in line for line in told(CloudConfig(**gateway, tls=keys.tls))] == [True, True]
    assert told(CloudConfig(**gateway, tls=keys.mutual_tls)) == []
    assert told(CloudConfig(**gateway, tls=keys.tls), has_keys=True) == []


def test_the_cloud_hosts_what_its_settings_say(keys, port, tmp_path, monkeypatch):
    endpoint = f"tls/127.0.0.1:{port}"
    at = keys.root / "keys"
    settings = tmp_path / "cloud.yaml"
    settings.write_text(
        f"listen: {endpoint}\ntls: {{certificate: {at}/server.pem, key: {at}/server.key}}\n"
        f"robot_link: {{client_ca: {at}/ca.pem, access: {at}/zenoh/access.json5}}\n"
    )
    seen = {}

    @contextmanager
    def no_model(config, publish, stop, tracer):
        yield SimpleNamespace(status=dict), None

    def serve(config, service, manifest, bus, stop):
        heard = bus.queue("observation", ANY_ROBOT)
        with join(endpoint, keys.link("arm1")) as robot:
            own, other = robot.publisher("observation", "arm1"), robot.publisher("observation", "arm2")
            until(lambda: other.put(b"spoofed") or own.put(b"own") or seen.update(last=texts(heard)) or seen["last"])

    monkeypatch.setattr(cloud_main, "context_service", no_model)
    monkeypatch.setattr(cloud_main, "serve", serve)
    monkeypatch.setattr(cloud_main, "stop_on_signals", lambda _: StopFlag())
    monkeypatch.setattr(cloud_main, "end_with_parent", lambda: None)
    monkeypatch.setattr(cloud_main, "setup_logging", lambda _: None)
    assert cloud_main.main(["--config", str(settings)]) == 0
    assert seen["last"] == {b"own"}


def test_the_edge_opens_its_link_with_its_keys(keys, port):
    endpoint = f"tls/127.0.0.1:{port}"
    config = EdgeConfig(cloud=endpoint, cloud_link=keys.link("arm1"))
    with host(endpoint, keys) as cloud, open_cloud_link(config, "vla_io", watch=True) as edge:
        heard, publisher = cloud.latest("observation", "arm1"), edge.publisher("observation", "arm1")
        assert edge.node.name == "vla_io_arm1"
        assert until(lambda: publisher.put(b"x") or heard.try_recv())


def test_a_log_in_that_nobody_asks_for_is_refused_by_zenoh_and_told(keys, port, accepted):
    told = refused(keys, port, keys.link("arm1", **keys.login("arm1")))
    assert "does it ask for any (robot_link.users)?" in told


def test_nothing_there_is_told_too(port):
    link = CloudLink()
    assert "nothing answers at 127.0.0.1" in link_problem(f"tcp/127.0.0.1:{port}", link)
    assert "nothing answers" in link_problem(f"tls/127.0.0.1:{port}", link)
    assert "may be refused" in link_problem(f"quic/127.0.0.1:{port}", link)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "does it ask for a user" in link_problem(f"tcp/127.0.0.1:{silent.getsockname()[1]}", link)


class FakeLink:
    endpoint, closed, up = "tls/somewhere:1", False, False

    def connected(self):
        return self.up


def test_an_outage_is_told_once_and_its_end_too(caplog):
    caplog.set_level(logging.INFO)
    clock, link, asked = ManualClock(), FakeLink(), []
    watch = LinkWatch(link, lambda: asked.append(1) or "the reason", clock, patience_s=5.0)

    def told(*steps_s):
        caplog.clear()
        for step_s in steps_s:
            clock.advance_ns(round(step_s * NS_PER_S))
            watch.look()
        return [record.getMessage() for record in caplog.records]

    assert told(0, 4.9) == []
    assert told(0.1, 1, 100) == ["not connected to tls/somewhere:1 for 5 s: the reason"] and len(asked) == 1
    link.up = True
    assert told(1, 1) == ["connected to tls/somewhere:1"]
    link.up = False
    assert told(4.9) == [] and len(told(0.2, 1)) == 1
    link.up = True
    assert len(told(1)) == 1
    link.up, watch._diagnose = False, lambda: setattr(link, "up", True) or "too late"
    assert told(6) == [], "connected while the reason was looked for"
