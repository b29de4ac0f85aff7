"""Ages exactly at their limits, ties, and what survives a change of instruction or session."""

import numpy as np
import pytest

from vla_edge.core.context_mailbox import Context, ContextMailbox, ContextReject, MailboxConfig

MODEL, INSTRUCTION = b"m" * 32, b"i" * 32
SHAPE = (2, 3)
NOW_NS = 10**12
# Binary fractions of a second, so that an age computed in seconds is exact.
QUARTER, HALF = 250_000_000, 500_000_000
CONFIG = MailboxConfig(SHAPE, max_age_s=0.5, future_tolerance_s=0.25, min_gap_s=0.25, max_gap_s=0.75, nominal_gap_s=0.5)


def context(stamp_ns, sequence=1, **changes):
    fields = {"session": "s", "sequence": sequence, "stamp_ns": stamp_ns, "model_hash": MODEL,
              "instruction_hash": INSTRUCTION, "tokens": np.zeros(SHAPE, np.float32)}
    return Context(**{**fields, **changes})


@pytest.fixture
def mailbox():
    made = ContextMailbox(MODEL, CONFIG)
    made.set_instruction(INSTRUCTION)
    return made


@pytest.mark.parametrize("age_ns, reject", [
    (HALF, None), (HALF + 1, ContextReject.STALE), (0, None),
    (-QUARTER, None), (-QUARTER - 1, ContextReject.FUTURE_STAMP),
])
def test_the_limits_of_age_belong_to_what_is_taken(mailbox, age_ns, reject):
    assert mailbox.offer(context(NOW_NS - age_ns), NOW_NS) is reject
    assert (mailbox.newest() is None) == (reject is not None)


def test_a_pair_may_be_as_old_as_the_limit(mailbox):
    mailbox.offer(context(NOW_NS), NOW_NS)
    assert mailbox.pair(NOW_NS + HALF).age_s == 0.5
    assert mailbox.pair(NOW_NS + HALF + 1) is None


def test_an_empty_mailbox_has_no_pair(mailbox):
    assert mailbox.pair(NOW_NS) is None and mailbox.newest() is None


def offer_all(mailbox, *ages_ns):
    for sequence, age_ns in enumerate(ages_ns):
        assert mailbox.offer(context(NOW_NS - age_ns, sequence), NOW_NS - age_ns) is None


def test_of_two_equally_near_to_the_nominal_gap_the_older_is_taken(mailbox):
    offer_all(mailbox, 3 * QUARTER, QUARTER, 0)  # 0.25 s on either side of 0.5 s
    assert mailbox.pair(NOW_NS).previous.sequence == 0
    assert mailbox.pair(NOW_NS).gap_s == 0.75


@pytest.mark.parametrize("gap_ns, found", [
    (QUARTER - 1, False), (QUARTER, True), (3 * QUARTER, True), (3 * QUARTER + 1, False)])
def test_the_limits_of_the_gap_belong_to_it(mailbox, gap_ns, found):
    offer_all(mailbox, gap_ns, 0)
    pair = mailbox.pair(NOW_NS)
    assert (pair.previous is not pair.now) == found
    assert pair.gap_s == pytest.approx(gap_ns * 1e-9 if found else 0.5)
    assert pair.now.stamp_ns == NOW_NS and pair.age_s == 0.0


def test_the_first_reason_is_the_one_that_is_named(mailbox):
    """Identity before form, form before time, time before numbers: the operator reads the cause, not a consequence."""
    mailbox.set_session("s")
    wrong = {"model_hash": b"x", "session": "t", "instruction_hash": b"x", "tokens": np.full((1, 1), np.nan, np.float32),
             "stamp_ns": NOW_NS + HALF}
    right = {"model_hash": MODEL, "session": "s", "instruction_hash": INSTRUCTION, "tokens": np.full(
        SHAPE, np.nan, np.float32), "stamp_ns": NOW_NS}
    found = []
    for field in right:
        found.append(mailbox.offer(context(**{"sequence": 1, **wrong}), NOW_NS))
        wrong[field] = right[field]
    found.append(mailbox.offer(context(**{"sequence": 1, **wrong}), NOW_NS))
    assert found == [ContextReject.MODEL_HASH, ContextReject.SESSION, ContextReject.INSTRUCTION_HASH,
                     ContextReject.SHAPE, ContextReject.FUTURE_STAMP, ContextReject.NOT_FINITE]


def test_no_instruction_at_all_is_no_wildcard(mailbox):
    mailbox.offer(context(NOW_NS), NOW_NS)
    mailbox.set_instruction(None)
    assert mailbox.newest() is None
    for instruction_hash in (INSTRUCTION, b"", None):
        assert mailbox.offer(context(NOW_NS, instruction_hash=instruction_hash),
                             NOW_NS) is ContextReject.INSTRUCTION_HASH


def test_the_same_session_again_forgets_nothing_and_none_takes_any(mailbox):
    mailbox.set_session("s")
    mailbox.offer(context(NOW_NS), NOW_NS)
    mailbox.set_session("s")
    assert mailbox.newest() is not None
    mailbox.set_session(None)
    assert mailbox.newest() is None
    assert mailbox.offer(context(NOW_NS, session="t"), NOW_NS) is None


def test_another_session_counts_anew_but_not_back_in_time(mailbox):
    assert mailbox.offer(context(NOW_NS, 9), NOW_NS) is None
    assert mailbox.offer(context(NOW_NS, 1, session="t"), NOW_NS) is ContextReject.OUT_OF_ORDER  # the same instant
    assert mailbox.offer(context(NOW_NS + 1, 1, session="t"), NOW_NS) is None
    assert mailbox.newest().session == "t" and mailbox.pair(NOW_NS).previous.session == "t"


def test_order_is_judged_by_the_newest_of_those_held(mailbox):
    for stamp_ns, sequence in ((NOW_NS, 1), (NOW_NS + 20, 5)):
        assert mailbox.offer(context(stamp_ns, sequence), NOW_NS + 20) is None
    assert mailbox.newest().sequence == 5 and mailbox.pair(NOW_NS + 20).now.sequence == 5
    for stamp_ns, sequence in ((NOW_NS + 10, 6), (NOW_NS + 20, 6), (NOW_NS + 30, 3), (NOW_NS + 30, 5)):
        assert mailbox.offer(context(stamp_ns, sequence), NOW_NS + 30) is ContextReject.OUT_OF_ORDER
    assert mailbox.offer(context(NOW_NS + 30, 6), NOW_NS + 30) is None


def test_the_oldest_makes_room():
    mailbox = ContextMailbox(MODEL, MailboxConfig(SHAPE, depth=2, min_gap_s=0.0))
    mailbox.set_instruction(INSTRUCTION)
    for k in range(3):
        assert mailbox.offer(context(NOW_NS + k * 100_000_000, k), NOW_NS + k * 100_000_000) is None
    assert mailbox.pair(NOW_NS + 2 * 100_000_000).previous.sequence == 1  # 0 would be nearer to 0.5 s


def test_what_the_defaults_are():
    config = MailboxConfig(SHAPE)
    assert (config.max_age_s, config.future_tolerance_s) == (0.6, 0.005)
    assert (config.min_gap_s, config.nominal_gap_s, config.max_gap_s, config.depth) == (0.2, 0.5, 0.8, 32)
