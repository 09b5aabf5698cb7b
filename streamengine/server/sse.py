"""Server-sent events: one response that pulls from its source whenever there is something, and stays alive between.

Nothing is queued: while the client does not read, the source is not asked, so what comes meanwhile leaves as
fewer and larger events. The source is closed however the response ends.
"""

from typing import Protocol

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamengine.bell import Bell
from streamengine.server.http import until_gone

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    # A proxy that gathers or compresses events makes a stream of them pointless.
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"


class Events(Protocol):
    """Where events come from. Rings the bell of its `EventStream` when there is something new."""

    @property
    def ended(self) -> bool:
        """Everything was taken and nothing will follow."""
        ...

    def due(self) -> float:
        """When to `take` although the bell did not ring, on anyio's clock; ``inf`` is never."""
        ...

    def take(self) -> bytes:
        """Whole events, as many as there are; empty if there is none."""
        ...

    def close(self) -> None:
        """The response is over, whether or not everything was taken."""
        ...


def event(json: bytes, *, id: str | None = None, name: str | None = None) -> bytes:
    """One event with ``json``, which is one line."""
    head = f"id: {id}\n" if id is not None else ""
    head += f"event: {name}\n" if name is not None else ""
    return b"%bdata: %b\n\n" % (head.encode(), json)


class EventStream(Response):
    """The response over ``events``; a comment goes out after ``heartbeat_s`` seconds of silence."""

    def __init__(self, events: Events, bell: Bell, heartbeat_s: float, headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._bell = bell
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            await until_gone(receive)
            tasks.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                await self._write(send)
                tasks.cancel_scope.cancel()
        finally:
            self._events.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        silent_until = anyio.current_time() + self._heartbeat_s
        while not self._events.ended:
            self._bell.rearm()
            data = self._events.take()
            if not data and anyio.current_time() >= silent_until:
                data = KEEP_ALIVE
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                silent_until = anyio.current_time() + self._heartbeat_s
            if not self._events.ended:
                await self._bell.wait(self._events.due(), silent_until)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
