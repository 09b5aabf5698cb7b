"""transformers' steps: static cache, torch.compile of the decoding step; the prompt runs eagerly (it has no paging)."""

import os

import torch
from driver import answer, timed
from transformers import AutoModelForCausalLM, StaticCache

torch.set_num_threads(len(os.sched_getaffinity(0)))


class Transformers:
    def __init__(self, model: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._model.eval()
        self._step = torch.compile(self._forward, dynamic=False)

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        cache = StaticCache(config=self._model.config, max_cache_len=context + 64)
        ids = torch.ones(batch, context, dtype=torch.long)
        position = torch.full((batch, 1), context)
        with torch.inference_mode():
            self._forward(ids, torch.arange(context).expand(batch, -1), cache)
            for _ in range(3):
                self._step(ids[:, :1], position, cache)
            return timed(lambda: self._step(ids[:, :1], position, cache), steps)

    def prefill(self, tokens: int) -> float:
        cache = StaticCache(config=self._model.config, max_cache_len=tokens)
        ids = torch.ones(1, tokens, dtype=torch.long)
        with torch.inference_mode():
            return timed(lambda: self._forward(ids, torch.arange(tokens).unsqueeze(0), cache), 1)[0]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        logits = self._model(ids, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits
        return logits.argmax(-1)


if __name__ == "__main__":
    answer(Transformers)
