import math

import numpy as np
import pytest

from vla_common.metrics import Counters, Histogram, RateMeter


def test_counters():
    counters = Counters("stale", "malformed")
    counters.add("stale")
    counters.add("new", 3)
    assert counters.snapshot() == {"stale": 1, "malformed": 0, "new": 3}
    assert counters["absent"] == 0 and counters.total() == 4


def test_histogram_matches_numpy_over_its_window():
    rng = np.random.default_rng(1)
    values = rng.exponential(size=1000)
    histogram = Histogram(capacity=256)
    for value in values:
        histogram.record(value)
    summary = histogram.summary()
    expected = np.quantile(values[-256:], (0.5, 0.99, 0.999))
    assert (summary.p50, summary.p99, summary.p999) == pytest.approx(tuple(expected))
    assert summary.count == histogram.count == 1000
    assert summary.maximum == values.max() and summary.last == values[-1]


def test_histogram_part_full_and_empty():
    histogram = Histogram(8)
    empty = histogram.summary()
    assert empty.count == 0 and math.isnan(empty.p50) and math.isnan(empty.maximum)
    histogram.record(-2.0)
    assert histogram.summary().p50 == histogram.summary().maximum == -2.0
    with pytest.raises(ValueError):
        Histogram(0)


def test_rate_meter():
    meter = RateMeter(window_s=2.0)
    assert meter.rate_hz(0) == 0.0
    for tick in range(31):  # 10 Hz for 3 s
        meter.record(tick * 100_000_000)
        if tick == 5:
            assert meter.rate_hz(tick * 100_000_000) == pytest.approx(10)
    assert meter.rate_hz(3_000_000_000) == pytest.approx(10)
    assert meter.rate_hz(4_000_000_000) == pytest.approx(5)
    assert meter.rate_hz(6_000_000_000) == 0.0
