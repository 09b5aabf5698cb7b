"""One socket: a reader, a writer and a watch, which carry out what the protocol decides."""

from contextlib import suppress
from threading import get_ident

import anyio
from anyio.abc import TaskGroup

from streamengine_sdk import wire
from streamengine_sdk.errors import ConnectionLost, EngineError
from streamengine_sdk.events import Trace
from streamengine_sdk.protocol import Protocol, lost
from streamengine_sdk.settings import Tracer
from streamengine_sdk.transport import Transport, TransportClosed


class Connection:
    """``transport`` is connected. `run` it in a task."""

    def __init__(self, transport: Transport, *, token: str | None = None, trace: Tracer = lambda _: None) -> None:
        self._transport = transport
        self._trace = trace
        self._mail = anyio.Event()
        self._greeted = anyio.Event()
        self._pings: dict[float, anyio.Event] = {}
        self._thread = get_ident()
        self._tasks: TaskGroup | None = None
        self.protocol = Protocol(anyio.current_time(), token=token, wake=self._wake)

    async def run(self) -> None:
        """Until the socket ends, or the task is cancelled. Raises nothing of its own: see ``protocol.error``."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._write)
                self._tasks.start_soon(self._watch)
                await self._read()
        finally:
            self._end(ConnectionLost("the client was closed", retryable=False))
            with anyio.CancelScope(shield=True):
                await self._transport.close()

    async def greeted(self) -> None:
        """Wait until `hello` is there. Raises the reason if the connection ends before."""
        await self._greeted.wait()
        self.protocol.check_alive()

    async def ping(self) -> None:
        """One round trip. Raises the reason if the connection ends before."""
        self.protocol.check_alive()
        t = anyio.current_time()
        answered = self._pings.setdefault(t, anyio.Event())
        self.protocol.post(wire.Ping(t=t))
        await answered.wait()
        self.protocol.check_alive()

    def _wake(self) -> None:
        # Only the loop's own thread may wake a task; otherwise the reader does it with the next message.
        if get_ident() == self._thread:
            with suppress(RuntimeError):  # a stream may be collected after its event loop has ended
                self._mail.set()

    async def _write(self) -> None:
        outbox = self.protocol.outbox
        try:
            while True:
                while outbox:
                    text, message = outbox.popleft()
                    await self._transport.send(text)
                    self._trace(Trace(kind="sent", message=message))
                self._mail = anyio.Event()
                if not outbox:
                    await self._mail.wait()
        except TransportClosed:
            pass  # the reader hears of it too, after what the server said before

    async def _read(self) -> None:
        try:
            while True:
                text = await self._transport.receive()
                for message in self.protocol.receive(text, anyio.current_time()):
                    self._trace(Trace(kind="received", message=message))
                    if isinstance(message, wire.Hello):
                        self._greeted.set()
                    elif isinstance(message, wire.Pong) and message.t in self._pings:
                        self._pings.pop(message.t).set()
                if self.protocol.outbox:
                    self._mail.set()
        except TransportClosed as closed:
            self._end(lost(closed.code, closed.reason))
        except EngineError as error:
            self._end(error)

    async def _watch(self) -> None:
        while anyio.current_time() < (dead_at := self.protocol.dead_at):
            with anyio.move_on_after(dead_at - anyio.current_time()):
                # A hello may say that it is earlier.
                await (anyio.sleep_forever() if self.protocol.hello else self._greeted.wait())
        self._end(ConnectionLost(f"nothing was heard for {self.protocol.patience_s:g} s"))

    def _end(self, error: EngineError) -> None:
        self.protocol.end(error)
        self._greeted.set()
        for answered in self._pings.values():
            answered.set()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
