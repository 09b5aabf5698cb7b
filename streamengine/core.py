"""The core: one synchronous loop that turns messages into steps and steps into deltas.

It owns the runner, the scheduler and its end of the link, and runs wherever it is called: in a process of
its own or in a thread. One turn: take the messages that are there → plan → submit → wait for the oldest
step in flight → commit → send everything that happened as one `Deltas`.

A request at fault ends alone, a step that raises ends the requests in it; the loop ends when the engine says
so or is gone, when steps keep failing, and on our own bugs. The link is an ordered channel with one writer,
so an abort never overtakes the submit that it is meant for: an abort for an unknown id is for a request that
has ended.
"""

import dataclasses
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING

from compiled.step import Handle, LoadError, Runner, Step
from streamengine.assembly import build_scheduler, told
from streamengine.config import EngineConfig
from streamengine.errors import EngineFailure, InvalidRequest, StartupError, StreamEngineError
from streamengine.guided.grammar import Constraint
from streamengine.histogram import COUNTS, SECONDS, Histogram
from streamengine.link import (
    Abort,
    AskProfile,
    AskStatistics,
    Configure,
    CoreLink,
    Deltas,
    EndProfile,
    Failed,
    LinkBroken,
    LinkClosed,
    Profiled,
    Progress,
    Ready,
    Statistics,
    Stop,
    Submit,
    ToCore,
)
from streamengine.profiling import Profiling
from streamengine.request import Delta, Finish, Request
from streamengine.scheduler import Scheduler
from streamengine.trace import Tracer
from streamengine.transfer.connection import unlisten
from streamengine.transfer.connector import Connector
from streamengine.transfer.opening import build_connector, open_listener, open_worker, reserve

if TYPE_CHECKING:
    from streamengine.guided.guide import Guide

GRAMMAR_POLL_S = 0.02
"""How long an idle core waits for a grammar before it looks at its messages again."""

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the core gives up: by then it is not the requests."""

BuildRunner = Callable[[EngineConfig, Callable[[Progress], None]], Runner]

_logger = logging.getLogger(__name__)


def run_core(link: CoreLink, build_runner: BuildRunner, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait for `Configure`, build and warm up a runner, serve until `Stop` or until the engine is gone.

    Closes ``link`` at the end, whatever the end is; its last message is `Failed` where something went wrong.
    ``build_runner`` reports its progress through its second argument. A runner with a ``close()`` is closed.

    Raises:
        Exception: our own bug, found while serving; the engine has been told.
    """
    with closing(link), ExitStack() as stack:
        try:
            configure, *messages = link.receive(block=True)
            assert isinstance(configure, Configure), f"{configure} before Configure"
            core = _start(link, configure.config, build_runner, clock, stack)
            if core is not None:
                core.run(messages)
        except Exception as error:
            if isinstance(error, LinkClosed) and not isinstance(error, LinkBroken):
                return
            with suppress(LinkClosed):
                link.send(Failed(EngineFailure.code, _one_line(error)))
            raise


def _start(
    link: CoreLink, config: EngineConfig, build_runner: BuildRunner, clock: Callable[[], float], stack: ExitStack
) -> "_Core | None":
    """A core that is ready, and said so; None when it could not be built, and said so."""
    try:
        listener = open_listener(config.transfer)  # first: whether an address can be had is known before all else
        if listener is not None:
            stack.callback(unlisten, listener)
        runner = build_runner(config, link.send)
        if close := getattr(runner, "close", None):
            stack.callback(close)
        link.send(Progress("warm-up"))
        runner.warmup()
    except LinkClosed:
        raise
    except Exception as error:
        if not isinstance(error, LoadError | StreamEngineError | OSError):  # of the system: a message says it all
            _logger.exception("the runner could not be built")
        link.send(Failed("startup", _one_line(error)))
        return None
    assert 1 <= runner.depth <= 2, f"the scheduler plans at most one step ahead, not {runner.depth - 1}"
    model = runner.model
    if config.max_model_len is not None and config.max_model_len < model.max_model_len:
        model = dataclasses.replace(model, max_model_len=config.max_model_len)
    tracer = None
    if config.trace is not None:
        try:
            tracer = Tracer(config.trace, config, model, runner.kv, runner.depth, clock(), text=config.trace_text)
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
            link.send(Failed("startup", f"the trace cannot be written: {_one_line(error)}"))
            return None
        stack.callback(tracer.close)
    kv, opened = runner.kv, None
    if config.transfer is not None:
        kv = reserve(config.transfer, kv)
        try:
            opened = open_worker(config.transfer, listener, model, kv, runner.kv_memory())
        except StartupError as error:
            link.send(Failed("startup", _one_line(error)))
            return None
        stack.callback(opened[1].close)
    if threading.current_thread() is threading.main_thread():
        # What is loaded by now stays; no collection needs to walk it again. In a thread the process is
        # somebody else's, and so is its garbage.
        gc.collect()
        gc.freeze()
    ledger = runner.statistics()
    _logger.info("memory: %s", told(ledger, kv))
    link.send(Ready(model=model, kv=kv, ledger=ledger))
    # numpy and the grammar engine take longer to import than all else that the command line needs of this module.
    from streamengine.guided.guide import Guide, load_vocabulary

    guide = stack.enter_context(closing(Guide(partial(load_vocabulary, model))))
    scheduler = build_scheduler(config, model, kv, guide.mask)
    transfer = None if opened is None else build_connector(config, model, kv, opened, scheduler.landing)
    profiling = Profiling(runner, model, eager=config.eager)
    return _Core(link, runner, scheduler, guide, profiling, clock, tracer, transfer, debug=config.debug)


class _Core:
    def __init__(
        self,
        link: CoreLink,
        runner: Runner,
        scheduler: Scheduler,
        guide: "Guide",
        profiling: Profiling,
        clock: Callable[[], float],
        tracer: Tracer | None,
        transfer: Connector | None,
        *,
        debug: bool,
    ) -> None:
        self._link = link
        self._runner = runner
        self._scheduler = scheduler
        self._guide = guide
        self._profiling = profiling
        self._unguided: dict[int, tuple[Request, float]] = {}
        """Requests whose grammar is in the making, and when they came."""
        self._clock = clock
        self._tracer = tracer
        self._transfer = transfer
        self._debug = debug
        self._in_flight: deque[tuple[Step, Handle]] = deque()
        self._deltas: list[Delta] = []
        self._failures = 0
        self._failed_steps = 0
        self._step_s, self._step_rows, self._step_tokens = Histogram(SECONDS), Histogram(COUNTS), Histogram(COUNTS)

    def run(self, messages: list[ToCore]) -> None:
        while self._take(messages):
            self._admit_guided()
            self._exchange()
            self._launch()
            self._land()
            self._flush()
            self._tell(self._profiling.poll())
            if self._failures >= MAX_FAILED_STEPS:
                self._link.send(Failed(EngineFailure.code, f"{self._failures} steps in a row failed"))
                return
            messages = self._receive()
        waiting = () if self._transfer is None else self._transfer.unfinished
        for request in (*self._unguided, *waiting, *self._scheduler.unfinished):
            self._abort(request, "shutdown")
        while self._in_flight:
            self._land()
        self._flush()

    def _receive(self) -> list[ToCore]:
        if self._scheduler.has_work or self._in_flight:
            return self._link.receive(block=False)
        if self._unguided:
            self._guide.wait(GRAMMAR_POLL_S)
            return self._link.receive(block=False)
        self._scheduler.check()
        # A runner may have something to prepare for the steps that it has seen.
        prepare = getattr(self._runner, "capture_next", lambda: False)
        while prepare():
            if messages := self._link.receive(block=False):
                return messages
        with self._guide.resting():
            if self._transfer is None:
                return self._link.receive(block=True)
            return self._link.receive(block=True, beside=self._transfer, most_s=self._transfer.wait_s(self._clock()))

    def _take(self, messages: list[ToCore]) -> bool:
        """Act on ``messages``; False when the loop is to be left."""
        for message in messages:
            match message:
                case Submit():
                    self._submit(message.request)
                case Abort():
                    self._abort(message.request, message.cause, message.index)
                case AskStatistics():
                    self._link.send(Statistics(self._statistics()))
                case AskProfile():
                    self._tell(self._profiling.start(message))
                case EndProfile():
                    self._tell(self._profiling.end(message.number))
                case Stop():
                    return False
                case Configure():
                    raise AssertionError("configured twice")
        return True

    def _tell(self, answer: Profiled | None) -> None:
        if answer is not None:
            self._link.send(answer)

    def _submit(self, request: Request) -> None:
        now = self._clock()
        if self._tracer:
            self._tracer.submitted(request, now)
        try:
            if request.grammar is None:
                self._queue(request, now)
            else:
                self._scheduler.check_room(request, now, len(self._unguided))
                self._guide.start(request.id, request.grammar, request.tenant, now)
                self._unguided[request.id] = request, now
        except StreamEngineError as error:
            self._refuse(request, error)

    def _admit_guided(self) -> None:
        """Queue those whose grammar has become a matcher; they arrived when they arrived."""
        for id, outcome in self._guide.done(self._clock()) if self._unguided else ():
            request, arrival = self._unguided.pop(id)
            try:
                if isinstance(outcome, StreamEngineError):
                    raise outcome
                shortest = len(outcome.matcher.ending or ())
                if shortest > request.max_tokens:
                    raise InvalidRequest(
                        f"the shortest answer takes {shortest} tokens, max_tokens is {request.max_tokens}",
                        param="max_tokens",
                    )
                self._queue(request, arrival, outcome)
            except StreamEngineError as error:
                self._refuse(request, error)

    def _queue(self, request: Request, arrival: float, constraint: Constraint | None = None) -> None:
        if self._transfer is None:
            told = self._scheduler.submit(request, arrival, constraint)
        else:
            sequence = self._scheduler.check_room(request, arrival, len(self._transfer), constraint)
            told = self._transfer.submit(sequence, self._clock())
        self._deltas += told
        if self._tracer and any(delta.finish for delta in told):
            self._tracer.aborted(request.id, "ended", self._clock())

    def _refuse(self, request: Request, error: StreamEngineError) -> None:
        self._end(request, Finish("error", error.code, error.message, error.param))
        if self._tracer:
            self._tracer.aborted(request.id, error.code, self._clock())

    def _end(self, request: Request, finish: Finish) -> None:
        self._deltas += [Delta(request=request.id, index=index, finish=finish) for index in range(request.n)]

    def _abort(self, request: int, cause: str, index: int | None = None) -> None:
        if self._tracer:
            self._tracer.aborted(request, cause, self._clock(), index)
        # An answer by itself ends only where it has begun, as in the scheduler.
        if index is None and self._guide.cancel(request):
            self._end(self._unguided.pop(request)[0], Finish("cancelled", cause))
        if self._transfer is not None:
            self._deltas += self._transfer.cancel(request, cause, index)
        self._deltas += self._scheduler.abort(request, cause, index)

    def _exchange(self) -> None:
        """Between two steps: what other engines want and bring."""
        if self._transfer is None:
            return
        turn = self._transfer.turn(self._clock(), [step.number for step, _ in self._in_flight])
        self._deltas += turn.deltas
        for request in turn.submit:
            self._submit(request)
        for id in turn.abort:
            self._abort(id, "released")

    def _launch(self) -> None:
        """Plan and submit until as many steps are in flight as the runner takes."""
        while len(self._in_flight) < self._runner.depth:
            self._debug_books()
            now = self._clock()
            step = self._scheduler.plan(now)
            if step is None:
                return
            if self._tracer:
                self._tracer.planned(step, now)
            self._step_rows.observe(len(step.rows))
            self._step_tokens.observe(sum(len(row.tokens) for row in step.rows))
            try:
                self._in_flight.append((step, self._runner.submit(step)))
            except Exception as error:
                self._fail(step, error)
                return

    def _land(self) -> None:
        """Wait for the oldest step in flight, if any, and take in what it did."""
        if not self._in_flight:
            return
        step, handle = self._in_flight.popleft()
        try:
            result = handle.wait()
        except Exception as error:
            self._fail(step, error)
        else:
            self._failures = 0
            self._step_s.observe(result.seconds)
            if self._transfer is not None:
                self._transfer.observe(step, result.seconds)
            self._note(step, result.seconds, self._scheduler.commit(step, result))

    def _fail(self, step: Step, error: Exception) -> None:
        _logger.error("step %d raised", step.number, exc_info=error)
        self._failures += 1
        self._failed_steps += 1
        self._note(step, None, self._scheduler.fail(step, EngineFailure.code, _one_line(error)))

    def _note(self, step: Step, seconds: float | None, deltas: list[Delta]) -> None:
        self._deltas += deltas
        if self._tracer:
            self._tracer.landed(step, seconds, deltas, self._clock())

    def _debug_books(self) -> None:
        """With ``debug``: what is read of a freed page is NaN, and the books balance between any two steps."""
        if self._debug:
            self._scheduler.check()
            if self._transfer is not None:
                self._transfer.check()
            freed = self._scheduler.drain_freed()
            if poison := getattr(self._runner, "poison", None):
                poison(freed)

    def _flush(self) -> None:
        if self._transfer is not None and self._deltas:
            self._deltas = self._transfer.told(self._deltas, self._clock())
        if self._deltas:
            self._link.send(Deltas(tuple(self._deltas)))
            self._deltas.clear()

    def _statistics(self) -> dict[str, float]:
        runner = {f"runner_{name}": value for name, value in self._runner.statistics().items()}
        return {
            **self._scheduler.statistics(),
            **self._guide.statistics(),
            **({} if self._transfer is None else self._transfer.statistics()),
            "failed_steps": self._failed_steps,
            **self._step_s.statistics("step_s"),
            **self._step_rows.statistics("step_rows"),
            **self._step_tokens.statistics("step_tokens"),
            **runner,
        }


def _one_line(error: Exception) -> str:
    """What is said of ``error`` to a user; of unexpected kinds the name belongs to it."""
    line = " ".join(str(error).split())
    if isinstance(error, LoadError | StreamEngineError):
        return line
    return f"{type(error).__name__}: {line}"[:500]
