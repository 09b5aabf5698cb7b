"""What users hold: submit, stream, abort, drain, statistics – and the core behind them, from start to end.

Owns the link to one core and the answers that are under way. One task reads the link and writes the logs;
one watches deadlines; readers are woken once per step. Refuses: decisions about steps and pages (the
core's), sockets and frames (the session's). When a log has ended the engine forgets it: it lives as long
as somebody holds it.
"""

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Literal, Unpack

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from compiled.step import KVSpec, ModelSpec
from streamengine.answer import Answer, Answers
from streamengine.choice import Choice, open_choices
from streamengine.config import EngineConfig
from streamengine.errors import EngineFailure, Overloaded, ShuttingDown, StartupError, StreamEngineError, Unavailable
from streamengine.generate import Asked, Generate
from streamengine.guided.leniency import Judges
from streamengine.intake import Intake
from streamengine.link import (
    Configure,
    Deltas,
    Failed,
    FrontLink,
    LinkClosed,
    Profiled,
    Progress,
    Ready,
    Statistics,
    Stop,
    Submit,
    ToCore,
)
from streamengine.log import Log
from streamengine.profile.record import Profile
from streamengine.questions import How, Questions
from streamengine.request import MAX_SEED
from streamengine.stream import Result, Stream, read_choices
from streamengine.tokenizer import Tokenizer

__all__ = ["Engine", "Generate", "Result", "Status", "Stream"]

STOP_S = 10.0
"""How long a core that was told to stop may take to say goodbye."""

Connect = Callable[[], AbstractAsyncContextManager[FrontLink]]
Status = Literal["starting", "ready", "draining", "failed", "closed"]

logger = logging.getLogger(__name__)


class Engine:
    """An ``async with`` block around one core: it starts at the beginning and is gone at the end.

    Args:
        config: what the core builds its runner from.
        connect: starts a core; gives the link to it and takes it down afterwards.
        load_tokenizer: model folder → tokenizer; called in a worker thread.
        restart: start a new core when one dies. What was running ends in `EngineFailure` either way.
        progress: is called with each start-up message.

    Raises:
        StartupError: on entering, when the core cannot start; `EngineFailure` when it died of that.
    """

    model: ModelSpec
    kv: KVSpec
    ledger: dict[str, float]
    """Where the memory went, in bytes."""
    intake: Intake
    """Knows the model's vocabulary and limits. These four are there once the engine is ready."""

    def __init__(
        self,
        config: EngineConfig,
        connect: Connect,
        load_tokenizer: Callable[[str], Tokenizer],
        *,
        restart: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.config = config
        self.epoch = ""  # changes with every core: an answer does not outlive its own
        self.progress: Progress | None = None  # the last start-up message
        self._connect = connect
        self._load_tokenizer = load_tokenizer
        self._restart = restart
        self._tell = progress
        self._phase: Literal["starting", "ready", "failed", "closed"] = "starting"
        self._started = False
        """This core has been ready; ``_was_ready``: some core has."""
        self._was_ready = False
        self._draining = False
        self._stopping = False
        self._failure: StreamEngineError | None = None
        self._changed = anyio.Event()
        self._link: FrontLink | None = None
        self._answers = Answers()
        self._judges = Judges()
        self._preparing = 0
        self._submitted = 0
        self._refused: Counter[str] = Counter()
        self._rearm = anyio.Event()
        self._questions = Questions(self._post)
        self._block: AbstractAsyncContextManager[Engine]

    # life

    @property
    def status(self) -> Status:
        return "draining" if self._draining and self._phase in ("starting", "ready") else self._phase

    async def __aenter__(self) -> "Engine":
        self._block = self._run()
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, traceback)

    async def wait_ready(self) -> None:
        """Until requests are taken.

        Raises:
            StreamEngineError: they never will be: the start failed, the core died, or the engine was closed.
        """
        while self._phase == "starting":
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        if self._phase == "closed":
            raise self._refusal()

    async def wait_failed(self) -> StreamEngineError:
        """Until the core is dead and will not be started again; why."""
        while self._phase not in ("failed", "closed"):
            await self._changed.wait()
        return self._failure or self._refusal()

    async def drain(self, deadline_s: float) -> None:
        """Refuse what is new and wait for what runs; after ``deadline_s`` seconds cancel it, as ``shutdown``."""
        self._draining = True
        self._change()
        with anyio.move_on_after(deadline_s):
            await self._wait_idle()
        self._post(*self._answers.abort_all("shutdown"))
        with anyio.move_on_after(STOP_S):
            await self._wait_idle()

    # requests

    async def submit(self, generate: Generate) -> Log:
        """The log of a new answer.

        Raises:
            RequestError: see `Intake`; `UnsupportedFeature` for more than one answer.
            Unavailable: too many requests are here already, or the engine is starting or draining.
            EngineFailure: the core is dead.
        """
        (log,) = await self._submit(generate, single=True)
        return log

    async def submit_all(self, generate: Generate) -> list[Log]:
        """The logs of all answers that a request draws, ``best_of`` or else ``n``. Raises what `submit` does."""
        return await self._submit(generate, single=False)

    def abort(self, log: Log, cause: str = "client") -> None:
        """End a request, with all its answers. Its logs end when its pages are free. Never blocks."""
        # Finalizers call this, in whatever thread: no more than a look and a post.
        self._post(*self._answers.abort(log, cause))

    def stream(self, prompt: str | None = None, **asked: Unpack[Asked]) -> Stream:
        """An answer as it comes; the arguments are the fields of `Generate`. One answer: for more, `generate`."""
        generate = Generate(prompt=prompt, **asked)
        return Stream(lambda: self.submit(generate), self.abort)

    async def generate(self, prompt: str | None = None, **asked: Unpack[Asked]) -> Result:
        """A whole answer, or ``n``, asked for as in `stream`. A cancelled scope ends it in the core as well."""
        generate = Generate(prompt=prompt, **asked)
        logs = await self.submit_all(generate)
        try:
            return await read_choices(logs, generate.sampling)
        finally:
            self.abort(logs[0])

    async def statistics(self) -> dict[str, float]:
        """A snapshot of the core's counts and, with ``engine_`` before the name, of the engine's own.

        Raises:
            Unavailable, EngineFailure: there is no core to ask.
        """
        self._check_core()
        return {
            **await self._questions.statistics(),
            "engine_open": len(self._answers),
            "engine_preparing": self._preparing,
            "engine_submitted": self._submitted,
            **{f"engine_{name}": value for name, value in self._answers.statistics().items()},
            **{f"engine_refused_{code}": count for code, count in self._refused.items()},
        }

    async def profile(self, steps: int = 32, **how: Unpack[How]) -> Profile:
        """What the next steps cost, call by call, whoever they are for: see `Questions.profile`. Raises what it and
        `statistics` do."""
        self._check_core()
        return await self._questions.profile(steps, **how)

    # taking requests in

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Count a request that is being read, so that what waits for a tokenizer is bounded as well."""
        self._check_ready()
        here, most = len(self._answers) + self._preparing, self.config.max_num_seqs + self.config.max_queue
        if here >= most:
            raise Overloaded(f"{here} requests are running or waiting, at most {most}", requests=here, limit=most)
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    async def _submit(self, generate: Generate, single: bool) -> list[Log]:
        submitted = anyio.current_time()
        try:
            with self._admitted():
                prompt = await self.intake.read(generate, single=single)
                self._submitted += 1
                request = self.intake.request(self._submitted, prompt, generate, secrets.randbelow(MAX_SEED + 1))
                choices = open_choices(request, prompt, generate.sampling, self.intake.tokenizer, submitted)
                if request.answered:
                    await self.intake.aside(lambda: choices[0].begin(request), len(request.answered))
            self._check_ready()  # it may have changed meanwhile
        except StreamEngineError as error:
            self._refused[error.code] += 1
            raise
        answer = Answer(request.id, choices, submitted, generate.queue_s, generate.total_s)
        self._post(Submit(request))  # first: what cannot be posted is not here either
        self._answers.add(answer)
        self._rearm.set()
        return answer.logs

    def _check_ready(self) -> None:
        if self.status != "ready":
            raise self._refusal()

    def _check_core(self) -> None:
        if self._phase != "ready" or self._link is None:
            raise self._refusal()

    def _refusal(self) -> StreamEngineError:
        match self.status:
            case "failed":
                assert self._failure is not None, "failed without a reason"
                # A new one each time: a traceback grows with every raise.
                return EngineFailure(self._failure.message)
            case "draining" | "closed":
                return ShuttingDown("the engine is shutting down")
        return Unavailable("the engine is starting")

    def _post(self, *messages: ToCore) -> None:
        if self._link is not None:
            self._link.post(*messages)

    # the core

    @asynccontextmanager
    async def _run(self) -> AsyncIterator["Engine"]:
        raised: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_core)
            tasks.start_soon(self._watch_deadlines)
            try:
                await self.wait_ready()
                yield self
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                raised = error  # out of the group before it is raised, or the group would wrap it
            finally:
                await self._stop()
                tasks.cancel_scope.cancel()
        if raised is not None:
            raise raised

    async def _stop(self) -> None:
        """Let the core say goodbye. One that still starts does not listen; taking the link away ends it."""
        self._stopping = True
        with anyio.move_on_after(STOP_S, shield=True):
            if self._link is not None and self._phase == "ready":
                self._link.post(Stop())
                while self._phase == "ready":
                    await self._changed.wait()

    async def _keep_core(self) -> None:
        try:
            while True:
                self._started = False
                failure = await self._run_core()
                if self._was_ready and not self._started:
                    failure = EngineFailure(f"the core could not be started again: {failure.message}")
                if self._stopping or not self._restart or not self._started:
                    break
                logger.error("%s; starting another", failure)
            if not self._stopping:
                self._failure = failure
        finally:
            self._phase = "closed" if self._failure is None else "failed"
            self._change()

    async def _run_core(self) -> StreamEngineError:
        """One core from its start to its end; why it ended."""
        self.epoch = secrets.token_hex(8)
        failure: StreamEngineError = ShuttingDown("the engine was closed")  # if whoever opened it is cancelled
        try:
            async with self._connect() as link, anyio.create_task_group() as tasks:
                tasks.start_soon(link.run_writer)
                self._link = link
                link.post(Configure(self.config))
                try:
                    failure = await self._serve(link, tasks)
                finally:
                    # At once: taking the core down may take a while.
                    self._fail_all(ShuttingDown("the engine was closed") if self._stopping else failure)
                tasks.cancel_scope.cancel()
        except OSError as error:
            return StartupError(f"cannot start the core: {error}")
        return failure

    async def _serve(self, link: FrontLink, tasks: TaskGroup) -> StreamEngineError:
        try:
            while True:
                match await link.receive():
                    case Deltas(deltas):
                        self._post(*self._answers.apply(deltas, anyio.current_time()))
                        for answer, choice in self._answers.take_unjudged():
                            tasks.start_soon(self._judge, answer, choice)
                        if not len(self._answers):
                            self._change()
                    case Progress() as progress:
                        self.progress = progress
                        if self._tell is not None:
                            self._tell(progress)
                    case Ready() as ready:
                        await self._become_ready(ready)
                    case Statistics() | Profiled() as answer:
                        self._questions.answer(answer)
                    case Failed(_, message):
                        break
        except LinkClosed as error:
            how = error if link.obituary is None else await link.obituary()
            return EngineFailure(f"the core died{'' if self._started else ' while it started'}: {how}")
        except StartupError as error:
            return error
        return EngineFailure(message) if self._started else StartupError(message)

    async def _become_ready(self, ready: Ready) -> None:
        tokenizer = await anyio.to_thread.run_sync(self._load_tokenizer, ready.model.folder)
        self.model, self.kv = ready.model, ready.kv
        self.ledger = {name: value for name, value in ready.ledger.items() if name.endswith("_bytes")}
        self.intake = Intake(self.config, ready.model, ready.kv, tokenizer)
        self._phase, self._started, self._was_ready = "ready", True, True
        self._change()

    async def _judge(self, answer: Answer, choice: Choice) -> None:
        valid = await self._judges.judge(choice.schema or "", choice.log.text)
        self._answers.judge(answer, choice, valid=valid)
        self._change()

    def _fail_all(self, error: StreamEngineError) -> None:
        self._link = None
        if self._phase == "ready":
            self._phase = "starting"
        self._answers.fail_all(error)
        self._questions.fail(error)
        self._change()

    def _change(self) -> None:
        """Wake everybody who waits for this engine to be in another state."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _wait_idle(self) -> None:
        while len(self._answers):
            await self._changed.wait()

    async def _watch_deadlines(self) -> None:
        while True:
            with anyio.CancelScope(deadline=self._answers.deadline):
                await self._rearm.wait()
            self._rearm = anyio.Event()
            self._post(*self._answers.expire(anyio.current_time()))
