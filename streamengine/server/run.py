"""From a bound socket to a drained one: uvicorn, the engine beside it, and signals.

In this order: the socket is bound, so that a taken port is known before anything is loaded; uvicorn
listens, so that `/ready` tells how far loading is; the engine starts; then we wait for a signal or for
the engine's death. On the first signal the service drains while the port still answers (`/ready` 503, new
sockets 503), on the second everything ends at once. The engine goes before uvicorn does.
"""

import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial

import anyio
import uvicorn
from anyio.abc import TaskGroup

from streamengine import compose
from streamengine.config import EngineConfig, ServerConfig, is_loopback
from streamengine.engine import Engine
from streamengine.errors import ShuttingDown, StartupError, StreamEngineError
from streamengine.link import Progress
from streamengine.server.app import create_app
from streamengine.server.identity import ENVIRONMENT, Keys
from streamengine.server.logs import configure_logging
from streamengine.server.protocols import StreamProtocol, http_protocol
from streamengine.server.service import Service

BACKLOG = 2048
PING_S = 20.0
CLOSING_S = 3
"""After the drain: how long uvicorn waits for closing handshakes before it cuts, in whole seconds."""

logger = logging.getLogger(__name__)

OpenEngine = Callable[[Callable[[Progress], None]], AbstractAsyncContextManager[Engine]]
"""Gives an engine that reports its start-up to the argument and is ready once entered."""


def serve(
    config: EngineConfig,
    server: ServerConfig,
    *,
    restart: bool = False,
    ready: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT has drained the server. Owns the process: signals and event loop.

    Args:
        restart: start a new core when one dies, instead of ending with `EngineFailure`.
        ready: is called with the URL once requests are answered.
        progress: is called with each start-up message.

    Raises:
        StartupError: the port is taken, or the engine cannot start.
        EngineFailure: the core died.
        ShuttingDown: a second signal cut what the first one had let run.
    """

    def open_engine(report: Callable[[Progress], None]) -> AbstractAsyncContextManager[Engine]:
        def told(message: Progress) -> None:
            report(message)
            if progress is not None:
                progress(message)

        return compose.open_engine(config, restart=restart, progress=told)

    configure_logging(server)
    keys = Keys(server, os.environ.get(ENVIRONMENT, ""))

    def told_ready(url: str) -> None:
        if not (keys.needed or is_loopback(server.host)):
            logger.warning("anybody who reaches %s may use this server: there are no API keys", server.host)
        if ready is not None:
            ready(url)

    running = Server(server, open_engine, keys=keys, ready=told_ready)
    anyio.run(partial(running.run, signals=True), backend="asyncio", backend_options={"use_uvloop": True})


class Server:
    """One server in an event loop that belongs to somebody else.

    Raises:
        StartupError: the address cannot be bound.
    """

    def __init__(
        self,
        config: ServerConfig,
        open_engine: OpenEngine,
        *,
        keys: Keys | None = None,
        ready: Callable[[str], None] | None = None,
    ) -> None:
        self.service = Service(config, keys)
        self._open_engine = open_engine
        self._ready = ready
        self._uvicorn = _Uvicorn(_uvicorn_config(self.service))
        try:
            self._uvicorn.config.load()
        except OSError as error:  # of TLS as well
            raise StartupError(f"the TLS files cannot be used: {error}", param="tls_cert") from error
        self._socket = _bind(config)  # last: whatever raises above leaves no socket open
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if config.tls_cert is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._stop = anyio.Event()
        self._engine_scope: anyio.CancelScope | None = None
        self._drained = False

    def stop(self) -> None:
        """Drain and end; while the engine still starts, and on a second call, end at once: what runs is cut, and `run`
        says so."""
        if self._engine_scope is not None and (self._stop.is_set() or self.service.engine is None):
            self._engine_scope.cancel()
        self._stop.set()

    async def run(self, *, signals: bool = False) -> None:
        """Serve until `stop` or, with ``signals``, SIGTERM or SIGINT.

        Raises:
            StartupError: the engine cannot start.
            EngineFailure: the core died; its streams were told.
            ShuttingDown: a second `stop`, or signal, cut what the first one had let run.
        """
        failure: StreamEngineError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._uvicorn.serve, [self._socket])
            if signals:
                tasks.start_soon(self._stop_on_signals)
            try:
                with anyio.CancelScope() as scope:
                    self._engine_scope = scope
                    await self._run_engine(tasks)
            except StreamEngineError as error:
                failure = error
            if scope.cancelled_caught and self.service.engine is not None and not self._drained:
                failure = ShuttingDown("told to stop a second time: the drain was cut off")
            await self._uvicorn.finish()
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _run_engine(self, tasks: TaskGroup) -> None:
        async with self._open_engine(self._report) as engine:
            # Not in here: whatever else is told to end at a second stop, the engine is to know first that it was.
            tasks.start_soon(self.service.open(engine).run)
            if self._ready is not None:
                self._ready(self.url)
            failure = await self._failed_before_stop(engine)
            if failure is not None:
                await self.service.fail()
                raise failure
            await self.service.drain()
            self._drained = True

    async def _failed_before_stop(self, engine: Engine) -> StreamEngineError | None:
        failure: StreamEngineError | None = None

        async def watch() -> None:
            nonlocal failure
            failure = await engine.wait_failed()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await self._stop.wait()
            tasks.cancel_scope.cancel()
        return failure

    def _report(self, message: Progress) -> None:
        self.service.progress = message

    async def _stop_on_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for _ in received:
                self.stop()


class _Uvicorn(uvicorn.Server):
    """Leaves signals alone, and can be waited for."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._finished = anyio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self._finished.set()

    async def finish(self) -> None:
        """Close the listener, then what is still open, and wait for that."""
        self.should_exit = True
        await self._finished.wait()


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service),
        http=http_protocol(service.config.max_header_bytes),
        ws=StreamProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws_max_size=service.config.max_message_bytes,
        ws_per_message_deflate=False,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        timeout_graceful_shutdown=CLOSING_S,
        ssl_certfile=service.config.tls_cert,
        ssl_keyfile=service.config.tls_key,
    )


def _bind(config: ServerConfig) -> socket.socket:
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except (OSError, ValueError) as error:  # a name with a label of 64 characters is no name
        raise StartupError(f"host {config.host} is no address of this machine: {error}", param="host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Now, since two sockets that only bind can share a port: the second must fail before it loads a model.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_bind(config, error) from error
    sock.setblocking(False)
    return sock


def _cannot_bind(config: ServerConfig, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {config.port} on {config.host} is in use", param="port")
    if error.errno == errno.EACCES:
        return StartupError(f"port {config.port} on {config.host} needs more rights", param="port")
    return StartupError(f"cannot listen on {config.host}: {error.strerror}", param="host")
