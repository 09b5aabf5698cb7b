"""Our steps: the runner alone, with sampling, without scheduler and text (those cost 3.6 µs a request)."""

import os

from driver import answer, timed

from compiled.step import Row, Runner, Sampling, Step
from streamengine.compose import build_runner
from streamengine.config import EngineConfig


class StreamEngine:
    def __init__(self, model: str) -> None:
        config = EngineConfig(model=model, threads=len(os.sched_getaffinity(0)), max_num_batched_tokens=2048)
        self._runner: Runner = build_runner(config, lambda progress: None)
        self._runner.warmup()
        self._page_size = self._runner.kv.page_size

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        pages = -(-(context + 1) // self._page_size)
        table = [tuple(range(1 + i * pages, 1 + (i + 1) * pages)) for i in range(batch)]
        step = Step(0, tuple(Row(i, (1,), context, table[i], Sampling()) for i in range(batch)))
        self._runner.submit(step).wait()
        return timed(lambda: self._runner.submit(step).wait(), steps)

    def prefill(self, tokens: int) -> float:
        pages = tuple(range(1, 1 - (-tokens // self._page_size)))
        step = Step(0, (Row(0, (1,) * tokens, 0, pages, Sampling()),))
        return timed(lambda: self._runner.submit(step).wait(), 1)[0]


if __name__ == "__main__":
    answer(StreamEngine)
