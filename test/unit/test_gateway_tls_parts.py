"""What the doors tell of handshakes: once, then now and then; and what addresses they take."""

import logging

import pytest

pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
from vla_cloud.gateway.door_tls import HandshakeLog
from vla_cloud.gateway.grpc_tls import HandshakeWatch
from vla_cloud.gateway.settings import GatewayError, check_listen, is_reachable
from vla_common.clock import NS_PER_S, ManualClock


def test_each_kind_of_failure_is_told_at_once_and_then_once_a_minute(caplog):
    clock = ManualClock()
    log = HandshakeLog("https://x", clock)
    for _ in range(1000):
        log.failed("no certificate")
    log.failed("plain HTTP")
    assert [record.getMessage() for record in caplog.records] == ["https://x: no certificate", "https://x: plain HTTP"]
    caplog.clear()
    clock.advance_ns(60 * NS_PER_S)
    log.failed("no certificate")
    log.failed("no certificate")
    assert [record.getMessage() for record in caplog.records] == ["https://x: no certificate (1000 times)"]
    caplog.clear()
    for number in range(1000):
        log.failed(f"kind {number}")
    assert len(caplog.records) < 16, "kinds are bounded too"


def test_connections_without_a_call_are_counted_and_told_now_and_then(caplog):
    clock = ManualClock()
    watch = HandshakeWatch("gRPC on x", 10.0, clock)

    def told(seconds):
        caplog.clear()
        clock.advance_ns(seconds * NS_PER_S)
        watch.look()
        return [record.getMessage() for record in caplog.records]

    watch.begun()
    watch.called("ipv4:1.2.3.4:5")
    watch.called("ipv4:1.2.3.4:5")
    watch.begun()
    assert told(11) == []
    (first,) = told(1)
    assert "gRPC on x: 1 connections brought no call" in first and "GRPC_VERBOSITY" in first
    for _ in range(3):
        watch.begun()
    assert told(12) == [] and "3 connections" in told(60)[0] and told(60) == []
    watch.called("ipv4:1.2.3.4:6")  # a call whose handshake was given up
    for number in range(10, 10_010):
        watch.begun()
        watch.called(f"ipv4:1.2.3.4:{number}")
    assert len(watch._peers) <= 4096 and not watch._pending


@pytest.mark.parametrize("listen, reachable", [
    ("127.0.0.1:1", False), ("[::1]:1", False), ("localhost:1", False), ("unix:/x", False), ("127.9.9.9:1", False),
    ("0.0.0.0:1", True), ("[::]:1", True), ("10.0.0.1:1", True), ("127.0.0.1.example.com:1", True), ("host:1", True),
])  # fmt: skip
def test_what_other_machines_reach(listen, reachable, caplog):
    caplog.set_level(logging.WARNING)
    assert is_reachable(listen) == reachable
    if reachable:
        with pytest.raises(GatewayError, match="other machines"):
            check_listen(listen, False, "gateway.grpc_listen")
    check_listen(listen, reachable, "gateway.grpc_listen")
