"""The routes: page, health, readiness, statistics, metrics, profiles, tickets, OpenAI's, and the stream endpoint."""

from typing import Annotated, Any

import anyio
import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp

from compiled.timeline import MAX_STEPS
from streamengine.errors import Forbidden
from streamengine.server.gate import Gate
from streamengine.server.http import Http, decode, unless_gone
from streamengine.server.identity import TICKET_S
from streamengine.server.metrics import Metrics
from streamengine.server.openai import openai_routes
from streamengine.server.page import page_routes
from streamengine.server.service import Service
from streamengine.server.streams import stream_routes
from streamengine.server.websocket import StreamEndpoint


def routes(service: Service) -> list[BaseRoute]:
    """All there are."""
    http = Http(service)
    own = _Routes(service, http)
    return [
        *page_routes(),
        Route("/health", own.health),
        Route("/ready", own.ready),
        Route("/metrics", Metrics(service).answer),
        *openai_routes(service),
        *stream_routes(http),
        http.route("/v1/stats", own.statistics, "GET"),
        http.route("/v1/profile", own.profile, "POST"),
        http.route("/v1/tickets", own.ticket, "POST"),
        WebSocketRoute("/v1/stream", StreamEndpoint(service)),
    ]


def create_app(service: Service) -> ASGIApp:
    """The ASGI application over ``service``, whose engine may still be missing."""
    app = Gate(Starlette(routes=routes(service), exception_handlers={HTTPException: _no_route}), service)
    if not service.config.allow_origins:
        return app
    # Outside of the gate: a browser asks without a key whether it may send one.
    return CORSMiddleware(
        app,
        allow_origins=service.config.allow_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["authorization", "content-type", "last-event-id"],
        expose_headers=["retry-after"],
    )


async def _no_route(request: Request, error: Exception) -> Response:
    """Starlette's 404 and 405 in the shape of every other error."""
    assert isinstance(error, HTTPException)
    code, what = {404: ("not_found", "no such route"), 405: ("method_not_allowed", "not a method of this route")}.get(
        error.status_code, ("invalid_request", error.detail)
    )
    message = f"{request.method} {request.url.path[:200]}: {what}"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, error.status_code, error.headers)


class ProfileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See `streamengine.questions.How`. Measuring the ceilings halts every stream for a second, so it is off here; a
    trace would be a file on this machine, so there is none."""

    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] = 32
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 60.0
    plain_steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)] = 0
    ceilings: bool = False


class _Routes:
    """Those of this file, for one server."""

    def __init__(self, service: Service, http: Http) -> None:
        self._service = service
        self._http = http

    async def health(self, request: Request) -> Response:
        """200 as long as the event loop answers; says nothing about the engine."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        service = self._service
        body: dict[str, Any] = {"status": service.status}
        if service.status == "ready":
            return JSONResponse(body)
        progress = service.progress or (service.engine and service.engine.progress)
        if service.status == "starting" and progress:
            body |= msgspec.structs.asdict(progress)
        return JSONResponse(body, 503)

    async def statistics(self, request: Request) -> Response:
        """Everybody's, so for admins where there are keys."""
        if not request.state.principal.admin:
            raise Forbidden("statistics are for keys with admin = true")
        streams = self._http.streams
        numbers = {**await streams.engine.statistics(), **streams.statistics(), "ledger": streams.engine.ledger}
        return JSONResponse(numbers)

    async def profile(self, request: Request) -> Response:
        """What the next steps cost, for admins where there are keys: names and code of the model, and nothing of what
        anybody asked. Who leaves ends it."""
        if not request.state.principal.admin:
            raise Forbidden("profiles are for keys with admin = true")
        body = await self._http.read(request, lambda data: decode(data or b"{}", ProfileBody))
        engine = self._http.streams.engine
        how = {name: getattr(body, name) for name in ("timeout_s", "plain_steps", "ceilings")}
        found = await unless_gone(request, lambda: engine.profile(body.steps, **how))
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def ticket(self, request: Request) -> Response:
        """Stands for the caller's key in the URL of one WebSocket."""
        ticket = self._service.tickets.issue(request.state.principal, anyio.current_time())
        return JSONResponse({"ticket": ticket, "expires_in": TICKET_S}, headers={"cache-control": "no-store"})
