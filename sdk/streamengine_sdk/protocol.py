"""The client's side of one connection, without I/O: what to say when it opens, and what to make of what is heard.

Owns the outbox, the limits that `hello` announced and the reason why the connection ended. Time is an argument.
Refuses: sockets (`connection`), when to open another one (`client`), what users see (`stream`).
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

from msgspec import UNSET
from msgspec.structs import replace

from streamengine_sdk import wire
from streamengine_sdk.errors import (
    ConnectionLost,
    EngineError,
    InvalidRequest,
    ProtocolError,
    StreamLost,
    Unauthorized,
    from_wire,
)
from streamengine_sdk.feed import Feed, FeedMessage

SILENT_HEARTBEATS = 2.5
"""A connection on which nothing came for so many heartbeats is dead."""

HEARTBEAT_S = 15.0
"""Assumed until `hello` says better."""

CLOSE_UNAUTHORIZED = 4401

BLIND_STREAMS = 8
"""So many may be asked for before `hello` tells how many may be open."""

COME_BACK = frozenset({1001, 1005, 1006, 1011, 1012, 1013})
"""After these close codes another connection may fare better. Others say that it would not."""


class Protocol:
    """``wake`` is called when something is in `outbox`: frames to be sent, with what they say."""

    def __init__(self, now: float, *, token: str | None = None, wake: Callable[[], None] = lambda: None) -> None:
        self.hello: wire.Hello | None = None
        self.goaway: wire.GoAway | None = None
        self.error: EngineError | None = None
        self.progressed = False
        # At most two messages per stream wait here, so it needs no bound of its own.
        self.outbox: deque[tuple[str, wire.ClientMessage]] = deque()
        self._token = token
        self._wake = wake
        self._heard_at = now
        self._feeds: WeakValueDictionary[str, Feed] = WeakValueDictionary()
        self._open: set[str] = set()
        self._held: deque[str] = deque()  # until `hello` is there, or others have ended
        init = wire.Init(client="streamengine-sdk", batch=True)
        # What is shown in traces does not hold the token.
        self._say(wire.encode(replace(init, token=token or UNSET)), init)

    @property
    def usable(self) -> bool:
        """May new requests go here?"""
        return self.error is None and self.goaway is None

    @property
    def patience_s(self) -> float:
        """How much silence is death."""
        return SILENT_HEARTBEATS * (self.hello.limits.heartbeat_s if self.hello else HEARTBEAT_S)

    @property
    def dead_at(self) -> float:
        return self._heard_at + self.patience_s

    @property
    def _epoch(self) -> str | None:
        return self.hello.epoch if self.hello else None

    @property
    def _full(self) -> bool:
        most = self.hello.limits.max_streams if self.hello else BLIND_STREAMS
        return self.goaway is not None or len(self._open) >= most

    # saying

    def post(self, message: wire.ClientMessage) -> None:
        """Safe in ``__del__``, from any thread, and when the connection is gone."""
        if self.error is None:
            self._say(wire.encode(message), message)

    def _say(self, text: str, message: wire.ClientMessage) -> None:
        if isinstance(message, wire.Generate | wire.Attach):
            self._open.add(message.id)
        self.outbox.append((text, message))
        self._wake()

    def start(self, feed: Feed) -> None:
        """Send a new request, without waiting for `hello`; or hold it while as many are open as the server takes.

        Raises:
            InvalidRequest: it is larger than the server takes: sent, it would end the whole connection.
            EngineError: why the connection has ended.
        """
        self.check_alive()
        message = feed.opening(self._epoch)
        text = wire.encode(message)
        if self.hello is not None:
            _check_size(text, self.hello.limits.max_message_bytes)
        self._feeds[feed.id] = feed
        if self._full:
            feed.held = True
            self._held.append(feed.id)
            return
        feed.carrier = self
        self._say(text, message)

    def adopt(self, feeds: Iterable[Feed], now: float) -> None:
        """Go on with streams of a connection that was lost, once it is known whose epoch this is."""
        for feed in feeds:
            if not feed.over:
                self._feeds[feed.id] = feed
                self._held.append(feed.id)
        self._open_held(now)

    def release(self) -> list[Feed]:
        """The streams that are still open, for another connection to adopt."""
        self._held.clear()
        feeds = [feed for feed in self._feeds.values() if not feed.over]
        for feed in feeds:
            feed.carrier = None
        return feeds

    def end(self, error: EngineError) -> None:
        """Once: the first reason counts."""
        self.error = self.error or error

    def check_alive(self) -> None:
        if self.error is not None:
            raise copy.copy(self.error)

    def _open_held(self, now: float) -> None:
        while self._held and self.hello is not None and not self._full:
            feed = self._feeds.get(self._held.popleft())
            if feed is None or feed.over:
                continue  # nobody waits for it any more
            feed.carrier = self
            feed.go(now)
            try:
                self.post(feed.opening(self._epoch))
                if feed.cancelled:
                    self.post(wire.Cancel(id=feed.id))
            except StreamLost as lost:
                feed.fail(lost)

    # hearing

    def receive(self, text: str, now: float) -> Sequence[wire.ServerMessage | wire.Unknown]:
        """Take one frame in and return what it says. Raises `EngineError`: the connection is no good any more."""
        try:
            frame = wire.decode_server(text)
        except wire.BadMessage as bad:
            raise ProtocolError(f"not a message of {wire.PROTOCOL}: {bad}") from None
        self._heard_at = now
        messages = frame.events if isinstance(frame, wire.Batch) else [frame]
        for message in messages:
            self._handle(message, now)
        return messages

    def _handle(self, message: wire.ServerMessage | wire.Unknown, now: float) -> None:
        match message:
            case wire.Delta() | wire.Progress() | wire.Value() | wire.Accepted() | wire.Done():
                self._deliver(message.id, message, now)
            case wire.Error():
                self._receive_error(message, now)
            case wire.Hello():
                self._receive_hello(message, now)
            case wire.GoAway():
                self.goaway = message
        if self.hello is None:
            raise ProtocolError(f"the first message was no hello of {wire.PROTOCOL}")

    def _receive_hello(self, hello: wire.Hello, now: float) -> None:
        if hello.protocol != wire.PROTOCOL:
            raise ProtocolError(f"the server speaks {hello.protocol}, this client {wire.PROTOCOL}")
        if hello.auth == "required" and self._token is None:
            raise Unauthorized("the server wants a token")
        self.hello = hello
        self._open_held(now)

    def _receive_error(self, error: wire.Error, now: float) -> None:
        if error.id:
            self._deliver(error.id, error, now)
        elif error.ref:
            # About a message. If that was the request itself, nothing else will come for it.
            feed = self._feeds.get(error.ref)
            if feed is not None and feed.stream_id is None:
                self._deliver(error.ref, error, now)
        elif error.fatal:
            raise from_wire(error)

    def _deliver(self, id: str, message: FeedMessage, now: float) -> None:
        # A stream that is too slow keeps its place: it comes back when it is read again.
        if isinstance(message, wire.Done) or (isinstance(message, wire.Error) and message.code != "slow_consumer"):
            self._open.discard(id)
        self._tell(id, message, now)
        self._open_held(now)

    def _tell(self, id: str, message: FeedMessage, now: float) -> None:
        feed = self._feeds.get(id)
        if feed is None or feed.over:
            return  # it was cut here already, or nobody reads it any more
        self.progressed |= isinstance(message, wire.Delta | wire.Done)
        if feed.receive(message, now, self._epoch):
            del self._feeds[id]


def _check_size(text: str, limit: int) -> None:
    if len(text) * 4 > limit and (size := len(text.encode())) > limit:
        message = f"the request has {size} bytes, at most {limit} are taken"
        raise InvalidRequest(message, code="message_too_large", status=413)


def lost(code: int, reason: str) -> EngineError:
    """The error for a connection that was closed with a WebSocket ``code``."""
    if code == CLOSE_UNAUTHORIZED:
        return Unauthorized(reason or "the server refused the token")
    error = ConnectionLost(f"the connection ended: {code} {reason}".strip(), retryable=code in COME_BACK)
    error.close_code = code
    return error
