"""A server in memory that speaks the whole protocol over real WebSocket frames, with answers that the test gives."""

import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream
from msgspec import UNSET
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from streamengine_sdk import wire
from streamengine_sdk.errors import EngineError
from streamengine_sdk.transport import Endpoint, WebSocketTransport

Answer = Iterable[str] | Callable[[wire.Generate], Iterable[str]]


@dataclass
class _Log:
    """One stream: its tokens, drawn only when a reader wants them, so that an answer may be endless."""

    stream: str
    request: wire.Generate
    source: Iterator[str]
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: EngineError | None = None

    def draw(self, count: int) -> None:
        """See to it that there are ``count`` tokens, or all."""
        limit = self.request.max_tokens or count
        while len(self.tokens) < count and self.finish_reason is None and self.error is None:
            try:
                self.tokens.append(next(self.source))
            except StopIteration:
                self.finish_reason = "stop"
            except EngineError as error:
                self.error = error
            else:
                self.finish_reason = "length" if len(self.tokens) == limit and self.request.max_tokens else None

    def terminal(self, id: str) -> wire.Done | wire.Error:
        count, prompt = len(self.tokens), len(self.request.prompt or "")
        usage = wire.Usage(prompt_tokens=prompt, completion_tokens=count, total_tokens=prompt + count)
        if self.error is not None:
            return _error(self.error, id=id, stream=self.stream, seq=count, usage=usage)
        data = "".join(self.tokens).encode()
        return wire.Done(
            id=id,
            seq=count + 1,
            finish_reason=self.finish_reason or "stop",
            cause="client" if self.finish_reason == "cancelled" else UNSET,
            usage=usage,
            check=wire.Check(bytes=len(data), crc32=zlib.crc32(data)),
        )


@dataclass
class _View:
    id: str
    log: _Log
    delivery: wire.Delivery
    position: int
    acked: int

    def take(self) -> wire.ServerMessage | None:
        size = self.delivery.coalesce_tokens
        if self.delivery.window:
            size = min(size, self.acked + self.delivery.window - self.position)
        self.log.draw(self.position + max(size, 1))
        tokens = self.log.tokens[self.position : self.position + size]
        if tokens:
            self.position += len(tokens)
            ids = [self.position] * len(tokens) if self.delivery.token_ids else UNSET
            return wire.Delta(id=self.id, seq=self.position, n=len(tokens), text="".join(tokens), tokens=ids)
        ended = self.position == len(self.log.tokens) and (self.log.finish_reason or self.log.error)
        return self.log.terminal(self.id) if ended else None


class FakeServer:
    """Give it to a client as ``transport``; its ``dial`` to a `FaultyTransport`.

    Args:
        answer: to every request, one string a token; or a function that is given the `wire.Generate`. It may be
            endless, and an `EngineError` that it raises ends the stream.
        heartbeat_s: as in the protocol.

    ``requests`` are those that started a stream, in order, and ``cancelled`` those that the client cancelled.

    Example::

        server = FakeServer(lambda request: request.prompt.split())
        async with AsyncClient("http://fake", transport=server) as client:
            assert (await client.generate("to be or not")).text == "tobeornot"
        assert server.requests[0].prompt == "to be or not"
    """

    def __init__(self, answer: Answer = ("Hello", ", ", "world"), *, heartbeat_s: float = 15) -> None:
        self.requests: list[wire.Generate] = []
        self.cancelled: list[wire.Generate] = []
        self.epoch = secrets.token_hex(4)
        self._answer = answer
        self._heartbeat_s = heartbeat_s
        self._logs: dict[str, _Log] = {}
        self._sockets: list[_Socket] = []

    def __call__(self, endpoint: Endpoint) -> WebSocketTransport:
        return WebSocketTransport(endpoint, dial=self.dial)

    async def dial(self, endpoint: Endpoint) -> ByteStream:
        """The client's end of a new connection."""
        limits = wire.Limits(max_message_bytes=4 << 20, max_streams=64, heartbeat_s=self._heartbeat_s)
        self._sockets.append(_Socket(self, limits))
        return self._sockets[-1]

    def say(self, message: wire.ServerMessage) -> None:
        """On every connection: a `wire.GoAway`, for example."""
        for socket in self._sockets:
            socket.replies.append(message)
            socket.wake()

    def close(self, code: int = 1006) -> None:
        """End every connection; streams stay and can be attached again."""
        sockets, self._sockets = self._sockets, []
        for socket in sockets:
            socket.end(code)

    def restart(self) -> None:
        """What a crash does: connections and streams are gone, and the epoch is another one."""
        self.epoch = secrets.token_hex(4)
        self._logs.clear()
        self.close()

    def delivery(self, wanted: wire.Delivery) -> wire.Delivery:
        """How streams are shown; to be overridden."""
        return wanted

    def start(self, request: wire.Generate) -> _Log:
        for log in self._logs.values():
            if request.key and log.request.key == request.key:
                return log
        self.requests.append(request)
        answer = self._answer(request) if callable(self._answer) else self._answer
        log = _Log(f"st_{secrets.token_urlsafe(16)}", request, iter(answer))
        self._logs[log.stream] = log
        return log

    def find(self, stream: str) -> _Log | None:
        return self._logs.get(stream)


class _Socket(ByteStream):
    """The server's side of one connection, worked by the client's own calls: no task, no thread."""

    def __init__(self, server: FakeServer, limits: wire.Limits) -> None:
        hello = wire.Hello(protocol=wire.PROTOCOL, epoch=server.epoch, auth="none", limits=limits)
        self.replies: deque[wire.ServerMessage] = deque([hello])
        self._server = server
        self._heartbeat_s = limits.heartbeat_s
        self._protocol = ServerProtocol(subprotocols=[Subprotocol(wire.PROTOCOL)])
        self._views: deque[_View] = deque()
        self._changed = anyio.Event()
        self._broken = False

    def wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def end(self, code: int) -> None:
        if code == 1006 or self._protocol.state is not State.OPEN:
            self._broken = True
        else:
            self._protocol.send_close(code)
        self.wake()

    async def send(self, item: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self._broken:
            raise anyio.BrokenResourceError
        self._protocol.receive_data(item)
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._protocol.send_response(self._protocol.accept(event))
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                self._handle(bytes(event.data).decode())
        self.wake()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        while not (data := self._output()):
            if self._broken or self._protocol.state is State.CLOSED:
                raise anyio.EndOfStream
            with anyio.move_on_after(self._heartbeat_s) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                self.replies.append(wire.Heartbeat())
        return data

    async def send_eof(self) -> None:
        self._broken = True

    async def aclose(self) -> None:
        self._broken = True
        self.wake()

    def _output(self) -> bytes:
        if self._protocol.state is State.OPEN and not self._broken:
            if message := self._next():
                self._protocol.send_text(wire.encode(message).encode())
        data = self._protocol.data_to_send()
        self._broken |= b"" in data  # websockets' word for the end
        return b"".join(data)

    def _next(self) -> wire.ServerMessage | None:
        if self.replies:
            return self.replies.popleft()
        for _ in range(len(self._views)):
            view = self._views.popleft()
            message = view.take()
            if not isinstance(message, wire.Done | wire.Error):
                self._views.append(view)
            if message is not None:
                return message
        return None

    def _handle(self, text: str) -> None:
        try:
            message = wire.decode_client(text)
        except wire.BadMessage as bad:
            self.replies.append(bad.error)
            return
        match message:
            case wire.Generate(id=id, delivery=delivery):
                try:
                    self._show(id, self._server.start(message), delivery, 0)
                except EngineError as error:
                    self.replies.append(_error(error, id=id))
            case wire.Attach(id=id, stream=stream, delivery=delivery, after=after):
                if (log := self._server.find(stream)) is not None:
                    self._show(id, log, delivery, after)
                else:
                    gone = EngineError(f"there is no stream {stream}", code="stream_not_found", status=404)
                    self.replies.append(_error(gone, id=id))
            case wire.Ping(t=t):
                self.replies.append(wire.Pong(t=t))
            case wire.Ack() | wire.Cancel():
                for view in self._views:
                    if view.id == message.id:
                        self._update(view, message)

    def _show(self, id: str, log: _Log, delivery: wire.Delivery, after: int) -> None:
        self.replies.append(wire.Accepted(id=id, stream=log.stream, after=after))
        self._views.append(_View(id, log, self._server.delivery(delivery), after, after))

    def _update(self, view: _View, message: wire.Ack | wire.Cancel) -> None:
        if isinstance(message, wire.Ack):
            view.acked = max(view.acked, message.seq)
        elif view.log.finish_reason is None:
            view.log.finish_reason = "cancelled"
            self._server.cancelled.append(view.log.request)


def _error(error: EngineError, **more: Any) -> wire.Error:
    status = error.status or 500
    return wire.Error(code=error.code, message=error.message, status=status, retryable=error.retryable, **more)
