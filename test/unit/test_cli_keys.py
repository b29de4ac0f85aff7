"""vla keys: what it writes, for whom, and what it refuses to overwrite."""

import os
import stat
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'vla-runtime[keys]'")
import yaml
import zenoh
from cryptography import x509

from vla_cli.certificate_maker import is_issued_by
from vla_cli.doctor_keys import check_certificates
from vla_cli.key_folder import KeyFolder, default_folder
from vla_cli.keys_main import EXIT_FAILED, EXIT_OK, EXIT_USAGE, main
from vla_cloud.config import CloudConfig
from vla_common.certificate_file import read_certificate, validity_problem
from vla_common.clock import NS_PER_S, ManualClock
from vla_common.config import from_mapping
from vla_common.link_security import host_settings, join_settings
from vla_common.tls import server_context
from vla_common.zenoh_session import read_access_control
from vla_edge.config import EdgeConfig

DAY_NS = 86_400 * NS_PER_S
START_NS = round(datetime(2027, 1, 31, 12, tzinfo=timezone.utc).timestamp()) * NS_PER_S


@pytest.fixture
def clock():
    return ManualClock(wall_ns=START_NS)


@pytest.fixture
def keys(tmp_path, clock, capsys):
    """Runs vla keys; returns its exit code and what it printed."""

    def run(*arguments):
        code = main([*arguments, "--out", str(tmp_path / "keys")], clock)
        return code, "".join(capsys.readouterr())

    run.root = tmp_path / "keys"
    return run


def modes(root):
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}


def test_only_the_owner_can_read_what_is_written(keys):
    umask = os.umask(0)
    try:
        for command in (["init"], ["robot", "arm1"], ["client", "alice"]):
            assert keys(*command)[0] == EXIT_OK
    finally:
        os.umask(umask)
    found = modes(keys.root)
    folders = {name for name, mode in found.items() if mode == 0o700}
    assert folders == {"robots", "robots/arm1", "clients", "clients/alice", "zenoh"}
    files = {name for name, mode in found.items() if mode == 0o600}
    assert files == {
        "ca.pem", "ca.key", "server.pem", "server.key", "zenoh/access.json5", "zenoh/users.txt",
        "robots/arm1/ca.pem", "robots/arm1/robot.pem", "robots/arm1/robot.key", "robots/arm1/password",
        "clients/alice/ca.pem", "clients/alice/client.pem", "clients/alice/client.key",
    }  # fmt: skip
    assert len(found) == len(files) + 5 and stat.S_IMODE(keys.root.stat().st_mode) == 0o700


def test_nothing_is_overwritten_without_force(keys):
    for command in (["init"], ["robot", "arm1"], ["client", "alice"]):
        assert keys(*command)[0] == EXIT_OK
    before = {path: path.read_bytes() for path in keys.root.rglob("*") if path.is_file()}
    for command in (["init"], ["server"], ["robot", "arm1"], ["client", "alice"]):
        code, told = keys(*command)
        assert code == EXIT_USAGE and "--force" in told
    assert {path: path.read_bytes() for path in keys.root.rglob("*") if path.is_file()} == before
    assert keys("server", "--force", "--host", "cloud.example")[0] == EXIT_OK
    after = {path: path.read_bytes() for path in keys.root.rglob("*") if path.is_file()}
    assert {path.name for path in before if after[path] != before[path]} == {"server.pem", "server.key"}
    assert keys("robot", "arm1", "--force")[0] == EXIT_OK
    assert (keys.root / "robots/arm1/robot.pem").read_bytes() != before[keys.root / "robots/arm1/robot.pem"]


def test_the_server_has_the_names_it_is_reached_by(keys):
    assert keys("init", "--host", "cloud.example", "--host", "10.0.0.7", "--host", "127.0.0.1")[0] == EXIT_OK
    facts = read_certificate(keys.root / "server.pem")
    assert facts.hosts == ("localhost", "127.0.0.1", "::1", "cloud.example", "10.0.0.7")
    certificate = x509.load_pem_x509_certificate((keys.root / "server.pem").read_bytes())
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]


def test_a_wrong_host_leaves_nothing_behind(keys):
    for host in ("https://cloud", "cloud:7448", "a b", ""):
        code, told = keys("init", "--host", host)
        assert code == EXIT_USAGE and "without port or scheme" in told and not keys.root.exists()


def test_names_of_robots_and_clients_cannot_be_mixed_up(keys):
    keys("init")
    keys("robot", "arm1")
    keys("client", "arm1")
    robot, client = keys.root / "robots/arm1/robot.pem", keys.root / "clients/arm1/client.pem"
    assert read_certificate(robot).common_name == "arm1"
    assert read_certificate(client).common_name == "client:arm1"
    for path in (robot, client):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
            x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH
        ]
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert is_issued_by(path.read_bytes(), (keys.root / "ca.pem").read_bytes())
    for name in ("client:alice", "*", "a/b", "", "..", "a" * 51):
        assert keys("robot", name)[0] == EXIT_USAGE and keys("client", name)[0] == EXIT_USAGE
    assert sorted(path.name for path in (keys.root / "robots").iterdir()) == ["arm1"]


def test_expiry_is_shown(keys, clock):
    keys("init", "--days", "100")
    keys("robot", "arm1", "--days", "10")
    code, told = keys("list")
    lines = {line.split()[0]: line for line in told.splitlines()}
    assert code == EXIT_OK and set(lines) == {"ca", "server", "robot"}
    assert "2037-01-28" in lines["ca"] and "3650 days left" in lines["ca"]
    assert "2027-05-11  100 days left  for localhost, 127.0.0.1, ::1" in lines["server"]
    assert "arm1" in lines["robot"] and "10 days left: issue it again soon" in lines["robot"]
    assert check_certificates(keys.root, clock).text.startswith("robot arm1 expires in 10 days")
    assert check_certificates(keys.root, clock).remedy == "vla keys robot arm1 --force"
    clock.advance_ns(11 * DAY_NS)
    code, told = keys("list")
    assert code == EXIT_FAILED and "EXPIRED" in told
    assert "expired on 2027-02-10" in check_certificates(keys.root, clock).text
    assert keys("robot", "arm1", "--force")[0] == EXIT_OK and keys("list")[0] == EXIT_OK
    assert check_certificates(keys.root, clock).level == "ok"


def test_validity_in_words(keys, clock):
    keys("init", "--days", "100")
    path = keys.root / "server.pem"
    for days, told in ((-2, "is the clock"), (0, ""), (71, "expires on 2027-05-11"), (101, "expired on 2027-05-11")):
        problem = validity_problem(path, START_NS + days * DAY_NS)
        assert told in problem and bool(told) == bool(problem)
    assert validity_problem(keys.root / "nothing", 0) == ""


def test_another_ca_makes_the_old_certificates_worthless(keys):
    keys("init")
    keys("robot", "arm1")
    assert keys("init", "--force")[0] == EXIT_OK
    robot = next(line for line in keys("list")[1].splitlines() if line.startswith("robot"))
    assert "OF ANOTHER CA" in robot


def test_what_is_printed_is_a_configuration_that_is_accepted(keys):
    cloud = from_mapping(CloudConfig, yaml.safe_load(keys("init")[1].partition("\n")[2]))
    edge = from_mapping(EdgeConfig, yaml.safe_load(keys("robot", "arm1")[1].partition("\n")[2]))
    assert cloud.listen == "tls/0.0.0.0:7448" and edge.cloud.startswith("tls/")
    settings = host_settings(cloud.listen, cloud.tls, cloud.robot_link) | read_access_control(cloud.robot_link.access)
    assert settings["transport/link/tls/enable_mtls"] is True
    assert [policy["id"] for policy in settings["access_control"]["policies"]] == ["arm1"]
    assert join_settings(edge.cloud, edge.cloud_link)["transport/link/tls/verify_name_on_connect"] is True
    server_context(cloud.tls)


def test_zenoh_knows_the_robots_of_the_folder(keys):
    keys("init")
    access, users = keys.root / "zenoh/access.json5", keys.root / "zenoh/users.txt"
    assert read_access_control(access)["access_control"]["policies"] == [] and users.read_text() == ""
    for name in ("arm2", "arm1"):
        keys("robot", name)
    lines = dict(line.split(":") for line in users.read_text().splitlines())
    assert lines == {name: (keys.root / "robots" / name / "password").read_text().strip() for name in ("arm1", "arm2")}
    assert len(set(lines.values())) == 2 and min(map(len, lines.values())) >= 32
    zenoh.Config.from_file(str(access))
    assert keys("revoke", "arm2")[0] == EXIT_OK
    assert users.read_text().startswith("arm1:") and "arm2" not in users.read_text() + access.read_text()
    assert keys("revoke", "arm2")[0] == EXIT_USAGE


def test_what_is_missing_is_named(keys, tmp_path, capsys):
    for command in (["robot", "arm1"], ["list"], ["server"]):
        code, told = keys(*command)
        assert code == EXIT_USAGE and "'vla keys init' makes a CA" in told
    assert keys("init", "--days", "0")[0] == EXIT_USAGE
    (tmp_path / "file").write_text("")
    assert main(["init", "--out", str(tmp_path / "file" / "keys")]) == EXIT_USAGE
    assert "cannot" in capsys.readouterr().err
    assert main(["check", "nowhere"]) == EXIT_USAGE


def test_the_usual_folder(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/somewhere")
    assert default_folder() == Path("/etc/somewhere/vla-runtime/keys")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert default_folder() == Path.home() / ".config/vla-runtime/keys"


def test_doctor_without_keys_or_without_cryptography(tmp_path, clock, monkeypatch):
    assert check_certificates(tmp_path, clock).level == "ok"
    keys = KeyFolder(tmp_path, clock)
    keys.init([])
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "vla_cli.key_folder")
    monkeypatch.delitem(sys.modules, "vla_cli.certificate_maker")
    assert "pip install" in check_certificates(tmp_path, clock).text
    assert read_certificate(keys.server) is None and validity_problem(keys.server, 0) == ""
