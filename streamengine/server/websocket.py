"""`/v1/stream`: uvicorn's WebSocket protocol made fit for streams, the checks before accept, the transport.

What uvicorn's own class does differently, and why that is changed here:
it closes a socket in the middle of a too large message, so that the client meets a reset in place of
close 1009; it drops a closing handshake when the server stops, which can take the last messages along;
its buffers hide megabytes from `writable`. It has no cap on WebSockets: ours is among the checks.
"""

import logging
import socket
from asyncio import BaseTransport

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from streamengine.server.access import origin_allowed
from streamengine.server.service import Service
from streamengine.session import Session, TransportClosed
from streamengine_sdk.wire import PROTOCOL

BUFFER_BYTES = 16 * 1024
"""Unsent bytes, in the kernel and in the loop each, above which a socket is not writable."""

CLOSE_S = 2.0
"""How long the other side may take to answer a close, in seconds."""

logger = logging.getLogger(__name__)


class StreamProtocol(WebSocketsSansIOProtocol):
    """One socket. Relies on internals of uvicorn 0.54; `pyproject.toml` pins it."""

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self.close_timeout = CLOSE_S
        self.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, BUFFER_BYTES)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope.setdefault("state", {})["protocol"] = self

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
            super().shutdown()


class WebSocketTransport:
    """`streamengine.session.Transport` over one accepted ASGI WebSocket."""

    def __init__(self, receive: Receive, send: Send, protocol: StreamProtocol) -> None:
        self._receive = receive
        self._send = send
        self._protocol = protocol

    async def send_text(self, text: str) -> None:
        await self._give({"type": "websocket.send", "text": text})

    async def receive(self) -> str | bytes:
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise TransportClosed(message["code"])
        text = message.get("text")
        return message["bytes"] if text is None else text

    async def close(self, code: int, reason: str) -> None:
        await self._give({"type": "websocket.close", "code": code, "reason": reason})

    async def writable(self) -> None:
        await self._protocol.writable.wait()

    async def _give(self, message: Message) -> None:
        await self.writable()
        # A ping timeout or a broken frame closes below ASGI, and uvicorn takes a send after that for a bug.
        if self._protocol.close_sent:
            raise TransportClosed(1006)
        try:
            await self._send(message)
        except OSError as error:
            raise TransportClosed(1006) from error


class StreamEndpoint:
    """The ASGI application of `/v1/stream`: refuse by HTTP status before accept, or run a session."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refusal = self._refusal(headers, scope["subprotocols"])
        if refusal is not None:
            status, message = refusal
            await WebSocket(scope, receive, send).send_denial_response(JSONResponse({"error": message}, status))
            return
        engine = self._service.engine
        assert engine is not None, "ready without an engine"
        transport = WebSocketTransport(receive, send, scope["state"]["protocol"])
        session = Session(engine, transport, self._service.config)
        with self._service.connection(session):
            await receive()
            await send({"type": "websocket.accept", "subprotocol": PROTOCOL if scope["subprotocols"] else None})
            try:
                await session.run()
            except Exception:
                logger.exception("a session failed")
                await transport.close(1011, "internal error")

    def _refusal(self, headers: Headers, subprotocols: list[str]) -> tuple[int, str] | None:
        service = self._service
        if not origin_allowed(headers.get("origin"), headers.get("host"), service.config):
            return 403, f"origin {headers['origin']} is not allowed"
        if subprotocols and PROTOCOL not in subprotocols:
            return 400, f"no known subprotocol among {', '.join(subprotocols)}: this is {PROTOCOL}"
        if service.status != "ready":
            return 503, f"the engine is {service.status}"
        if service.connections >= service.config.max_connections:
            return 503, f"{service.connections} connections are open, which is the most"
        return None
