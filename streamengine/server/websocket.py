"""`/v1/stream`: who may connect, and a session for whoever does.

A client that is refused gets an HTTP status before the upgrade, but where it can only be a browser, which cannot read
that: whoever brought a token as a subprotocol is told after it, by an error and a close code.
"""

import base64
import binascii
import logging
from urllib.parse import parse_qsl

import anyio
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from streamengine.config import is_loopback
from streamengine.errors import Forbidden, InvalidRequest, Overloaded, StreamEngineError, Unauthorized, Unavailable
from streamengine.server.access import origin_allowed
from streamengine.server.gate import deny
from streamengine.server.identity import ANONYMOUS, Principal
from streamengine.server.protocols import ForeignProtocol, StreamProtocol
from streamengine.server.service import Seat, Service
from streamengine.session import Session, TransportClosed
from streamengine_sdk import wire

AUTH = "streamengine.auth."
"""Before a token, in base64 for URLs without padding, as a subprotocol."""

PAD = 32
"""What deltas are padded to where others can watch the length of records."""

logger = logging.getLogger(__name__)


class WebSocketTransport:
    """`streamengine.session.Transport` over one accepted ASGI WebSocket."""

    def __init__(self, receive: Receive, send: Send, protocol: StreamProtocol | ForeignProtocol) -> None:
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
        if text is None:
            return message["bytes"]
        if isinstance(self._protocol, ForeignProtocol) and len(text.encode()) > self._protocol.max_bytes:
            await self.close(1009, "message too big")
            raise TransportClosed(1009)
        return text

    async def close(self, code: int, reason: str) -> None:
        await self._give({"type": "websocket.close", "code": code, "reason": reason})

    async def writable(self) -> None:
        await self._protocol.writable.wait()

    async def _give(self, message: Message) -> None:
        await self.writable()
        # A ping timeout or a broken frame closes below ASGI, and uvicorn takes a send after that for a bug.
        if self._protocol.close_sent:
            raise TransportClosed(self._protocol.close_code)
        try:
            await self._send(message)
        except OSError as error:
            raise TransportClosed(self._protocol.close_code) from error


class StreamEndpoint:
    """The ASGI application of `/v1/stream`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        self._pad = PAD if config.tls_cert is not None and not is_loopback(config.host) else 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, offered = self._service, scope["subprotocols"]
        try:
            self._check(Headers(scope=scope), offered)
            principal = self._identify(scope, offered)
            if isinstance(principal, Principal):
                service.check_connections(principal)
        except StreamEngineError as error:
            await deny(scope, receive, send, error)
            return
        known = principal if isinstance(principal, Principal) else None
        with service.connection(known) as seat:
            protocol = scope.get("state", {}).get("protocol") or ForeignProtocol(self._service.config.max_message_bytes)
            transport = WebSocketTransport(receive, send, protocol)
            await receive()
            await send({"type": "websocket.accept", "subprotocol": wire.PROTOCOL if offered else None})
            if isinstance(principal, Unauthorized):
                await _turn_away(transport, principal)
            else:
                await self._talk(seat, transport)

    async def _talk(self, seat: Seat, transport: WebSocketTransport) -> None:
        streams, config = self._service.streams, self._service.config
        assert streams is not None, "ready without streams"
        admit = seat.admit if self._service.keys.needed else None
        seat.session = Session(streams, transport, config, principal=seat.principal, admit=admit, pad=self._pad)
        begun = anyio.current_time()
        try:
            await seat.session.run()
        except Exception:
            logger.exception("a session failed")
            await transport.close(1011, "internal error")
        finally:
            name = None if seat.principal is None else seat.principal.name
            facts = {"session": seat.session.id, "principal": name, "seconds": round(anyio.current_time() - begun, 3)}
            logger.info("a connection ended", extra={"facts": facts})

    def _check(self, headers: Headers, offered: list[str]) -> None:
        """Raises what refuses anybody."""
        service = self._service
        if not origin_allowed(headers.get("origin"), headers.get("host"), service.config):
            raise Forbidden(f"origin {headers['origin']} is not allowed")
        if offered and wire.PROTOCOL not in offered:
            names = ", ".join(name for name in offered if not name.startswith(AUTH)) or "what was offered"
            raise InvalidRequest(f"no known subprotocol in {names}: this is {wire.PROTOCOL}", param="subprotocol")
        if service.status != "ready":
            raise Unavailable(f"the engine is {service.status}")
        if service.connections >= service.config.max_connections:
            raise Overloaded(f"{service.connections} connections are open, which is the most")

    def _identify(self, scope: Scope, offered: list[str]) -> Principal | Unauthorized | None:
        """Who it is; None if it has yet to say so by `init`. An error is to be told after the upgrade.

        Raises:
            Unauthorized, InvalidRequest: is to be told before it.
        """
        service, headers = self._service, Headers(scope=scope)
        text = scope.get("state", {}).get("query", scope["query_string"])
        query = parse_qsl(text.decode("latin-1"), keep_blank_values=True)
        for name, _ in query:
            if name != "ticket":
                raise InvalidRequest(f"a query may hold a ticket, no {name}: a key has no place in a URL", param=name)
        if "authorization" in headers:
            return service.keys.authenticate(headers)
        for name in offered:
            if name.startswith(AUTH) and service.keys.needed:
                try:
                    return service.keys.find(_token(name))
                except Unauthorized as error:
                    return error
        if query:
            return service.tickets.redeem(query[0][1], anyio.current_time())
        return None if service.keys.needed else ANONYMOUS


def _token(subprotocol: str) -> str:
    encoded = subprotocol.removeprefix(AUTH)
    try:
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise Unauthorized("the token is not encoded as base64 for URLs") from None


async def _turn_away(transport: WebSocketTransport, error: Unauthorized) -> None:
    message = wire.Error(code=error.code, message=error.message, status=error.status, retryable=False, fatal=True)
    try:
        await transport.send_text(wire.encode(message))
        await transport.close(4401, error.code)
    except TransportClosed:
        pass
