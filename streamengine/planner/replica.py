"""One engine under a virtual clock: what `streamengine.core` does around its scheduler, with a time for each step."""

from collections import deque
from collections.abc import Iterable

from compiled.step import KVSpec, ModelSpec, Step
from streamengine.assembly import build_scheduler
from streamengine.config import EngineConfig
from streamengine.errors import StreamEngineError
from streamengine.planner.times import Shape, StepTimes
from streamengine.planner.workload import Answers
from streamengine.request import Delta, Finish, Request


class Engine:
    """A core and a runner with ``depth`` steps in flight. Messages wait until the core looks at them: while a step is
    waited for it does not.

    ``phase_s`` is where in the ratios of ``times`` it is at time 0. ``wake_at`` is when the oldest step in flight will
    be there; None: nothing is in flight, and a message is acted on at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSpec,
        kv: KVSpec,
        depth: int,
        times: StepTimes,
        answers: Answers,
        phase_s: float = 0.0,
    ) -> None:
        self.scheduler = build_scheduler(config, model, kv)
        self._depth, self._times, self._answers = depth, times, answers
        self._phase_s = phase_s
        self._debug = config.debug
        self._inbox: list[Request | int] = []
        self._in_flight: deque[tuple[Step, float, float]] = deque()
        self._free_at = 0.0
        self.busy_s = 0.0
        self.steps = 0

    @property
    def wake_at(self) -> float | None:
        return self._in_flight[0][1] if self._in_flight else None

    def post(self, message: Request | int) -> None:
        """A request, or the id of one that is cancelled."""
        self._inbox.append(message)

    def turn(self, now: float) -> list[Delta]:
        """Take the messages, fill the pipe."""
        deltas = [delta for message in self._inbox for delta in self._take(message, now)]
        self._inbox.clear()
        while len(self._in_flight) < self._depth and (step := self.scheduler.plan(now)) is not None:
            self._free_at = max(now, self._free_at)
            ratio = self._times.ratio(self._phase_s + self._free_at)
            seconds = self._times.middle(Shape.of_step(step)) * ratio
            self._free_at += seconds
            self._in_flight.append((step, self._free_at, seconds))
            if self._debug:
                self.scheduler.check()
        assert self._in_flight or not self.scheduler.has_work, "nothing can be planned, and requests are unfinished"
        return deltas

    def land(self) -> list[Delta]:
        """The oldest step in flight is over."""
        step, _, seconds = self._in_flight.popleft()
        self.busy_s += seconds
        self.steps += 1
        return self.scheduler.commit(step, self._answers.compute(step, seconds))

    def _take(self, message: Request | int, now: float) -> Iterable[Delta]:
        if isinstance(message, int):
            return self.scheduler.abort(message, "client")
        try:
            return self.scheduler.submit(message, now)
        except StreamEngineError as error:
            finish = Finish("error", error.code, error.message)
            return [Delta(request=message.id, index=index, finish=finish) for index in range(message.n)]

    def check_idle(self) -> None:
        """Prove that nothing is left: no request, no step, and no page that somebody holds."""
        assert not self._in_flight and not self._inbox and not self.scheduler.has_work, "something is unfinished"
        self.scheduler.check()
        figures = self.scheduler.statistics()
        assert figures["kv_pages_used"] == 0, f"{figures['kv_pages_used']} pages are lost"
