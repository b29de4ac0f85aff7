"""Bounded queues in front of the workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_cloud.core.admission import Admission, AdmissionConfig
from vla_cloud.core.generate import Priority
from vla_common.backoff import Backoff

S = 1_000_000_000
HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


def new(**changes: object) -> Admission:
    values: dict[str, object] = dict(max_active=2, max_queued=4, max_queued_tokens=100, share={LOW: 0.5})
    return Admission(AdmissionConfig(**{**values, **changes}))


def begin(admission: Admission, *names: str, priority: Priority = NORMAL, tokens: int = 1) -> None:
    for name in names:
        assert admission.offer(name, priority, tokens) is None
        admission.next()


def test_requests_begin_at_once_up_to_max_active_then_wait_then_are_refused() -> None:
    admission = new()
    begin(admission, "a", "b")
    assert admission.active == 2
    begin(admission, "c", "d", "e", "f")
    assert (admission.active, admission.queued, admission.queued_tokens) == (2, 4, 4)
    refusal = admission.offer("g", NORMAL, 1)
    assert refusal is not None and refusal.retry_after_s >= 0.1 and "4 requests wait" in refusal.message
    assert admission.next() is None and admission.refused == 1
    admission.end("a", S)
    assert admission.next() == "c"
    assert admission.offer("g", NORMAL, 1) is None


def test_the_order_is_priority_then_age() -> None:
    admission = new(max_active=1, share={})
    begin(admission, "first")
    begin(admission, "n1", "n2")
    begin(admission, "h1", priority=HIGH)
    order = []
    last = "first"
    for _ in range(3):
        admission.end(last, S)
        last = admission.next() or ""
        order.append(last)
    assert order == ["h1", "n1", "n2"]


def test_a_priority_may_fill_only_its_share() -> None:
    admission = new()
    begin(admission, "a", "b")
    begin(admission, "l1", "l2", priority=LOW)
    refusal = admission.offer("l3", LOW, 1)
    assert refusal is not None and "LOW" in refusal.message
    assert admission.offer("n", NORMAL, 1) is None


def test_waiting_tokens_are_bounded_but_one_large_prompt_may_wait() -> None:
    admission = new()
    begin(admission, "a", "b")
    begin(admission, "huge", tokens=1000)
    refusal = admission.offer("c", NORMAL, 1)
    assert refusal is not None and "tokens" in refusal.message
    admission.end("huge", S)
    assert admission.offer("c", NORMAL, 60) is None
    assert admission.offer("d", NORMAL, 41) is not None


def test_who_leaves_the_queue_leaves_no_trace() -> None:
    admission = new()
    begin(admission, "a", "b", "c", "d")
    admission.end("c", S)
    admission.end("c", S)
    admission.end("unknown", S)
    assert (admission.queued, admission.queued_tokens) == (1, 1)
    admission.end("a", S)
    assert admission.next() == "d"


def test_ids_are_unique_while_they_are_here() -> None:
    admission = new()
    begin(admission, "a")
    with pytest.raises(ValueError, match="unique"):
        admission.offer("a", NORMAL, 1)
    admission.end("a", S)
    assert admission.offer("a", NORMAL, 1) is None


def test_the_retry_delay_follows_the_rate_of_ends() -> None:
    admission = new(max_active=1, max_queued=40, max_retry_s=9.0)
    begin(admission, "x")
    for i in range(20):
        begin(admission, f"q{i}")
    assert admission.retry_after_s() == 0.1
    last = "x"
    for i in range(5):
        admission.end(last, i * 2 * S)
        last = admission.next() or ""
    assert admission.retry_after_s() == 9.0  # 2 s each, 15 wait
    admission = new(max_active=1, max_queued=40)
    begin(admission, "x", *(f"q{i}" for i in range(20)))
    admission.end("x", 0)
    admission.next()
    admission.end("q0", S // 10)
    assert admission.retry_after_s() == pytest.approx(0.95)


def test_bounds_that_admit_nobody_are_refused() -> None:
    for wrong in ({"max_active": 0}, {"max_queued": 0}, {"max_queued_tokens": 0}, {"share": {LOW: 0.0}}, {"max_retry_s": 0.0}):
        with pytest.raises(ValueError):
            AdmissionConfig(**wrong)


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["offer", "next", "end"]), st.sampled_from(Priority))))
def test_bounds_hold_and_nobody_is_forgotten(steps: list[tuple[int, str, Priority]]) -> None:
    admission = new(share={LOW: 0.5, NORMAL: 0.75})
    here: set[str] = set()
    for number, step, priority in steps:
        name = str(number)
        if step == "offer" and name not in here:
            if admission.offer(name, priority, 30) is None:
                here.add(name)
        elif step == "next":
            admission.next()
        elif step == "end":
            admission.end(name, number * S)
            here.discard(name)
        assert admission.active + admission.queued == len(here)
        assert admission.active <= 2 and admission.queued <= 6
    for name in [*here]:
        admission.end(name, 100 * S)
    assert admission.active == admission.queued == admission.queued_tokens == 0


def test_a_process_that_dies_at_once_is_started_ever_later_and_one_that_ran_soon() -> None:
    backoff = Backoff(0.5, 4.0, 60.0)
    delays, now = [], 0
    for _ in range(5):
        backoff.started(now)
        assert backoff.due_ns is None
        now += S
        delays.append(backoff.ended(now))
        assert backoff.due_ns == now + round(delays[-1] * S)
        now = backoff.due_ns
    assert delays == [0.5, 1.0, 2.0, 4.0, 4.0]
    backoff.started(now)
    assert backoff.ended(now + 60 * S) == 0.5
