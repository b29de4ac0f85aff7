"""Contexts: which are taken, and which two go to the denoiser."""

import numpy as np
import pytest

from vla_edge.core.context_mailbox import Context, ContextMailbox, ContextReject, MailboxConfig

MODEL, INSTRUCTION, NS = b"m" * 32, b"i" * 32, 1_000_000_000
NOW_NS = 1000 * NS
SHAPE = (4, 8)


def context(stamp_ns=NOW_NS, sequence=None, **changes):
    fields = {"session": "s", "sequence": stamp_ns if sequence is None else sequence, "stamp_ns": stamp_ns,
              "model_hash": MODEL, "instruction_hash": INSTRUCTION, "tokens": np.zeros(SHAPE, np.float32)}
    return Context(**{**fields, **changes})


@pytest.fixture
def mailbox():
    made = ContextMailbox(MODEL, MailboxConfig(SHAPE))
    made.set_instruction(INSTRUCTION)
    return made


@pytest.mark.parametrize("changes, reject", [
    ({"model_hash": b"x" * 32}, ContextReject.MODEL_HASH),
    ({"instruction_hash": b"x" * 32}, ContextReject.INSTRUCTION_HASH),
    ({"tokens": np.zeros((4, 7), np.float32)}, ContextReject.SHAPE),
    ({"tokens": np.full(SHAPE, np.nan, np.float32)}, ContextReject.NOT_FINITE),
    ({"tokens": np.full(SHAPE, np.inf, np.float32)}, ContextReject.NOT_FINITE),
    ({"stamp_ns": NOW_NS + 6_000_000}, ContextReject.FUTURE_STAMP),
    ({"stamp_ns": NOW_NS + 5 * NS}, ContextReject.FUTURE_STAMP),  # clocks of two machines, compared by mistake
    ({"stamp_ns": NOW_NS - 601_000_000}, ContextReject.STALE),
])
def test_what_is_refused_by_name(mailbox, changes, reject):
    assert mailbox.offer(context(**changes), NOW_NS) is reject
    assert mailbox.newest() is None and mailbox.pair(NOW_NS) is None


@pytest.mark.parametrize("stamp_ns", [NOW_NS, NOW_NS + 4_000_000, NOW_NS - 599_000_000])
def test_what_is_taken(mailbox, stamp_ns):
    assert mailbox.offer(context(stamp_ns), NOW_NS) is None
    assert mailbox.newest().stamp_ns == stamp_ns


def test_order(mailbox):
    assert mailbox.offer(context(NOW_NS, 5), NOW_NS) is None
    assert mailbox.offer(context(NOW_NS, 6), NOW_NS) is ContextReject.OUT_OF_ORDER  # same observation twice
    assert mailbox.offer(context(NOW_NS - NS // 10, 4), NOW_NS) is ContextReject.OUT_OF_ORDER
    assert mailbox.offer(context(NOW_NS + 1, 5), NOW_NS) is ContextReject.OUT_OF_ORDER


def test_without_an_instruction_nothing_is_taken():
    mailbox = ContextMailbox(MODEL, MailboxConfig(SHAPE))
    assert mailbox.offer(context(), NOW_NS) is ContextReject.INSTRUCTION_HASH


def test_another_instruction_forgets_and_the_same_does_not(mailbox):
    mailbox.offer(context(), NOW_NS)
    mailbox.set_instruction(INSTRUCTION)
    assert mailbox.newest() is not None
    mailbox.set_instruction(b"j" * 32)
    assert mailbox.newest() is None
    assert mailbox.offer(context(), NOW_NS) is ContextReject.INSTRUCTION_HASH


def test_a_late_reply_never_answers_another_session(mailbox):
    mailbox.set_session("new")
    assert mailbox.offer(context(), NOW_NS) is ContextReject.SESSION
    assert mailbox.offer(context(session="new"), NOW_NS) is None
    mailbox.set_session("newer")
    assert mailbox.newest() is None


def test_an_unbound_mailbox_forgets_the_former_session(mailbox):
    mailbox.offer(context(NOW_NS - NS // 2), NOW_NS)
    assert mailbox.offer(context(NOW_NS, 0, session="t"), NOW_NS) is None
    assert mailbox.pair(NOW_NS).previous.session == "t"


def fill(mailbox, ages_s):
    for age_s in sorted(ages_s, reverse=True):
        stamp_ns = NOW_NS - round(age_s * NS)
        assert mailbox.offer(context(stamp_ns), stamp_ns) is None


@pytest.mark.parametrize("ages_s, gap_s", [
    ([0.05], 0.5),  # alone: the same again, at the nominal gap
    ([0.05, 0.15], 0.5),  # 0.1 s apart is too near
    ([0.05, 0.25], 0.2), ([0.05, 0.85], 0.8),  # the bounds belong to it
    ([0.05, 0.86], 0.5),  # too far
    ([0.05, 0.35, 0.54, 0.60], 0.49),
    ([0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65], 0.5),
])
def test_the_earlier_context_is_the_one_nearest_to_half_a_second_before(mailbox, ages_s, gap_s):
    fill(mailbox, ages_s)
    pair = mailbox.pair(NOW_NS)
    assert pair.gap_s == pytest.approx(gap_s) and pair.age_s == pytest.approx(min(ages_s))
    same = gap_s == 0.5 and len(ages_s) < 7
    assert (pair.previous is pair.now) == same


def test_a_context_that_grew_too_old_makes_no_pair(mailbox):
    mailbox.offer(context(), NOW_NS)
    assert mailbox.pair(NOW_NS + 599_000_000) is not None
    assert mailbox.pair(NOW_NS + 601_000_000) is None
    assert mailbox.newest() is not None


def test_memory_is_bounded(mailbox):
    for k in range(1000):
        mailbox.offer(context(NOW_NS + k), NOW_NS + k)
    assert len(mailbox._held) == 32
