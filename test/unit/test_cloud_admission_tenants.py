"""One tenant in the queue cannot keep the others out, nor make them wait for all of its requests."""

from __future__ import annotations

import random

import pytest

from vla_cloud.core.admission import Admission, AdmissionConfig
from vla_cloud.core.generate import Priority

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


def full(**changes: object) -> Admission:
    """One request is active; what comes now waits."""
    values: dict[str, object] = dict(max_active=1, max_queued=8, max_queued_tokens=1000, share={})
    admission = Admission(AdmissionConfig(**{**values, **changes}))
    assert admission.offer("active", NORMAL, 1) is None and admission.next() == "active"
    return admission


def drain(admission: Admission) -> list[str]:
    order, last = [], "active"
    while True:
        admission.end(last, 0)
        following = admission.next()
        if following is None:
            return order
        order.append(following)
        last = following


def test_a_tenant_fills_only_its_share_and_others_still_get_in() -> None:
    admission = full()
    for number in range(4):
        assert admission.offer(f"a{number}", NORMAL, 1, b"a") is None
    refusal = admission.offer("a4", HIGH, 1, b"a")
    assert refusal is not None and "4 requests of this tenant wait" in refusal.message
    for number in range(4):
        assert admission.offer(f"b{number}", NORMAL, 1, b"b") is None
    assert admission.offer("c", NORMAL, 1, b"c") is not None  # the queue itself is full
    admission.end("a1", 0)
    assert admission.offer("a4", NORMAL, 1, b"a") is None


def test_who_is_nobody_in_particular_has_no_share() -> None:
    admission = full()
    assert all(admission.offer(f"r{number}", NORMAL, 1) is None for number in range(8))


def test_tenants_begin_in_turn_and_each_in_its_own_order() -> None:
    admission = full(tenant_share=1.0)
    for name in ("a0", "a1", "a2", "b0", "c0", "c1"):
        assert admission.offer(name, NORMAL, 1, name[:1].encode()) is None
    assert admission.offer("h", HIGH, 1, b"a") is None
    assert drain(admission) == ["h", "a0", "b0", "c0", "a1", "c1", "a2"]


def test_counts_come_back_however_requests_leave() -> None:
    rng = random.Random(3)
    admission = full(max_queued=30, max_active=3)
    here: list[str] = ["active"]
    for number in range(3000):
        if here and rng.random() < 0.5:
            admission.end(here.pop(rng.randrange(len(here))), number)
        else:
            name, tenant = f"r{number}", rng.choice((b"", b"a", b"b", b"c"))
            if admission.offer(name, rng.choice((HIGH, NORMAL, LOW)), rng.randint(1, 20), tenant) is None:
                here.append(name)
        while admission.next() is not None:
            pass
        assert admission.active + admission.queued == len(here)
        assert all(count <= 15 + 3 for tenant, count in admission._per_tenant.items() if tenant)
    for name in here:
        admission.end(name, 0)
    assert (admission.active, admission.queued, admission.queued_tokens) == (0, 0, 0)
    assert not admission._per_tenant and not any(turns._queues for turns in admission._queues.values())


@pytest.mark.parametrize("share", [0.0, 1.1, float("nan")])
def test_a_share_that_admits_nobody_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="tenant_share"):
        AdmissionConfig(tenant_share=share)
