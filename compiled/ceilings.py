"""What this machine can do at best: the two ceilings that steps are held against."""

import time
from collections.abc import Callable
from functools import partial

import torch

from compiled.parameters import DTYPES

_READ_BYTES = 512 * 2**20
_PART_BYTES = 32 * 2**20
_SIDES = {2048: 2, 1024: 4, 512: 16}
_TRIES = 3


def measure_ceilings(dtype: str) -> dict[str, float]:
    """``read_gb_s``: a plain read of memory that no cache holds; ``multiply_gflop_s``: a square matrix product in
    ``dtype``. On torch's current threads, the best of a few tries of several sizes: large ones for many cores, and
    ones of a millisecond, which end before somebody else who wants the core too gets his turn."""
    memory = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    parts = [memory, *memory.split(_PART_BYTES // 4)] * _TRIES
    matrices = [one for side, tries in _SIDES.items() for one in [torch.randn(side, side).to(DTYPES[dtype])] * tries]
    return {
        "read_gb_s": max(part.nbytes / _seconds(part.sum) for part in parts) / 1e9,
        "multiply_gflop_s": max(2 * len(one) ** 3 / _seconds(partial(torch.mm, one, one)) for one in matrices) / 1e9,
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
