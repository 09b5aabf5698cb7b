"""What every HTTP request passes before its route: Host, Origin, key; and the line that is logged about it.

A route needs a key unless it is listed as open here: what is forgotten is closed. WebSockets pass the Host check
only; who may upgrade is `websocket`'s, because a browser cannot send a key in a header there.
"""

import logging
import re
import time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from streamengine.errors import Forbidden, StreamEngineError
from streamengine.server.access import host_allowed, origin_allowed
from streamengine.server.http import error_body
from streamengine.server.page import FILES
from streamengine.server.service import Service

OPEN = frozenset({"/health", "/ready", *FILES})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_STREAM_ID = re.compile(r"st_[A-Za-z0-9_-]+")

logger = logging.getLogger(__name__)


def refusal(error: StreamEngineError) -> JSONResponse:
    """What whoever may not come in is told."""
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error_body(error), error.status, headers)


async def deny(scope: Scope, receive: Receive, send: Send, error: StreamEngineError) -> None:
    """Refuse an upgrade; by a bare 403 where the server in front cannot say more."""
    if "websocket.http.response" in scope.get("extensions", {}):
        await WebSocket(scope, receive, send).send_denial_response(refusal(error))
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})


class Gate:
    """ASGI middleware. Puts the `Principal` into ``scope["state"]["principal"]``."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._open = OPEN if service.config.protect_metrics else OPEN | {"/metrics"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._upgrade(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._admit(scope)
            except StreamEngineError as error:
                await refusal(error)(scope, receive, note)
            else:
                await self._app(scope, receive, note)
        finally:
            _log(scope, status, time.monotonic() - begun)

    async def _upgrade(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_host(Headers(scope=scope))
        except Forbidden as error:
            await deny(scope, receive, send, error)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        headers, config = Headers(scope=scope), self._service.config
        self._check_host(headers)
        origin, host = headers.get("origin"), headers.get("host")
        # A page may send a plain POST to any address without asking; only its answer is kept from it.
        if scope["method"] not in SAFE_METHODS and not origin_allowed(origin, host, config):
            raise Forbidden(f"origin {origin} is not allowed")
        if scope["path"] not in self._open:
            scope.setdefault("state", {})["principal"] = self._service.keys.authenticate(headers)

    def _check_host(self, headers: Headers) -> None:
        """No page can reach us by a name that was rebound to this address."""
        host = headers.get("host")
        if not host_allowed(host, self._service.config):
            raise Forbidden(f"host {host} is not allowed")


def _log(scope: Scope, status: int, seconds: float) -> None:
    """Neither the query nor the id of a stream, which is as good as a key to it."""
    if logger.isEnabledFor(logging.INFO):
        principal = scope.get("state", {}).get("principal")
        facts = {
            "method": scope["method"],
            "path": _STREAM_ID.sub("st_…", scope["path"]),
            "status": status,
            "principal": principal and principal.name,
            "ms": round(seconds * 1000, 3),
        }
        logger.info("a request was answered", extra={"facts": facts})
