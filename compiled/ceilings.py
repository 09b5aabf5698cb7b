"""What this machine can do at best: the two ceilings that steps are held against."""

import time
from collections.abc import Callable

import torch

from compiled.parameters import DTYPES

_READ_BYTES = 512 * 2**20
_SIDE = 2048
_TRIES = 5


def measure_ceilings(dtype: str) -> dict[str, float]:
    """``read_gb_s``: a plain read of memory that no cache holds; ``multiply_gflop_s``: a large square matrix
    product in ``dtype``. On torch's current threads, the best of a few tries."""
    memory = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    matrix = torch.randn(_SIDE, _SIDE).to(DTYPES[dtype])
    return {
        "read_gb_s": memory.nbytes / _best(memory.sum) / 1e9,
        "multiply_gflop_s": 2 * _SIDE**3 / _best(lambda: matrix @ matrix) / 1e9,
    }


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
