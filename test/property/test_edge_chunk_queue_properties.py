"""Any order of chunks, late, early, long, short, repeated: the queue against a dictionary from tick to row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_edge.core.chunk import ActionChunk, Reject
from vla_edge.core.chunk_queue import ChunkQueue
from vla_edge.core.ensembler import ConstantAlpha, Replace

T, CAPACITY = 0.01, 40
CASES = settings(max_examples=300, deadline=None, database=None, derandomize=True)

CHUNK = st.tuples(st.just("chunk"), st.integers(-30, 15), st.integers(1, 45), st.one_of(st.none(), st.integers(0, 60)))
STEP = st.tuples(st.just("step"), st.integers(0, 20))
CLEAR = st.tuples(st.just("clear"))
HISTORIES = st.lists(st.one_of(CHUNK, CHUNK, STEP, CLEAR), min_size=1, max_size=40)


class Model:
    """What the queue should hold; alpha is the weight of what is planned already."""

    def __init__(self, alpha):
        self.alpha, self.plan = alpha, {}

    def insert(self, base, rows, next_tick, still_since):
        covered, first = next_tick in self.plan, base + 1
        if not covered and still_since is not None and still_since <= base:
            first = max(first, next_tick)
        said = {first + k: row for k, row in enumerate(rows) if first + k >= next_tick}
        if not said:
            return Reject.ALL_PAST
        if min(said) > (max(self.plan) + 1 if covered else next_tick):
            return Reject.GAP
        if max(said) - next_tick + 2 > CAPACITY:
            return Reject.GAP
        kept = {t: row for t, row in self.plan.items() if covered and next_tick - 1 <= t < min(said)}
        merged = {t: self.alpha * self.plan[t] + (1.0 - self.alpha) * row if covered and t in self.plan else row
                  for t, row in said.items()}
        self.plan = kept | merged
        return None

    def velocity(self, tick):
        if tick + 1 in self.plan:
            return (self.plan[tick + 1] - self.plan[tick]) / T
        if tick - 1 in self.plan:
            return (self.plan[tick] - self.plan[tick - 1]) / T
        return np.zeros_like(self.plan[tick])


def check(queue, model):
    position, velocity = np.full(2, 9.0), np.full(2, 9.0)
    ticks = sorted(model.plan)
    assert queue.empty == (not ticks)
    if ticks:
        assert (queue.first_tick, queue.last_tick) == (ticks[0], ticks[-1])
        assert ticks == list(range(ticks[0], ticks[-1] + 1)), "no gaps"
    for tick in [*ticks, (ticks[0] if ticks else 0) - 1, (ticks[-1] if ticks else 0) + 1]:
        assert queue.covers(tick) == (tick in model.plan)
        if queue.sample(tick, position, velocity):
            np.testing.assert_allclose(position, model.plan[tick], atol=1e-12)
            np.testing.assert_allclose(velocity, model.velocity(tick), atol=1e-9)
        else:
            assert tick not in model.plan
    rows = np.full((7, 2), 9.0)
    for tick in ticks[:3]:
        count = queue.ahead(tick, rows)
        assert count == min(7, ticks[-1] - tick + 1)
        np.testing.assert_allclose(rows[:count], [model.plan[tick + k] for k in range(count)], atol=1e-12)


def run(history, rule, alpha, start):
    """Both through the same history; after every event they agree on everything that can be read."""
    queue, model = ChunkQueue(2, rule, T, CAPACITY), Model(alpha)
    rng, now, sequence = np.random.default_rng(1), start, 0
    for event, *numbers in history:
        if event == "step":
            now += numbers[0]
        elif event == "clear":
            queue.clear()
            model.plan = {}
        else:
            offset, horizon, still = numbers
            sequence += 1
            rows = rng.normal(size=(horizon, 2))
            before = rows.copy()
            base, still_since = now - 1 + offset, None if still is None else now - still
            chunk = ActionChunk("a", sequence, base, 0, T, ("x", "y"), rows)
            assert queue.insert(chunk, now, still_since) is model.insert(base, rows, now, still_since)
            assert (rows == before).all(), "a chunk is never changed"
        check(queue, model)


@CASES
@given(HISTORIES)
def test_the_newest_chunk_replaces(history):
    run(history, Replace(), 0.0, start=100)


@CASES
@given(HISTORIES, st.floats(0.0, 1.0), st.sampled_from([-50, 0, 10**12]))
def test_chunks_are_blended_on_their_ticks(history, alpha, start):
    run(history, ConstantAlpha(alpha), alpha, start)
