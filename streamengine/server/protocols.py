"""uvicorn's two protocol classes, made fit: bounds on what a request may send before anybody looks at it, and
WebSockets that drain.

What uvicorn's own classes do differently, and why that is changed here: no bound on headers, nor on how long a client
takes to send a request or to read its answer; a request that asks for HTTP/2 as well loses its body; a connection
whose upgrade only the WebSocket parser finds at fault is forgotten and stays open; a socket is closed in the middle
of a too large message, so that the client meets a reset in place of close 1009; a closing handshake is dropped when
the server stops, which can take the last messages along; buffers hide megabytes from `writable`; query strings, where
a ticket may be, are logged. There is no cap on WebSockets: ours is among the checks before the upgrade. Relies on
internals of uvicorn 0.54; `pyproject.toml` pins it.
"""

import asyncio
import socket
from asyncio import BaseTransport
from functools import partial
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.protocol import State

BUFFER_BYTES = 16 * 1024
"""Unsent bytes, in the kernel and in the loop each, above which a socket is not writable."""

CLOSE_S = 2.0
"""How long the other side may take to answer a close, in seconds."""

HEAD_S = 10.0
"""How long a client may take to send the line and headers of a request, in seconds."""

BODY_S = 120.0
"""How long a client may take to send a body, in seconds."""

STALL_S = 60.0
"""How long a client may take nothing of an answer that waits for it, in seconds."""

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
BAD_UPGRADE = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HttpProtocol(HttpToolsProtocol):
    """One connection, until it is upgraded. At most ``head_bytes`` of line and headers."""

    def __init__(self, *args: Any, head_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = head_bytes
        self._head = self._received = 0
        self._in_head = True
        self.access_log = False  # its lines hold queries
        self.parser: Any = _Parser(self)
        self._timer: asyncio.TimerHandle | None = None
        """Runs while a request comes in."""
        self._stall: asyncio.TimerHandle | None = None
        """Runs while an answer does not go out."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        _bound_buffers(transport)
        self._timer = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._received += len(data)
        super().data_received(data)
        # A line that never ends is no header yet.
        if self._in_head and self._received > self._most and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._in_head, self._head, self._received = True, 0, 0
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self.transport.close)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > self._most:
            raise ValueError("too large")  # ends the parser, which ends in `send_400_response`
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        if self._head > self._most:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        self.transport.write(TOO_LARGE)
        self.transport.close()

    @property
    def asks_for_more(self) -> bool:
        """The request may be answered in a protocol that is not spoken here: it is answered in this one."""
        return self.parser.should_upgrade() and self._get_upgrade() is not None and not self._should_upgrade()

    @property
    def plain_head(self) -> bytes:
        """The line and headers of a request that `asks_for_more`, if it did not."""
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = (b"%s: %s" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join([line, *kept, b"", b""])

    def on_headers_complete(self) -> None:
        if self.asks_for_more:
            return
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if not self.parser.should_upgrade():
            self._timer = self.loop.call_later(BODY_S, self._end_body)

    def on_message_complete(self) -> None:
        if self.asks_for_more:
            return
        self._stop_timer()
        super().on_message_complete()

    def _end_body(self) -> None:
        if self.pipeline:  # not read while the answer before it goes out
            self._timer = self.loop.call_later(BODY_S, self._end_body)
            return
        if not self.cycle.response_started:
            self.transport.write(TOO_SLOW)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall(None)

    def resume_writing(self) -> None:
        self._stop_stall()
        super().resume_writing()

    def _watch_stall(self, before: int | None) -> None:
        """Cut a client that took none of the ``before`` bytes that wait for it: nothing else would ever end it."""
        unsent = self.transport.get_write_buffer_size()
        if before is not None and unsent >= before:
            self.transport.abort()
        else:
            self._stall = self.loop.call_later(STALL_S, self._watch_stall, unsent)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Parser:
    """httptools' parser, which takes all that follows the headers of a request to upgrade for the other protocol. Where
    that is not spoken, as with Java's clients, which ask for HTTP/2, it reads them again without the question."""

    def __init__(self, protocol: HttpProtocol) -> None:
        self._protocol = protocol
        self._parser = self._new()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                if not self._protocol.asks_for_more:
                    raise
                head, data = self._protocol.plain_head, data[upgrade.args[0] :]
            self._parser = self._new()
            self._parser.feed_data(head)

    def _new(self) -> HttpRequestParser:
        parser = HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return parser


class StreamProtocol(WebSocketsSansIOProtocol):
    """One WebSocket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn.debug = False  # it would log headers and messages

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self.close_timeout = CLOSE_S
        _bound_buffers(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # More headers than it takes, or a body; only of some of that it says so itself.
            self.transport.write(b"".join(self.conn.data_to_send()) or BAD_UPGRADE)
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            state = self.scope.setdefault("state", {})
            state["protocol"] = self
            state["query"], self.scope["query_string"] = self.scope["query_string"], b""

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True  # a refusal completes it too: uvicorn would log that it was forgotten

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                # uvicorn would log a traceback, so a client could fill the log.
                self.frames = []
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        # Called again for whatever still comes in, which the parser throws away: only reading it to its
        # end lets the close frame arrive.
        if self.close_timer is not None or self.conn.close_sent is None:
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": self.conn.close_sent.code})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def shutdown(self) -> None:
        if self.close_timer is None:
            if self.handshake_complete and self.conn.state is not State.OPEN:
                self.close_sent = True  # by the parser, which uvicorn does not know: a second close would raise
            super().shutdown()

    @property
    def close_code(self) -> int:
        """What the client closed with; 1006 if it did not say."""
        received = self.conn.close_rcvd
        return 1006 if received is None else received.code


class ForeignProtocol:
    """Stands for the protocol class of a server that is not ours, as behind Ray: it does not tell how full its buffers
    are, so a slow client is held back by its window alone, nor bound messages to ``max_bytes``."""

    close_sent = False
    close_code = 1006

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.writable = asyncio.Event()
        self.writable.set()


def http_protocol(head_bytes: int) -> Any:
    """`HttpProtocol` with its bound, as uvicorn takes it."""
    return partial(HttpProtocol, head_bytes=head_bytes)


def _bound_buffers(transport: Any) -> None:
    transport.set_write_buffer_limits(high=BUFFER_BYTES)
    transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, BUFFER_BYTES)
