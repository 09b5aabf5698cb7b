"""A connection without sockets between a client and a session: messages go from one to the other as they are."""

from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel

from streamengine_sdk.transport import TransportClosed

CAPACITY = 16
"""Messages under way in one direction before a sender waits."""


class _Pipe:
    def __init__(self) -> None:
        self._items: deque[str] = deque()
        self._changed = anyio.Event()
        self.code: int | None = None

    def close(self, code: int) -> None:
        self.code = self.code or code
        self._notify()

    async def room(self) -> None:
        while len(self._items) >= CAPACITY and self.code is None:
            await self._changed.wait()

    async def put(self, item: str, closed: Callable[[int], Exception]) -> None:
        await anyio.lowlevel.checkpoint()
        await self.room()
        if self.code is not None:
            raise closed(self.code)
        self._items.append(item)
        self._notify()

    async def get(self, closed: Callable[[int], Exception]) -> str:
        await anyio.lowlevel.checkpoint()
        while not self._items:
            if self.code is not None:
                raise closed(self.code)
            await self._changed.wait()
        self._notify()
        return self._items.popleft()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class MemoryPeer:
    """The server's end: what a session wants of a transport."""

    def __init__(self, inbox: _Pipe, outbox: _Pipe, closed: Callable[[int], Exception]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = closed

    async def send_text(self, text: str) -> None:
        await self._outbox.put(text, self._closed)

    async def receive(self) -> str:
        return await self._inbox.get(self._closed)

    async def writable(self) -> None:
        await self._outbox.room()

    async def close(self, code: int, reason: str) -> None:
        self.drop(code)

    def drop(self, code: int = 1006) -> None:
        """End the connection for both sides; each gets what was under way to it before."""
        self._inbox.close(code)
        self._outbox.close(code)


class MemoryTransport:
    """The client's end. ``serve`` is given the other one when the client connects, and returns at once.
    ``closed`` makes what the other end raises when the connection is over, from its code.

    Use::

        def serve(peer: MemoryPeer) -> None:
            tasks.start_soon(Session(peer).run)

        client = AsyncClient("http://memory", transport=lambda _: MemoryTransport(serve))
    """

    def __init__(
        self, serve: Callable[[MemoryPeer], object], closed: Callable[[int], Exception] = TransportClosed
    ) -> None:
        self._serve = serve
        self._outbox, self._inbox = _Pipe(), _Pipe()
        self._peer = MemoryPeer(self._outbox, self._inbox, closed)

    async def connect(self) -> None:
        self._serve(self._peer)

    async def send(self, text: str) -> None:
        await self._outbox.put(text, TransportClosed)

    async def receive(self) -> str:
        return await self._inbox.get(TransportClosed)

    async def close(self) -> None:
        self._peer.drop(1000)
