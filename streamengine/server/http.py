"""What every HTTP route needs: bodies in, errors out, and to notice that a client has gone."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from math import ceil
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from streamengine.errors import (
    InvalidJSON,
    InvalidRequest,
    MessageTooLarge,
    StreamEngineError,
    Unavailable,
    UnsupportedFeature,
)
from streamengine.server.service import Service
from streamengine.streams import Streams
from streamengine_sdk.strict_json import check_json, check_size
from streamengine_sdk.wire import field_of

INLINE_BYTES = 64 * 1024
"""A longer body may take more than a millisecond to decode, and is decoded in a worker thread."""

GONE = 499
"""The status for a client that will not read it."""

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}
"""An error's ``type`` in OpenAI's words; else it is ``invalid_request_error`` below 500 and ``server_error`` above."""

T = TypeVar("T")
Answer = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger(__name__)


def error_body(error: StreamEngineError) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class Http:
    """What the routes of one server share. ``statuses`` are those that errors get in place of their own."""

    def __init__(self, service: Service, statuses: Mapping[int, int] | None = None) -> None:
        self.config = service.config
        self._statuses = statuses or {}
        self._service = service
        self._decoders = anyio.CapacityLimiter(2)  # more would only take turns with the event loop

    def route(self, path: str, answer: Answer, *methods: str) -> Route:
        """A route of ``answer``, whose errors become responses."""

        async def handle(request: Request) -> Response:
            try:
                return await answer(request)
            except StreamEngineError as error:
                return self._refuse(error)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except Exception:
                logger.exception("%s failed", path)
                return self._refuse(StreamEngineError("internal error"))

        return Route(path, handle, methods=list(methods))

    def _refuse(self, error: StreamEngineError) -> Response:
        streams, headers = self._service.streams, {}
        if streams is not None and (wait_ms := streams.retry_after_ms(error)) is not None:
            headers["retry-after"] = str(ceil(wait_ms / 1000))
        return JSONResponse(error_body(error), self._statuses.get(error.status, error.status), headers)

    @property
    def streams(self) -> Streams:
        """Raises `Unavailable` while there are none, because the engine still starts."""
        if self._service.streams is None:
            raise Unavailable(f"the engine is {self._service.status}")
        return self._service.streams

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """What ``parse`` makes of the body; it may take long.

        Raises:
            MessageTooLarge: above ``max_message_bytes``.
            UnsupportedFeature: it is compressed; and what ``parse`` raises.
        """
        body = await self._receive(request)
        if len(body) <= INLINE_BYTES:
            return parse(body)
        return await anyio.to_thread.run_sync(parse, body, limiter=self._decoders)

    async def _receive(self, request: Request) -> bytes:
        most, body = self.config.max_message_bytes, bytearray()
        if (coding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            raise UnsupportedFeature(f"content-encoding {coding[:50]} is not supported", param="content-encoding")
        too_large = MessageTooLarge(f"the body is larger than {most} bytes", limit=most)
        if int(request.headers.get("content-length", 0)) > most:  # the parser let only numbers pass
            raise too_large
        async for chunk in request.stream():
            if len(body) + len(chunk) > most:  # uvicorn reads the rest and drops it, so that the refusal is read
                raise too_large
            body += chunk
        return bytes(body)


def decode(body: bytes, kind: type[T]) -> T:
    """``body`` as ``kind``. A field that is null is as good as absent, whether or not ``kind`` knows it.

    Raises:
        InvalidJSON: no JSON, a key that is there twice, NaN, or nested too deep.
        InvalidRequest: not a ``kind``; by field.
    """
    try:
        text = body.decode()
        check_size(text)
        value = _convert(text, kind)
        check_json(text)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=field_of(str(error))) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidJSON(f"the body is no JSON that is accepted here: {error}") from error
    return value


def _convert(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        given = msgspec.json.decode(text) if "unknown field" in str(error) else None
        if not isinstance(given, dict) or None not in given.values():
            raise
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, kind)


async def until_gone(receive: Receive) -> None:
    """Until the client has closed; its request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """What ``work`` gives. It is cancelled when the client goes, and `ClientDisconnect` raised."""
    outcome: list[T] = []
    failure: Exception | None = None

    async def watch() -> None:
        await until_gone(request.receive)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            outcome.append(await work())
        except Exception as error:  # out of the group before it is raised, or the group would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not outcome:
        raise ClientDisconnect
    return outcome[0]
