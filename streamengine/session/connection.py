"""The session of one connection: what it may ask, what it is shown, and what happens when it ends.

Owns the request ids of its connection, their views, the limits of a connection and the policy on disconnect.
Refuses: sockets and HTTP (a transport brings messages), tokens and templates (the engine's), the life of streams
(`Streams`: a stream outlives this).

One reader task and one writer task live as long as the connection; each `generate` adds a short task
that ends when the engine has taken the request. The reader only decodes and hands on, so a cancel or
a ping never waits behind work. Only the writer sends. Nothing is queued per token: one bell wakes the
writer, which goes round the open requests and takes from each log what is new since its position
there. While the transport is not writable it takes nothing, so tokens gather and leave as one larger
delta. A slow reader therefore costs the memory of its logs, which `Streams` bounds, and slows
neither the engine nor another connection. Answers that are no stream (pongs, refusals) are bounded
too: above that many unsent ones the reader stops reading.

However the connection ends, a ``finally`` lets go of its streams: what a client closed with 1000 is cancelled, the
rest lingers for somebody to attach.
"""

import logging
import secrets
import time
from collections.abc import Callable
from importlib import metadata
from math import inf
from typing import Literal

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec import UNSET

from streamengine.bell import Bell
from streamengine.config import ServerConfig
from streamengine.engine import Generate
from streamengine.errors import RateLimited, ShuttingDown, StreamEngineError, TooManyStreams, Unauthorized
from streamengine.session.inbound import Bucket, Inbound
from streamengine.session.outbound import Outbound
from streamengine.session.translate import check_values, to_error, to_generate
from streamengine.session.transport import Transport, TransportClosed
from streamengine.session.view import View
from streamengine.streams import ANONYMOUS, MAX_ATTACHMENTS, Principal, Streams
from streamengine_sdk import wire

FEATURES = (
    *("ack", "attach", "batch", "coalesce", "continues", "grammar", "key", "logprobs", "pad", "token_ids", "values"),
)
"""What `hello` announces beyond the bare protocol."""

MAX_LINGER_S = 600
"""The schema's."""

MAX_INVALID_JSON = 3
INIT_S = 5.0
"""Where a key is needed: how long a client may take to send it."""

NORMAL = 1000
"""The close code of a client that wants nothing more."""

SERVER = {"name": "streamengine", "version": metadata.version("streamengine")}

Admit = Callable[[str], Principal]
"""Whose key this is. Raises `Unauthorized`, or `RateLimited` where that principal has too many connections."""

logger = logging.getLogger(__name__)


class Session:
    """One client on one transport; `run` it once. The engine of ``streams`` is ready.

    Args:
        principal: who it is; None waits for an `init` whose token ``admit`` takes.
        admit: needed where there are keys.
        pad: bytes that a delta's length is a multiple of, where the client does not say.
    """

    def __init__(
        self,
        streams: Streams,
        transport: Transport,
        config: ServerConfig,
        *,
        principal: Principal | None = ANONYMOUS,
        admit: Admit | None = None,
        pad: int = 0,
    ) -> None:
        self.id = secrets.token_hex(8)
        self._streams = streams
        self._transport = transport
        self._config = config
        self._principal = principal
        self._admit = admit
        self._pad = pad
        self._bell = Bell()
        self._inbound = Inbound(transport)
        self._outbound = Outbound(transport, self._bell)
        self._views: dict[str, View] = {}
        self._invalid_json = 0
        self._draining = False
        self._cut_at = inf
        self._cut = False
        self._closing: tuple[int, str] | None = None
        self._code = 1006
        self._tasks: TaskGroup
        self._outbound.reply(self._hello())

    async def run(self) -> None:
        """Talk until either side closes."""
        try:
            self._bucket = Bucket(self._config.message_rate, self._config.message_burst, anyio.current_time())
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._read)
                await self._write()
                self._tasks.cancel_scope.cancel()
        except* TransportClosed as closed:
            codes = [error.code for error in closed.exceptions if isinstance(error, TransportClosed)]
            self._code = NORMAL if NORMAL in codes else codes[0]
        finally:
            for view in self._views.values():
                self._leave(view)

    def go_away(self, reason: Literal["shutdown", "idle", "max_session"], deadline_s: float) -> None:
        """Take no new request; close when nothing runs: 1001, or 1012 if the shutdown cut a stream."""
        if not self._draining:
            self._draining = True
            if reason == "max_session":
                self._cut_at = anyio.current_time() + deadline_s
            deadline_ms = int(deadline_s * 1000)
            self._outbound.reply(wire.GoAway(reason=reason, deadline_ms=deadline_ms, reconnect=True))

    def _hello(self) -> wire.Hello:
        config = self._config
        return wire.Hello(
            protocol=wire.PROTOCOL,
            epoch=self._streams.epoch,
            session=self.id,
            auth="none" if self._admit is None else "required" if self._principal is None else "ok",
            server=SERVER,
            models=[self._streams.engine.model.name],
            features=list(FEATURES),
            limits=wire.Limits(
                max_message_bytes=config.max_message_bytes,
                max_streams=config.max_streams,
                heartbeat_s=config.heartbeat_s,
                max_queue=self._streams.engine.config.max_queue,
                max_log_bytes=config.max_log_bytes,
                max_principal_log_bytes=config.max_principal_log_bytes,
                max_connections=UNSET if self._admit is None else config.max_principal_connections,
                max_attachments=MAX_ATTACHMENTS,
                max_linger_s=MAX_LINGER_S,
                max_session_s=config.max_session_s or UNSET,
                retain_s=config.retain_s,
                ack_stall_s=config.ack_stall_s,
                idle_s=config.idle_s,
                messages_per_s=config.message_rate,
                message_burst=config.message_burst,
            ),
        )

    def _leave(self, view: View) -> None:
        """The disconnect policy. A reader that says nothing lets its stream linger."""
        if view.attachment is not None:
            delivery = view.delivery
            at_once = self._code == NORMAL or delivery.on_disconnect == "cancel"
            linger_s = None if delivery.linger_s is UNSET else delivery.linger_s
            self._streams.detach(view.attachment, 0 if at_once else linger_s)

    # reading

    async def _read(self) -> None:
        message: wire.ClientMessage | wire.BadMessage | None = None
        with anyio.move_on_after(INIT_S if self._principal is None else inf):
            message = await self._inbound.next()
        if message is None:
            self._turn_away(Unauthorized("no init with a token came in time"), 4408)
        elif isinstance(message, wire.Init):
            self._init(message)
        elif self._principal is None:
            self._turn_away(Unauthorized("a key is needed: send init with a token first"), 4401)
        else:
            self._handle(message)
        while self._closing is None:
            await self._outbound.room()
            self._handle(await self._inbound.next())

    def _init(self, message: wire.Init) -> None:
        self._outbound.batch = message.batch
        if self._admit is None or (self._principal is not None and message.token is UNSET):
            return
        try:
            principal = self._admit(message.token or "")
        except RateLimited as error:
            self._turn_away(error, 4429)
        except Unauthorized as error:
            self._turn_away(error, 4401)
        else:
            self._principal = self._principal or principal

    def _turn_away(self, error: StreamEngineError, code: int) -> None:
        self._outbound.reply(to_error(error, retry_after_ms=self._streams.retry_after_ms(error), fatal=True))
        self._closing = (code, error.code)

    def _handle(self, message: wire.ClientMessage | wire.BadMessage) -> None:
        # These pay for themselves: there cannot be more of them than of tokens and requests.
        if isinstance(message, wire.Ack) and self._ack(message):
            return
        if isinstance(message, wire.Cancel) and self._cancel(message):
            return
        if (wait_ms := self._bucket.take(anyio.current_time())) is not None:
            self._slow_down(message, wait_ms)
            return
        match message:
            case wire.BadMessage():
                self._refuse(message)
            case wire.Generate() | wire.Attach():
                self._open(message)
            case wire.Ping(t=t):
                self._outbound.reply(wire.Pong(t=t, server_t=time.time()))
            case wire.Init():
                text = "init is for the first message"
                self._outbound.reply(wire.Error(code="invalid_message", message=text, status=400, retryable=False))

    def _ack(self, message: wire.Ack) -> bool:
        view = self._views.get(message.id)
        if view is not None and view.ack(message.seq):
            self._bell.set()
            return True
        return False

    def _cancel(self, message: wire.Cancel) -> bool:
        view = self._views.get(message.id)
        if view is None or view.cause is not None:
            return False
        view.cause = "client"
        if view.attachment is not None:
            self._streams.cancel(view.attachment.record, "client")
        return True

    def _slow_down(self, message: wire.ClientMessage | wire.BadMessage, wait_ms: int) -> None:
        error = RateLimited(f"more than {self._config.message_rate:g} messages a second", retry_after_ms=wait_ms)
        if self._bucket.flood:
            self._turn_away(error, 4429)
            return
        id = getattr(message, "id", None)
        starts = isinstance(message, wire.Generate | wire.Attach) and id not in self._views
        named = {"id": id} if starts else {"ref": id or UNSET}
        self._outbound.reply(to_error(error, retry_after_ms=wait_ms, **named))

    def _refuse(self, bad: wire.BadMessage) -> None:
        self._invalid_json += bad.code == "invalid_json"
        if self._invalid_json >= MAX_INVALID_JSON:
            self._closing = (4400, "bad messages")
        # As terminal it would end the request that runs under this id.
        self._outbound.reply(_duplicate(bad.id) if bad.id in self._views else bad.error)

    def _open(self, message: wire.Generate | wire.Attach) -> None:
        """Begin a view, or refuse it by an error that is its terminal."""
        if message.id in self._views:
            self._outbound.reply(_duplicate(message.id))
            return
        config = self._config
        view = View(message.id, message.delivery, config.heartbeat_s, config.ack_stall_s)
        try:
            if len(self._views) >= config.max_streams:
                raise TooManyStreams(f"{config.max_streams} requests are open on this connection, which is the most")
            if isinstance(message, wire.Attach):
                self._attach(view, message)
            else:
                if self._draining:
                    raise ShuttingDown("no new request is taken on this connection")
                generate = to_generate(message, self._streams.engine.model.name)
                self._tasks.start_soon(self._submit, view, generate, message.key or None)
        except StreamEngineError as error:
            self._outbound.reply(to_error(error, retry_after_ms=self._streams.retry_after_ms(error), id=message.id))
        else:
            self._views[message.id] = view

    def _attach(self, view: View, message: wire.Attach) -> None:
        assert self._principal is not None, "a message before the principal is known"
        record = self._streams.find(message.stream, self._principal)
        if message.delivery.values:
            check_values(is_json=record.log.json)
        view.attach(self._streams.attach(record, self._bell, message.after))
        self._bell.set()

    async def _submit(self, view: View, generate: Generate, key: str | None) -> None:
        assert self._principal is not None, "a message before the principal is known"
        try:
            # When this is cancelled the engine has taken nothing; when it returns, there is a stream to let go of.
            record, replay = await self._streams.open(self._principal, generate, key)
            attachment = self._streams.attach(record, self._bell, record.log.continued)
            view.attach(attachment, replay=replay)
            if view.cause is not None:  # that came meanwhile
                self._streams.cancel(record, view.cause)
        except StreamEngineError as error:
            view.refuse(error, self._streams.retry_after_ms(error))
        except Exception:
            logger.exception("a submit failed")
            view.refuse(StreamEngineError("internal error"))
        self._bell.set()

    # writing

    async def _write(self) -> None:
        now = anyio.current_time()
        ends_at = inf if self._config.max_session_s is None else now + self._config.max_session_s
        idle_at, silent_at, frames = now + self._config.idle_s, now, 0
        while True:
            self._bell.rearm()
            await self._round(now)
            now = anyio.current_time()
            if self._outbound.frames != frames:
                frames, silent_at = self._outbound.frames, now + self._config.heartbeat_s
            if self._views:
                idle_at = now + self._config.idle_s
            if now >= min(ends_at, idle_at):
                self.go_away("max_session" if now >= ends_at else "idle", self._config.drain_s)
            if self._draining and self._closing is None and (not self._views or now >= self._cut_at):
                self._closing = (1012, "restart") if self._cut else (1001, "going away")
            if self._closing is not None and self._outbound.idle:
                self._code = self._closing[0]
                await self._transport.close(*self._closing)
                return
            if now >= silent_at:
                self._outbound.reply(wire.Heartbeat(t=time.time()))
                continue
            next_due = min((view.due(now) for view in self._views.values()), default=inf)
            wishes = (self._cut_at,) if self._draining else (ends_at, idle_at)
            if next_due > now:
                await self._bell.wait(next_due, silent_at, *wishes)
                now = anyio.current_time()
            else:
                await anyio.lowlevel.checkpoint()

    async def _round(self, now: float) -> None:
        """Every answer, and at most one message of each view, so that many streams share the socket evenly."""
        await self._outbound.send_replies()
        for view in tuple(self._views.values()):
            if view.due(now) <= now:
                await self._turn(view, now)
        await self._outbound.flush()

    async def _turn(self, view: View, now: float) -> None:
        await self._outbound.writable()
        # Taken only now, so that everything which came while waiting is in it.
        message = view.take(self._streams.engine.model.name, now)
        if message is None:
            return
        if isinstance(message, wire.Done | wire.Error):
            self._finish(view, message)
        pad = self._pad if view.delivery.pad is UNSET else view.delivery.pad
        await self._outbound.send(message, pad if isinstance(message, wire.Delta) else 0)

    def _finish(self, view: View, message: wire.Done | wire.Error) -> None:
        """Before it is sent: whoever has read it may use the id again."""
        if isinstance(message, wire.Done):
            self._cut |= message.cause == "shutdown"
        else:
            self._cut |= self._draining and bool(message.stream)
        del self._views[view.id]
        self._leave(view)


def _duplicate(id: str | None) -> wire.Error:
    text = f"id {id} is already open on this connection"
    return wire.Error(code="duplicate_id", message=text, status=409, retryable=False, ref=id or UNSET)
