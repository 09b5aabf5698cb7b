"""What the routes look at and the drain acts on: the engine, once it is there, and the open sessions."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from streamengine.config import ServerConfig
from streamengine.engine import Engine
from streamengine.errors import RateLimited, Unauthorized
from streamengine.link import Progress
from streamengine.server.identity import Keys, Principal, Tickets
from streamengine.session import Session
from streamengine.streams import Streams

FLUSH_S = 5.0
"""After the last stream has ended: how long slow clients may take to read the rest, in seconds."""


class Seat:
    """One open connection, and whose it is as soon as that is known."""

    def __init__(self, service: "Service", principal: Principal | None) -> None:
        self.principal = principal
        self.session: Session | None = None
        self._service = service

    def admit(self, token: str) -> Principal:
        """Whose key ``token`` is. Raises `Unauthorized`, and `RateLimited` where that one has too many connections."""
        principal = self._service.keys.find(token)
        if self.principal is None:
            self._service.check_connections(principal)
            self.principal = principal
        elif self.principal != principal:
            raise Unauthorized("the connection is another principal's")
        return principal


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
        self._seats: set[Seat] = set()
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
        return len(self._seats)

    def check_connections(self, principal: Principal) -> None:
        """Raises `RateLimited` where one more of this principal would be too many."""
        if principal.anonymous:
            return
        most, name = self.config.max_principal_connections, principal.name
        if sum(seat.principal is not None and seat.principal.name == name for seat in self._seats) >= most:
            raise RateLimited(f"{most} connections of this key are open, which is the most", limit=most)

    @contextmanager
    def connection(self, principal: Principal | None) -> Iterator[Seat]:
        """Count a connection and let the drain reach its session, while inside."""
        seat = Seat(self, principal)
        self._seats.add(seat)
        try:
            yield seat
        finally:
            self._seats.discard(seat)
            if self.draining and not self._seats:
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
        for seat in self._seats:
            if seat.session is not None:
                seat.session.go_away("shutdown", deadline_s)

    async def _flush(self) -> None:
        if self._seats:
            with anyio.move_on_after(FLUSH_S):
                await self._empty.wait()
