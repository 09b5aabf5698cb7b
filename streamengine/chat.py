"""A conversation on the terminal.

The engine's event loop runs in a thread of its own and this one is the reader of lines, so that line
editing works and Ctrl-C arrives where it means something: in an answer it ends the answer, at the
prompt it clears the line.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent import futures

import anyio.from_thread
import typer

from streamengine.config import EngineConfig
from streamengine.engine import Engine, Result, Stream
from streamengine.errors import StreamEngineError
from streamengine.sampling import SamplingParams
from streamengine.terminal import open_engine

with contextlib.suppress(ImportError):  # Python may be built without it; lines are then edited by the terminal alone
    import readline  # noqa: F401

LOOK_S = 0.05
"""How long Ctrl-C may go unnoticed in an answer."""

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def run(config: EngineConfig, sampling: SamplingParams, system: str | None) -> None:
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(open_engine(config)) as engine,
    ):
        if sys.stdin.isatty():
            typer.echo(HELP, err=True)
        Conversation(portal, engine, sampling, system).run()


class Conversation:
    """Lines in, streamed answers out; each answer sees all before it."""

    def __init__(
        self,
        portal: anyio.from_thread.BlockingPortal,
        engine: Engine,
        sampling: SamplingParams,
        system: str | None,
    ) -> None:
        self._portal = portal
        self._engine = engine
        self._sampling = sampling
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)

    def run(self) -> None:
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = input(prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                typer.echo()
                continue
            match line:
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    self._messages = list(self._beginning)
                case _:
                    self._answer(line)

    def _answer(self, line: str) -> None:
        asked = [*self._messages, {"role": "user", "content": line}]
        try:
            result = self._stream(asked)
        except StreamEngineError as error:
            # The question is not kept, so that the next one may succeed.
            typer.echo(f"error: {error.message}", err=True)
            return
        # What a stopped answer had said was seen, so it belongs to the conversation.
        self._messages = [*asked, {"role": "assistant", "content": result.text}]

    def _stream(self, messages: list[dict[str, str]]) -> Result:
        with _interrupts() as interrupted:
            stream = self._portal.call(self._open, messages)
            answer = self._portal.start_task_soon(show, stream)
            while not futures.wait([answer], LOOK_S).done:
                if interrupted():
                    self._portal.start_task_soon(stream.cancel)
                    break
        return answer.result()

    async def _open(self, messages: list[dict[str, str]]) -> Stream:
        return self._engine.stream(messages=messages, sampling=self._sampling)


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Tells whether Ctrl-C was pressed meanwhile. As an exception it could come between any two steps, such as between
    the start of a task and the assignment of what ends it."""
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


async def show(stream: Stream) -> Result:
    """Write the text to stdout as it comes."""
    shown = False
    async with stream:
        try:
            async for text in stream.text:
                typer.echo(text, nl=False)
                shown = True
        finally:
            if shown:
                typer.echo()
        return await stream.result()
