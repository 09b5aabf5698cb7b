"""What a device can do at best: the two ceilings that steps are held against."""

from collections.abc import Callable
from functools import partial

import torch

from compiled.clock import clock_of
from compiled.parameters import DTYPES

_TRIES = 3
_READ_BYTES = 512 * 2**20
_PART_BYTES = 32 * 2**20
_SIDES = {2048: 2, 1024: 4, 512: 16}

_CUDA_READ_BYTES = 2**30
"""Twenty times an H200's cache, and what is left beside the KV pages of a small GPU."""
_CUDA_SIDES = {8192: 4, 4096: 8}


def measure_ceilings(dtype: str, device: torch.device = torch.device("cpu")) -> dict[str, float]:  # noqa: B008
    """``read_gb_s``: a plain read of memory that no cache holds; ``multiply_gflop_s``: a square matrix product in
    ``dtype``; the best of a few tries.

    On the CPU with torch's current threads and in several sizes: large ones for many cores, and ones of a millisecond,
    which end before somebody else who wants the core too gets his turn. On CUDA between events, in a GiB of memory.
    """
    cuda = device.type == "cuda"
    memory = torch.ones((_CUDA_READ_BYTES if cuda else _READ_BYTES) // 4, dtype=torch.float32, device=device)
    parts = [memory, *(() if cuda else memory.split(_PART_BYTES // 4))] * _TRIES
    read = max(part.nbytes / _seconds(part.sum, device) for part in parts)
    del memory, parts
    multiply = 0.0
    for side, tries in (_CUDA_SIDES if cuda else _SIDES).items():
        one = torch.randn(side, side, device=device).to(DTYPES[dtype])
        best = min(_seconds(partial(torch.mm, one, one), device) for _ in range(tries))
        multiply = max(multiply, 2 * side**3 / best)
    return {"read_gb_s": read / 1e9, "multiply_gflop_s": multiply / 1e9}


def plain_read(size: int, device: torch.device = torch.device("cpu")) -> Callable[[], float]:  # noqa: B008
    """Reads ``size`` bytes whenever it is called, and returns the seconds that took. What is read in between should be
    more than the device's caches hold."""
    memory = torch.ones(-(-size // 4), dtype=torch.float32, device=device)
    return partial(_seconds, memory.sum, device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    clock = clock_of(device)
    if device.type == "cuda":
        work()  # keeps the stream busy until the host has launched what is timed
    began = clock.now()
    work()
    return clock.seconds(began, clock.now())
