"""Streams over HTTP: the protocol's own messages as server-sent events, which can be resumed, or one JSON object.

An event is numbered ``<stream>:<seq>``, which is what a browser sends back as ``Last-Event-ID``; a value is not, since
its delta is yet to come. What a WebSocket
says with `cancel` is a ``DELETE`` here. A client that goes lets its stream linger if it was sent events, since it
can come back, and ends it otherwise; ``delivery.on_disconnect`` says it differently.
"""

from functools import partial
from typing import Any, Literal

import anyio
import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamengine.bell import Bell
from streamengine.calls.parser import ToolCall
from streamengine.errors import InvalidRequest, UnsupportedFeature, from_code
from streamengine.log import Log
from streamengine.server.http import Http, decode, unless_gone
from streamengine.server.sse import EventStream, event
from streamengine.session.translate import check_values, to_generate, to_terminal
from streamengine.session.view import View
from streamengine.streams import StreamRecord, Streams
from streamengine_sdk import wire

State = Literal["queued", "prefill", "decode", "done", "error"]

NOT_HERE = {
    "window": "nothing can be acknowledged over HTTP",
    "pad": "events are not padded",
}
"""Fields of `wire.Delivery` that this side of the server does not have, and why."""


class StreamState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stream as JSON: ``seq`` tokens so far, their text, and the tools that they call. ``end`` is its terminal
    message, once there is one; ``tokens`` and ``logprobs`` are there where they were asked for with the request."""

    stream: str
    model: str
    state: State
    seq: int
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: list[int] | UnsetType = UNSET
    logprobs: list[wire.Logprob] | UnsetType = UNSET
    end: wire.Done | wire.Error | UnsetType = UNSET


def stream_routes(http: Http) -> list[Route]:
    api = StreamRoutes(http)
    return [
        http.route("/v1/generate", api.generate, "POST"),
        http.route("/v1/streams/{stream}", api.look, "GET"),
        http.route("/v1/streams/{stream}", api.cancel, "DELETE"),
        http.route("/v1/streams/{stream}/events", api.events, "GET"),
    ]


class StreamRoutes:
    """The answers of one server."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def generate(self, request: Request) -> Response:
        message = await self._http.read(request, read_generate)
        _check_delivery(message.delivery)
        streams = self._http.streams
        generate = to_generate(message, streams.engine.model.name)
        key = None if message.key is UNSET else message.key
        as_events = "text/event-stream" in request.headers.get("accept", "")

        async def open() -> Shown:
            record, replay = await streams.open(request.state.principal, generate, key)
            after = record.log.continued
            return Shown(self._http, record, message.delivery, after, replay=replay, linger=as_events)

        shown = await unless_gone(request, open)
        if as_events:
            return self._respond(shown)
        try:
            return _json(await unless_gone(request, shown.whole))
        finally:
            shown.close()

    async def events(self, request: Request) -> Response:
        record = self._find(request)
        query = dict(request.query_params)
        after = _position(record.log.id, query.pop("after", None), request.headers.get("last-event-id"))
        try:
            delivery = msgspec.convert(query, wire.Delivery, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error), param=wire.field_of(str(error))) from error
        _check_delivery(delivery)
        if delivery.values:
            check_values(is_json=record.log.json)
        if record.log.ended and after == len(record.log) + 1:
            return Response(status_code=204)  # it has had the end: no browser asks again after this
        return self._respond(Shown(self._http, record, delivery, after))

    async def look(self, request: Request) -> Response:
        return _json(_state(self._find(request), self._http.streams))

    async def cancel(self, request: Request) -> Response:
        """The answer comes when the stream's pages are free."""
        record = self._find(request)
        self._http.streams.cancel(record)
        await unless_gone(request, partial(_until_ended, record.log))
        return _json(_state(record, self._http.streams))

    def _find(self, request: Request) -> StreamRecord:
        return self._http.streams.find(request.path_params["stream"], request.state.principal)

    def _respond(self, shown: "Shown") -> Response:
        return EventStream(shown, shown.bell, self._http.config.heartbeat_s)


class Shown:
    """One stream shown to one client, as `streamengine.server.sse.Events` or at once.

    Args:
        after: tokens that it has already.
        replay: the stream was there before.
        linger: what the client's going means, unless ``delivery`` says it.
    """

    def __init__(
        self,
        http: Http,
        record: StreamRecord,
        delivery: wire.Delivery,
        after: int = 0,
        *,
        replay: bool = False,
        linger: bool = True,
    ) -> None:
        self.bell = Bell()
        self.ended = False
        self._record = record
        self._streams = http.streams
        self._model = http.streams.engine.model.name
        lingers = linger if delivery.on_disconnect is UNSET else delivery.on_disconnect == "linger"
        self._linger_s = 0 if not lingers else None if delivery.linger_s is UNSET else delivery.linger_s
        self._attachment = http.streams.attach(record, self.bell, after)
        self._view = View(record.log.id, delivery, http.config.heartbeat_s, http.config.ack_stall_s)
        self._view.attach(self._attachment, replay=replay)

    def due(self) -> float:
        return self._view.due(anyio.current_time())

    def take(self) -> bytes:
        """One message: while the client does not read it, the rest waits in the log."""
        message = self._next()
        if message is None:
            return b""
        name = message.__struct_config__.tag
        return event(wire.encode(message).encode(), id=self._number(message), name=str(name))

    def close(self) -> None:
        self._streams.detach(self._attachment, self._linger_s)

    async def whole(self) -> StreamState:
        """All of it, once it has ended.

        Raises:
            StreamEngineError: it ended in an error.
        """
        deltas: list[wire.Delta] = []
        while True:
            self.bell.rearm()
            match self._next():
                case None:
                    await self.bell.wait(self.due())
                case wire.Delta() as delta:
                    deltas.append(delta)
                case wire.Error(code=code, message=text):
                    raise self._record.log.error or from_code(code, text)
                case wire.Done():
                    break
        return msgspec.structs.replace(
            _state(self._record, self._streams),
            tokens=_joined([delta.tokens for delta in deltas]),
            logprobs=_joined([delta.logprobs for delta in deltas]),
        )

    def _next(self) -> wire.ServerMessage | None:
        now = anyio.current_time()
        message = self._view.take(self._model, now) if self._view.due(now) <= now else None
        self.ended = isinstance(message, wire.Done | wire.Error)
        return message

    def _number(self, message: wire.ServerMessage) -> str | None:
        match message:
            case wire.Accepted(after=seq) | wire.Delta(seq=seq) | wire.Done(seq=seq):
                return f"{self._record.log.id}:{seq}"
            case wire.Error() if self._record.log.ended:
                return f"{self._record.log.id}:{len(self._record.log) + 1}"
        return None


def read_generate(body: bytes) -> wire.Generate:
    """The message `generate` without its ``id``, which belongs to a connection. Raises `RequestError`."""
    fields = {name: value for name, value in decode(body, dict[str, Any]).items() if not name.startswith("x_")}
    if "id" in fields:
        raise InvalidRequest("id names a request on a WebSocket: there is none here", param="id")
    try:
        return msgspec.convert({**fields, "id": "http"}, wire.Generate)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=wire.field_of(str(error))) from error


def _position(stream: str, after: str | None, last_event_id: str | None) -> int:
    """Tokens that the client has. A browser that reconnects sends both: then the newer one counts, which is its
    own."""
    number, name = after, "after"
    if last_event_id is not None:
        of, _, number = last_event_id.rpartition(":")
        name = "last-event-id"
        if of != stream:
            raise InvalidRequest(f"{name} is of another stream, or of none", param=name)
    if number is None:
        return 0
    if not (number.isascii() and number.isdecimal() and len(number) <= 10):
        raise InvalidRequest(f"{name} must be a number of tokens", param=name)
    return int(number)


def _check_delivery(delivery: wire.Delivery) -> None:
    for name, why in NOT_HERE.items():
        if getattr(delivery, name):
            raise UnsupportedFeature(f"delivery.{name} is not supported: {why}", param=f"delivery.{name}")


def _state(record: StreamRecord, streams: Streams) -> StreamState:
    log = record.log
    state: State = "decode" if len(log) else "prefill" if log.started else "queued"
    end: wire.Done | wire.Error | UnsetType = UNSET
    if log.ended:
        state = "done" if log.error is None else "error"
        end = to_terminal(log.id, log)
    model = streams.engine.model.name
    return StreamState(
        stream=log.id, model=model, state=state, seq=len(log), text=log.text, tool_calls=log.tool_calls, end=end
    )


async def _until_ended(log: Log) -> None:
    bell = Bell()
    log.follow(bell)
    try:
        while not log.ended:
            bell.rearm()
            await bell.wait()
    finally:
        log.unfollow(bell)


def _joined(lists: list[Any]) -> Any:
    given = [items for items in lists if items is not UNSET]
    return [item for items in given for item in items] if given else UNSET


def _json(state: StreamState) -> Response:
    return Response(msgspec.json.encode(state), media_type="application/json")
