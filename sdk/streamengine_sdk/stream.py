"""What ``client.stream()`` returns: an answer while it arrives.

A class, not an async generator: dropping it cancels at once, any task may cancel it, and no cancel scope
stays open between two events.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import Literal, Self

import anyio

from streamengine_sdk.connection import Connection
from streamengine_sdk.errors import Timeout
from streamengine_sdk.events import Delta, Done, Event, Result
from streamengine_sdk.feed import Feed


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines in seconds; ``None`` is none. All but ``queue`` are kept by the client and raise `Timeout`.

    Args:
        connect: until the socket is open.
        queue: for the request to wait on the server before it is refused as `Overloaded`.
        first_token: from sending the request.
        between: from one token to the next; heartbeats do not count.
        total: from sending the request to its end.
    """

    connect: float | None = 5
    queue: float | None = None
    first_token: float | None = 60
    between: float | None = 30
    total: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (isinstance(value, int | float) and 0 < value <= 1e9):
                raise ValueError(f"timeout {name} must be above 0 to 1e9 seconds, not {value!r}")


Kind = Literal["first_token", "between", "total"]
Opener = Callable[[], Awaitable[tuple[Connection, Feed]]]


class TokenStream:
    """Events of one answer: `Progress` while it waits, `Delta`s, then one `Done`.

    The request is sent by the first ``async with``, iteration, `result` or `cancel`. ``break``, an exception,
    a cancelled scope, `aclose` and dropping the stream all cancel it on the server, without waiting.
    Only one task iterates; `result` and `cancel` may be called beside it, from any task.

    Raises:
        EngineError: see `streamengine_sdk.errors`; ``partial`` holds what had arrived.
    """

    _feed: Feed | None = None
    _connection: Connection | None = None

    def __init__(self, open: Opener, timeouts: Timeouts) -> None:
        """Made by `AsyncClient.stream`; ``open`` sends the request."""
        self._open = open
        self._timeouts = timeouts
        self._opening = anyio.Lock(fast_acquire=True)
        self._closed = False
        self._cancelled = False
        self._snapshot = ""
        self._joined = 0
        self._read = 0

    @property
    def stream_id(self) -> str | None:
        """The server's name for the stream, once it was accepted."""
        return self._feed.stream_id if self._feed else None

    @property
    def snapshot(self) -> str:
        """The text of all events taken so far."""
        if self._feed is not None and self._joined < self._read:
            self._snapshot += "".join(self._feed.texts[self._joined : self._read])
            self._joined = self._read
        return self._snapshot

    @property
    def text(self) -> AsyncIterator[str]:
        """Only the text, never empty strings."""
        return _Text(self)

    async def result(self) -> Result:
        """Wait for the end and return the whole answer, whatever was iterated before."""
        feed = await self._start()
        await self._ended(feed)
        return feed.result()

    async def cancel(self) -> Done:
        """Cancel, and wait until the server has let go of it. From any task; an iteration then ends in its `Done`."""
        feed = await self._start()
        self._cancel()
        return await self._ended(feed)

    async def aclose(self) -> None:
        """Cancel without waiting, and end the iteration."""
        self._closed = True
        self._cancel()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._closed:
            raise StopAsyncIteration
        feed = await self._start()
        self._expire(feed, "total")  # even where tokens come faster than they are taken
        while not feed.events:
            if feed.error is not None:
                raise feed.error
            if feed.done is not None:
                raise StopAsyncIteration
            await self._changed(feed)
        event = feed.events.popleft()
        self._read += isinstance(event, Delta)
        return event

    def __del__(self) -> None:
        self._cancel()

    async def _start(self) -> Feed:
        """Send the request, if that was not done yet."""
        if self._feed is not None:
            return self._feed
        async with self._opening:
            if self._feed is None:
                self._require_open()
                self._connection, self._feed = await self._open()
                if self._closed:  # meanwhile, by another task
                    self._cancel()
        return self._feed

    def _require_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError

    def _cancel(self) -> None:
        if self._connection is None or self._feed is None or self._feed.over or self._cancelled:
            return
        self._cancelled = True
        self._connection.cancel(self._feed.id)

    async def _ended(self, feed: Feed) -> Done:
        while feed.done is None:
            if feed.error is not None:
                raise feed.error
            await self._changed(feed)
        return feed.done

    async def _changed(self, feed: Feed) -> None:
        """Wait for what comes next; a deadline that passes ends the stream."""
        waiting: Kind = "first_token" if feed.token_at is None else "between"
        deadline = min(self._deadline(feed, waiting), self._deadline(feed, "total"))
        try:
            with anyio.CancelScope(deadline=deadline):
                await feed.changed()
                return
        except anyio.get_cancelled_exc_class():
            self._cancel()
            raise
        self._expire(feed, waiting)
        self._expire(feed, "total")

    def _deadline(self, feed: Feed, kind: Kind) -> float:
        seconds: float | None = getattr(self._timeouts, kind)
        if seconds is None or (kind == "first_token" and feed.token_at is not None):
            return inf
        start = feed.token_at if kind == "between" else feed.started
        return inf if start is None else start + seconds

    def _expire(self, feed: Feed, kind: Kind) -> None:
        if feed.over or anyio.current_time() < self._deadline(feed, kind):
            return
        self._cancel()
        error = Timeout(f"the deadline {kind} of {getattr(self._timeouts, kind)} s passed")
        error.kind = kind
        feed.fail(error)
        feed.events.clear()  # what was not taken is in the error's partial


class _Text:
    """The text of a stream, without the rest."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            event = await anext(self._stream)
            if isinstance(event, Delta) and event.text:
                return event.text
