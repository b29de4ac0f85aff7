"""Random events in random order: a chat request always ends, once, by its deadline, with tokens that make sense."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vla_cloud.core import life_events as e
from vla_cloud.core.request_life import LifeConfig, RequestLife, Stage

S = 1_000_000_000
PROMPT, MAX_NEW, DEADLINE = 10, 6, 60 * S
NAMES = ["p0", "p1", "d0", "d1", "w0"]

names = st.sampled_from(NAMES)
attempts = st.integers(0, 3)
codes = st.sampled_from(["RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"])
positions = st.integers(PROMPT, PROMPT + MAX_NEW)
tokens = st.lists(st.integers(0, 99), min_size=1, max_size=3)
events = st.one_of(
    st.builds(e.Placed, st.sampled_from([None, "p0", "p1"]), st.sampled_from(["d0", "d1", "w0"])),
    st.builds(e.NotPlaced, st.just("none")),
    st.builds(e.Reserved, names, attempts),
    st.builds(e.Refused, names, attempts, codes, st.just("no"), st.floats(0, 5)),
    st.builds(e.Prefilled, names, attempts, st.integers(0, 20), st.integers(0, 10**9)),
    st.builds(e.PushFailed, names, attempts, codes, st.just("no")),
    st.builds(e.TokensCame, names, attempts, positions, tokens),
    st.builds(e.WorkerFinished, names, attempts, st.sampled_from(["stop", "length"]), st.integers(0, 6), st.integers(0, 20)),
    st.builds(e.Aborted, names, attempts),
    st.builds(e.Failed, names, attempts, codes, st.just("no"), st.booleans()),
    st.builds(e.WorkerLost, names),
    st.builds(e.WorkerDead, names),
    st.just(e.Cancel()),
    st.just(e.EndHere()),
    st.just(e.Tick()),
)  # fmt: skip
# Half of the time the event that moves the request on, so that late stages are met often.
steps = st.lists(st.tuples(st.one_of(st.none(), events), st.integers(0, 5 * S)), max_size=60)


def helpful(life: RequestLife) -> e.Event:
    """What a healthy worker would say now."""
    work = life._work
    match life.stage:
        case Stage.RESERVING:
            return e.Reserved(work.decode, life.attempt)
        case Stage.PREFILLING:
            return e.Prefilled(work.prefill, life.attempt, 0, 1000)
        case Stage.TRANSFERRING | Stage.DECODING | Stage.GENERATING if len(life.outputs) < MAX_NEW:
            return e.TokensCame(work.decode, life.attempt, PROMPT + len(life.outputs), [1])
        case Stage.DECODING | Stage.GENERATING:
            return e.WorkerFinished(work.decode, life.attempt, "length", len(life.outputs) - work.start_outputs, 0)
    return e.Tick()


class Watcher:
    """Checks every action against what was sent before."""

    def __init__(self) -> None:
        self.ends: list[e.Action] = []
        self.emitted: list[int] = []
        self.sent: set[tuple[str, int]] = set()
        self.aborted: set[tuple[str, int]] = set()
        self.reserved: dict[int, str] = {}

    def see(self, action: e.Action) -> None:
        assert not self.ends or isinstance(action, e.SendWriterDone | e.SendAbort), "something after the end"
        match action:
            case e.End() | e.Fail():
                self.ends.append(action)
            case e.Emit(tokens):
                self.emitted.extend(tokens)
            case e.SendReserve(worker, attempt) | e.SendPrefill(worker, attempt) | e.SendGenerate(worker, attempt):
                assert (worker, attempt) not in self.aborted
                self.sent.add((worker, attempt))
            case e.SendAbort(worker, attempt):
                assert (worker, attempt) in self.sent, "abort of what was never sent"
                assert (worker, attempt) not in self.aborted, "aborted twice"
                self.aborted.add((worker, attempt))
            case e.SendWriterDone(worker, attempt):
                assert (worker, attempt) in self.aborted, "D is told of a writer of an attempt that it still has"


@settings(max_examples=500, deadline=None)
@given(steps)
def test_a_request_always_ends_once_and_by_its_deadline(script: list[tuple[e.Event | None, int]]) -> None:
    life = RequestLife(PROMPT, MAX_NEW, {77}, DEADLINE, LifeConfig(capacity_wait_s=10.0, settle_s=20.0))
    watcher, now = Watcher(), 0

    def feed(event: e.Event) -> None:
        for action in life.handle(event, now):
            watcher.see(action)

    feed(e.Tick())
    for event, pause_ns in script:
        until = now + pause_ns
        while (wake := life.next_wake_ns) is not None and wake <= until and not life.is_settled:
            now = max(now, wake)
            feed(e.Tick())
        now = until
        feed(helpful(life) if event is None else event)
        assert now < DEADLINE or life.is_ended
    for _ in range(1000):  # nobody speaks any more; only time passes
        wake = life.next_wake_ns
        if wake is None:
            break
        assert wake >= now or life.is_ended or life.stage is Stage.PLACING
        now = max(now, wake)
        feed(e.Tick())
        if life.stage is Stage.PLACING:
            feed(e.NotPlaced("none"))
    assert life.is_ended and life.is_settled
    assert len(watcher.ends) == 1
    assert watcher.emitted == life.outputs and len(life.outputs) <= MAX_NEW
    if isinstance(watcher.ends[0], e.End):
        assert 0 <= watcher.ends[0].cached_tokens <= PROMPT
    assert life._retries.failures <= 5


@settings(max_examples=100, deadline=None)
@given(steps)
def test_it_ends_before_the_deadline_while_its_wakes_are_served(script: list[tuple[e.Event | None, int]]) -> None:
    """As above with the clock stopped at each wake: the end is never later than the deadline itself."""
    life = RequestLife(PROMPT, MAX_NEW, {77}, DEADLINE, LifeConfig())
    now = 0
    life.handle(e.Tick(), now)
    for event, _ in script:
        life.handle(helpful(life) if event is None else event, now)
    while not life.is_ended:
        wake = life.next_wake_ns
        assert wake is not None and wake <= DEADLINE
        now = max(now, wake)
        life.handle(e.Tick(), now)
    assert now <= DEADLINE
