"""The core's side of a profile: one window of the runner's steps at a time, asked for and answered over the link.

Never raises: what goes wrong with a profile is the answer to whoever asked for it, and no request is told.
"""

import logging
from datetime import UTC, datetime
from typing import Any

from compiled.step import ModelSpec, Runner
from compiled.timeline import Window
from streamengine.errors import EngineFailure, QueueTimeout, StreamEngineError, UnsupportedFeature
from streamengine.link import AskProfile, Profiled
from streamengine.profile import hardware
from streamengine.profile.record import Ceilings, Profile
from streamengine.profile.summary import Circumstances, summarise

_logger = logging.getLogger(__name__)


class Profiling:
    """Of one core. ``eager`` says that its model is not compiled."""

    def __init__(self, runner: Runner, model: ModelSpec, *, eager: bool) -> None:
        self._runner: Any = runner
        """A `compiled.timeline.Profiled` as well, or there are no profiles."""
        self._model, self._eager = model, eager
        self._asked: AskProfile | None = None

    def start(self, asked: AskProfile) -> Profiled | None:
        """Measure from the next step on; the answer where that is impossible."""
        try:
            if not hasattr(self._runner, "profile"):
                raise UnsupportedFeature(f"{type(self._runner).__name__} cannot be profiled")
            self._runner.profile(asked.measure)
        except Exception as error:
            return _refusal(asked.number, error)
        self._asked = asked
        return None

    def poll(self) -> Profiled | None:
        """The answer once all steps are measured."""
        return None if self._asked is None else self._finish(self._asked, stop=False)

    def end(self, number: int) -> Profiled | None:
        """The answer to question ``number`` as far as it goes, where it is not answered yet."""
        asked = self._asked
        return None if asked is None or asked.number != number else self._finish(asked, stop=True)

    def _finish(self, asked: AskProfile, *, stop: bool) -> Profiled | None:
        try:
            window: Window | None = self._runner.profiled(stop=stop)
            if window is None and not stop:
                return None
            self._asked = None
            if window is None or not window.steps:
                raise QueueTimeout("no step was measured in the time that the profile was given")
            return Profiled(asked.number, self._document(asked, window))
        except Exception as error:
            self._asked = None
            return _refusal(asked.number, error)

    def _document(self, asked: AskProfile, window: Window) -> Profile:
        facts = self._runner.statistics()
        ceilings = None
        if asked.ceilings:
            found = self._runner.ceilings()
            ceilings = Ceilings(read_gbps=found["read_gb_s"], product_gflops=found["multiply_gflop_s"])
        there = Circumstances(
            model=self._model,
            eager=self._eager,
            scenario="live",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            hardware=hardware.describe(int(facts.get("threads", 1)), window.device),
            ceilings=ceilings,
            statistics=facts,
        )
        return summarise(window, there)


def _refusal(number: int, error: Exception) -> Profiled:
    """What is said of ``error``: of a trace that cannot be written, of torch's profiler, of a bug. Steps go on."""
    if isinstance(error, StreamEngineError):
        return Profiled(number, code=error.code, message=error.message, param=error.param)
    _logger.warning("no profile", exc_info=error)
    return Profiled(number, code=EngineFailure.code, message=f"no profile: {type(error).__name__}: {error}")
