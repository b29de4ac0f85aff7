"""The file of API keys, the ring that is read from it, and the command that writes it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from vla_cli import api_keys_main
from vla_cloud.core.client import ANYBODY, Client, PermissionDenied, Unauthenticated
from vla_cloud.core.generate import Priority
from vla_cloud.gateway.api_key_file import KeyEntry, KeyFile, changed_keys, load_keys, new_token, token_hash
from vla_cloud.gateway.clients import Clients, open_clients
from vla_cloud.gateway.key_ring import KeyFileWatch, KeyRing, tenant_salt
from vla_cloud.gateway.settings import GatewayError
from vla_common.clock import NS_PER_S, ManualClock

SECRET = b"s" * 32


def run(capsys, *arguments: object, clock: ManualClock | None = None) -> tuple[int, str, str]:
    code = api_keys_main.main([str(one) for one in arguments], clock or ManualClock())
    out = capsys.readouterr()
    return code, out.out, out.err


def entry(name: str, token: str, **changes: object) -> KeyEntry:
    return KeyEntry(name, token_hash(token) or "", **changes)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path, capsys) -> None:
    path = tmp_path / "deep" / "keys.yaml"
    limits = ("--requests-per-minute", 60, "--tokens-per-minute", 9000, "--tokens-per-day", 100_000, "--max-tokens", 512,
              "--max-concurrent", 4)  # fmt: skip
    code, out, err = run(capsys, "add", "robot-lab", "--file", path, "--tenant", "lab", "--priority", "low", *limits,
                         "--expires", "30d", "--models", "small", "large", "--operator")  # fmt: skip
    token = out.strip()
    assert code == 0 and out == token + "\n" and token.startswith("vla_") and len(token) == 47 and "not shown again" in err
    assert token not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    assert not list(path.parent.glob(".keys.yaml.?*[!k]"))  # nothing half-written is left
    (key,) = load_keys(path).keys
    assert key == entry(
        "robot-lab", token, tenant="lab", priority="low", requests_per_minute=60, tokens_per_minute=9000,
        tokens_per_day=100_000, max_tokens=512, max_concurrent=4, expires="2023-12-14T22:13:20Z", models=("small", "large"),
        operator=True,
    )  # fmt: skip
    assert key.expires_wall_ns == (1_700_000_000 + 30 * 86_400) * NS_PER_S
    code, out, _ = run(capsys, "list", "--file", path)
    assert code == 0 and "tenant=lab" in out and "max_tokens=512" in out and "expires=2023" in out and key.sha256 not in out
    later = ManualClock(wall_ns=key.expires_wall_ns)
    assert "EXPIRED=2023" in run(capsys, "list", "--file", path, clock=later)[1]


def test_names_are_unique_and_revoking_deletes(tmp_path, capsys) -> None:
    path = tmp_path / "keys.yaml"
    tokens = [run(capsys, "add", name, "--file", path)[1].strip() for name in ("a", "b")]
    assert tokens[0] != tokens[1]
    code, out, err = run(capsys, "add", "a", "--file", path)
    assert code == 1 and not out and "has a key 'a'" in err and len(load_keys(path).keys) == 2
    assert run(capsys, "revoke", "a", "--file", path)[0] == 0
    assert [key.name for key in load_keys(path).keys] == ["b"]
    assert "no key 'a'" in run(capsys, "revoke", "a", "--file", path)[2]
    assert run(capsys, "revoke", "a", "--file", tmp_path / "none.yaml")[0] == 1 and not (tmp_path / "none.yaml").exists()
    assert "cannot read" in run(capsys, "list", "--file", tmp_path / "none.yaml")[2]


@pytest.mark.parametrize(("arguments", "told"), [
    (("a@b",), "name 'a@b'"), (("a", "--tenant", "x y"), "tenant 'x y'"), (("a", "--max-tokens", 0), "max_tokens must be"),
    (("", ), "name ''"), (("x" * 65,), "name"), (("a", "--requests-per-minute", -5), "requests_per_minute must be"),
])  # fmt: skip
def test_a_key_that_admits_nobody_is_not_made(tmp_path, capsys, arguments, told) -> None:
    code, out, err = run(capsys, "add", *arguments, "--file", tmp_path / "keys.yaml")
    assert code == 1 and not out and told in err and not (tmp_path / "keys.yaml").exists()


@pytest.mark.parametrize("text", ["30", "d", "0d", "-1d", "1y", "1.5h", "99999999d"])
def test_a_duration_has_a_unit(tmp_path, text) -> None:
    with pytest.raises(SystemExit):
        api_keys_main.main(["add", "a", f"--expires={text}", "--file", str(tmp_path / "k")])


def test_two_writers_wait_for_each_other(tmp_path) -> None:
    path, names = tmp_path / "keys.yaml", [f"k{number}" for number in range(12)]

    def add(name: str) -> None:
        with changed_keys(path) as keys:
            keys.append(entry(name, new_token()))

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in load_keys(path).keys) == sorted(names)


def test_a_failed_change_leaves_the_file_as_it_was(tmp_path) -> None:
    path = tmp_path / "keys.yaml"
    with changed_keys(path) as keys:
        keys.append(entry("a", new_token()))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="two keys have name 'a'"), changed_keys(path) as keys:
        keys.append(entry("a", new_token()))
    assert path.read_bytes() == before and {one.name for one in tmp_path.iterdir()} == {"keys.yaml", ".keys.yaml.lock"}


HASH = "0" * 64


@pytest.mark.parametrize(("text", "told"), [
    (f"keys: [{{name: a, sha256: '{HASH}', max_token: 5}}]", "did you mean 'max_tokens'"),
    ("key: []", "did you mean 'keys'"), ("[]", "expected keys and values"), ("keys: {", "not YAML"),
    (f"keys: [{{name: a, sha256: '{HASH}', max_tokens: '5'}}]", "max_tokens"),
    (f"keys: [{{name: a, sha256: '{HASH}', max_tokens: true}}]", "max_tokens"),
    (f"keys: [{{name: a, sha256: '{HASH}', operator: 'yes'}}]", "operator"),
    (f"keys: [{{name: a, sha256: '{HASH}', priority: robot}}]", "priority"),
    (f"keys: [{{name: a, sha256: '{HASH}', expires: '2030-01-01'}}]", "expires"),
    (f"keys: [{{name: a, sha256: '{HASH}', expires: 2030-01-01T00:00:00Z}}]", "expires"),
    ("keys: [{name: a, sha256: abc}]", "64 hexadecimal"), ("keys: [{name: a}]", "sha256"),
    (f"keys: [{{name: a, sha256: '{HASH}'}}, {{name: b, sha256: '{HASH}'}}]", "two keys have sha256"),
    (f"keys: [{{name: a, sha256: '{HASH}'}}, {{name: a, sha256: '{'1' * 64}'}}]", "two keys have name"),
    (f"keys: [{{name: 'a\\nb', sha256: '{HASH}'}}]", "name"), (b"\xff\xfe".decode("latin-1") * 2 + "\x00", "not YAML"),
])  # fmt: skip
def test_a_file_with_anything_wrong_is_refused_as_a_whole(tmp_path, text, told) -> None:
    with pytest.raises(GatewayError, match=told):
        load_keys(write(tmp_path / "keys.yaml", text))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_open_is_refused(tmp_path, mode) -> None:
    with pytest.raises(GatewayError, match="chmod 600"):
        load_keys(write(tmp_path / "keys.yaml", "keys: []", mode))
    assert load_keys(write(tmp_path / "keys.yaml", "keys: []", 0o400)) == KeyFile()
    with pytest.raises(GatewayError, match="not a file|cannot read"):
        load_keys(tmp_path)


def ring_of(*entries: KeyEntry, clock: ManualClock | None = None) -> KeyRing:
    return KeyRing(KeyFile(entries), SECRET, clock or ManualClock())


def test_a_key_is_known_by_its_hash_and_tells_who_asks() -> None:
    token = new_token()
    ring = ring_of(entry("a", token, priority="low", models=("m",), max_tokens=7), entry("b", new_token(), tenant="t"))
    client = ring.find(token)
    assert (client.name, client.tenant, client.ceiling, client.usual) == ("a", "a", Priority.LOW, Priority.LOW)
    assert client.may_use("m") and not client.may_use("n") and client.rules.max_tokens == 7 and not client.is_operator
    assert client.salt == tenant_salt(SECRET, "a") and len(client.salt) == 32
    assert client.scoped("x") == "x@a"
    for wrong, cause in ((new_token(), "unknown"), (token[:-1], "malformed"), (token + "A", "malformed"), ("", "malformed"),
                         (token.replace("vla_", "sk-_"), "malformed"), ("vla_" + "é" * 43, "malformed")):  # fmt: skip
        with pytest.raises(Unauthenticated) as caught:
            ring.find(wrong)
        assert caught.value.cause == cause and token not in str(caught.value)


def test_an_expired_key_is_named_as_such_to_its_holder_alone() -> None:
    token, clock = new_token(), ManualClock()
    ring = ring_of(entry("a", token, expires="2023-11-14T22:13:30Z"), clock=clock)
    clock.advance_ns(10 * NS_PER_S - 1)
    assert ring.find(token).name == "a"
    clock.advance_ns(1)
    with pytest.raises(Unauthenticated, match="expired") as caught:
        ring.find(token)
    assert caught.value.cause == "expired"
    with pytest.raises(Unauthenticated, match="not known"):
        ring.find(new_token())


def test_salts_differ_by_tenant_and_by_secret() -> None:
    salts = {tenant_salt(secret, tenant) for secret in (SECRET, b"t" * 32) for tenant in ("a", "b", "ab")}
    assert len(salts) == 6


def test_a_priority_is_a_ceiling() -> None:
    high, low = (Client(ceiling=p, usual=p) for p in (Priority.HIGH, Priority.LOW))
    assert [high.priority(p) for p in (None, Priority.HIGH, Priority.NORMAL, Priority.LOW)] == [
        Priority.HIGH, Priority.HIGH, Priority.NORMAL, Priority.LOW,
    ]  # fmt: skip
    assert {low.priority(p) for p in (None, Priority.HIGH, Priority.NORMAL, Priority.LOW)} == {Priority.LOW}
    assert ANYBODY.priority(None) is Priority.NORMAL and ANYBODY.priority(Priority.HIGH) is Priority.HIGH


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    path, (one, two) = tmp_path / "keys.yaml", (new_token(), new_token())
    with changed_keys(path) as keys:
        keys.append(entry("one", one))
    ring = KeyRing(load_keys(path), SECRET, ManualClock())
    watch = KeyFileWatch(path, ring)
    watch.look()
    assert watch.counts.snapshot() == {"reloaded": 0, "reload_failed": 0}
    with changed_keys(path) as keys:
        keys[:] = [entry("two", two)]
    watch.look(), watch.look()
    assert ring.find(two).name == "two" and watch.counts["reloaded"] == 1
    with pytest.raises(Unauthenticated):
        ring.find(one)
    good = path.read_text()
    for number, break_it in enumerate((lambda: write(path, "keys: ["), lambda: path.chmod(0o644), path.unlink), 1):
        break_it()
        watch.look(), watch.look()
        assert ring.find(two).name == "two" and watch.counts["reload_failed"] == number  # told once
    write(path, good)
    watch.look()
    assert watch.counts["reloaded"] == 2 and two not in caplog.text
    assert sum("stay as they were" in record.getMessage() for record in caplog.records) == 3


def test_the_watch_runs_beside_and_ends(tmp_path) -> None:
    path, token = tmp_path / "keys.yaml", new_token()
    write(path, "keys: []")
    ring = KeyRing(load_keys(path), SECRET, ManualClock())
    watch = KeyFileWatch(path, ring, period_s=0.01)
    watch.start(), watch.start()
    with changed_keys(path) as keys:
        keys.append(entry("a", token))
    for _ in range(1000):
        if len(ring):
            break
        threading.Event().wait(0.01)
    assert ring.find(token).name == "a"
    watch.close(), watch.close()
    assert not any(thread.name == "api-keys" for thread in threading.enumerate())


def test_without_keys_everybody_is_the_same() -> None:
    clients = Clients(ManualClock())
    assert not clients.has_keys and clients.identify(None) is ANYBODY is clients.identify("Bearer whatever")
    assert clients.require(None) is ANYBODY
    clients.require_operator(ANYBODY)


def test_with_keys_a_door_that_forgot_to_look_lets_nobody_in(caplog) -> None:
    token, clock = new_token(), ManualClock()
    clients = Clients(clock, ring_of(entry("a", token), clock=clock))
    for client in (None, ANYBODY):
        with pytest.raises(Unauthenticated):
            clients.require(client)
    for header, cause in ((None, "missing"), ("", "missing"), (token, "malformed"), (f"Basic {token}", "malformed"),
                          ("Bearer", "malformed"), (f"Bearer {token} x", "malformed"), (f"Bearer {new_token()}", "unknown"),
                          (f"Bearer {token}" + "A" * 100_000, "malformed")):  # fmt: skip
        with pytest.raises(Unauthenticated) as caught:
            clients.identify(header)
        assert caught.value.cause == cause, header
    client = clients.identify(f"bearer   {token} ")
    assert clients.require(client) is client
    with pytest.raises(PermissionDenied):
        clients.require_operator(client)
    counts = clients.counts()
    assert (counts["refused_missing"], counts["refused_malformed"], counts["refused_unknown"]) == (2, 5, 1)
    assert counts["refused_not_operator"] == 1
    assert len(caplog.records) == 1 and token not in caplog.text  # strangers cannot fill the log
    clock.advance_ns(11 * NS_PER_S)
    with pytest.raises(Unauthenticated):
        clients.identify(None)
    assert "and 7 more" in caplog.records[1].getMessage()


def test_limits_live_as_long_as_their_key_and_follow_the_file() -> None:
    token, other, clock = new_token(), new_token(), ManualClock()
    ring = ring_of(entry("a", token, requests_per_minute=2), clock=clock)
    clients = Clients(clock, ring)
    client = clients.identify(f"Bearer {token}")
    clients.begin(client, 1).end(0)
    assert clients.limits_of(client).level("requests_per_minute", 0) == 1
    ring.replace(KeyFile((entry("a", token, requests_per_minute=20),)))
    assert clients.limits_of(clients.identify(f"Bearer {token}")).level("requests_per_minute", 0) == 10
    ring.replace(KeyFile((entry("b", other),)))
    clients.begin(clients.identify(f"Bearer {other}"), 1).end(0)
    assert set(clients._limits) == {"b"}


def test_settings_open_or_say_what_is_wrong(tmp_path, caplog) -> None:
    assert not open_clients(ManualClock()).has_keys
    with pytest.raises(GatewayError, match="vla api-keys add"):
        open_clients(ManualClock(), str(tmp_path / "none"))
    keys = write(tmp_path / "keys", "")
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 31)
    secret.chmod(0o600)
    with pytest.raises(GatewayError, match="needs 32"):
        open_clients(ManualClock(), str(keys), str(secret))
    secret.write_bytes(b"x" * 32)
    clients = open_clients(ManualClock(), str(keys), str(secret))
    assert clients.has_keys and "nobody can ask" in caplog.text
    os.chmod(secret, 0o644)
    with pytest.raises(GatewayError, match="chmod 600"):
        open_clients(ManualClock(), str(keys), str(secret))
