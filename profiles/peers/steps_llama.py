"""llama.cpp's steps. Its weights have 4 bits where the others' have 16, so it reads a quarter of the bytes."""

import os

import numpy as np
from driver import answer, timed
from llama_cpp import Llama


class LlamaCpp:
    def __init__(self, model: str) -> None:
        threads = len(os.sched_getaffinity(0))
        self._llama = Llama(model, n_ctx=4096, n_batch=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        if batch != 1:
            return []  # the Python binding decodes one sequence
        self._llama.reset()
        self._llama.eval([1] * context)

        def step() -> None:
            self._llama.eval([int(np.argmax(self._llama.eval_logits[-1]))])

        step()
        return timed(step, steps)

    def prefill(self, tokens: int) -> float:
        self._llama.reset()
        return timed(lambda: self._llama.eval([1] * tokens), 1)[0]


if __name__ == "__main__":
    answer(LlamaCpp)
