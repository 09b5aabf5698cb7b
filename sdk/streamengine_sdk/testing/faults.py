"""Connections that break, stutter and crawl, byte by byte, under a client that should not mind."""

from collections.abc import Awaitable, Callable, Iterable
from itertools import repeat

import anyio
from anyio.abc import ByteStream

from streamengine_sdk.transport import Endpoint, WebSocketTransport, connect_socket


class FaultyTransport:
    """Give it to a client as ``transport``.

    Args:
        drop_every: each connection breaks after so many bytes in both directions; or one number for each connection
            in turn, and no break after the last. (The handshake alone needs some hundreds.)
        split: bytes that arrive at once, at most.
        delay: seconds before anything arrives.
        dial: opens the socket under it: of a `FakeServer`, for example.

    Example::

        server = FakeServer(["Hel", "lo"] * 100)
        transport = FaultyTransport(drop_every=1500, split=7, dial=server.dial)
        async with AsyncClient("http://fake", transport=transport, reconnect=Backoff(first=0.001)) as client:
            assert (await client.generate("hi")).text == "Hello" * 100
            assert transport.connections > 1
    """

    def __init__(
        self,
        *,
        drop_every: int | Iterable[int] | None = None,
        split: int | None = None,
        delay: float = 0,
        dial: Callable[[Endpoint], Awaitable[ByteStream]] = connect_socket,
    ) -> None:
        self.connections = 0
        self._drops = repeat(drop_every) if isinstance(drop_every, int) else iter(drop_every or ())
        self._split = split
        self._delay = delay
        self._dial = dial

    def __call__(self, endpoint: Endpoint) -> WebSocketTransport:
        return WebSocketTransport(endpoint, dial=self._faulty)

    async def _faulty(self, endpoint: Endpoint) -> ByteStream:
        stream = await self._dial(endpoint)
        self.connections += 1
        return _FaultyStream(stream, next(self._drops, None), self._split, self._delay)


class _FaultyStream(ByteStream):
    def __init__(self, inner: ByteStream, bytes_left: int | None, split: int | None, delay: float) -> None:
        self._inner = inner
        self._left = bytes_left
        self._split = split
        self._delay = delay
        self._pending = b""

    async def send(self, item: bytes) -> None:
        await self._inner.send(self._spend(item))
        await self._break_if_spent()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await self._break_if_spent()
        if self._delay:
            await anyio.sleep(self._delay)
        self._pending = self._pending or await self._inner.receive(max_bytes)
        size = self._split or max_bytes
        item, self._pending = self._pending[:size], self._pending[size:]
        return self._spend(item)

    def _spend(self, item: bytes) -> bytes:
        if self._left is not None:
            item = item[: self._left]
            self._left -= len(item)
        return item

    async def _break_if_spent(self) -> None:
        if self._left == 0:
            await self._inner.aclose()
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        await self._inner.send_eof()

    async def aclose(self) -> None:
        await self._inner.aclose()
