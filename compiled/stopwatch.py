"""How long each stage of a start takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """``seconds`` by stage. A stage that is entered again adds to its time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
