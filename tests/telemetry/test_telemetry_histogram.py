"""Counts by size: quantiles against numpy's, merging, windows, and plain data."""

import json

import numpy as np
import pytest

from zstrat.telemetry import EDGES, Histogram, Unit, Windowed


@pytest.fixture
def seconds():
    return np.random.default_rng(7).lognormal(-7.0, 2.0, 5000)


def test_quantiles_are_those_of_numpy_but_for_a_bucket(seconds):
    made = Histogram()
    made.add_many(seconds)
    assert made.count == 5000
    assert made.total == pytest.approx(seconds.sum())
    assert made.max == seconds.max()
    for q in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(seconds, q, method="inverted_cdf")
        assert made.quantile(q) == pytest.approx(exact, rel=0.25)


def test_small_counts_are_exact():
    made = Histogram(Unit.COUNTS)
    made.add_many([0, 0, 1, 2, 3, 5, 7, 8])
    assert [made.quantile(q) for q in (0.25, 0.375, 0.5, 0.625, 1)] == [0, 1, 2, 3, 8]
    counts = [[0, 2], [1, 1], [2, 1], [3, 1], [5, 1], [7, 1], [9, 1]]
    assert made.buckets() == counts
    summary = made.summary()
    assert (summary["count"], summary["mean"], summary["max"]) == (8, 26 / 8, 8)


def test_each_value_is_in_the_bucket_of_its_edges(seconds):
    counts = np.zeros(len(EDGES[Unit.SECONDS]), np.int64)
    np.add.at(counts, np.searchsorted(EDGES[Unit.SECONDS], seconds, "right"), 1)
    made = Histogram()
    made.add_many(seconds)
    assert made.counts.tolist() == counts.tolist()


def test_what_has_no_size_counts_as_nothing():
    made = Histogram()
    made.add_many([0.0, -1.0, float("nan"), 1e9])
    assert (made.count, made.quantile(0.5), made.max) == (
        4,
        pytest.approx(0, abs=1e-6),
        1e9,
    )
    assert made.quantile(1.0) == pytest.approx(1e9, rel=0.5)
    assert Histogram().quantile(0.5) == 0.0
    assert Histogram().summary()["mean"] == 0.0


def test_merging_is_adding_all_to_one(seconds):
    one, two, both = Histogram(), Histogram(), Histogram()
    one.add_many(seconds[:100])
    two.add_many(seconds[100:])
    both.add_many(seconds)
    one.merge(two)
    assert one.counts.tolist() == both.counts.tolist()
    assert one.summary() == pytest.approx(both.summary())
    with pytest.raises(ValueError, match="of seconds into one of bytes"):
        Histogram(Unit.BYTES).merge(one)


def test_plain_data_says_all_of_it(seconds):
    made = Histogram()
    made.add_many(seconds)
    plain = json.loads(json.dumps(made.plain()))
    assert len(json.dumps(plain)) < 2000
    assert Histogram.from_plain(plain).summary() == made.summary()


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"unit": "hours", "total": 0, "max": 0, "buckets": []},
        {"unit": "seconds", "total": 0, "max": 0, "buckets": [[-1, 1]]},
        {"unit": "seconds", "total": 0, "max": 0, "buckets": [[500, 1]]},
        {"unit": "seconds", "total": "x", "max": 0, "buckets": []},
        {"unit": "seconds", "total": 0, "max": 0, "buckets": [3]},
        {"unit": "seconds", "total": 0, "max": 0, "buckets": [[1, 2**70]]},
    ],
)
def test_what_is_no_histogram_is_refused(plain):
    with pytest.raises(ValueError, match="malformed histogram"):
        Histogram.from_plain(plain)


def test_a_window_forgets_and_the_total_does_not():
    made = Windowed(Unit.COUNTS)
    for second in range(30):
        made.add_many([second] * 2, second + 0.5)
    assert made.total.count == 60
    assert made.recent(29.9).count == 2 * 11  # ten seconds, and the present one
    assert made.recent(29.9).max == 29
    assert made.recent(35.0).count == 2 * 5
    assert made.recent(99.0).count == 0
    plain = made.plain(35.0)
    assert Histogram.from_plain(plain["total"]).count == 60
    assert Histogram.from_plain(plain["recent"]).count == 10
