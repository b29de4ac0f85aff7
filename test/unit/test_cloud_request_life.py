"""The gateway's state machine of a chat request: every stage x every event, and every way on from a failure."""

from __future__ import annotations

import pytest

from vla_cloud.core import life_events as e
from vla_cloud.core.request_life import LifeConfig, RequestLife, Stage

S = 1_000_000_000
DEADLINE = 100 * S
P, P2, D, D2, W = "p0.1", "p1.1", "d0.1", "d1.1", "w0.1"


def new(max_new: int = 4, **config: object) -> RequestLife:
    return RequestLife(10, max_new, {99}, DEADLINE, LifeConfig(transfer_late_s=lambda n: 2.0 + n * 1e-9, **config))


def at(stage: Stage, **kwargs: object) -> RequestLife:
    """A life in a stage, attempt 0, with P and D."""
    life = new(**kwargs)
    if stage is Stage.PLACING:
        life.handle(e.Tick(), 0)
        return life
    life.handle(e.Tick(), 0)
    if stage is Stage.GENERATING:
        life.handle(e.Placed(None, W), 0)
        return life
    life.handle(e.Placed(P, D), 0)
    if stage is Stage.RESERVING:
        return life
    life.handle(e.Reserved(D, 0), 0)
    if stage is Stage.PREFILLING:
        return life
    if stage is Stage.ENDED:
        life.handle(e.Cancel(), 0)
        life.handle(e.Aborted(P, 0), 0)
        return life
    life.handle(e.Prefilled(P, 0, 0, 1000), 0)
    if stage is Stage.DECODING:
        life.handle(e.TokensCame(D, 0, 10, [1]), 0)
    return life


def own(stage: Stage) -> str:
    """Who answers in this stage."""
    return W if stage is Stage.GENERATING else D


def kinds(actions: list[e.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_the_straight_way() -> None:
    life = new()
    assert life.handle(e.Tick(), 1) == [e.NeedPlace(frozenset())]
    assert life.handle(e.Placed(P, D), 2) == [e.SendReserve(D, 0, P)]
    assert life.handle(e.Reserved(D, 0), 3) == [e.SendPrefill(P, 0, D)]
    assert life.handle(e.Prefilled(P, 0, 8, 1000), 4) == []
    assert life.stage is Stage.TRANSFERRING
    assert life.handle(e.TokensCame(D, 0, 10, [1]), 5) == [e.Emit((1,))]
    assert life.handle(e.TokensCame(D, 0, 11, [2, 3]), 6) == [e.Emit((2, 3))]
    assert life.handle(e.TokensCame(D, 0, 13, [4]), 7) == [e.Emit((4,))]
    assert life.handle(e.WorkerFinished(D, 0, "length", 4, 0), 8) == [e.End("length", 8)]
    assert life.is_settled and life.next_wake_ns is None


def test_the_straight_way_without_transfer() -> None:
    life = at(Stage.GENERATING)
    assert life.handle(e.TokensCame(W, 0, 10, [99]), 5) == [e.Emit((99,))]
    assert life.handle(e.WorkerFinished(W, 0, "stop", 1, 6), 8) == [e.End("stop", 6)]


# What each event does in each stage. "-": nothing. Events that are not listed for a stage do nothing there.
EVENTS = {
    "tick": lambda w: e.Tick(),
    "placed": lambda w: e.Placed(P2, D2),
    "not_placed": lambda w: e.NotPlaced("none"),
    "reserved": lambda w: e.Reserved(w, 0),
    "refused_busy_d": lambda w: e.Refused(w, 0, "RESOURCE_EXHAUSTED", "full", 0.5),
    "refused_bad_d": lambda w: e.Refused(w, 0, "INVALID_ARGUMENT", "bad"),
    "refused_busy_p": lambda w: e.Refused(P, 0, "RESOURCE_EXHAUSTED", "full"),
    "refused_bad_p": lambda w: e.Refused(P, 0, "INVALID_ARGUMENT", "bad"),
    "prefilled": lambda w: e.Prefilled(P, 0, 0, 1),
    "prefilled_by_d": lambda w: e.Prefilled(w, 0, 0, 1),
    "push_failed": lambda w: e.PushFailed(P, 0, "UNAVAILABLE", "gone"),
    "tokens": lambda w: e.TokensCame(w, 0, 10, [5]),
    "next_tokens": lambda w: e.TokensCame(w, 0, 11, [5]),
    "tokens_of_p": lambda w: e.TokensCame(P, 0, 10, [5]),
    "too_many_tokens": lambda w: e.TokensCame(w, 0, 10, [5] * 5),
    "finished": lambda w: e.WorkerFinished(w, 0, "stop", 1, 0),
    "finished_by_p": lambda w: e.WorkerFinished(P, 0, "stop", 1, 0),
    "aborted_d": lambda w: e.Aborted(w, 0),
    "aborted_p": lambda w: e.Aborted(P, 0),
    "failed_d": lambda w: e.Failed(w, 0, "INTERNAL", "broke"),
    "failed_transfer": lambda w: e.Failed(w, 0, "UNAVAILABLE", "checksum", True),
    "failed_p": lambda w: e.Failed(P, 0, "INTERNAL", "broke"),
    "lost_d": lambda w: e.WorkerLost(w),
    "dead_d": lambda w: e.WorkerDead(w),
    "lost_p": lambda w: e.WorkerLost(P),
    "dead_p": lambda w: e.WorkerDead(P),
    "lost_other": lambda w: e.WorkerLost("x.1"),
    "cancel": lambda w: e.Cancel(),
    "end_here": lambda w: e.EndHere(),
    "give_up": lambda w: e.GiveUp("UNAVAILABLE", "server ends"),
    "old_attempt": lambda w: e.TokensCame(w, 7, 10, [5]),
    "stranger": lambda w: e.Reserved("x.1", 0),
}  # fmt: skip

AP, AD, WD = "SendAbort p", "SendAbort d", "SendWriterDone d"
NEED = "NeedPlace"
TABLE: dict[Stage, dict[str, list[str]]] = {
    Stage.PLACING: {
        "placed": ["SendReserve"], "cancel": ["Fail"], "end_here": ["End"], "give_up": ["Fail"],
    },
    Stage.RESERVING: {
        "reserved": ["SendPrefill"], "refused_busy_d": [NEED], "refused_bad_d": ["Fail"],
        "tokens": [AD, WD, NEED], "next_tokens": [AD, WD, NEED], "too_many_tokens": [AD, WD, NEED],
        "finished": [AD, WD, NEED], "aborted_d": [NEED], "failed_d": [NEED], "failed_transfer": [NEED],
        "lost_d": [NEED], "dead_d": [NEED], "lost_p": [AD, WD, NEED], "dead_p": [AD, WD, NEED],
        "cancel": [AD, WD, "Fail"], "end_here": [AD, WD, "End"], "give_up": [AD, WD, "Fail"],
    },
    Stage.PREFILLING: {
        "refused_busy_d": [AP, NEED], "refused_bad_d": [AP, "Fail"], "refused_busy_p": [AD, WD, NEED],
        "refused_bad_p": [AD, WD, "Fail"], "prefilled": [], "push_failed": [AD, WD, NEED], "tokens": ["Emit"],
        "next_tokens": [AP, AD, NEED], "too_many_tokens": [AP, AD, NEED], "finished": [AP, AD, NEED],
        "aborted_d": [AP, NEED], "aborted_p": [AD, WD, NEED], "failed_d": [AP, NEED], "failed_transfer": [AP],
        "failed_p": [AD, WD, NEED], "lost_d": [AP, NEED], "dead_d": [AP, NEED], "lost_p": [AD, NEED],
        "dead_p": [AD, WD, NEED], "cancel": [AP, AD, "Fail"], "end_here": [AP, AD, "End"],
        "give_up": [AP, AD, "Fail"],
    },
    Stage.TRANSFERRING: {
        "refused_busy_d": [NEED], "refused_bad_d": ["Fail"], "tokens": ["Emit"], "next_tokens": [AD, WD, NEED],
        "too_many_tokens": [AD, WD, NEED], "finished": [AD, WD, NEED], "aborted_d": [NEED], "failed_d": [NEED],
        "failed_transfer": [NEED], "lost_d": [NEED], "dead_d": [NEED],
        "cancel": [AD, WD, "Fail"], "end_here": [AD, WD, "End"], "give_up": [AD, WD, "Fail"],
    },
    Stage.DECODING: {
        "refused_busy_d": [NEED], "refused_bad_d": ["Fail"], "next_tokens": ["Emit"], "tokens": [AD, NEED],
        "too_many_tokens": [AD, NEED], "finished": ["End"], "aborted_d": [NEED], "failed_d": [NEED],
        "failed_transfer": [NEED], "lost_d": [NEED], "dead_d": [NEED],
        "cancel": [AD, "Fail"], "end_here": [AD, "End"], "give_up": [AD, "Fail"],
    },
    Stage.GENERATING: {
        "refused_busy_d": [NEED], "refused_bad_d": ["Fail"], "tokens": ["Emit"], "next_tokens": [AD, NEED],
        "too_many_tokens": [AD, NEED], "finished": [AD, NEED], "aborted_d": [NEED], "failed_d": [NEED],
        "failed_transfer": [NEED], "lost_d": [NEED], "dead_d": [NEED],
        "cancel": [AD, "Fail"], "end_here": [AD, "End"], "give_up": [AD, "Fail"],
    },
    Stage.ENDED: {},
}  # fmt: skip


def short(action: e.Action, decode: str) -> str:
    name = type(action).__name__
    if name in ("SendAbort", "SendWriterDone"):
        return f"{name} {'d' if action.worker == decode else 'p' if action.worker == P else action.worker}"
    return name


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stage", Stage)
def test_every_event_in_every_stage(stage: Stage, event: str) -> None:
    life = at(stage)
    actions = life.handle(EVENTS[event](own(stage)), 1)
    assert [short(action, own(stage)) for action in actions] == TABLE[stage].get(event, [])
    assert life.is_ended == (stage is Stage.ENDED or any(isinstance(a, e.End | e.Fail) for a in actions))


@pytest.mark.parametrize("stage", Stage)
def test_the_deadline_ends_every_stage(stage: Stage) -> None:
    life = at(stage)
    if stage is not Stage.ENDED:
        assert life.next_wake_ns is not None and life.next_wake_ns <= DEADLINE
    actions = life.handle(e.Tick(), DEADLINE)
    if stage is Stage.ENDED:
        assert actions == []
    else:
        assert isinstance(actions[-1], e.Fail) and actions[-1].code == "DEADLINE_EXCEEDED"
        assert life.is_ended


def test_a_dead_p_is_dropped_and_another_prefills() -> None:  # sglang#6215
    life = at(Stage.PREFILLING)
    assert life.handle(e.WorkerLost(P), 1) == [e.SendAbort(D, 0), e.NeedPlace(frozenset({P}))]
    assert life.handle(e.Placed(P2, D), 1) == [e.SendReserve(D, 1, P2)]
    # D learns that nobody writes into the old blocks only when the process is known to be dead.
    assert life.handle(e.WorkerDead(P), 2) == [e.SendWriterDone(D, 0)]
    assert life.handle(e.Reserved(D, 1), 3) == [e.SendPrefill(P2, 1, D)]
    assert life.handle(e.TokensCame(D, 0, 10, [7]), 4) == []  # of the attempt that was dropped
    assert life.handle(e.TokensCame(D, 1, 10, [1]), 5) == [e.Emit((1,))]


def test_the_death_of_p_is_one_failure_even_if_d_is_the_first_to_say_so() -> None:
    life = at(Stage.PREFILLING)
    broken = e.Failed(D, 0, "UNAVAILABLE", "the peer closed the link or died", True)
    assert life.handle(broken, S) == [e.SendAbort(P, 0)]
    assert life.workers == {P} and life.next_wake_ns == S + 50_000_000
    assert life.handle(e.Tick(), S + 1) == []
    assert life.handle(e.WorkerLost(P), S + 2) == [e.NeedPlace(frozenset({P}))]
    assert life.handle(e.WorkerDead(P), S + 3) == []
    assert life.handle(e.Placed(P2, D), S + 3) == [e.SendReserve(D, 1, P2)]
    assert life.attempt == 1


@pytest.mark.parametrize("last_word", [None, e.PushFailed(P, 0, "UNAVAILABLE", "cut"), e.Aborted(P, 0)])
def test_a_p_that_lives_on_after_a_broken_transfer_is_used_again(last_word: e.Event | None) -> None:
    life = at(Stage.PREFILLING)
    life.handle(e.Failed(D, 0, "UNAVAILABLE", "the peer closed the link or died", True), S)
    if last_word is not None:
        assert life.handle(last_word, S + 1) == []
    assert life.handle(e.Tick(), S + 50_000_000) == [e.NeedPlace(frozenset({D}), P)]
    assert life.handle(e.Placed(P, D2), S + 50_000_000) == [e.SendReserve(D2, 1, P)]


def test_a_second_broken_transfer_from_the_same_p_waits_for_nobody() -> None:
    life = at(Stage.PREFILLING)
    life.handle(e.Failed(D, 0, "UNAVAILABLE", "checksum", True), 0)
    life.handle(e.Tick(), S)
    life.handle(e.Placed(P, D2), S)
    life.handle(e.Reserved(D2, 1), S)
    again = e.Failed(D2, 1, "UNAVAILABLE", "checksum", True)
    assert life.handle(again, S) == [e.SendAbort(P, 1), e.NeedPlace(frozenset({D2, P}))]


def test_the_preferred_p_is_lost_while_no_worker_has_room() -> None:
    life = at(Stage.TRANSFERRING)
    assert life.handle(e.WorkerLost(D), S) == [e.NeedPlace(frozenset({D}), P)]
    assert life.handle(e.NotPlaced("full"), S) == []
    assert life.handle(e.WorkerLost(P), S + 1) == [e.NeedPlace(frozenset({P}))]
    assert life.handle(e.NotPlaced("full"), S + 1) == []
    assert life.next_wake_ns is not None and life.next_wake_ns > S + 1


def test_a_dead_d_goes_on_with_the_tokens_so_far_and_the_p_that_has_the_prompt() -> None:
    life = at(Stage.DECODING)
    assert life.handle(e.WorkerLost(D), 1) == [e.NeedPlace(frozenset({D}), P)]
    life.handle(e.Placed(P, D2), 1)
    life.handle(e.Reserved(D2, 1), 1)
    life.handle(e.Prefilled(P, 1, 8, 10), 1)
    assert life.handle(e.TokensCame(D2, 1, 11, [2, 3]), 2) == [e.Emit((2, 3))]
    life.handle(e.TokensCame(D2, 1, 13, [4]), 2)
    assert life.handle(e.WorkerFinished(D2, 1, "length", 3, 8), 3) == [e.End("length", 0)]
    assert life.outputs == [1, 2, 3, 4]


def test_a_rejection_by_d_releases_p_at_once() -> None:  # vllm#41269
    life = at(Stage.PREFILLING)
    actions = life.handle(e.Refused(D, 0, "RESOURCE_EXHAUSTED", "no blocks", 3.0), 1)
    assert actions[0] == e.SendAbort(P, 0)
    life = at(Stage.PREFILLING)
    assert life.handle(e.Refused(D, 0, "INVALID_ARGUMENT", "too long"), 1)[0] == e.SendAbort(P, 0)


def test_d_out_of_memory_goes_elsewhere_instead_of_parking() -> None:  # sglang#6857
    life = at(Stage.DECODING)
    assert life.handle(e.Failed(D, 0, "RESOURCE_EXHAUSTED", "no blocks"), 1) == [e.NeedPlace(frozenset({D}))]


def test_a_late_transfer_takes_a_backup_d_first_then_another_p() -> None:
    life = at(Stage.TRANSFERRING)
    late_ns = life.next_wake_ns
    assert late_ns is not None and 2 * S <= late_ns < 3 * S
    assert life.handle(e.Tick(), late_ns - 1) == []
    assert life.handle(e.Tick(), late_ns) == [
        e.SendAbort(D, 0), e.SendWriterDone(D, 0), e.NeedPlace(frozenset({D}), P)]  # fmt: skip
    life.handle(e.Placed(P, D2), late_ns)
    life.handle(e.Reserved(D2, 1), late_ns)
    assert life.handle(e.PushFailed(P, 1, "UNAVAILABLE", "no answer"), late_ns)[-1] == e.NeedPlace(frozenset({D2, P}))


def test_after_the_last_token_a_dead_d_does_no_harm() -> None:
    life = at(Stage.DECODING, max_new=1)
    assert life.handle(e.WorkerLost(D), 1) == [e.End("length", 0)]
    life = at(Stage.TRANSFERRING)
    life.handle(e.TokensCame(D, 0, 10, [99]), 1)
    assert life.handle(e.WorkerLost(D), 1) == [e.End("stop", 0)]


def test_a_cancelled_request_is_settled_when_p_has_stopped_writing() -> None:  # sglang#24527
    life = at(Stage.PREFILLING)
    life.handle(e.Cancel(), 1)
    assert life.is_ended and not life.is_settled
    assert life.handle(e.Aborted(P, 0), 2) == [e.SendWriterDone(D, 0)]
    assert life.is_settled
    assert life.handle(e.Aborted(P, 0), 3) == []  # late signals are ignored


def test_an_unacknowledged_writer_is_given_up_after_the_lease() -> None:  # vllm#46283
    life = at(Stage.PREFILLING, settle_s=30.0)
    life.handle(e.Cancel(), 1)
    assert life.next_wake_ns == 1 + 30 * S
    assert life.handle(e.Tick(), 1 + 30 * S) == []
    assert life.is_settled


def test_when_d_is_gone_too_nobody_needs_to_know_of_the_writer() -> None:
    life = at(Stage.PREFILLING)
    assert life.workers == {P, D} and life.decode == D
    life.handle(e.Cancel(), 1)
    assert life.workers == {P, D} and life.decode is None
    assert life.handle(e.Reserved(P, 0), 2) == []
    assert life.handle(e.Failed(P, 1, "INTERNAL", "of another attempt"), 2) == []
    assert not life.is_settled
    assert life.handle(e.WorkerLost(D), 3) == []
    assert life.is_settled and life.workers == frozenset()


@pytest.mark.parametrize(
    "last_word",
    [e.Prefilled(P, 0, 0, 1), e.PushFailed(P, 0, "UNAVAILABLE", ""), e.Refused(P, 0, "UNAVAILABLE", ""),
     e.Failed(P, 0, "INTERNAL", ""), e.Aborted(P, 0), e.WorkerDead(P)],
)  # fmt: skip
def test_any_last_word_of_a_stopped_writer_frees_the_blocks_on_d(last_word: e.Event) -> None:
    life = at(Stage.PREFILLING)
    life.handle(e.Cancel(), 1)
    assert life.handle(last_word, 2) == [e.SendWriterDone(D, 0)]
    assert life.is_settled


def test_busy_workers_are_asked_again_until_the_wait_is_over() -> None:
    life = new(capacity_wait_s=5.0)
    actions, now, tries = life.handle(e.Tick(), 0), 0, 0
    while not life.is_ended:
        if isinstance(actions[-1], e.NeedPlace) and actions[-1].exclude:
            actions = life.handle(e.NotPlaced("no other"), now)
        elif actions and isinstance(actions[-1], e.NeedPlace):
            life.handle(e.Placed(P, D), now)
            tries += 1
            actions = life.handle(e.Refused(D, life.attempt, "RESOURCE_EXHAUSTED", "full", 0.1), now)
        if life.is_ended:
            break
        if not actions:
            assert life.next_wake_ns is not None and life.next_wake_ns > now
            now = life.next_wake_ns
            actions = life.handle(e.Tick(), now)
    assert actions[-1] == e.Fail("RESOURCE_EXHAUSTED", "full", 0.1)
    assert 5 * S <= now < 7 * S and 5 < tries < 60


def test_failures_are_bounded() -> None:
    life = new(max_failures=3)
    life.handle(e.Tick(), 0)
    for attempt in range(3):
        life.handle(e.Placed(None, W), 0)
        actions = life.handle(e.Failed(W, attempt, "INTERNAL", "NaN"), 0)
    assert isinstance(actions[-1], e.Fail) and actions[-1].code == "INTERNAL" and "3 failures" in actions[-1].message


def test_cached_tokens_are_those_of_the_first_token_and_never_more_than_the_prompt() -> None:  # router#193
    life = at(Stage.PREFILLING)
    life.handle(e.TokensCame(D, 0, 10, [1]), 1)  # D's token overtakes P's word
    life.handle(e.Prefilled(P, 0, 6, 10), 2)
    life.handle(e.WorkerLost(D), 3)  # the second prefill finds all in P's cache: not what the client is told
    life.handle(e.Placed(P, D2), 3)
    life.handle(e.Reserved(D2, 1), 3)
    life.handle(e.Prefilled(P, 1, 10, 10), 3)
    life.handle(e.TokensCame(D2, 1, 11, [99]), 4)
    assert life.handle(e.WorkerFinished(D2, 1, "stop", 1, 11), 5) == [e.End("stop", 6)]
    life = at(Stage.GENERATING)
    life.handle(e.TokensCame(W, 0, 10, [99]), 1)
    assert life.handle(e.WorkerFinished(W, 0, "stop", 1, 4096), 1) == [e.End("stop", 10)]


def test_lost_tokens_are_noticed() -> None:
    life = at(Stage.DECODING)
    actions = life.handle(e.WorkerFinished(D, 0, "stop", 2, 0), 1)
    assert kinds(actions) == ["SendAbort", "NeedPlace"]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        RequestLife(0, 1, (), DEADLINE, LifeConfig())
    with pytest.raises(ValueError, match="at least one"):
        RequestLife(1, 0, (), DEADLINE, LifeConfig())
