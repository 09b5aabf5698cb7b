"""The session of one connection: its reader, its writer, and what happens when it ends.

Owns the request ids of its connection, heartbeat and limits, and the policy on disconnect. Refuses:
sockets and HTTP (a transport brings messages), tokens and templates (the engine's).

One reader task and one writer task live as long as the connection; each `generate` adds a short task
that ends when the engine has taken the request. The reader only decodes and hands on, so a cancel or
a ping never waits behind work. Only the writer sends. Nothing is queued per token: one bell wakes the
writer, which goes round the open requests and takes from each log what is new since its position
there. While the transport is not writable it takes nothing, so tokens gather and leave as one larger
delta. A slow reader therefore costs the memory of its logs, which the model's context bounds, and slows
neither the engine nor another connection. Answers that are no stream (pongs, refusals) are bounded
too: at `MAX_REPLIES` unsent ones the reader stops reading.

There is no resume yet: every end of the connection aborts what it started, in a ``finally``.
"""

import logging
import time
from collections import deque
from importlib import metadata
from math import inf
from typing import Literal, Protocol

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import RunVar
from msgspec import UNSET

from streamengine.bell import Bell
from streamengine.config import ServerConfig
from streamengine.engine import Engine, Generate
from streamengine.errors import ShuttingDown, StreamEngineError
from streamengine.session.translate import RETRY_AFTER_MS, to_error, to_generate
from streamengine.session.view import PIECE_LOGPROBS, PIECE_TOKENS, View
from streamengine_sdk import wire

FEATURES = ("coalesce", "logprobs", "token_ids")
"""What `hello` announces beyond the bare protocol."""

INLINE_BYTES = 64 * 1024
"""A longer message may take more than a millisecond to decode, and is decoded in a worker thread."""

MAX_REPLIES = 256
"""None is longer than about a kilobyte: see `shorten`."""

MAX_INVALID_JSON = 3

SERVER = {"name": "streamengine", "version": metadata.version("streamengine")}

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("decoders")
logger = logging.getLogger(__name__)


class TransportClosed(Exception):
    """The connection is over; ``code`` is the WebSocket close code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with code {code}")
        self.code = code


class Transport(Protocol):
    """Messages in and out. Every method may raise `TransportClosed`."""

    async def send_text(self, text: str) -> None: ...

    async def receive(self) -> str | bytes:
        """The next message: a string, or the bytes of a binary one."""
        ...

    async def close(self, code: int, reason: str) -> None: ...

    async def writable(self) -> None:
        """Wait until what was sent has left, up to a small buffer."""
        ...


class Session:
    """One client on one transport; `run` it once. ``engine`` is ready."""

    def __init__(self, engine: Engine, transport: Transport, config: ServerConfig) -> None:
        self._engine = engine
        self._transport = transport
        self._config = config
        self._bell = Bell()
        self._room = Bell()
        self._views: dict[str, View] = {}
        self._replies: deque[wire.ServerMessage] = deque([self._hello()])
        self._sent_at = -inf
        self._invalid_json = 0
        self._draining = False
        self._cut = False
        self._closing: tuple[int, str] | None = None
        self._tasks: TaskGroup

    async def run(self) -> None:
        """Talk until either side closes. Whatever still runs then is aborted, however this ends."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._read)
                await self._write()
                self._tasks.cancel_scope.cancel()
        except* TransportClosed:
            pass
        finally:
            for view in self._views.values():
                view.cancel(self._engine, "disconnect")
                view.close()

    def go_away(self, reason: Literal["shutdown", "idle"], deadline_s: float) -> None:
        """Take no new request; close when nothing runs: 1001, or 1012 if the shutdown cut a stream."""
        if not self._draining:
            self._draining = True
            self._reply(wire.GoAway(reason=reason, deadline_ms=int(deadline_s * 1000), reconnect=True))

    def _hello(self) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL,
            epoch=self._engine.epoch,
            auth="none",
            server=SERVER,
            models=[self._engine.model.name],
            features=list(FEATURES),
            limits=wire.Limits(
                max_message_bytes=self._config.max_message_bytes,
                max_streams=self._config.max_streams,
                heartbeat_s=self._config.heartbeat_s,
            ),
        )

    # reading

    async def _read(self) -> None:
        while self._closing is None:
            await self._read_one()
            while len(self._replies) >= MAX_REPLIES:
                self._room.rearm()
                await self._room.wait()

    async def _read_one(self) -> None:
        """Keeps nothing of the frame while the next one is waited for."""
        frame = await self._transport.receive()
        try:
            if len(frame) <= INLINE_BYTES:
                message = wire.decode_client(frame)
            else:
                message = await anyio.to_thread.run_sync(wire.decode_client, frame, limiter=_decoders())
        except wire.BadMessage as bad:
            self._refuse(bad)
        else:
            self._handle(message)

    def _handle(self, message: wire.ClientMessage) -> None:
        match message:
            case wire.Generate():
                self._generate(message)
            case wire.Cancel(id=id):
                if view := self._views.get(id):
                    view.cancel(self._engine, "client")
            case wire.Ping(t=t):
                self._reply(wire.Pong(t=t, server_t=time.time()))
            case _:
                ref = getattr(message, "id", UNSET)
                text = f"{message.__struct_config__.tag} is not supported by this server"
                self._reply(wire.Error(code="unsupported_feature", message=text, status=422, retryable=False, ref=ref))

    def _refuse(self, bad: wire.BadMessage) -> None:
        self._invalid_json += bad.code == "invalid_json"
        if self._invalid_json >= MAX_INVALID_JSON:
            self._closing = (4400, "bad messages")
        if bad.id in self._views:
            # As terminal it would end the request that runs under this id.
            self._reply(_duplicate(bad.id))
        else:
            self._reply(bad.error)

    def _generate(self, message: wire.Generate) -> None:
        id = message.id
        if id in self._views:
            self._reply(_duplicate(id))
            return
        if len(self._views) >= self._config.max_streams:
            self._reply(_too_many_streams(id, self._config.max_streams))
            return
        try:
            if self._draining:
                raise ShuttingDown("this server is shutting down")
            generate = to_generate(message, self._engine.model.name)
        except StreamEngineError as error:
            self._reply(to_error(error, id))
            return
        piece = PIECE_LOGPROBS if message.logprobs else PIECE_TOKENS
        view = self._views[id] = View(id, message.delivery, self._config.heartbeat_s, piece)
        self._tasks.start_soon(self._submit, view, generate)

    async def _submit(self, view: View, generate: Generate) -> None:
        try:
            # When this is cancelled the engine has taken nothing; when it returns, there is a log to abort.
            log = await self._engine.submit(generate)
        except StreamEngineError as error:
            view.refuse(error)
        except Exception:
            logger.exception("a submit failed")
            view.refuse(StreamEngineError("internal error"))
        else:
            view.attach(self._engine, log, log.reader(self._bell))
        self._bell.set()

    def _reply(self, message: wire.ServerMessage) -> None:
        self._replies.append(message)
        self._bell.set()

    # writing

    async def _write(self) -> None:
        while True:
            self._bell.rearm()
            await self._send_replies()
            for view in tuple(self._views.values()):
                if view.due() <= anyio.current_time():
                    await self._turn(view)
            if self._draining and not self._views and self._closing is None:
                self._closing = (1012, "restart") if self._cut else (1001, "going away")
            if self._closing is not None and not self._replies:
                await self._transport.close(*self._closing)
                return
            if anyio.current_time() >= self._sent_at + self._config.heartbeat_s:
                await self._send(wire.Heartbeat(t=time.time()))
            next_due = min((view.due() for view in self._views.values()), default=inf)
            await self._bell.wait(next_due, self._sent_at + self._config.heartbeat_s)

    async def _turn(self, view: View) -> None:
        """At most one message of ``view``, so that many streams share the socket evenly."""
        await self._transport.writable()
        await self._send_replies()
        # Taken only now, so that everything which came while waiting is in it.
        message = view.take(self._engine.model.name, anyio.current_time())
        if message is None:
            return
        if isinstance(message, wire.Done | wire.Error):
            if isinstance(message, wire.Done):
                self._cut |= message.cause == "shutdown"
            else:
                self._cut |= message.code == ShuttingDown.code and bool(message.stream)
            # Before it is sent: whoever has read it may use the id again.
            del self._views[view.id]
            view.close()
        await self._send(message)

    async def _send_replies(self) -> None:
        while self._replies:
            await self._send(self._replies.popleft())
            self._room.set()

    async def _send(self, message: wire.ServerMessage) -> None:
        await self._transport.send_text(wire.encode(message))
        self._sent_at = anyio.current_time()


def _decoders() -> anyio.CapacityLimiter:
    """Two threads for all connections of an event loop: more would only take turns with it."""
    try:
        return _limiter.get()
    except LookupError:
        _limiter.set(limiter := anyio.CapacityLimiter(2))
        return limiter


def _duplicate(id: str) -> wire.Error:
    text = f"id {id} is already open on this connection"
    return wire.Error(code="duplicate_id", message=text, status=409, retryable=False, ref=id)


def _too_many_streams(id: str, limit: int) -> wire.Error:
    return wire.Error(
        code="too_many_streams",
        message=f"{limit} requests are open on this connection, which is the most",
        status=429,
        retryable=True,
        retry_after_ms=RETRY_AFTER_MS,
        id=id,
    )
