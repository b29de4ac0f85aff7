"""Budgets of clients, against a plain account of what was taken, used and refilled."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_cloud.core.client import ClientRules, LimitReached
from vla_cloud.core.client_limits import DAY_NS, MINUTE_NS, Bucket, ClientLimits, Ticket
from vla_cloud.core.generate import InvalidRequest

S = 1_000_000_000
OPS = st.lists(st.tuples(st.integers(0, 90 * S), st.integers(0, 40)), min_size=1, max_size=60)


@given(st.integers(1, 50), OPS)
def test_a_bucket_holds_exactly_what_was_refilled_and_not_taken(capacity: int, ops: list[tuple[int, int]]) -> None:
    bucket, now, level = Bucket(capacity, MINUTE_NS, 0), 0, Fraction(capacity)
    for delta_ns, amount in ops:
        now += delta_ns
        level = min(Fraction(capacity), level + Fraction(capacity * delta_ns, MINUTE_NS))
        if amount > capacity:
            continue
        wait_ns = bucket.wait_ns(amount, now)
        assert (wait_ns == 0) == (level >= amount)
        if wait_ns:  # the delay is exact: enough then, not enough a nanosecond before
            at = level + Fraction(capacity * wait_ns, MINUTE_NS)
            assert at >= amount > at - Fraction(capacity, MINUTE_NS)
            continue
        bucket.take(amount, now)
        level -= amount
        assert bucket.level(now) == pytest.approx(float(level))


@given(st.integers(1, 50), OPS, st.integers(0, 59))
def test_no_span_of_time_sees_more_than_its_share(capacity: int, ops: list[tuple[int, int]], first: int) -> None:
    bucket, now, taken = Bucket(capacity, MINUTE_NS, 0), 0, []
    for delta_ns, amount in ops:
        now += delta_ns
        if amount <= capacity and not bucket.wait_ns(amount, now):
            bucket.take(amount, now)
            taken.append((now, amount))
    part = taken[first % max(1, len(taken)) :]
    for index, (end, _) in enumerate(part):
        used = sum(amount for _, amount in part[: index + 1])
        assert used <= capacity * (1 + Fraction(end - part[0][0], MINUTE_NS))


def test_an_empty_bucket_is_full_again_after_a_period_and_never_more() -> None:
    bucket = Bucket(7, MINUTE_NS, 0)
    bucket.take(7, 0)
    assert bucket.wait_ns(1, 0) == -(-MINUTE_NS // 7) and bucket.level(MINUTE_NS // 2) == 3.5
    assert bucket.level(MINUTE_NS) == 7 == bucket.level(DAY_NS)
    bucket.take(-5, DAY_NS)
    assert bucket.level(DAY_NS) == 7
    half = Bucket(10, MINUTE_NS, 0)
    half.take(5, 0)
    assert half.resized(100, 0).level(0) == 50


ENDS = ("served", "refused", "failed early", "failed late", "cancelled", "cancelled early", "not reserved")


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_budgets_hold_and_every_end_settles_once(seed: int) -> None:
    """At any time: level = capacity - refill-capped account of what is reserved or used; at the end nothing is held."""
    rng = random.Random(seed)
    rules = ClientRules(rng.randint(1, 30), rng.randint(50, 400), rng.randint(200, 3000), None, rng.randint(1, 6))
    limits, now = ClientLimits("k", rules, 0), 0
    running: list[tuple[Ticket, int, int, str]] = []
    levels = {"tokens_per_minute": Fraction(rules.tokens_per_minute), "tokens_per_day": Fraction(rules.tokens_per_day)}
    periods = {"tokens_per_minute": MINUTE_NS, "tokens_per_day": DAY_NS}

    def move(delta_ns: int) -> None:
        nonlocal now
        now += delta_ns
        for name in levels:
            size = getattr(rules, name)
            levels[name] = min(Fraction(size), levels[name] + Fraction(size * delta_ns, periods[name]))

    def pay(tokens: int) -> None:
        for name in levels:
            levels[name] = min(Fraction(getattr(rules, name)), levels[name] - tokens)

    for _ in range(80):
        move(rng.choice((0, rng.randint(0, 3 * S), rng.randint(0, 60 * S))))
        if running and rng.random() < 0.5:
            ticket, prompt, answer, how = running.pop(rng.randrange(len(running)))
            made = rng.randint(1, answer)
            if how in ("served", "failed late", "cancelled"):
                ticket.generated(made)
            if how in ("refused", "failed early", "failed late"):
                ticket.forgive()
            used = {"served": prompt + made, "failed late": prompt + made, "cancelled": prompt + made,
                    "cancelled early": prompt}.get(how, 0)  # fmt: skip
            assert ticket.used == used
            for _ in range(rng.randint(1, 3)):  # once, however often it is said
                ticket.end(now)
            if how != "not reserved":
                pay(used - (prompt + answer))
        else:
            prompt, answer, how = rng.randint(1, 100), rng.randint(1, 100), rng.choice(ENDS)
            before = dict(levels)
            try:
                ticket = limits.begin(1 + answer, now)
            except (LimitReached, InvalidRequest) as error:
                assert limits.active == len(running)
                if isinstance(error, LimitReached):
                    assert error.retry_after_s >= 0.1 and error.limit in str(error)
                continue
            running.append((ticket, prompt, answer, "not reserved"))
            if how != "not reserved":
                try:
                    ticket.reserve(prompt, answer, now)
                except (LimitReached, InvalidRequest):
                    continue
                assert all(before[name] >= prompt + answer for name in levels)  # never more than there was
                running[-1] = (ticket, prompt, answer, how)
                pay(prompt + answer)
        assert limits.active == len(running) <= rules.max_concurrent
        for name, level in levels.items():
            assert level >= 0 and limits.level(name, now) == pytest.approx(float(level), abs=1e-6)
    for ticket, prompt, answer, how in running:
        ticket.end(now)
        if how != "not reserved":
            pay(prompt - (prompt + answer))  # all as if the client had left before the first token
    assert limits.active == 0
    move(DAY_NS)
    assert [limits.level(name, now) for name in levels] == [rules.tokens_per_minute, rules.tokens_per_day]


def test_the_delay_and_the_name_of_the_limit_are_told() -> None:
    limits = ClientLimits("k", ClientRules(requests_per_minute=2, tokens_per_minute=100, max_concurrent=2), 0)
    first = limits.begin(10, 0)
    first.reserve(20, 40, 0)
    with pytest.raises(LimitReached, match="tokens_per_minute: 100; try again in 6.0 s") as caught:
        limits.begin(50, 0)  # 10 missing of 100 per minute
    assert (caught.value.limit, caught.value.retry_after_s) == ("tokens_per_minute", 6.0)
    second = limits.begin(10, 0)
    with pytest.raises(LimitReached, match="max_concurrent: 2"):
        limits.begin(1, 0)
    with pytest.raises(LimitReached, match="tokens_per_minute"):
        second.reserve(1, 40, 0)  # what the prompt adds counts, too
    second.end(0)
    first.end(8 * S)
    with pytest.raises(LimitReached, match="requests_per_minute: 2") as caught:
        limits.begin(1, 8 * S)
    assert caught.value.retry_after_s == 22.0
    with pytest.raises(InvalidRequest, match="tokens_per_minute: 100; shorten the prompt or lower max_tokens"):
        limits.begin(101, 8 * S)
    assert limits.active == 0


def test_a_busy_client_is_told_by_how_long_its_requests_take() -> None:
    limits = ClientLimits("k", ClientRules(max_concurrent=2), 0)
    for start in (0, 8 * S):
        limits.begin(1, start).end(start + 8 * S)
    limits.begin(1, 20 * S), limits.begin(1, 20 * S)
    with pytest.raises(LimitReached) as caught:
        limits.begin(1, 20 * S)
    assert caught.value.retry_after_s == pytest.approx(4.0)


def test_changed_limits_keep_what_was_used() -> None:
    limits = ClientLimits("k", ClientRules(tokens_per_minute=100), 0)
    limits.begin(1, 0).reserve(50, 25, 0)
    limits.change(ClientRules(tokens_per_minute=1000, requests_per_minute=3), 0)
    assert (limits.level("tokens_per_minute", 0), limits.level("requests_per_minute", 0)) == (250, 3)
    limits.change(ClientRules(), 0)
    with pytest.raises(KeyError):
        limits.level("tokens_per_minute", 0)
