"""Steps against the clock: decode and prefill beside the ceilings, host time apart, transformers beside it."""

import inspect
import itertools
import statistics
import time
from typing import Any

import torch

from compiled.timeline import Measure
from profiles.gpu.bench import Bench, Launches, capture_all, limited
from profiles.gpu.driver import Driver, Times, one_step
from profiles.gpu.machine import best, ceilings


def overlap(bench: Bench) -> None:
    """As many steps in flight as the runner takes give the tokens that one at a time gives, and hide host time; also
    where each step's bitmask hangs on the tokens of the one before."""
    runner = bench.runner("large")
    bench.facts["depth"] = runner.depth
    bench.expect(runner.depth > 1, "the runner takes one step at a time")
    for kind in ("plain", "guided"):
        told = []
        for name, depth in (("one", 1), ("overlapped", runner.depth)):
            driver = _filled(bench, runner, min(8, bench.sizes.max_num_seqs))
            times = driver.decode(bench.sizes.steps, depth=depth, guided=kind == "guided")
            told.append([tokens[-bench.sizes.steps - 1 :] for tokens in driver.tokens])
            bench.facts[f"{kind}_{name}_ms"] = _ms(times.all)
        bench.expect(told[0] == told[1], f"{kind} tokens differ between one step at a time and several in flight")
    pairs = [pair for tokens in told[1] for pair in itertools.pairwise(tokens)]
    bench.expect(all((one + two) % 2 for one, two in pairs), "a guided token is none that its bitmask allows")
    bench.show(
        "one step at a time {plain_one_ms:.3f} ms, {depth} in flight {plain_overlapped_ms:.3f} ms; "
        "guided {guided_one_ms:.3f} and {guided_overlapped_ms:.3f} ms"
    )
    if bench.device.type == "cuda":
        driver = _filled(bench, runner, 8)
        torch.cuda.set_sync_debug_mode("error")  # what waits for the device raises
        try:
            driver.decode(8)
            driver.decode(8, guided=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def decode(bench: Bench) -> None:
    """Steps of one token a row. ``percent`` is of the ceiling: weights and cached keys and values, read once at the
    highest bandwidth that was measured here."""
    limits = _ceilings(bench)
    runner = bench.runner("large")
    bench.facts |= capture_all(runner)
    for batch in bench.sizes.decode:
        found = bench.facts[str(batch)] = {}
        driver = _filled(bench, runner, batch, 3)
        launches = Launches(bench.device)
        times = driver.decode(bench.sizes.steps, submitted=launches.count)
        found |= _decode_facts(bench, runner, batch, times, limits["read"]) | {"late_percent": launches.late_percent}
        for name, pieces in (("pieces_ms", True), ("no_graphs_ms", False)):
            with limited(runner, whole=False, pieces=pieces):
                found[name] = _ms(driver.decode(bench.sizes.steps).all)
    _eager_decode(bench)
    for batch in bench.sizes.decode:
        bench.show(
            "batch {batch:>4}: {ms:7.3f} ms, {tokens_per_s:9.0f} tokens/s, {percent:5.1f} % of the memory ceiling, "
            "host {host_ms:.3f} ms, late {late_percent} %; pieces {pieces_ms:.3f} ms, no graphs {no_graphs_ms:.3f} ms",
            batch=batch,
            **bench.facts[str(batch)],
        )


def _decode_facts(bench: Bench, runner: Any, batch: int, times: Times, ceiling: float) -> dict[str, float]:
    facts, kv = runner.statistics(), runner.kv
    context = bench.sizes.context + bench.sizes.steps / 2
    moved = facts["read_bytes"] + batch * context * kv.page_bytes / kv.page_size
    seconds = statistics.median(times.all)
    return {
        "ms": seconds * 1e3,
        "tokens_per_s": batch / seconds,
        "percent": 100 * moved / seconds / ceiling,
        "host_ms": _ms(times.host),
        "blocked_ms": _ms(times.blocked),
    }


def prefill(bench: Bench) -> None:
    """One prompt a step, several times. ``percent`` is of the matrix product's ceiling, counting the weights' products
    and, of attention, the half that causality leaves."""
    limits = _ceilings(bench)
    runner = bench.runner("large")
    config, facts = bench.sizes.large, runner.statistics()
    for tokens in bench.sizes.prefill:
        step = one_step(runner, [(bench.prompt(tokens), 0)])
        seconds = best(bench, lambda step=step: runner.submit(step).wait())
        attention = 2 * tokens**2 * config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
        work = tokens * facts["flop_per_token"] + attention
        bench.facts[str(tokens)] = {
            "ms": seconds * 1e3,
            "tokens_per_s": tokens / seconds,
            "percent": 100 * work / seconds / limits["multiply"],
        }
        bench.show(
            "{tokens:>5} tokens: {ms:8.3f} ms, {tokens_per_s:9.0f} tokens/s, {percent:5.1f} % of the matrix ceiling",
            tokens=tokens,
            **bench.facts[str(tokens)],
        )
    bench.close()
    model = bench.reference("large", torch.bfloat16)
    for tokens in bench.sizes.eager_prefill:
        ids = torch.tensor([bench.prompt(tokens)], device=bench.device)
        with torch.inference_mode():
            seconds = best(bench, lambda ids=ids: model(ids, logits_to_keep=1))
        bench.facts.setdefault(str(tokens), {})["transformers_ms"] = seconds * 1e3
        bench.show("{tokens:>5} tokens: {ms:8.3f} ms in transformers", tokens=tokens, ms=seconds * 1e3)


def _eager_decode(bench: Bench) -> None:
    from transformers import DynamicCache  # slow to import, and some sections do without

    bench.close()
    model = bench.reference("large", torch.bfloat16)
    for batch in bench.sizes.eager_decode:
        ids = torch.tensor([bench.prompt(bench.sizes.context, seed) for seed in range(batch)], device=bench.device)
        times = []
        with torch.inference_mode():
            cache = {_cache_name(model): DynamicCache(config=model.config)}
            made = model(ids, use_cache=True, logits_to_keep=1, **cache)
            for _ in range(bench.sizes.steps // 2):
                bench.synchronize()
                started = time.perf_counter()
                token = made.logits[:, -1].argmax(-1, keepdim=True)
                made = model(token, use_cache=True, **cache)
                bench.synchronize()
                times.append(time.perf_counter() - started)
        bench.facts[str(batch)]["transformers_ms"] = _ms(times)
        bench.show("batch {batch:>4}: {ms:7.3f} ms in transformers", batch=batch, ms=_ms(times))
        del made
    del model
    bench.close()


def _cache_name(model: Any) -> str:
    """Of the keyword: transformers has renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def profile(bench: Bench) -> None:
    """Calls that are timed by the stream's events add up to their steps, and graphs are replayed again afterwards."""
    runner = bench.runner("large")
    steps, facts = bench.sizes.steps, bench.facts
    capture_all(runner)
    driver = _filled(bench, runner, min(8, bench.sizes.max_num_seqs), 3)
    driver.decode(steps)
    before = runner.statistics()["graph_steps_whole"]
    runner.profile(Measure(steps=4, plain=4))
    driver.decode(steps + 8)
    window = runner.profiled()
    bench.expect(window is not None, "no window after all of its steps")
    replayed = runner.statistics()["graph_steps_whole"] - before
    covered = [sum(span.seconds for span in step.spans) for step in window.steps]
    total = sum(step.seconds for step in window.steps)
    facts["plain_ms"], facts["measured_ms"] = _ms(window.plain), _ms([step.seconds for step in window.steps])
    facts["covered_percent"] = 100 * sum(covered) / total
    facts["ceilings"] = runner.ceilings()
    bench.show("{plain_ms:.3f} ms a step, measured {measured_ms:.3f} ms, of which calls {covered_percent:.1f} %")
    for step, seconds in zip(window.steps, covered, strict=True):
        # An event tells half a microsecond.
        bench.expect(seconds <= step.seconds + 1e-6 * len(step.spans), f"calls took {seconds} s of {step.seconds} s")
        bench.expect(all(span.start >= 0 for span in step.spans), "a call began before its step")
    bench.expect(replayed == steps + 4, f"{replayed} of the {steps + 4} other steps were replayed")


def _filled(bench: Bench, runner: Any, batch: int, rounds: int = 1) -> Driver:
    """``batch`` rows of the context's length, a few steps old, with room for ``rounds`` of timed steps."""
    prompts = [bench.prompt(bench.sizes.context, seed) for seed in range(batch)]
    driver = Driver(runner, prompts, rounds * bench.sizes.steps + 8)
    driver.prefill(bench.sizes.max_num_batched_tokens)
    driver.decode(4)
    return driver


def _ceilings(bench: Bench) -> dict[str, float]:
    """Bytes and operations a second. Measured again in each section: clocks change."""
    found = bench.facts["ceilings"] = ceilings(bench)
    return {"read": max(found["copy_gb_s"], found["read_gb_s"]) * 1e9, "multiply": found["multiply_tflop_s"] * 1e12}


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3
