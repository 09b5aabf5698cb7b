from math import inf
from random import Random

from streamengine.histogram import SECONDS, Histogram, read


def test_buckets_count_all_that_is_not_above_their_bound():
    histogram = Histogram((1, 2.5, 10))
    for value in (0, 1, 1.01, 2.5, 3):
        histogram.observe(value)
    histogram.observe(100, times=2)
    assert histogram.statistics("h") == {
        "h_le_1": 2,
        "h_le_2.5": 4,
        "h_le_10": 5,
        "h_count": 7,
        "h_sum": 207.51,
    }


def test_what_was_observed_is_read_back_from_statistics():
    histogram, random = Histogram(SECONDS), Random(1)
    values = [random.expovariate(1.0) for _ in range(1000)]
    for value in values:
        histogram.observe(value)
    buckets, total = read(histogram.statistics("h"), "h", SECONDS)
    assert buckets == [
        *((bound, sum(value <= bound for value in values)) for bound in SECONDS),
        (inf, 1000),
    ]
    assert abs(total - sum(values)) < 1e-9


def test_statistics_that_are_not_there_read_as_zeros():
    assert read({}, "h", (1,)) == ([(1, 0), (inf, 0)], 0)
