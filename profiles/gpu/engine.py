"""The engine's own scheduler above the runner, as its core runs them: all of a step's host time but sockets."""

import statistics
import time
from collections import deque
from typing import Any

from compiled.step import Sampling
from profiles.gpu.bench import Bench, Launches, capture_all
from streamengine.assembly import build_scheduler
from streamengine.config import EngineConfig
from streamengine.request import Request


def engine(bench: Bench) -> None:
    """Requests that come at once and decode together. The host's time is hidden if no step is launched late."""
    runner = bench.runner("large")
    bench.facts |= capture_all(runner)
    for batch in bench.sizes.decode:
        found = bench.facts[str(batch)] = _serve(bench, runner, batch)
        bench.show(
            "batch {batch:>4}: {ms:7.3f} ms a step; host {host_ms:.3f} ms, of it scheduler {scheduler_ms:.3f} ms; "
            "waiting for the device {blocked_ms:.3f} ms, late {late_percent} %",
            batch=batch,
            **found,
        )
        bench.expect(found["tokens"] == found["asked"], f"{found['tokens']} tokens came, not {found['asked']}")
    late = [bench.facts[str(batch)]["late_percent"] for batch in bench.sizes.decode]
    bench.facts["late_percent"] = None if None in late else max(late)


def _serve(bench: Bench, runner: Any, batch: int) -> dict[str, Any]:
    sizes = bench.sizes
    config = EngineConfig(max_num_seqs=sizes.max_num_seqs, max_num_batched_tokens=sizes.max_num_batched_tokens)
    scheduler = build_scheduler(config, runner.model, runner.kv)
    # The first to get its prompt in still answers when the last one does.
    answer = sizes.steps + batch * sizes.context // sizes.max_num_batched_tokens
    for id in range(batch):
        prompt = tuple(bench.prompt(sizes.context, id))
        scheduler.submit(Request(id=id, prompt=prompt, max_tokens=answer, sampling=Sampling()), 0.0)
    flying: deque[tuple[Any, Any]] = deque()
    parts: list[tuple[float, float, float]] = []  # of each pure decoding step: scheduler, submit, blocked
    tokens, decoding, launches = 0, False, Launches(bench.device)
    while scheduler.has_work or flying:
        scheduled = submitted = 0.0
        while len(flying) < runner.depth:
            began = time.perf_counter()
            step = scheduler.plan(began)
            planned = time.perf_counter()
            scheduled += planned - began
            if step is None:
                break
            flying.append((step, runner.submit(step)))
            launches.count()
            submitted += time.perf_counter() - planned
            decoding = len(step.rows) == batch and all(len(row.tokens) == 1 for row in step.rows)
        if not flying:
            break
        step, handle = flying.popleft()
        began = time.perf_counter()
        result = handle.wait()
        landed = time.perf_counter()
        scheduler.commit(step, result)
        scheduled += time.perf_counter() - landed
        tokens += sum(map(len, result.tokens))
        if decoding and submitted:
            parts.append((scheduled, submitted, landed - began))
    scheduler_s, submit_s, blocked_s = (statistics.median(part) for part in zip(*parts[2:], strict=True))
    total = scheduler_s + submit_s + blocked_s
    return {
        "ms": total * 1e3,
        "tokens": tokens,
        "asked": batch * answer,
        "scheduler_ms": scheduler_s * 1e3,
        "host_ms": (scheduler_s + submit_s) * 1e3,
        "blocked_ms": blocked_s * 1e3,
        "late_percent": launches.late_percent,
    }
