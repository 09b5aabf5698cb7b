"""The same client without ``async``: its event loop runs in a thread of its own, which is one for each client."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from streamengine_sdk.client import AsyncClient
from streamengine_sdk.events import Done, Event, Result
from streamengine_sdk.request import Options
from streamengine_sdk.settings import Timeouts
from streamengine_sdk.stream import TokenStream

T = TypeVar("T")


class Client:
    """`AsyncClient` for code that waits. Arguments, methods and errors are the same; any thread may use it.

    Example::

        with Client("http://127.0.0.1:8000") as client:
            for event in client.stream("Why is the sky blue?", max_tokens=200):
                match event:
                    case events.Delta(text=text):
                        print(text, end="", flush=True)
            print(client.generate("2 + 2 =", max_tokens=1, temperature=0).text)
    """

    def __init__(self, url: str, *, backend: str = "asyncio", **arguments: Any) -> None:
        self._client = AsyncClient(url, **arguments)
        self._backend = backend
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(self._backend, name="streamengine-sdk"))
            stack.enter_context(portal.wrap_async_context_manager(self._client))
            self._portal, self._stack = portal, stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal = None
        self._stack.__exit__(kind, error, traceback)

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> "SyncStream":
        """See `AsyncClient.stream`."""
        return self._made(partial(self._client.stream, prompt, **options))

    def resume(self, stream_id: str, *, after: int = 0, timeouts: Timeouts | None = None) -> "SyncStream":
        """See `AsyncClient.resume`."""
        return self._made(partial(self._client.resume, stream_id, after=after, timeouts=timeouts))

    def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Result:
        """See `AsyncClient.generate`."""
        with self.stream(prompt, **options) as stream:
            return stream.result()

    def ping(self) -> float:
        """See `AsyncClient.ping`."""
        return self._open_portal().call(self._client.ping)

    def _made(self, make: Callable[[], TokenStream]) -> "SyncStream":
        portal = self._open_portal()
        return SyncStream(portal, portal.call(make))

    def _open_portal(self) -> BlockingPortal:
        if self._portal is None:
            raise RuntimeError("the client is not open: use it in `with`")
        return self._portal


class SyncStream:
    """`TokenStream` for code that waits: ``break``, an exception, `close` and dropping it cancel on the server."""

    def __init__(self, portal: BlockingPortal, stream: TokenStream) -> None:
        """Made by `Client.stream`."""
        self._portal = portal
        self._stream = stream

    @property
    def text(self) -> Iterator[str]:
        return _Waiting(self, self._portal, self._stream.text)

    @property
    def values(self) -> Iterator[tuple[str, Any]]:
        return _Waiting(self, self._portal, self._stream.values)

    @property
    def stream_id(self) -> str | None:
        return self._stream.stream_id

    @property
    def seq(self) -> int:
        return self._stream.seq

    @property
    def snapshot(self) -> str:
        return self._stream.snapshot

    @property
    def json(self) -> Any:
        return self._stream.json

    def result(self) -> Result:
        return self._portal.call(self._stream.result)

    def cancel(self) -> Done:
        return self._portal.call(self._stream.cancel)

    def close(self) -> None:
        self._portal.call(self._stream.aclose)

    def __enter__(self) -> Self:
        self._portal.call(self._stream.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return _next(self._portal, self._stream)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the client is closed, and with it the stream
            self._portal.start_task_soon(self._stream.aclose)


class _Waiting(Iterator[T], Generic[T]):
    """Holds its stream, which would be cancelled otherwise."""

    def __init__(self, owner: SyncStream, portal: BlockingPortal, items: AsyncIterator[T]) -> None:
        self._owner = owner
        self._portal = portal
        self._items = items

    def __next__(self) -> T:
        return _next(self._portal, self._items)


def _next(portal: BlockingPortal, items: AsyncIterator[T]) -> T:
    try:
        return portal.call(items.__anext__)
    except StopAsyncIteration:
        raise StopIteration from None
