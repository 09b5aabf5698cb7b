"""Text messages over one WebSocket: the Sans-I/O protocol of `websockets` on an anyio socket.

Owns the handshake, pings, fragments and the close. Refuses: what the messages mean.
Anything with the four methods of `Transport` can take its place, so tests need no socket.
"""

import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

import anyio
from anyio.abc import ByteStream
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, InvalidURI
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from streamengine_sdk.errors import ConnectError, Unauthorized
from streamengine_sdk.wire import PROTOCOL

DEFAULT_PATH = "/v1/stream"

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message from the server. Slices of text are some KiB; more than this is no stream of ours."""

AGAIN = frozenset({429, 500, 502, 503, 504})
"""To these answers to a handshake another one may get a better. A proxy says 500 while what is behind it dies."""

CLOSE_S = 1.0
"""How long a close waits for the server's answer before it drops the socket, in seconds."""


@dataclass(frozen=True)
class Endpoint:
    """Where to connect, and the HTTP headers to say there. A token is not shown."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, url: str, token: str | None = None) -> "Endpoint":
        """``http`` and ``https`` mean ``ws`` and ``wss``; no path means ``/v1/stream``. Raises `ValueError`."""
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        path = parts.path if parts.path.strip("/") else DEFAULT_PATH
        if parts.username is not None:
            raise ValueError("the URL holds a user name: give a token instead")
        url = urlunsplit((scheme, parts.netloc, path, parts.query, parts.fragment))
        try:
            parse_uri(url)
        except InvalidURI as error:
            raise ValueError(str(error)) from error
        if token is None:
            return cls(url)
        if not token.isascii() or not token.isprintable() or " " in token or not token:
            raise ValueError("a token is printable ASCII without spaces")
        return cls(url, {"Authorization": f"Bearer {token}"})


class TransportClosed(Exception):
    """No more messages. ``code`` is the WebSocket close code, 1006 if there was none."""

    def __init__(self, code: int = 1006, reason: str = "") -> None:
        super().__init__(f"{code} {reason}".strip())
        self.code = code
        self.reason = reason


class Transport(Protocol):
    """One connection. `send` and `receive` are each called from one task, and none once `close` is called."""

    async def connect(self) -> None:
        """Raises `ConnectError`."""

    async def send(self, text: str) -> None:
        """Raises `TransportClosed`."""

    async def receive(self) -> str:
        """Raises `TransportClosed`."""
        ...

    async def close(self) -> None:
        """Say goodbye if that is possible, in a bounded time. Raises nothing; may be called twice."""


async def connect_socket(endpoint: Endpoint, *, ssl_context: ssl.SSLContext | None = None) -> ByteStream:
    """A TCP connection, with TLS if the URL says so. Raises `OSError`."""
    uri = parse_uri(endpoint.url)
    if uri.secure:
        return await anyio.connect_tcp(
            uri.host, uri.port, tls=True, ssl_context=ssl_context, tls_standard_compatible=False
        )
    return await anyio.connect_tcp(uri.host, uri.port)


class WebSocketTransport:
    """The real one, over the socket that ``dial`` opens.

    For a private certificate authority give the client
    ``transport=lambda endpoint: WebSocketTransport(endpoint, ssl_context=context)``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        ssl_context: ssl.SSLContext | None = None,
        dial: Callable[[Endpoint], Awaitable[ByteStream]] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._dial = dial or partial(connect_socket, ssl_context=ssl_context)
        self._protocol = ClientProtocol(
            parse_uri(endpoint.url), subprotocols=[Subprotocol(PROTOCOL)], max_size=MAX_MESSAGE_BYTES
        )
        self._stream: ByteStream | None = None
        self._messages: deque[str] = deque()
        self._fragments: list[bytes] = []
        # Pongs leave from the reader's task, messages from the writer's.
        self._sending = anyio.Lock(fast_acquire=True)
        self._torn = False

    async def connect(self) -> None:
        try:
            await self._open()
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            await self._drop()
            raise ConnectError(f"no connection to {self._endpoint.url}: {_reason(error)}") from None
        except BaseException:
            await self._drop()
            raise

    async def _open(self) -> None:
        protocol = self._protocol
        self._stream = await self._dial(self._endpoint)
        request = protocol.connect()
        request.headers.update(self._endpoint.headers)
        protocol.send_request(request)
        await self._flush(self._stream)
        while protocol.state is State.CONNECTING and protocol.handshake_exc is None:
            await self._pump(self._stream)
        if isinstance(protocol.handshake_exc, InvalidStatus):
            raise _refused(self._endpoint.url, protocol.handshake_exc)
        if protocol.handshake_exc is not None:
            text = f"{self._endpoint.url} is no WebSocket: {protocol.handshake_exc}"
            raise ConnectError(text) from None

    async def send(self, text: str) -> None:
        if self._stream is None or self._protocol.state is not State.OPEN:
            raise self._closed()
        self._protocol.send_text(text.encode())
        try:
            await self._flush(self._stream)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise TransportClosed(1006, "the connection broke") from None

    async def receive(self) -> str:
        while not self._messages:
            if self._stream is None or self._protocol.state is not State.OPEN:
                raise self._closed()
            await self._pump(self._stream)
        return self._messages.popleft()

    def _closed(self) -> TransportClosed:
        close = self._protocol.close_rcvd
        if close is not None:
            return TransportClosed(close.code, close.reason)
        return TransportClosed(1006, str(self._protocol.parser_exc or "the connection broke"))

    async def close(self) -> None:
        stream, protocol = self._stream, self._protocol
        try:
            if stream is None or self._torn:
                return
            with anyio.move_on_after(CLOSE_S):
                if protocol.state is State.OPEN:
                    protocol.send_close(1000)
                    await self._flush(stream)
                # Closing a socket with unread bytes sends a reset, which may overtake our goodbye.
                while protocol.state is not State.CLOSED:
                    await self._pump(stream)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # gone already
        finally:
            await self._drop()

    async def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await anyio.aclose_forcefully(stream)

    async def _pump(self, stream: ByteStream) -> None:
        """Take what the socket has, and answer what the protocol wants answered."""
        try:
            data = await stream.receive()
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._protocol.receive_eof()
            return
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._take(event)
        try:
            await self._flush(stream)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._protocol.receive_eof()

    def _take(self, frame: Frame) -> None:
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return
        self._fragments.append(bytes(frame.data))
        if frame.fin:
            data, self._fragments = b"".join(self._fragments), []
            # Bytes that are no UTF-8 become no JSON, which the reader above reports.
            self._messages.append(data.decode(errors="replace"))

    async def _flush(self, stream: ByteStream) -> None:
        async with self._sending:
            data = b"".join(self._protocol.data_to_send())
            if data:
                # A frame that was cut by a cancellation cannot be followed by another.
                self._torn = True
                await stream.send(data)
                self._torn = False


def _reason(error: BaseException) -> str:
    """What the operating system said: of several addresses that were tried, for the first."""
    if isinstance(error, ExceptionGroup):
        return _reason(error.exceptions[0])
    return _reason(error.__cause__) if error.__cause__ else str(error) or type(error).__name__


def _refused(url: str, refusal: InvalidStatus) -> ConnectError:
    response = refusal.response
    body = bytes(response.body).decode(errors="replace").strip()[:200]
    kind = Unauthorized if response.status_code == 401 else ConnectError
    text = f"{url} answered HTTP {response.status_code}" + (f": {body}" if body else "")
    return kind(text, status=response.status_code, retryable=response.status_code in AGAIN)
