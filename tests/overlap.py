"""Whole batches served by a scheduler and a runner in this process, as the core does it."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled.runner import LocalRunner, RunnerOptions, build_runner
from compiled.step import Handle, Step
from streamengine.guided.guide import Guide
from streamengine.kv import KVPool
from streamengine.prefix import PrefixCache
from streamengine.request import Request
from streamengine.scheduler import Scheduler

PAGES, PAGE_SIZE = 120, 4

Tokens = Mapping[tuple[int, int], list[int]]


def start(folder: Path, **options: Any) -> LocalRunner:
    """A runner that is warm."""
    fixed: dict[str, Any] = {
        "dtype": "float32", "page_size": PAGE_SIZE, "kv_pages": PAGES, "max_num_seqs": 8, "max_num_batched_tokens": 64
    }  # fmt: skip
    runner = build_runner(RunnerOptions(model=str(folder), **(fixed | options)), lambda *_: None)
    runner.warmup()
    return runner


def serve(
    runner: LocalRunner,
    requests: list[Request],
    *,
    pages: int = PAGES,
    cached: bool = False,
    guide: Guide | None = None,
    aborts: Mapping[int, int] | None = None,
    **limits: Any,
) -> tuple[Tokens, Mapping[str, float]]:
    """All ``requests`` at once, as the core does it; after so many steps ``aborts`` end one of them. ``guide`` is there
    where some have grammars."""
    prefix = PrefixCache(page_size=PAGE_SIZE, pages=pages - 1, secret=b"secret") if cached else None
    most = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_queue": 100, "max_model_len": 256}
    scheduler = Scheduler(
        KVPool(pages, PAGE_SIZE, prefix, debug=True), mask=guide.mask if guide else None, **(most | limits)
    )
    tokens: dict[tuple[int, int], list[int]] = {}
    for request in requests:
        begun = None
        if guide is not None and request.grammar is not None:
            begun = guide._constraint(guide.compile(request.grammar))
        scheduler.submit(request, 0.0, begun)
    in_flight: deque[tuple[Step, Handle]] = deque()
    for number in range(2000):
        if aborts and number in aborts:
            scheduler.abort(aborts[number], "client")
        while len(in_flight) < runner.depth and (step := scheduler.plan(0.0)):
            runner.poison(scheduler.drain_freed())
            in_flight.append((step, runner.submit(step)))
        if not in_flight:
            break
        step, handle = in_flight.popleft()
        for delta in scheduler.commit(step, handle.wait()):
            tokens.setdefault((delta.request, delta.index), []).extend(delta.tokens)
        scheduler.check()
    assert not scheduler.has_work
    return tokens, scheduler.statistics()
