"""A runner that computes nothing: every row gets a token each `TICK_S`, for measuring what is around it."""

import time
from collections.abc import Callable
from typing import Any

from compiled.step import Handle, KVSpec, ModelSpec, Step, StepResult
from streamengine.calls.format import IN_WORDS, CallFormat
from streamengine.config import EngineConfig
from streamengine.link import Progress

TICK_S = 0.005
WORDS = (b" one", b" two", b" three", b" four", b" five", b" six", b" seven", b" eight")


class Ticking:
    """A `compiled.step.Runner`. A step ends a tick after the one before it, or when it can, if that is later."""

    depth = 1

    def __init__(self, config: EngineConfig) -> None:
        assert config.kv_pages and config.max_model_len, "both are given"
        self.model = ModelSpec("ticking", "", "", "", len(WORDS), config.max_model_len, eos_token_ids=())
        self.kv = KVSpec(config.kv_pages, config.page_size, page_bytes=0)
        self._next = 0.0

    def submit(self, step: Step) -> Handle:
        self._next = max(self._next + TICK_S, time.perf_counter())
        time.sleep(max(0.0, self._next - time.perf_counter()))
        token = (step.number % len(WORDS),)
        return _Finished(StepResult(step.number, tuple(token if row.sampling else () for row in step.rows), TICK_S))

    def warmup(self) -> None:
        """There is nothing to warm up."""

    def statistics(self) -> dict[str, float]:
        return {"cpu_s": time.process_time()}

    def kv_memory(self) -> None:
        """There is none."""


class _Finished:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class Words:
    """The tokenizer that belongs to it."""

    vocab_size = len(WORDS)
    longest_token = max(map(len, WORDS))

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    encode_part = encode

    def decode(self, ids: Any, *, special: bool = False) -> str:
        return b"".join(WORDS[id] for id in ids).decode()

    def token_bytes(self, token: int) -> bytes:
        return WORDS[token]

    def chat(self, messages: Any, tools: Any = (), options: Any = ()) -> list[int]:
        return [0] * len(messages)

    def calls(self) -> CallFormat:
        return IN_WORDS


def build(config: EngineConfig, report: Callable[[Progress], None]) -> Ticking:
    return Ticking(config)
