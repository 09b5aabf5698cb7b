"""The device and what it can do at best: the two ceilings that all figures are held against."""

import importlib.metadata
import platform
import time
from collections.abc import Callable
from functools import partial

import torch

from compiled.provision import describe_gpu
from profiles.gpu.bench import Bench

TRIES = 10


def measure(bench: Bench) -> None:
    names = ("torch", "triton", "transformers", "flashinfer-python", "apache-tvm-ffi")
    bench.facts["versions"] = {"python": platform.python_version(), **{name: _version(name) for name in names}}
    bench.facts["gpu"] = describe_gpu()
    bench.facts |= ceilings(bench)
    bench.show("copy {copy_gb_s:.0f} GB/s, read {read_gb_s:.0f} GB/s, multiply {multiply_tflop_s:.1f} TFLOP/s")


def ceilings(bench: Bench) -> dict[str, float]:
    """GB/s of a copy (read and written bytes) and of a sum (read bytes), TFLOP/s of a square product of random
    bfloat16; the best of several."""
    sizes, device = bench.sizes, bench.device
    source = torch.ones(sizes.read_bytes // 4, dtype=torch.float32, device=device)
    copy = 2 * source.nbytes / best(bench, partial(torch.empty_like(source).copy_, source))
    read = source.nbytes / best(bench, source.sum)
    left, right = (torch.randn(sizes.side, sizes.side, dtype=torch.bfloat16, device=device) for _ in range(2))
    multiply = 2 * sizes.side**3 / best(bench, lambda: left @ right)
    return {"copy_gb_s": copy / 1e9, "read_gb_s": read / 1e9, "multiply_tflop_s": multiply / 1e12}


def best(bench: Bench, work: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs, after two that do not count."""
    times = []
    for _ in range(TRIES):
        bench.synchronize()
        started = time.perf_counter()
        work()
        bench.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[2:])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
