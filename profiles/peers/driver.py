"""What every engine under comparison answers: how long its steps take. One process an engine, JSON lines in and out.

Runs under each engine's own interpreter, so it needs the standard library only.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol


class Steps(Protocol):
    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decoding steps of ``batch`` sequences that hold ``context`` tokens."""
        ...

    def prefill(self, tokens: int) -> float:
        """Seconds until the first token of a prompt that nothing is cached of."""
        ...


def answer(open_engine: Callable[[str], Steps]) -> None:
    """Load the model named by the first argument, say how long that took, then measure what is asked for."""
    # Libraries print to standard output; the answers have it for themselves.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()
    engine = open_engine(sys.argv[1])
    engine.decode(1, 8, 1)
    print(json.dumps({"ready_s": time.perf_counter() - started}), file=out)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["what"] == "decode":
            seconds = engine.decode(asked["batch"], asked["context"], asked["steps"])
        else:
            seconds = [engine.prefill(asked["tokens"])]
        print(json.dumps({"seconds": seconds}), file=out)


def timed(step: Callable[[], object], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds
