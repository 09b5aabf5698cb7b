"""The typed channel between the engine's event loop and the core's synchronous loop.

One socket pair, length-prefixed msgpack, the same frozen values as everywhere, never pickle. Both ends may
live in one process (the core in a thread) or in two; there is no second implementation to keep equal.
The core's end blocks and polls; the engine's end is anyio. Whoever closes, the other sees
`LinkClosed`: that is how either side learns that the other is gone.

A frame is a list of messages of one direction, in order. Back-pressure: the core's `send` blocks while the
engine does not read, so a stalled event loop stops generation instead of filling memory (the engine reads
in a task that never waits for its writer, so the two cannot block each other). The engine's outbox never
blocks; what bounds it is what the engine admits, `EngineConfig.max_queue` requests and one abort each.
"""

import select
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from math import ceil
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from compiled.step import KVSpec, ModelSpec
from compiled.timeline import Measure
from streamengine.config import EngineConfig
from streamengine.frames import Frames, encode, pack
from streamengine.frames import LinkBroken as LinkBroken
from streamengine.frames import LinkClosed as LinkClosed
from streamengine.profile.record import Profile
from streamengine.request import Delta, Request

MAX_FRAME_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024

# engine → core


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """First message, once: build a runner from this."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End ``request`` now, or only its answer ``index``. Unknown or finished ones are ignored: races are normal."""

    request: int
    cause: str
    index: int | None = None


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop. What still runs is aborted."""


class AskStatistics(msgspec.Struct, frozen=True, tag="ask_statistics"):
    pass


class AskProfile(msgspec.Struct, frozen=True, tag="ask_profile"):
    """Measure the next steps, and with ``ceilings`` the machine after them, which no step runs beside. Answered once,
    by `Profiled`, after the last of them or after `EndProfile`. One at a time."""

    number: int
    measure: Measure
    ceilings: bool = False


class EndProfile(msgspec.Struct, frozen=True, tag="end_profile"):
    """Answer now with what was measured. One that is answered already is ignored."""

    number: int


ToCore = Configure | Submit | Abort | Stop | AskStatistics | AskProfile | EndProfile

# core → engine


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Start-up: ``phase`` is what is being done, ``done`` of ``total`` units (0 of 0: unknown)."""

    phase: str
    done: float = 0
    total: float = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Start-up is over, warm-up included; ``ledger`` says in bytes where the memory went."""

    model: ModelSpec
    kv: KVSpec
    ledger: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The core cannot start or go on. ``code`` is one of `errors`; the link closes after it."""

    code: str
    message: str


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """Everything that one step did."""

    deltas: tuple[Delta, ...]


class Statistics(msgspec.Struct, frozen=True, tag="statistics"):
    values: dict[str, float]


class Profiled(msgspec.Struct, frozen=True, tag="profiled"):
    """The profile that was asked for as ``number``, or the error that took its place, by its code."""

    number: int
    profile: Profile | None = None
    code: str = ""
    message: str = ""
    param: str | None = None


FromCore = Progress | Ready | Failed | Deltas | Statistics | Profiled


def link_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: the engine's (for `FrontLink.open`) and the core's (for `CoreLink`)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class HasFileno(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int: ...


class CoreLink:
    """The core's end: one thread, blocking. Owns ``sock``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._frames: Frames[ToCore] = Frames(list[ToCore], MAX_FRAME_BYTES)

    def receive(self, block: bool, beside: HasFileno | None = None, most_s: float | None = None) -> list[ToCore]:
        """All messages that are there; with ``block`` at least one, or none where ``beside`` can be read from, or
        ``most_s`` seconds have passed, before.

        Raises:
            LinkClosed: nothing is left to read and the engine's end is closed.
        """
        messages: list[ToCore] = []
        if block and beside is not None:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            poll.register(beside, select.POLLIN)
            poll.poll(None if most_s is None else ceil(1000 * most_s))
            block = False
        while True:
            wait = block and not messages
            try:
                data = self._sock.recv(_CHUNK_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except OSError as error:
                if messages:
                    return messages  # the next call raises
                raise LinkClosed(str(error)) from error
            if not data and messages:
                return messages
            messages += self._frames.feed(data)

    def send(self, message: FromCore) -> None:
        """Blocks while the engine does not read.

        Raises:
            LinkClosed: the engine's end is closed.
        """
        try:
            self._sock.sendall(pack([encode(message, MAX_FRAME_BYTES)]))
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def close(self) -> None:
        self._sock.close()


class FrontLink:
    """The engine's end: one task reads (`receive`), one writes (`run_writer`), anybody posts."""

    obituary: Callable[[], Awaitable[str]] | None = None
    """Says of a core that is gone how it ended. Given by whoever started it."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._frames: Frames[FromCore] = Frames(list[FromCore], MAX_FRAME_BYTES)
        self._inbox: deque[FromCore] = deque()
        self._outbox: deque[msgspec.Raw] = deque()
        self._posted = anyio.Event()
        self._thread = threading.get_ident()
        self._closed = False

    @classmethod
    async def open(cls, sock: socket.socket) -> "FrontLink":
        """Take ownership of ``sock`` in this event loop."""
        return cls(await anyio.abc.UNIXSocketStream.from_socket(sock))

    def post(self, *messages: ToCore) -> None:
        """Append to the outbox, in order. Never blocks; after the end it does nothing.

        A message that cannot be encoded is the poster's error, and nobody else's: see `encode`.
        Safe in a finalizer, which the garbage collector may run in any thread. An event must not be set
        from another thread, so such a message leaves with the next one that this thread posts or receives.
        An abort, the one message that finalizers post, is for a request that is about to send deltas.
        """
        if self._closed:
            return
        self._outbox.extend([encode(message, MAX_FRAME_BYTES) for message in messages])
        if threading.get_ident() == self._thread:
            self._posted.set()

    async def run_writer(self) -> None:
        """Write what is posted, in frames of whatever is there. Returns when the link has ended; why is
        for `receive` to say. Cancelling it may leave half a frame behind, so close the link afterwards."""
        while not self._closed:
            await self._posted.wait()
            self._posted = anyio.Event()
            while self._outbox:
                messages, size = [self._outbox.popleft()], 0
                while self._outbox and (size := size + len(memoryview(messages[-1]))) < _CHUNK_BYTES:
                    messages.append(self._outbox.popleft())
                try:
                    await self._stream.send(pack(messages))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return

    async def receive(self) -> FromCore:
        """The next message. One task at a time.

        Raises:
            LinkClosed: nothing is left to read and the core's end is closed, or this one.
        """
        if self._outbox:
            self._posted.set()
        while not self._inbox:
            try:
                data = await self._stream.receive(_CHUNK_BYTES)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                data = b""
            try:
                self._inbox.extend(self._frames.feed(data))
            except LinkClosed:
                self._end()
                raise
        return self._inbox.popleft()

    async def aclose(self) -> None:
        self._end()
        await self._stream.aclose()

    def _end(self) -> None:
        self._closed = True
        self._outbox.clear()
        self._posted.set()
