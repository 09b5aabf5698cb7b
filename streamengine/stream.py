"""What `Engine.stream` and `Engine.generate` give: one answer as an object to iterate, to hold in ``async with``,
or to await; and whole answers.

A `Stream` is an object and no async generator: leaving the loop by ``break``, by an exception or by a cancelled
scope drops the last reference, and aborting needs no ``await``. No task and no cancel scope is opened here.
"""

from collections.abc import Callable, Coroutine, Sequence
from math import inf
from types import TracebackType
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from streamengine.bell import Bell
from streamengine.calls.parser import ToolCall
from streamengine.log import Guided, Log, Reader, TextDelta, TokenLogprob, Usage
from streamengine.request import FinishReason
from streamengine.sampling import SamplingParams
from streamengine.timing import Timing


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. ``token_ids`` holds the id that ended it; ``text`` does not hold its text, nor the
    ``stop_sequence``. ``cause`` says who cancelled it.

    ``logprobs`` are those of ``token_ids``, ``prompt_logprobs`` those of the prompt from its second token on; both
    are empty unless asked for. ``beam_score`` is that of a beam search, ``guided`` is there where a schema was not
    strict.

    Where more than one answer was drawn, ``choices`` holds the ``n`` asked for, the best first if they were ranked;
    the fields here are those of the first, but ``usage`` counts the prompt once and every answer drawn.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str | None = None
    cause: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    beam_score: float | None = None
    guided: Guided | None = None
    choices: tuple["Result", ...] = ()


class Stream:
    """One answer as it comes. Nothing is asked before the first ``await`` on it.

    ::

        async with engine.stream("Why is the sky blue?") as stream:
            async for text in stream.text:
                print(text, end="")
            result = await stream.result()

    Without ``async with`` leaving the loop ends the answer as well, but not the cancellation of the task around it: on
    asyncio its traceback may keep the stream, and so the answer, alive until garbage is collected. Iteration, `result`
    and `cancel` raise what the request ended in, if that is an error: see `streamengine.errors`.
    """

    def __init__(self, submit: Callable[[], Coroutine[Any, Any, Log]], abort: Callable[[Log], None]) -> None:
        self._log: Log | None = None
        self._submit = submit
        self._abort = abort
        self._lock = anyio.Lock()
        self._bell = Bell()
        self._reader: Reader

    async def __aenter__(self) -> "Stream":
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> TextDelta:
        """Everything that came since the last one, in one slice."""
        await anyio.lowlevel.checkpoint()
        log = await self._start()
        while True:
            self._bell.rearm()
            if (delta := self._reader.take()) is not None:
                return delta
            if log.ended:
                if log.error is not None:
                    raise log.error
                raise StopAsyncIteration
            await self._bell.wait()

    @property
    def text(self) -> "TextStream":
        """The same iteration, as strings that are not empty."""
        return TextStream(self)

    async def result(self) -> Result:
        """Wait for the end. Takes nothing from an iteration: the result is whole in any case."""
        return await read_result(await self._start())

    async def cancel(self) -> Result:
        """End it now and wait until its pages are free; from any task. What came so far is the result."""
        self._abort(await self._start())
        return await self.result()

    def close(self) -> None:
        """End it now if it runs, and do not wait. Never blocks; safe to repeat."""
        if self._log is not None and not self._log.ended:
            self._abort(self._log)

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing` and its like."""
        self.close()

    async def _start(self) -> Log:
        if self._log is None:
            async with self._lock:
                if self._log is None:
                    log = await self._submit()
                    self._reader = log.reader(self._bell, log.continued)
                    self._log = log
        return self._log


class TextStream:
    """A `Stream` as strings."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __aiter__(self) -> "TextStream":
        return self

    async def __anext__(self) -> str:
        while True:
            delta = await self._stream.__anext__()
            if delta.text and delta.call is None:
                return delta.text


async def read_result(log: Log) -> Result:
    """Wait for the end of ``log``. Raises what it ended in, if that is an error."""
    bell = Bell()
    reader = log.reader(bell, log.continued)
    try:
        while not log.ended:
            bell.rearm()
            await bell.wait()
    finally:
        reader.close()
    if log.outcome is None:
        assert log.error is not None, "a log that ended has a terminal"
        raise log.error
    outcome = log.outcome
    return Result(
        text=log.text,
        tool_calls=log.tool_calls,
        token_ids=tuple(log.token_ids),
        finish_reason=outcome.finish_reason,
        usage=outcome.usage,
        timing=outcome.timing,
        stop_sequence=outcome.stop_sequence,
        cause=outcome.cause,
        logprobs=tuple(log.logprobs),
        prompt_logprobs=tuple(log.prompt_logprobs),
        beam_score=log.beam_score,
        guided=outcome.guided,
    )


async def read_choices(logs: Sequence[Log], sampling: SamplingParams) -> Result:
    """Wait for all answers of one request; the result of the whole. Raises what the first bad one ended in."""
    drawn = [await read_result(log) for log in logs]
    if len(drawn) == 1:
        return drawn[0]
    usage = Usage(
        prompt_tokens=drawn[0].usage.prompt_tokens,
        completion_tokens=sum(result.usage.completion_tokens for result in drawn),
        cached_tokens=drawn[0].usage.cached_tokens,
    )
    if sampling.n < len(drawn):
        drawn.sort(key=_mean_logprob, reverse=True)
    choices = drawn[: sampling.n]
    if sampling.logprobs is None:  # they were only needed for the order
        choices = [msgspec.structs.replace(choice, logprobs=()) for choice in choices]
    return msgspec.structs.replace(choices[0], usage=usage, choices=tuple(choices))


def _mean_logprob(result: Result) -> float:
    return sum(item.logprob for item in result.logprobs) / len(result.logprobs) if result.logprobs else -inf
