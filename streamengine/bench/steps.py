"""How long steps take, and how far that is from what the machine can do.

A decoding step must read every weight once, and a prompt must multiply by every weight once per token; so
decode is held against the memory bandwidth and prefill against the matrix product, both measured here, on
the same threads, right before. Each figure is the median of several runs.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from compiled.step import LoadError, Row, Runner, Sampling, Step
from streamengine.compose import build_runner, measure_ceilings
from streamengine.config import EngineConfig
from streamengine.errors import StartupError
from streamengine.link import Progress

DECODE_BATCHES = (1, 8, 32)
PREFILL_TOKENS = (128, 512, 2048)
CONTEXT = 128
REPEATS = 7


def measure(config: EngineConfig, report: Callable[[Progress], None], show: Callable[[str], None]) -> dict[str, Any]:
    try:
        runner = build_runner(config, report)
    except LoadError as error:
        raise StartupError(str(error), param="model") from error
    report(Progress("warm-up"))
    runner.warmup()
    _check_fit(runner)
    facts = runner.statistics()
    ceilings = measure_ceilings(runner.model.dtype)
    show(f"ceilings  read {ceilings['read_gb_s']:.1f} GB/s, multiply {ceilings['multiply_gflop_s']:.0f} GFLOP/s")
    weights = facts["read_bytes"]
    result: dict[str, Any] = {
        "model": runner.model.name,
        "dtype": runner.model.dtype,
        "eager": config.eager,
        "threads": facts["threads"],
        "read_bytes": weights,
        "ceilings": ceilings,
        "decode": [_decode(runner, batch, weights, ceilings["read_gb_s"]) for batch in DECODE_BATCHES],
        "prefill": [_prefill(runner, tokens, facts["flop_per_token"], ceilings) for tokens in PREFILL_TOKENS],
    }
    for row in result["decode"]:
        show(
            f"decode    batch {row['batch']:>4}  {row['ms']:8.1f} ms a step  {row['tokens_per_s']:8.1f} tokens/s  "
            f"{row['percent_of_read']:5.1f} % of the read ceiling"
        )
    for row in result["prefill"]:
        show(
            f"prefill   {row['tokens']:>5} tok  {row['ms']:8.1f} ms         {row['tokens_per_s']:8.1f} tokens/s  "
            f"{row['percent_of_multiply']:5.1f} % of the multiply ceiling"
        )
    return result


def _check_fit(runner: Runner) -> None:
    needed = 1 + max(max(DECODE_BATCHES) * _pages(runner, CONTEXT + 1), _pages(runner, max(PREFILL_TOKENS)))
    if runner.kv.pages < needed:
        raise StartupError(f"the benchmark needs {needed} KV pages, not {runner.kv.pages}", param="kv_pages")


def _pages(runner: Runner, tokens: int) -> int:
    return -(-tokens // runner.kv.page_size)


def _decode(runner: Runner, batch: int, weights: float, read_gb_s: float) -> dict[str, float]:
    pages = _pages(runner, CONTEXT + 1)
    rows = tuple(
        Row(i, (1,), CONTEXT, tuple(range(1 + i * pages, 1 + (i + 1) * pages)), Sampling()) for i in range(batch)
    )
    seconds = _median(runner, Step(0, rows))
    return {
        "batch": batch,
        "ms": seconds * 1e3,
        "tokens_per_s": batch / seconds,
        "percent_of_read": 100 * weights / seconds / (read_gb_s * 1e9),
    }


def _prefill(runner: Runner, tokens: int, flop_per_token: float, ceilings: dict[str, float]) -> dict[str, float]:
    pages = _pages(runner, tokens)
    seconds = _median(runner, Step(0, (Row(0, (1,) * tokens, 0, tuple(range(1, 1 + pages)), Sampling()),)))
    gflop_s = tokens * flop_per_token / seconds / 1e9
    return {
        "tokens": tokens,
        "ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "percent_of_multiply": 100 * gflop_s / ceilings["multiply_gflop_s"],
    }


def _median(runner: Runner, step: Step) -> float:
    runner.submit(step).wait()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        runner.submit(step).wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
