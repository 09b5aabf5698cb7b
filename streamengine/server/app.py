"""The routes: page, health, readiness, models, statistics, metrics, and the stream endpoint."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from streamengine.config import ServerConfig
from streamengine.engine import Engine
from streamengine.errors import StreamEngineError
from streamengine.server.access import host_allowed
from streamengine.server.metrics import Metrics
from streamengine.server.openai import openai_routes
from streamengine.server.page import page_routes
from streamengine.server.service import Service
from streamengine.server.websocket import StreamEndpoint


def create_app(service: Service) -> ASGIApp:
    """The ASGI application over ``service``, whose engine may still be missing."""
    app = Starlette(
        routes=[
            *page_routes(),
            Route("/health", _health),
            Route("/ready", _ready(service)),
            Route("/metrics", Metrics(service).answer),
            *openai_routes(service),
            Route("/v1/stats", _with_engine(service, _statistics)),
            WebSocketRoute("/v1/stream", StreamEndpoint(service)),
        ]
    )
    return HostCheck(app, service.config)


class HostCheck:
    """Refuses every request for a foreign name, so that no page can reach us by DNS rebinding."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host")
        if host_allowed(host, self._config):
            await self._app(scope, receive, send)
            return
        refusal = JSONResponse({"error": f"host {host} is not allowed"}, 403)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(refusal)
        else:
            await refusal(scope, receive, send)


Handler = Callable[[Request], Awaitable[Response]]


async def _health(request: Request) -> Response:
    """200 as long as the event loop answers; says nothing about the engine."""
    return JSONResponse({"status": "ok"})


def _ready(service: Service) -> Handler:
    async def ready(request: Request) -> Response:
        body: dict[str, Any] = {"status": service.status}
        if service.status == "ready":
            return JSONResponse(body)
        progress = service.progress or (service.engine and service.engine.progress)
        if service.status == "starting" and progress:
            body |= msgspec.structs.asdict(progress)
        return JSONResponse(body, 503)

    return ready


def _with_engine(service: Service, answer: Callable[[Engine], Awaitable[Any]]) -> Handler:
    async def handle(request: Request) -> Response:
        if service.engine is None or service.engine.status not in ("ready", "draining"):
            return JSONResponse({"error": f"the engine is {service.status}"}, 503)
        try:
            return JSONResponse(await answer(service.engine))
        except StreamEngineError as error:
            return JSONResponse({"error": error.message}, error.status)

    return handle


async def _statistics(engine: Engine) -> Any:
    return {**await engine.statistics(), "ledger": engine.ledger}
