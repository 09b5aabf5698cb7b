"""How long steps take, how far that is from what the machine can do, and what of it is not the model.

A decoding step must read every weight once, and a prompt must multiply by every weight once per token; so decode is
held against a plain read of as many bytes, in turns with its steps, and prefill against the matrix product, measured
right before; both on the same device and threads. Each figure is the median of several runs.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from compiled.step import LoadError, Row, Runner, Sampling, Step
from streamengine.compose import build_runner
from streamengine.config import EngineConfig
from streamengine.errors import StartupError
from streamengine.link import Progress

DECODE_BATCHES = (1, 8, 32)
PREFILL_TOKENS = (128, 512, 2048)
CONTEXT = 128
REPEATS = 9
PARTS = ("host", "sample")
"""What a runner counts apart from the forward pass."""


def measure(config: EngineConfig, report: Callable[[Progress], None], show: Callable[[str], None]) -> dict[str, Any]:
    try:
        runner: Any = build_runner(config, report)  # a `compiled.timeline.Profiled` as well
    except LoadError as error:
        raise StartupError(str(error), param="model") from error
    report(Progress("warm-up"))
    runner.warmup()
    _check_fit(runner)
    facts = runner.statistics()
    ceilings = runner.ceilings()
    show(f"ceilings  read {ceilings['read_gb_s']:.1f} GB/s, multiply {ceilings['multiply_gflop_s']:.0f} GFLOP/s")
    weights = facts["read_bytes"]
    result: dict[str, Any] = {
        "model": runner.model.name,
        "dtype": runner.model.dtype,
        "eager": config.eager,
        "threads": facts["threads"],
        "read_bytes": weights,
        "ceilings": ceilings,
        "decode": [_decode(runner, batch, weights) for batch in DECODE_BATCHES],
        "prefill": [_prefill(runner, tokens, facts["flop_per_token"], ceilings) for tokens in PREFILL_TOKENS],
    }
    for row in result["decode"]:
        show(
            f"decode    batch {row['batch']:>4}  {row['ms']:8.1f} ms a step  {row['tokens_per_s']:8.1f} tokens/s  "
            f"{row['percent_of_read']:5.1f} % of a plain read of its weights ({row['read_ms']:.1f} ms)  "
            f"host {row['host_us']:5.0f} µs, sampler {row['sample_us']:5.0f} µs"
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


def _decode(runner: Any, batch: int, weights: float) -> dict[str, float]:
    pages = _pages(runner, CONTEXT + 1)
    rows = tuple(
        Row(i, (1,), CONTEXT, tuple(range(1 + i * pages, 1 + (i + 1) * pages)), Sampling()) for i in range(batch)
    )
    read: list[float] = []
    plain = runner.plain_read(int(weights))
    seconds, beside = _median(runner, Step(0, rows), lambda: read.append(plain()))
    return {
        "batch": batch,
        "ms": seconds * 1e3,
        "tokens_per_s": batch / seconds,
        "read_ms": statistics.median(read) * 1e3,
        "percent_of_read": 100 * statistics.median(read) / seconds,
        **beside,
    }


def _prefill(runner: Runner, tokens: int, flop_per_token: float, ceilings: dict[str, float]) -> dict[str, float]:
    pages = _pages(runner, tokens)
    seconds, beside = _median(runner, Step(0, (Row(0, (1,) * tokens, 0, tuple(range(1, 1 + pages)), Sampling()),)))
    gflop_s = tokens * flop_per_token / seconds / 1e9
    return {
        "tokens": tokens,
        "ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "percent_of_multiply": 100 * gflop_s / ceilings["multiply_gflop_s"],
        **beside,
    }


def _median(runner: Runner, step: Step, between: Callable[[], object] = lambda: None) -> tuple[float, dict[str, float]]:
    """Seconds of ``step``, and the microseconds of its parts outside of the model's pieces and attention. ``between``
    is called before each run."""
    runner.submit(step).wait()
    runs = []
    for _ in range(REPEATS):
        between()
        before = runner.statistics()
        started = time.perf_counter()
        runner.submit(step).wait()
        seconds, after = time.perf_counter() - started, runner.statistics()
        runs.append((seconds, *(1e6 * (after[f"{part}_seconds"] - before[f"{part}_seconds"]) for part in PARTS)))
    seconds, *beside = map(statistics.median, zip(*runs, strict=True))
    return seconds, {f"{part}_us": micros for part, micros in zip(PARTS, beside, strict=True)}
