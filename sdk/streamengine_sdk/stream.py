"""What ``client.stream()`` returns: an answer while it arrives.

A class, not an async generator: dropping it cancels at once, any task may cancel it, and no cancel scope
stays open between two events.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.lowlevel
import jiter

from streamengine_sdk.events import Delta, Done, Event, Result, Value
from streamengine_sdk.feed import Feed

T = TypeVar("T")


class TokenStream:
    """Events of one answer: `Progress` while it waits, `Delta`s, then one `Done`.

    The request is sent by the first ``async with``, iteration, `result` or `cancel`. ``break``, an exception,
    a cancelled scope, `aclose` and dropping the stream all cancel it on the server, without waiting.
    Only one task iterates; `result` and `cancel` may be called beside it, from any task.
    A lost connection is replaced without a gap or a repeat, and without a trace in the events.

    Raises:
        EngineError: see `streamengine_sdk.errors`; ``partial`` holds what had arrived.
    """

    _feed: Feed | None = None

    def __init__(self, open: Callable[[], Awaitable[Feed]]) -> None:
        """Made by the client; ``open`` sends the request."""
        self._open = open
        self._opening = anyio.Lock(fast_acquire=True)
        self._closed = False
        self._snapshot = ""
        self._taken: list[str] = []
        self._seq = 0

    @property
    def stream_id(self) -> str | None:
        """The server's name for the stream, once it was accepted."""
        return self._feed.stream_id if self._feed else None

    @property
    def seq(self) -> int:
        """The last token of all events taken so far; `AsyncClient.resume` goes on after it."""
        return self._seq

    @property
    def snapshot(self) -> str:
        """The text of all events taken so far."""
        if self._taken:
            self._snapshot += "".join(self._taken)
            self._taken.clear()
        return self._snapshot

    @property
    def json(self) -> Any:
        """The same as a JSON value, as far as it has come: what is open is closed. ``None`` before it begins.

        Raises:
            ValueError: the answer is no JSON.
        """
        text = self.snapshot.encode()
        return jiter.from_json(text, partial_mode="trailing-strings") if text.strip() else None

    @property
    def text(self) -> AsyncIterator[str]:
        """Only the text of the answer, never empty strings."""
        return _Picked(self, lambda it: it.text if isinstance(it, Delta) and it.channel == "text" and it.text else None)

    @property
    def values(self) -> AsyncIterator[tuple[str, Any]]:
        """With ``output``: each part of the answer as soon as it is complete, under its JSON Pointer."""
        return _Picked(self, lambda it: (it.path, it.value) if isinstance(it, Value) else None)

    async def result(self) -> Result:
        """Wait for the end and return the whole answer, whatever was iterated before."""
        feed = await self._start()
        await self._ended(feed)
        return feed.result()

    async def cancel(self) -> Done:
        """Cancel, and wait until the server has let go of it. From any task; an iteration then ends in its `Done`."""
        feed = await self._start()
        feed.cancel()
        return await self._ended(feed)

    async def aclose(self) -> None:
        """Cancel without waiting, and end the iteration."""
        self._closed = True
        if self._feed is not None:
            self._feed.cancel()

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
        await self._checkpoint(feed)
        feed.expire(anyio.current_time(), waiting=False)  # even where tokens come faster than they are taken
        while not feed.events:
            if feed.error is not None:
                raise feed.error.with_traceback(None)
            if feed.done is not None:
                raise StopAsyncIteration
            await self._changed(feed)
        event = feed.take(anyio.current_time())
        if isinstance(event, Delta):
            self._seq = event.seq
            if event.channel == "text":
                self._taken.append(event.text)
        return event

    def __del__(self) -> None:
        if self._feed is not None:
            self._feed.cancel()

    async def _start(self) -> Feed:
        """Send the request, if that was not done yet."""
        if self._feed is not None:
            return self._feed
        async with self._opening:
            if self._feed is None:
                self._require_open()
                self._feed = await self._open()
                self._seq = self._feed.seq
                if self._closed:  # meanwhile, by another task
                    self._feed.cancel()
        return self._feed

    def _require_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError

    async def _ended(self, feed: Feed) -> Done:
        feed.wait_for_end(anyio.current_time(), 1)
        try:
            while feed.done is None:
                if feed.error is not None:
                    raise feed.error.with_traceback(None)
                await self._changed(feed)
            return feed.done
        finally:
            feed.wait_for_end(anyio.current_time(), -1)

    async def _changed(self, feed: Feed) -> None:
        """Wait for what comes next; a deadline that passes ends the stream."""
        feed.go_on()
        try:
            with anyio.CancelScope(deadline=feed.deadline()[0]):
                await feed.changed()
                return
        except anyio.get_cancelled_exc_class():
            feed.cancel()
            raise
        feed.expire(anyio.current_time())

    async def _checkpoint(self, feed: Feed) -> None:
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
        except anyio.get_cancelled_exc_class():
            feed.cancel()
            raise


class _Picked(AsyncIterator[T], Generic[T]):
    """What ``pick`` finds in the events of a stream; ``None`` is nothing."""

    def __init__(self, stream: TokenStream, pick: Callable[[Event], T | None]) -> None:
        self._stream = stream
        self._pick = pick

    async def __anext__(self) -> T:
        while True:
            found = self._pick(await anext(self._stream))
            if found is not None:
                return found
