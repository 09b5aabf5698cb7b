"""What a runner counts, for `Runner.statistics`: of the steps since it began to serve."""

import logging
from operator import attrgetter

from compiled.compilations import Watch
from compiled.step import Step

log = logging.getLogger(__name__)


class Meter:
    """Counters of steps, and facts about the runner, by name."""

    def __init__(self) -> None:
        self._facts: dict[str, float] = {}
        self._watch: Watch | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps = self._tokens = self._broken_rows = self._compilations = 0
        self._seconds = self._host_seconds = self._sample_seconds = 0.0

    def note(self, **facts: float) -> None:
        """Add to what `statistics` tells."""
        self._facts.update(facts)

    def prepare(self) -> None:
        """What is compiled from here on is compiled in time."""
        self._watch = None

    def serve(self) -> None:
        """Warm-up is over: count from here on, also what is compiled."""
        self.note(warmup_seconds=self._seconds)
        self._begin()
        self._watch = Watch()

    def launched(self, step: Step, host_seconds: float) -> None:
        """``host_seconds``: what the host did for its forward pass."""
        self._steps += 1
        self._tokens += sum(map(len, map(attrgetter("tokens"), step.rows)))
        self._host_seconds += host_seconds
        for what in self._watch.look() if self._watch is not None else ():
            self._compilations += 1
            log.error("step %d: something was compiled while serving: %s", step.number, what)

    def sampled(self, host_seconds: float, sample_seconds: float) -> None:
        """``host_seconds``: what the host did for a step's tokens, apart from waiting for its grammars; of these
        ``sample_seconds`` to launch the sampler."""
        self._host_seconds += host_seconds
        self._sample_seconds += sample_seconds

    def landed(self, step: Step, seconds: float, broken_rows: int, host_seconds: float = 0.0) -> None:
        """``broken_rows`` had a NaN where one mattered."""
        self._seconds += seconds
        self._host_seconds += host_seconds
        if broken_rows and not self._broken_rows:
            log.error(
                "step %d: %d rows of the model's logits hold NaN; such ids are not drawn", step.number, broken_rows
            )
        self._broken_rows += broken_rows

    def statistics(self) -> dict[str, float]:
        return self._facts | {
            "steps": self._steps,
            "step_tokens": self._tokens,
            "step_seconds": self._seconds,
            "host_seconds": self._host_seconds,
            "sample_seconds": self._sample_seconds,
            "broken_rows": self._broken_rows,
            "compilations_after_ready": self._compilations,
        }
