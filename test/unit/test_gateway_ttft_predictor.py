import random

from vla_cloud.core.ttft_predictor import TtftPredictor

S = 1_000_000_000


class Line:
    """Requests whose first token comes after base + rate * tokens to compute, one at a time."""

    def __init__(self, base_s=0.05, rate_s=0.001, **kwargs):
        self.predictor = TtftPredictor(**kwargs)
        self.base_s, self.rate_s, self.now_ns = base_s, rate_s, 0
        self.count = 0

    def serve(self, tokens, cached=0):
        name = f"r{self.count}"
        self.count += 1
        self.predictor.begin(name, tokens, self.now_ns)
        self.now_ns += round((self.base_s + self.rate_s * (tokens - cached)) * S)
        self.predictor.first_token(name, self.now_ns)
        self.predictor.end(name, cached, self.now_ns)

    def predict(self, tokens):
        return self.predictor.predict_s(tokens, self.now_ns)


def test_it_learns_base_and_rate_and_says_nothing_before():
    line, draw = Line(), random.Random(1)
    for _ in range(7):
        line.serve(draw.randrange(10, 2000))
    assert line.predict(1000) is None
    for _ in range(20):
        line.serve(draw.randrange(10, 2000))
    for tokens in (100, 1000, 4000):
        assert abs(line.predict(tokens) - (0.05 + 0.001 * tokens)) < 0.05 * (0.05 + 0.001 * tokens) + 0.01


def test_prompts_of_one_length_tell_nothing_of_longer_ones_so_the_prediction_stays_low():
    line, draw = Line(), random.Random(1)
    for _ in range(30):
        line.serve(10 + draw.randrange(3))
    assert line.predict(4000) < 0.2


def test_requests_that_wait_count():
    line, draw = Line(), random.Random(1)
    for _ in range(30):
        line.serve(draw.randrange(10, 2000))
    alone = line.predict(500)
    for name in ("a", "b", "c"):
        line.predictor.begin(name, 1000, line.now_ns)
    assert line.predict(500) > alone + 2.7
    line.predictor.first_token("a", line.now_ns)
    line.predictor.first_token("a", line.now_ns)
    line.predictor.end("b", None, line.now_ns)
    line.predictor.end("b", None, line.now_ns)
    assert alone + 0.9 < line.predict(500) < alone + 1.1
    line.predictor.end("c", None, line.now_ns)
    assert line.predictor.waiting_tokens == 0 and abs(line.predict(500) - alone) < 1e-9


def test_where_prompts_are_cached_a_long_one_is_not_expected_to_take_long():
    line, draw = Line(), random.Random(1)
    for _ in range(100):
        tokens = draw.randrange(1000, 2000)
        line.serve(tokens, cached=tokens - 16)
    assert line.predict(2000) < 0.4


def test_old_knowledge_is_none_so_that_refusals_end():
    line, draw = Line(fresh_s=30.0), random.Random(1)
    for _ in range(20):
        line.serve(draw.randrange(10, 2000))
    line.now_ns += 29 * S
    assert line.predict(1000) is not None
    line.now_ns += 2 * S
    assert line.predict(1000) is None


def test_failed_requests_teach_nothing_and_leave_nothing():
    predictor = TtftPredictor(min_samples=1)
    for number in range(100):
        predictor.begin(f"r{number}", 100, 0)
        if number % 2:
            predictor.first_token(f"r{number}", 5 * S)
        predictor.end(f"r{number}", None, 9 * S)
    predictor.end("never seen", 0, 9 * S)
    assert predictor.waiting_tokens == 0 and predictor.predict_s(100, 9 * S) is None


def test_a_machine_that_became_faster_is_noticed():
    line, draw = Line(rate_s=0.01), random.Random(1)
    for _ in range(50):
        line.serve(draw.randrange(10, 1000))
    slow = line.predict(1000)
    line.rate_s = 0.001
    for _ in range(80):
        line.serve(draw.randrange(10, 1000))
    assert line.predict(1000) < 0.25 * slow
