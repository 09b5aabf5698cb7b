"""One socket and the requests on it: a reader, a writer and a watch, until it ends once.

Owns the outbox, the limits that `hello` announced and the reason why the connection ended.
Refuses: opening sockets again (the client's), what users see (the stream's).
"""

import copy
from collections import deque
from contextlib import suppress
from threading import get_ident
from weakref import WeakValueDictionary

import anyio
from anyio.abc import TaskGroup

from streamengine_sdk import wire
from streamengine_sdk.errors import (
    ConnectionLost,
    EngineError,
    InvalidRequest,
    ProtocolError,
    Unauthorized,
    from_wire,
)
from streamengine_sdk.feed import Feed, FeedMessage
from streamengine_sdk.transport import Transport, TransportClosed

SILENT_HEARTBEATS = 2.5
"""A connection on which nothing came for so many heartbeats is dead."""

HEARTBEAT_S = 15.0
"""Assumed until `hello` says better."""

CLOSE_UNAUTHORIZED = 4401


class Connection:
    """``transport`` is connected. `run` it in a task; everything else never waits, apart from `greeted`."""

    def __init__(self, transport: Transport) -> None:
        self.hello: wire.Hello | None = None
        self.goaway: wire.GoAway | None = None
        self.error: EngineError | None = None
        self._transport = transport
        self._feeds: WeakValueDictionary[str, Feed] = WeakValueDictionary()
        self._pings: dict[float, anyio.Event] = {}
        # At most two messages per open stream wait here, so it needs no bound of its own.
        self._outbox: deque[str] = deque()
        self._mail = anyio.Event()
        self._greeted = anyio.Event()
        self._thread = get_ident()
        self._heard_at = anyio.current_time()
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Until the socket ends, or the task is cancelled. Raises nothing of its own."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._write)
                self._tasks.start_soon(self._watch)
                await self._read()
        finally:
            self._end(ConnectionLost("the client was closed"))
            with anyio.CancelScope(shield=True):
                await self._transport.close()

    async def greeted(self) -> None:
        """Wait until `hello` is there. Raises the reason if the connection ends before."""
        await self._greeted.wait()
        self._check_alive()

    def open(self, id: str, text: str, *, with_tokens: bool, with_logprobs: bool) -> Feed:
        """Send the `generate` called ``id`` and return where its answer arrives.

        Raises:
            InvalidRequest: ``text`` is larger than the server takes: sent, it would end the whole connection.
            EngineError: why the connection has ended.
        """
        self._check_alive()
        if self.hello is not None and len(text) * 4 > self.hello.limits.max_message_bytes:
            _check_size(text, self.hello.limits.max_message_bytes)
        feed = Feed(id, anyio.current_time(), with_tokens=with_tokens, with_logprobs=with_logprobs)
        self._feeds[id] = feed
        self._post(text)
        return feed

    def cancel(self, id: str) -> None:
        """Ask for the end of a request. Safe in ``__del__``, from any thread, and when nothing runs any more."""
        if self.error is None:
            self._post(wire.encode(wire.Cancel(id=id)))

    async def ping(self) -> None:
        """One round trip. Raises the reason if the connection ends before."""
        self._check_alive()
        t = anyio.current_time()
        answered = self._pings.setdefault(t, anyio.Event())
        self._post(wire.encode(wire.Ping(t=t)))
        await answered.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.error is not None:
            raise copy.copy(self.error)

    def _post(self, text: str) -> None:
        self._outbox.append(text)
        # Only the loop's own thread may wake a task; otherwise the reader does it with the next message.
        if get_ident() == self._thread:
            with suppress(RuntimeError):  # a stream may be collected after its event loop has ended
                self._mail.set()

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self._transport.send(self._outbox.popleft())
                self._mail = anyio.Event()
                if not self._outbox:
                    await self._mail.wait()
        except TransportClosed:
            pass  # the reader hears of it too, after what the server said before

    async def _read(self) -> None:
        try:
            while True:
                self._receive(await self._transport.receive())
        except TransportClosed as closed:
            self._end(_lost(closed))
        except wire.BadMessage as bad:
            self._end(ProtocolError(f"not a message of {wire.PROTOCOL}: {bad}"))
        except EngineError as error:
            self._end(error)

    async def _watch(self) -> None:
        with anyio.move_on_after(SILENT_HEARTBEATS * HEARTBEAT_S):
            await self._greeted.wait()
        limit = SILENT_HEARTBEATS * (self.hello.limits.heartbeat_s if self.hello else HEARTBEAT_S)
        while True:
            if anyio.current_time() >= self._heard_at + limit:
                self._end(ConnectionLost(f"nothing was heard for {limit:g} s"))
            await anyio.sleep_until(self._heard_at + limit)

    def _receive(self, text: str) -> None:
        message = wire.decode_server(text)
        self._heard_at = anyio.current_time()
        match message:
            case wire.Delta() | wire.Progress() | wire.Accepted() | wire.Done():
                self._deliver(message.id, message)
            case wire.Error():
                self._receive_error(message)
            case wire.Hello():
                self._receive_hello(message)
            case wire.GoAway():
                self.goaway = message
            case wire.Pong():
                if message.t in self._pings:
                    self._pings.pop(message.t).set()
        if self.hello is None:
            raise ProtocolError(f"the first message was no hello of {wire.PROTOCOL}")
        if self._outbox:
            self._mail.set()

    def _receive_hello(self, hello: wire.Hello) -> None:
        if hello.protocol != wire.PROTOCOL:
            raise ProtocolError(f"the server speaks {hello.protocol}, this client {wire.PROTOCOL}")
        if hello.auth == "required":
            raise Unauthorized("the server wants a token")
        self.hello = hello
        self._greeted.set()

    def _receive_error(self, error: wire.Error) -> None:
        if error.id:
            self._deliver(error.id, error)
        elif error.ref:
            # About a message. If that was the `generate` itself, nothing else will come for it.
            feed = self._feeds.get(error.ref)
            if feed is not None and feed.stream_id is None:
                self._deliver(error.ref, error)
        elif error.fatal:
            raise from_wire(error)

    def _deliver(self, id: str, message: FeedMessage) -> None:
        feed = self._feeds.get(id)
        if feed is None or feed.over:
            return  # it was cut here already, or nobody reads it any more
        if feed.receive(message, self._heard_at):
            del self._feeds[id]
            if not isinstance(message, wire.Done | wire.Error):
                self.cancel(id)  # we refused what came, and the server does not know yet

    def _end(self, error: EngineError) -> None:
        """Once: the first reason counts, and every open stream gets a copy of it."""
        if self.error is not None:
            return
        self.error = error
        for feed in list(self._feeds.values()):
            feed.fail(copy.copy(error))
        self._greeted.set()
        for answered in self._pings.values():
            answered.set()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()


def _check_size(text: str, limit: int) -> None:
    size = len(text.encode())
    if size > limit:
        raise InvalidRequest(
            f"the request has {size} bytes, at most {limit} are taken", code="message_too_large", status=413
        )


def _lost(closed: TransportClosed) -> EngineError:
    if closed.code == CLOSE_UNAUTHORIZED:
        return Unauthorized(closed.reason or "the server refused the token")
    error = ConnectionLost(f"the connection ended: {closed}")
    error.close_code = closed.code
    return error
