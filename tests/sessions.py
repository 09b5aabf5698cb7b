"""Sessions over connections in memory, against an engine whose every token is placed by the test."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import anyio
from anyio.abc import TaskGroup

from streamengine.config import EngineConfig, ServerConfig
from streamengine.log import Log, Outcome
from streamengine.session import Session, TransportClosed
from streamengine.streams import Streams
from streamengine.timing import Timing
from tests.fakes import fake_model
from tests.schema import validate

PATIENCE_S = 5.0
Message = dict[str, Any]


class ScriptedEngine:
    """Takes every request; what its streams say and when is up to the test."""

    model = fake_model()
    config = EngineConfig()

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.generates: list[Any] = []
        self.aborts: list[tuple[Log, str]] = []
        self.refusal: Exception | None = None
        self.submitting = anyio.Event()
        self.aborted = anyio.Event()
        self.may_submit = anyio.Event()
        self.may_submit.set()

    async def submit(self, generate: Any) -> Log:
        self.submitting.set()
        await self.may_submit.wait()
        if self.refusal is not None:
            raise self.refusal
        self.generates.append(generate)
        self.logs.append(Log(f"st_{len(self.logs):016}", prompt_tokens=7))
        return self.logs[-1]

    def abort(self, log: Log, cause: str) -> None:
        if not log.ended:
            self.aborts.append((log, cause))
            self.aborted.set()


def say(log: Log, text: str) -> None:
    """One token a character."""
    log.started = True
    log.append([(ord(character), character) for character in text])
    log.wake()


def end(log: Log, reason: Any = "stop", cause: str | None = None) -> None:
    log.end(Outcome(finish_reason=reason, usage=log.usage, timing=Timing(total_ms=1.0), cause=cause))
    log.wake()


class MemoryTransport:
    """Both ends of a connection: the session's four methods, and a client's. What passes is held against the schema."""

    def __init__(self) -> None:
        self._to_server, self._server = anyio.create_memory_object_stream[str | bytes](inf)
        self._to_client, self._client = anyio.create_memory_object_stream[Message](inf)
        self._open = anyio.Event()
        self._open.set()
        self._events: list[Message] = []
        self.waiting = anyio.Event()
        self.frames: list[str] = []
        """Every frame that the server has sent."""
        self.closed: tuple[int, str] | None = None
        self.code = 1006
        """What the client closes with."""
        self.broken = False

    async def send_text(self, text: str) -> None:
        await self._open.wait()
        if self.broken:
            raise TransportClosed(1006)
        self.frames.append(text)
        await self._to_client.send(validate("server", text))

    async def receive(self) -> str | bytes:
        try:
            return await self._server.receive()
        except anyio.EndOfStream:
            raise TransportClosed(self.code) from None

    async def close(self, code: int, reason: str) -> None:
        self.closed = (code, reason)

    async def writable(self) -> None:
        if not self._open.is_set():
            self.waiting.set()
        await self._open.wait()

    # the client's side

    def block(self) -> None:
        self._open = anyio.Event()
        self.waiting = anyio.Event()

    def unblock(self) -> None:
        self._open.set()

    def send(self, type: str, **fields: Any) -> None:
        self.send_raw(json.dumps(validate("client", {"type": type, **fields})))

    def send_bad(self, type: str, **fields: Any) -> None:
        """What the schema may refuse."""
        self.send_raw(json.dumps({"type": type, **fields}))

    def send_raw(self, frame: str | bytes) -> None:
        self._to_server.send_nowait(frame)

    def generate(self, id: str, **fields: Any) -> None:
        self.send("generate", id=id, **{"prompt": "hello", **fields})

    def generate_badly(self, id: str, **fields: Any) -> None:
        self.send_bad("generate", id=id, **{"prompt": "hello", **fields})

    async def next(self, *skipping: str) -> Message:
        """The next message, from inside of a batch too."""
        while True:
            while not self._events:
                with anyio.fail_after(PATIENCE_S):
                    message = await self._client.receive()
                self._events = message["events"] if message["type"] == "batch" else [message]
            message = self._events.pop(0)
            if message["type"] not in skipping:
                return message

    async def until(self, type: str, id: str) -> list[Message]:
        """Everything up to the message of this type, of this request only."""
        found: list[Message] = []
        while not found or found[-1]["type"] != type:
            message = await self.next()
            if message.get("id") == id:
                found.append(message)
        return found

    def unread(self) -> int:
        return self._client.statistics().current_buffer_used + len(self._events)

    def disconnect(self, code: int = 1006) -> None:
        self.code = code
        self._to_server.close()

    def free(self) -> None:
        for stream in (self._to_server, self._server, self._to_client, self._client):
            stream.close()


class Connected:
    """A session and its client."""

    def __init__(self, hub: "Hub", **options: Any) -> None:
        self.hub = hub
        self.engine = hub.engine
        self.client = MemoryTransport()
        self.session = Session(hub.streams, self.client, hub.config, **options)
        self.ended = anyio.Event()

    async def run(self) -> None:
        await self.session.run()
        self.ended.set()

    async def started(self, id: str = "r1", **fields: Any) -> Log:
        """A request that was accepted and whose first progress has been read."""
        self.client.generate(id, **fields)
        while (await self.client.next()).get("type") != "progress":
            pass
        return self.engine.logs[-1]

    async def attached(self, stream: str, after: int = 0, id: str = "r1", **fields: Any) -> Message:
        """The answer to an `attach`."""
        self.client.send("attach", id=id, stream=stream, after=after, **fields)
        return await self.client.next("hello")

    async def closed(self) -> int:
        with anyio.fail_after(PATIENCE_S):
            await self.ended.wait()
        assert self.client.closed is not None
        return self.client.closed[0]

    async def left(self, code: int = 1006) -> None:
        """The client has closed and the session has seen it."""
        self.client.disconnect(code)
        with anyio.fail_after(PATIENCE_S):
            await self.ended.wait()


class Hub:
    """The streams of one server, and as many connections to it as a test wants."""

    def __init__(self, tasks: TaskGroup, engine: Any, config: ServerConfig, connected: list[Connected]) -> None:
        self.engine = engine
        self.config = config
        self.streams = Streams(engine, config)
        self._tasks = tasks
        self._connected = connected
        tasks.start_soon(self.streams.run)

    def connect(self, **options: Any) -> Connected:
        connected = Connected(self, **options)
        self._connected.append(connected)
        self._tasks.start_soon(connected.run)
        return connected


@asynccontextmanager
async def hub(engine: Any = None, **config: Any) -> AsyncIterator[Hub]:
    connected: list[Connected] = []
    try:
        async with anyio.create_task_group() as tasks:
            try:
                yield Hub(tasks, engine or ScriptedEngine(), ServerConfig(**config), connected)
            finally:
                tasks.cancel_scope.cancel()
    finally:
        for each in connected:
            each.client.free()


@asynccontextmanager
async def connect(**config: Any) -> AsyncIterator[Connected]:
    async with hub(**config) as it:
        yield it.connect()
