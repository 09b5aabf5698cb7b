"""What every engine under comparison answers about constrained answers: one process an engine, JSON lines in and out.

Runs under each engine's own interpreter, so it needs the standard library only.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Item = dict[str, Any]
"""``ids`` of a prompt, and ``schema`` or None."""

Sampling = dict[str, Any]
"""``max_tokens``, ``temperature``, ``seed`` and ``ignore_eos``."""


class Generator(Protocol):
    def generate(self, items: list[Item], sampling: Sampling) -> list[dict[str, Any]]:
        """All at once. ``text``, ``tokens`` (how many) and ``finish`` of each, or ``refused`` and the reason."""
        ...


def answer(open_engine: Callable[[str], Generator]) -> None:
    """Load the model named by the first argument, say so, then generate what is asked for."""
    # Libraries print to standard output; the answers have it for themselves.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()
    engine = open_engine(sys.argv[1])
    print(json.dumps({"ready_s": time.perf_counter() - started}), file=out)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        answers = engine.generate(asked["items"], asked["sampling"])
        print(json.dumps({"seconds": time.perf_counter() - started, "answers": answers}), file=out)
