"""What a step costs beside the model: planning it, committing it, and the message about it. No model is loaded."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from compiled.step import KVSpec, ModelSpec, Sampling, Step, StepResult
from streamengine.assembly import build_scheduler
from streamengine.config import EngineConfig
from streamengine.link import CoreLink, Deltas, Progress, link_pair
from streamengine.request import Request

REQUESTS = 256
PROMPT = 128
STEPS = 200
PARTS = ("plan", "commit", "message")


def measure(config: EngineConfig, report: Callable[[Progress], None], show: Callable[[str], None]) -> dict[str, Any]:
    """Medians over `STEPS` steps in which each of `REQUESTS` running requests gets one token."""
    pages = 1 + REQUESTS * -(-(PROMPT + STEPS + 2) // config.page_size)
    config = msgspec.structs.replace(config, max_num_seqs=REQUESTS, max_num_batched_tokens=REQUESTS * PROMPT)
    model = ModelSpec("none", "", "", "", vocab_size=2**15, max_model_len=PROMPT + STEPS + 2, eos_token_ids=(0,))
    scheduler = build_scheduler(config, model, KVSpec(pages, config.page_size, page_bytes=0))
    for id in range(REQUESTS):
        prompt = tuple((id * 31 + i) % 30_000 + 1 for i in range(PROMPT))
        scheduler.submit(Request(id=id, prompt=prompt, max_tokens=STEPS + 2, sampling=Sampling()), now=0.0)
    front, back = link_pair()
    times: list[tuple[float, ...]] = []
    with front:
        link = CoreLink(back)
        for number in range(STEPS + 1):
            times.append(_step(scheduler, link, float(number)))
            front.recv(2**20)
        link.close()
    # The first step computes the prompts.
    micros = [statistics.median(part) * 1e6 / REQUESTS for part in zip(*times[1:], strict=True)]
    result = {**{f"{part}_us": value for part, value in zip(PARTS, micros, strict=True)}, "total_us": sum(micros)}
    parts = ", ".join(f"{part} {value:.2f}" for part, value in zip(PARTS, micros, strict=True))
    show(f"scheduler {sum(micros):6.2f} µs per request and step ({parts}), {REQUESTS} requests running")
    return {"requests": REQUESTS, **result}


def _step(scheduler: Any, link: CoreLink, now: float) -> tuple[float, float, float]:
    """Seconds to plan, to commit and to send."""
    begin = time.perf_counter()
    step: Step = scheduler.plan(now)
    planned = time.perf_counter()
    assert len(step.rows) == REQUESTS, f"{len(step.rows)} rows"
    result = StepResult(step.number, tuple((5,) for _ in step.rows), seconds=0.01)
    computed = time.perf_counter()
    deltas = tuple(scheduler.commit(step, result))
    committed = time.perf_counter()
    link.send(Deltas(deltas))
    return planned - begin, committed - computed, time.perf_counter() - committed
