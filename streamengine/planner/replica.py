"""One engine under a virtual clock: what `streamengine.core` does around its scheduler, with a time for each step."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from compiled.step import KVSpec, ModelSpec, Step
from streamengine.assembly import build_scheduler
from streamengine.config import EngineConfig
from streamengine.errors import StreamEngineError
from streamengine.planner.times import Shape, StepTimes
from streamengine.planner.wires import Place, Wire
from streamengine.planner.workload import Answers
from streamengine.request import Delta, Finish, Request
from streamengine.transfer.connector import Connector
from streamengine.transfer.opening import build_connector, reserve


class Engine:
    """A core and a runner with ``depth`` steps in flight. Messages wait until the core looks at them: while a step is
    waited for it does not.

    Args:
        config: with ``transfer`` it has a connector, whose ``wire`` somebody must read.
        phase_s: where in the speeds of ``times`` it is at time 0.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSpec,
        kv: KVSpec,
        place: Place,
        times: StepTimes,
        answers: Answers,
        phase_s: float = 0.0,
    ) -> None:
        self.wire = Wire()
        if config.transfer is not None:
            kv = reserve(config.transfer, kv)
        self.scheduler = build_scheduler(config, model, kv)
        self._connector: Connector | None = None
        if config.transfer is not None:
            worker: Any = self.wire  # it keeps to the protocol of `transfer.connector`
            opened = (place.card(kv), worker, _no_checksums)
            config = msgspec.structs.replace(config, debug=False)
            self._connector = build_connector(config, model, kv, opened, self.scheduler.landing)
        self._times, self._answers = times, answers
        self._phase_s = phase_s
        self._inbox: list[Request | int] = []
        self._in_flight: deque[tuple[Step, float, float]] = deque()
        self._free_at = 0.0
        self.busy_s = 0.0
        self.steps = 0

    @property
    def lands_at(self) -> float | None:
        """When the oldest step in flight will be there; None: none is, and what is posted is looked at at once."""
        return self._in_flight[0][1] if self._in_flight else None

    def wakes_at(self, now: float) -> float | None:
        """When an idle one has something to do by itself."""
        wait = None if self._connector is None else self._connector.wait_s(now)
        return None if wait is None else now + wait

    def post(self, message: Request | int) -> None:
        """A request, or the id of one that is cancelled."""
        self._inbox.append(message)

    def turn(self, now: float) -> list[Delta]:
        """Take the messages, fill the pipe."""
        deltas = [delta for message in self._inbox for delta in self._take(message, now)]
        self._inbox.clear()
        deltas += self._exchange(now)
        while len(self._in_flight) < self._times.depth and (step := self.scheduler.plan(now)) is not None:
            self._free_at = max(now, self._free_at)
            seconds = self._times.seconds(Shape.of_step(step), self._phase_s + self._free_at)
            self._free_at += seconds
            self._in_flight.append((step, self._free_at, seconds))
        assert self._in_flight or not self.scheduler.has_work, "nothing can be planned, and requests are unfinished"
        return self._told(deltas, now)

    def land(self, now: float) -> list[Delta]:
        """The oldest step in flight is over."""
        step, _, seconds = self._in_flight.popleft()
        self.busy_s += seconds
        self.steps += 1
        if self._connector is not None:
            self._connector.observe(step, seconds)
        return self._told(self.scheduler.commit(step, self._answers.compute(step, seconds)), now)

    def _exchange(self, now: float) -> Iterator[Delta]:
        if self._connector is not None:
            turn = self._connector.turn(now, [step.number for step, *_ in self._in_flight])
            yield from turn.deltas
            for request in turn.submit:
                yield from self._take(request, now)
            for id in turn.abort:
                yield from self._take(id, now)

    def _take(self, message: Request | int, now: float) -> Iterable[Delta]:
        scheduler, connector = self.scheduler, self._connector
        if isinstance(message, int):
            ends = [] if connector is None else connector.cancel(message, "client")
            return ends + scheduler.abort(message, "client")
        try:
            if connector is None:
                return scheduler.submit(message, now)
            return connector.submit(scheduler.check_room(message, now, len(connector)), now)
        except StreamEngineError as error:
            finish = Finish("error", error.code, error.message)
            return [Delta(request=message.id, index=index, finish=finish) for index in range(message.n)]

    def _told(self, deltas: list[Delta], now: float) -> list[Delta]:
        return deltas if self._connector is None else self._connector.told(deltas, now)

    def check(self) -> None:
        """Prove that sequences, pages and transfers agree."""
        self.scheduler.check()
        if self._connector is not None:
            self._connector.check()

    def check_idle(self) -> None:
        """Prove that nothing is left: no request, no step, and no page that somebody holds."""
        assert not self._in_flight and not self._inbox and not self.scheduler.has_work, "something is unfinished"
        self.check()
        figures = self.statistics()
        assert figures["kv_pages_used"] == 0, f"{figures['kv_pages_used']} pages are lost"

    def statistics(self) -> dict[str, float]:
        return self.scheduler.statistics() | ({} if self._connector is None else self._connector.statistics())


def _no_checksums(pages: tuple[int, ...]) -> tuple[int, ...]:
    raise AssertionError("simulated pages have no content")
