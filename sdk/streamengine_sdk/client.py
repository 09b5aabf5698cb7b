"""The client: one socket, opened when it is needed and replaced when it is lost, with all requests on it.

Owns the connections' tasks, the request ids and when to connect again. Refuses: anything about a single stream.
"""

import copy
import random
from collections.abc import Callable
from functools import partial
from itertools import count
from types import TracebackType
from typing import Self, Unpack

import anyio
import msgspec
from anyio.abc import TaskGroup

from streamengine_sdk import wire
from streamengine_sdk.connection import Connection
from streamengine_sdk.errors import ConnectionLost, EngineError, InvalidRequest, Overloaded, Timeout
from streamengine_sdk.events import Result, Trace
from streamengine_sdk.feed import Feed
from streamengine_sdk.output import Output
from streamengine_sdk.protocol import Protocol
from streamengine_sdk.request import Options, build, check_encodable
from streamengine_sdk.settings import Backoff, Timeouts, Tracer
from streamengine_sdk.stream import TokenStream
from streamengine_sdk.transport import Endpoint, Transport, WebSocketTransport

BLIND_CHARACTERS = 64 * 1024
"""A longer request waits for `hello` and its limit: too large a message would end the whole connection."""


class _NotOpen(RuntimeError):
    pass


class AsyncClient:
    """A client for asyncio and trio.

    Args:
        url: ``http(s)://`` or ``ws(s)://``; without a path it is ``/v1/stream``.
        token: sent as ``Authorization: Bearer``, and in `init` for where a proxy drops that.
        timeouts: for all requests that bring none.
        reconnect: how a connection that was lost under open streams is replaced; ``None`` fails them instead.
        continuations: how often an answer may be continued by another server when the one that began it is gone, or
            was restarted: it is sent what has arrived, and goes on behind that. Greedy and seeded answers come out as
            if nothing had happened, and so do others, with the seed that the server tells. 0 ends such a stream in
            `StreamLost`; the ids of tokens are then not asked for.
        window: tokens that may be under way or wait here unread, for each stream; 0 is any number.
        coalesce_ms: the server may gather tokens for so long: fewer, larger events.
        on_event: told of every message and connection, for tracing. Called on the event loop: it must be quick and
            raise nothing.
        transport: makes the connection; another one than a WebSocket in tests.

    Raises:
        ValueError: the URL, the token or a number cannot be used.

    Example::

        async with AsyncClient("http://127.0.0.1:8000") as client:
            async for event in client.stream("Why is the sky blue?", max_tokens=200):
                match event:
                    case events.Delta(text=text):
                        print(text, end="", flush=True)
                    case events.Done(usage=usage):
                        print(f"\\n{usage.completion_tokens} tokens")

    Streams share the socket. More than the server takes at once wait here for others to end, in order, and the clock of
    their timeouts with them. When the socket breaks, another is opened and each stream goes on after its last token.
    Leaving the ``async with`` cancels what still runs.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        reconnect: Backoff | None = Backoff(),  # noqa: B008 - frozen
        continuations: int = 3,
        window: int = 1024,
        coalesce_ms: float = 0,
        on_event: Tracer | None = None,
        transport: Callable[[Endpoint], Transport] = WebSocketTransport,
    ) -> None:
        self._endpoint = Endpoint.parse(url, token)
        self._token = token
        self._timeouts = timeouts or Timeouts()
        self._backoff = reconnect
        if continuations < 0:
            raise ValueError(f"continuations must be 0 or more, not {continuations}")
        self._continuations = continuations
        self._delivery = msgspec.convert({"window": window, "coalesce_ms": coalesce_ms}, wire.Delivery)
        self._trace: Tracer = on_event or (lambda _: None)
        self._transport = transport
        self._ids = count(1)
        self._connection: Connection | None = None
        self._connecting: anyio.Lock
        self._tasks: TaskGroup | None = None
        self._attempt = 0
        self._quiet_since = 0.0

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("this client is open already")
        self._connecting = anyio.Lock(fast_acquire=True)
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._tasks is not None, "entered before"
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        # Not told of the error: it would come back wrapped in a group, and users could not catch it by its name.
        await tasks.__aexit__(None, None, None)

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> TokenStream:
        """Ask for an answer; nothing is sent before the result is used.

        Args:
            prompt: plain text to go on with, no chat template; or give ``messages`` or ``token_ids``.
            options: see `Options`.

        Raises:
            InvalidRequest: at once, for what cannot be sent.
            TypeError: an unknown option, or timeouts that are none.

        Example::

            async with client.stream(messages=[{"role": "user", "content": "hi"}], temperature=0) as stream:
                async for text in stream.text:
                    print(text, end="")
                    if len(stream.snapshot) > 1000:
                        await stream.cancel()
                result = await stream.result()
        """
        timeouts = self._own_timeouts(options.get("timeouts"))
        message, output = build(self._id(), prompt, options, timeouts, self._delivery)
        greeted = check_encodable(message) > BLIND_CHARACTERS
        return TokenStream(partial(self._send, message, timeouts, output, greeted=greeted))

    async def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Result:
        """The whole answer at once; arguments and errors are those of `stream`. Cancelling it cancels the request.

        Example::

            result = await client.generate("2 + 2 =", max_tokens=1, temperature=0)
            print(result.text, result.usage.completion_tokens)
        """
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    def resume(self, stream_id: str, *, after: int = 0, timeouts: Timeouts | None = None) -> TokenStream:
        """Show a stream that exists, from the token after ``after`` on: one of another client or process.

        Its use raises `StreamLost` where the server does not have it any more. Like every stream it is cancelled
        when it is left early.

        Args:
            stream_id: as `TokenStream.stream_id` or `Result.stream_id` gave it.
            after: as `TokenStream.seq` or `Result.seq` gave it; 0 brings the whole answer.

        Example::

            async with client.resume(stream_id, after=seq) as stream:
                async for text in stream.text:
                    print(text, end="")
        """
        fields = {"id": self._id(), "stream": stream_id, "after": after, "delivery": self._delivery}
        try:
            message = msgspec.convert(fields, wire.Attach)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error), param=wire.field_of(str(error))) from None
        return TokenStream(partial(self._send, message, self._own_timeouts(timeouts)))

    async def ping(self) -> float:
        """Seconds of one round trip; opens the connection if there is none."""
        connection = await self._connected(self._timeouts.connect)
        sent = anyio.current_time()
        await connection.ping()
        return anyio.current_time() - sent

    def _id(self) -> str:
        return f"r{next(self._ids)}"

    def _own_timeouts(self, given: Timeouts | None) -> Timeouts:
        timeouts = self._timeouts if given is None else given
        if not isinstance(timeouts, Timeouts):
            raise TypeError(f"timeouts must be Timeouts, not {type(timeouts).__name__}")
        return timeouts

    async def _send(
        self,
        message: wire.Generate | wire.Attach,
        timeouts: Timeouts,
        output: Output | None = None,
        *,
        greeted: bool = False,
    ) -> Feed:
        connection = await self._connected(timeouts.connect, greeted=greeted)
        now, cut_s = anyio.current_time(), self._backoff.cut if self._backoff else 0
        feed = Feed(message, timeouts, now, output, continuations=self._continuations, cut_s=cut_s)
        connection.protocol.start(feed)
        return feed

    async def _connected(self, seconds: float | None, *, greeted: bool = False) -> Connection:
        self._running()
        try:
            with anyio.fail_after(seconds):
                async with self._connecting:
                    connection = await self._usable_connection()
                if greeted:
                    await connection.greeted()
                return connection
        except TimeoutError:
            error = Timeout(f"no connection to {self._endpoint.url} within {seconds} s")
            error.kind = "connect"
            raise error from None

    async def _usable_connection(self) -> Connection:
        connection = self._connection
        if connection is not None and connection.protocol.error is None:
            goaway = connection.protocol.goaway
            if goaway is None:
                return connection
            if not goaway.reconnect:
                raise Overloaded(f"the server goes away: {goaway.reason}", code="shutting_down")
        transport = self._transport(self._endpoint)
        await transport.connect()
        try:
            tasks = self._running()
        except RuntimeError:
            await transport.close()
            raise
        self._trace(Trace(kind="connected"))
        self._connection = Connection(transport, token=self._token, trace=self._trace)
        tasks.start_soon(self._attend, self._connection)
        return self._connection

    def _running(self) -> TaskGroup:
        if self._tasks is None:
            raise _NotOpen("the client is not open: use it in `async with`")
        return self._tasks

    async def _attend(self, connection: Connection) -> None:
        """Run it, and see to what is open when it ends."""
        error: EngineError | None = ConnectionLost("the client was closed", retryable=False)
        try:
            await connection.run()
            error = await self._carry_over(connection.protocol)
        finally:
            if error is not None:
                for feed in connection.protocol.release():
                    feed.fail(copy.copy(error))

    async def _carry_over(self, protocol: Protocol) -> EngineError | None:
        """Find another connection for what is open on this one, or return why there is none."""
        error, feeds = protocol.error or ConnectionLost("the connection ended"), protocol.release()
        if protocol.progressed or self._attempt == 0:
            self._attempt, self._quiet_since = 0, anyio.current_time()
        while self._backoff is not None and error.retryable and not all(feed.over for feed in feeds):
            wait = self._backoff.delay(self._attempt, random.random())
            if anyio.current_time() + wait > self._quiet_since + self._backoff.give_up:
                error = ConnectionLost(f"nothing arrived for {self._backoff.give_up:g} s; at last, {error.message}")
                break
            self._trace(Trace(kind="lost", error=error, retry_in=wait))
            self._attempt += 1
            await anyio.sleep(wait)
            try:
                heir = await self._connected(self._timeouts.connect)
            except EngineError as failed:
                error = failed
            except _NotOpen:  # it was left just when the wait was over
                error = ConnectionLost("the client was closed", retryable=False)
            else:
                heir.protocol.adopt(feeds, anyio.current_time())
                return None
        self._trace(Trace(kind="lost", error=error))
        self._attempt = 0
        return error
