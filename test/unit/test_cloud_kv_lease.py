"""Leases: never shortened, all swept, heartbeats from queue entry on, late ones ignored and counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_cloud.core.kv_lease import LeaseConfig, LeaseTable
from vla_common.clock import NS_PER_S, ManualClock


def table():
    clock = ManualClock()
    return LeaseTable(LeaseConfig(), clock), clock


def advance(clock, seconds):
    clock.advance_ns(round(seconds * NS_PER_S))


def test_a_lease_without_heartbeats_ends_after_30_seconds():
    leases, clock = table()
    leases.begin("a")
    advance(clock, 29.999)
    assert leases.sweep() == [] and leases.left_s("a") == pytest.approx(0.001)
    advance(clock, 0.001)
    assert leases.sweep() == ["a"] and leases.sweep() == [] and "a" not in leases and len(leases) == 0


def test_a_heartbeat_extends_to_20_seconds_from_now_and_never_shortens():
    leases, clock = table()
    leases.begin("a")
    advance(clock, 5)
    assert leases.heartbeat("a") and leases.left_s("a") == 25  # 20 from now would be earlier
    advance(clock, 15)
    assert leases.heartbeat("a") and leases.left_s("a") == 20
    advance(clock, 19)
    assert leases.sweep() == []
    advance(clock, 1)
    assert leases.sweep() == ["a"]


def test_every_ended_lease_is_swept_whatever_comes_before_it():
    leases, clock = table()
    for name in "abcdef":
        leases.begin(name)
    advance(clock, 20)
    for name in "ace":  # the first in order live on
        assert leases.heartbeat(name)
    advance(clock, 10)
    assert leases.sweep() == ["b", "d", "f"]
    advance(clock, 10)
    assert leases.sweep() == ["a", "c", "e"]


def test_a_heartbeat_after_the_end_does_not_revive_even_before_the_sweep():
    leases, clock = table()
    leases.begin("a")
    advance(clock, 30)
    assert not leases.heartbeat("a") and leases.late == 1
    assert leases.sweep() == ["a"]
    assert not leases.heartbeat("a") and not leases.heartbeat("never") and leases.late == 3


def test_a_request_that_is_over_has_no_lease():
    leases, clock = table()
    leases.begin("a")
    with pytest.raises(ValueError, match="already"):
        leases.begin("a")
    assert leases.end("a") and not leases.end("a") and leases.left_s("a") == 0
    leases.begin("a")
    advance(clock, 60)
    assert leases.sweep() == ["a"]


@pytest.mark.parametrize("bad", [{"heartbeat_s": 7.0}, {"initial_s": 14.0}, {"heartbeat_s": 0.0}, {"extension_s": 1.0}])
def test_a_lease_must_outlive_two_lost_heartbeats(bad):
    with pytest.raises(ValueError, match="heartbeat"):
        LeaseConfig(**bad)


def test_two_lost_heartbeats_end_nothing():
    leases, clock = table()
    leases.begin("a")
    for tick in range(1, 201):
        advance(clock, 1)
        if tick % 5 == 0 and (tick // 5) % 3 == 0:  # every 5 s, two of three are lost
            assert leases.heartbeat("a")
        assert leases.sweep() == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 4)), st.tuples(st.just("beat"), st.integers(0, 4)),
    st.tuples(st.just("end"), st.integers(0, 4)), st.tuples(st.just("wait"), st.integers(0, 12)),
    st.tuples(st.just("sweep"), st.just(0))), max_size=60))
def test_leases_equal_a_plain_model(actions):
    leases, clock = table()
    model: dict[str, float] = {}
    now = 0
    for what, value in actions:
        name = str(value)
        before = dict(model)
        if what == "wait":
            advance(clock, value)
            now += value
        elif what == "begin" and name not in model:
            leases.begin(name)
            model[name] = now + 30
        elif what == "beat":
            alive = name in model and model[name] > now
            assert leases.heartbeat(name) == alive
            if alive:
                model[name] = max(model[name], now + 20)
        elif what == "end":
            assert leases.end(name) == (model.pop(name, None) is not None)
        elif what == "sweep":
            ended = {key for key, at in model.items() if at <= now}
            assert set(leases.sweep()) == ended
            model = {key: at for key, at in model.items() if key not in ended}
        for key in model:
            assert leases.left_s(key) == max(0, model[key] - now)
            assert key not in before or model[key] >= before[key]
    assert len(leases) == len(model)
