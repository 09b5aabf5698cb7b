"""What tasks wait for: a bell that rings again and again, a reply that comes once."""

from math import inf
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from streamengine.errors import StreamEngineError

T = TypeVar("T")


class Bell:
    """A wake-up that any number of logs and tasks ring and one task waits for.

    Rearm it, look at what there is, then wait: what rings in between is not missed.
    """

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    def rearm(self) -> None:
        if self._event.is_set():
            self._event = anyio.Event()

    async def wait(self, *deadlines: float) -> None:
        """Until it has rung since `rearm` or a deadline has passed. Lets other tasks run in any case."""
        deadline = min(deadlines, default=inf)
        if deadline <= anyio.current_time():
            await anyio.lowlevel.checkpoint()
            return
        with anyio.CancelScope(deadline=deadline):
            await self._event.wait()


class Reply(Generic[T]):
    """One answer, or an error, for everybody who waits for it."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._answer: list[T | StreamEngineError] = []

    def set(self, answer: T | StreamEngineError) -> None:
        self._answer.append(answer)
        self._event.set()

    async def wait(self) -> T:
        await self._event.wait()
        answer = self._answer[0]
        if isinstance(answer, StreamEngineError):
            raise answer
        return answer
