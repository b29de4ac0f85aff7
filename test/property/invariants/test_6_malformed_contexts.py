"""Invariant 6, contexts: of another model, instruction or session, of a wrong shape, not finite, stale, from the future
or out of order they are refused and named; all others are taken."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import SIZES, report

from vla_edge.core.context_mailbox import Context, ContextMailbox, ContextReject, MailboxConfig

SHAPE = (3, 2)


def wrong_context(context, held, model, instruction, session, now_ns, config):
    wrong = set()
    if context.model_hash != model:
        wrong.add(ContextReject.MODEL_HASH)
    if session is not None and context.session != session:
        wrong.add(ContextReject.SESSION)
    if instruction is None or context.instruction_hash != instruction:
        wrong.add(ContextReject.INSTRUCTION_HASH)
    if context.tokens.shape != SHAPE:
        wrong.add(ContextReject.SHAPE)
    elif not all(math.isfinite(x) for x in context.tokens.ravel().tolist()):
        wrong.add(ContextReject.NOT_FINITE)
    age_s = (now_ns - context.stamp_ns) * 1e-9
    if age_s < -config.future_tolerance_s:
        wrong.add(ContextReject.FUTURE_STAMP)
    if age_s > config.max_age_s:
        wrong.add(ContextReject.STALE)
    if held is not None and (context.stamp_ns <= held.stamp_ns or (
            context.session == held.session and context.sequence <= held.sequence)):
        wrong.add(ContextReject.OUT_OF_ORDER)
    return wrong


def check_mailbox(seed, contexts, counts):
    rng = np.random.default_rng(seed)
    config = MailboxConfig(SHAPE)
    model, instruction, session = rng.bytes(32), rng.bytes(32), "io"
    box, now_ns, held = ContextMailbox(model, config), int(rng.integers(10**10, 10**15)), None
    box.set_instruction(instruction)
    box.set_session(session)
    sequence = 0
    tokens = np.ones(SHAPE, np.float32)
    for _ in range(contexts):
        now_ns += int(rng.integers(1, 100_000_000))
        if rng.random() < 0.005:
            instruction = rng.bytes(32) if rng.random() < 0.7 else None
            box.set_instruction(instruction)
            held = None
        if rng.random() < 0.005:
            session = f"io{rng.integers(100)}" if rng.random() < 0.7 else None
            box.set_session(session)
            held = box.newest()  # the same session again is no change
        sequence += int(rng.integers(1, 3))
        newest_ns = 0 if held is None else held.stamp_ns
        stamp = int(rng.choice([max(now_ns - 600_000_000, newest_ns + 1), now_ns + 5_000_000, now_ns]))
        fields = {"session": session or "any", "sequence": sequence, "stamp_ns": max(stamp, newest_ns + 1),
                  "model_hash": model, "instruction_hash": instruction or b"", "tokens": tokens}
        for _ in range(int(rng.choice([0, 1, 1, 2]))):
            kind = rng.integers(7)
            if kind == 0:
                fields["model_hash"] = [model[:-1] + bytes([model[-1] ^ 1]), b"", model[:16]][rng.integers(3)]
            elif kind == 1:
                fields["instruction_hash"] = [rng.bytes(32), b"", fields["instruction_hash"][:31]][rng.integers(3)]
            elif kind == 2:
                fields["session"] = str(rng.choice(["", "IO", "io\x00x", "other"]))
            elif kind == 3:
                fields["tokens"] = [tokens[:2], tokens.ravel(), tokens.T, tokens[None]][rng.integers(4)]
            elif kind == 4:
                fields["tokens"] = tokens.copy()
                fields["tokens"].flat[rng.integers(6)] = rng.choice([np.nan, np.inf, -np.inf])
            elif kind == 5:
                fields["stamp_ns"] = now_ns + int(rng.choice([5_000_001, 10**12, -600_000_001, -now_ns]))
            else:
                fields["stamp_ns"], fields["sequence"] = newest_ns - int(rng.integers(2)), sequence - 3
        context = Context(**fields)
        wrong = wrong_context(context, held, model, instruction, session, now_ns, config)
        reject = box.offer(context, now_ns)
        if reject is None:
            assert not wrong, f"accepted although {wrong}"
            assert box.newest() is context
            held = context
        else:
            assert reject in wrong, f"refused as {reject}, but what is wrong is {wrong or 'nothing'}"
            assert box.newest() is held, "a refused context was kept"
        counts[reject] = counts.get(reject, 0) + 1


@pytest.mark.parametrize("contexts", SIZES)
def test_the_mailbox_agrees_with_the_rules(contexts):
    counts = {}
    for seed in range(contexts // 1_000):
        check_mailbox(seed, 1_000, counts)
    assert set(counts) == {None, *ContextReject} and counts[None] > contexts / 20
    report("6 contexts", contexts=contexts, accepted=counts.pop(None), **{k.value: n for k, n in counts.items()})
