"""Observations counted in fixed buckets: nothing is sampled away, and two snapshots can be subtracted. Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """``bounds`` are the buckets' upper limits, inclusive and ascending; there is one more for what is above."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def statistics(self, name: str) -> dict[str, float]:
        """``name_le_<bound>`` counts what is not above the bound; ``name_count`` and ``name_sum`` are of all."""
        below = dict(zip(bucket_names(name, self._bounds), accumulate(self._counts), strict=False))
        return {**below, f"{name}_count": sum(self._counts), f"{name}_sum": self._sum}


def bucket_names(name: str, bounds: Sequence[float]) -> list[str]:
    """The names in `Histogram.statistics` of all buckets but the last, which is ``name_count``."""
    return [f"{name}_le_{bound:g}" for bound in bounds]


def read(values: Mapping[str, float], name: str, bounds: Sequence[float]) -> tuple[list[tuple[float, float]], float]:
    """``([(bound, cumulative count), …, (inf, count)], sum)`` out of statistics; zeros where it is missing."""
    names = [*bucket_names(name, bounds), f"{name}_count"]
    buckets = [(bound, values.get(key, 0)) for bound, key in zip((*bounds, inf), names, strict=True)]
    return buckets, values.get(f"{name}_sum", 0)
