"""What a person sees while the engine starts: bars on a terminal, one line per phase elsewhere. On stderr."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import typer
from rich import progress as bars
from rich.console import Console

from streamengine import compose
from streamengine.config import EngineConfig
from streamengine.engine import Engine
from streamengine.link import Progress


class StartupProgress:
    """Call it with every `Progress` message; leaving it takes the bars away."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._task: bars.TaskID | None = None
        self._bars: bars.Progress | None = None
        if sys.stderr.isatty():
            columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TimeElapsedColumn())
            self._bars = bars.Progress(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bars away; a second call does nothing."""
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        new = progress.phase != self._phase
        self._phase = progress.phase
        if self._bars is not None:
            self._move(self._bars, progress, new)
        elif new:
            typer.echo(progress.phase, err=True)

    def _move(self, shown: bars.Progress, progress: Progress, new: bool) -> None:
        total = progress.total or None
        if new:
            if self._task is not None:
                shown.update(self._task, total=1, completed=1)
            self._task = shown.add_task(progress.phase, total=total)
        assert self._task is not None
        shown.update(self._task, total=total, completed=progress.done)


@asynccontextmanager
async def open_engine(config: EngineConfig) -> AsyncIterator[Engine]:
    """`compose.open_engine` with its start-up shown on the terminal."""
    async with AsyncExitStack() as stack:
        with StartupProgress() as progress:
            engine = await stack.enter_async_context(compose.open_engine(config, progress=progress))
        yield engine
