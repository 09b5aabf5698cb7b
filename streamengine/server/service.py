"""What the routes look at and the drain acts on: the engine, once it is there, and the open sessions."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from streamengine.config import ServerConfig
from streamengine.engine import Engine
from streamengine.link import Progress
from streamengine.server.identity import Keys, Tickets
from streamengine.session import Session
from streamengine.streams import Streams

FLUSH_S = 5.0
"""After the last stream has ended: how long slow clients may take to read the rest, in seconds."""


class Service:
    """The state of one server. ``engine`` and ``streams`` are None until the engine is ready."""

    def __init__(self, config: ServerConfig, keys: Keys | None = None) -> None:
        self.config = config
        self.keys = keys or Keys(config)
        self.tickets = Tickets()
        self.engine: Engine | None = None
        self.streams: Streams | None = None
        self.progress: Progress | None = None
        self.draining = False
        self._sessions: set[Session] = set()
        self._empty = anyio.Event()

    @property
    def status(self) -> str:
        """``starting``, ``ready``, ``draining``, ``failed`` or ``closed``."""
        if self.engine is not None and self.engine.status != "ready":
            return self.engine.status
        return "draining" if self.draining else "ready" if self.engine is not None else "starting"

    def open(self, engine: Engine) -> Streams:
        """Requests are taken from now on; `Streams.run` is to be run beside."""
        self.engine, self.streams = engine, Streams(engine, self.config)
        return self.streams

    @property
    def connections(self) -> int:
        return len(self._sessions)

    @contextmanager
    def connection(self, session: Session) -> Iterator[None]:
        """Count ``session`` and let the drain reach it, while inside."""
        self._sessions.add(session)
        try:
            yield
        finally:
            self._sessions.discard(session)
            if self.draining and not self._sessions:
                self._empty.set()

    async def drain(self) -> None:
        """Refuse what is new; let what runs finish within ``drain_s``; wait until its clients have it."""
        self._dismiss(self.config.drain_s)
        if self.engine is not None:
            await self.engine.drain(self.config.drain_s)
        await self._flush()

    async def fail(self) -> None:
        """The engine is dead and every stream has its error: let the clients read it, and close."""
        self._dismiss(0)
        await self._flush()

    def _dismiss(self, deadline_s: float) -> None:
        self.draining = True
        for session in self._sessions:
            session.go_away("shutdown", deadline_s)

    async def _flush(self) -> None:
        if self._sessions:
            with anyio.move_on_after(FLUSH_S):
                await self._empty.wait()
