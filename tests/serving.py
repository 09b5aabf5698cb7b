"""A real server over a fake runner, in a thread with its own event loop, for tests that come from outside."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.to_thread import run_sync
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from compiled.step import Runner
from streamengine.config import EngineConfig, ServerConfig
from streamengine.core import run_core
from streamengine.engine import Engine
from streamengine.link import CoreLink, FrontLink, Progress, link_pair
from streamengine.server import Server
from streamengine.server.run import OpenEngine
from tests.fakes import ByteTokenizer, FakeRunner, fake_kv
from tests.schema import validate

PATIENCE_S = 20.0
BuildRunner = Callable[[Callable[[Progress], None]], Runner]


def roomy_runner(**more: Any) -> FakeRunner:
    return FakeRunner(kv=fake_kv(pages=2049, page_size=16), **more)


def engine_over(runner: Runner | BuildRunner, **config: Any) -> OpenEngine:
    """Opens an engine whose core is a thread of this process. A function is called there to build the runner."""

    def build(_: EngineConfig, report: Callable[[Progress], None]) -> Runner:
        return runner(report) if callable(runner) else runner

    @asynccontextmanager
    async def core() -> AsyncIterator[FrontLink]:
        front, back = link_pair()
        thread = threading.Thread(target=run_core, args=(CoreLink(back), build), daemon=True)
        thread.start()
        link = await FrontLink.open(front)
        try:
            yield link
        finally:
            await link.aclose()
            await run_sync(thread.join, PATIENCE_S)

    def open_engine(progress: Callable[[Progress], None]) -> AbstractAsyncContextManager[Engine]:
        return Engine(EngineConfig(**config), core, lambda folder: ByteTokenizer(), progress=progress)

    return open_engine


@dataclass
class Served:
    server: Server
    portal: BlockingPortal
    ended: Any
    """A future: done when the server has ended, with what it raised."""
    stopped: bool = False

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        self.stopped = True
        self.portal.call(self.server.stop)

    def get(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        return self.ask("GET", path, **headers)

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, Any, Any]:
        """Status, headers, body: parsed where it is JSON."""
        request = urllib.request.Request(self.url + path, headers=headers, method=method)
        try:
            answer: Any = urllib.request.urlopen(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body = answer.read()
            parsed = json.loads(body) if body and answer.headers["content-type"] == "application/json" else body
            return answer.status, answer.headers, parsed

    def handshake(self, *headers: str, path: str = "/v1/stream", host: str | None = None) -> tuple[int, str]:
        """Ask for a WebSocket by hand; status and head of the answer."""
        status, head, _ = self._upgrade(*headers, path=path, host=host)
        return status, head

    def refusal(self, *headers: str) -> tuple[int, str]:
        """The same; status and the beginning of the body."""
        status, _, body = self._upgrade(*headers, path="/v1/stream", host=None)
        return status, body

    def _upgrade(self, *headers: str, path: str, host: str | None) -> tuple[int, str, str]:
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: {host or f'127.0.0.1:{self.port}'}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            *headers,
        ]
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as sock:
            sock.sendall("\r\n".join([*lines, "", ""]).encode())
            head = b""
            while b"\r\n\r\n" not in head:
                received = sock.recv(4096)
                assert received, f"closed after {head!r}"
                head += received
        top, _, body = head.partition(b"\r\n\r\n")
        return int(top.split()[1]), top.decode(), body.decode(errors="replace")

    @contextmanager
    def connect(self, query: str = "", **options: Any) -> Iterator["Client"]:
        url = f"ws{self.url.removeprefix('http')}/v1/stream{query}"
        with connect(
            url, subprotocols=[Subprotocol("streamengine.v1")], open_timeout=PATIENCE_S, **options
        ) as connection:
            client = Client(connection)
            assert client.next()["type"] == "hello"
            yield client


class Client:
    """A raw client that holds every message, its own too, against the schema."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, type: str, **fields: Any) -> None:
        self.connection.send(json.dumps(validate("client", {"type": type, **fields})))

    def generate(self, id: str = "r1", **fields: Any) -> None:
        self.send("generate", id=id, **{"prompt": "hello", "temperature": 0, **fields})

    def next(self) -> dict[str, Any]:
        return validate("server", str(self.connection.recv(PATIENCE_S)))

    def until(self, *types: str) -> list[dict[str, Any]]:
        messages = [self.next()]
        while messages[-1]["type"] not in types:
            messages.append(self.next())
        return messages


def text_of(messages: list[dict[str, Any]]) -> str:
    """The text of one stream. Its deltas have no gap, and its end agrees with them."""
    deltas = [message for message in messages if message["type"] == "delta"]
    last = 0
    for delta in deltas:
        assert delta["seq"] - delta.get("n", 1) == last, f"{delta} after {last}"
        last = delta["seq"]
    text = "".join(delta["text"] for delta in deltas)
    for done in messages:
        if done["type"] == "done":
            assert (done["seq"], done["check"]["bytes"]) == (last + 1, len(text.encode()))
    return text


def eventually(condition: Callable[[], bool]) -> None:
    """For what is only visible through another request: asked again until it holds, within bounds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@contextmanager
def serving(open_engine: OpenEngine, *, wait: bool = True, **config: Any) -> Iterator[Served]:
    """A server on a free port. Leaving it stops it, unless the test has seen to that."""
    ready = threading.Event()
    with start_blocking_portal("asyncio", {"use_uvloop": True}) as portal:
        settings = ServerConfig(**{"port": 0, "drain_s": 0.0, **config})
        server = portal.call(lambda: Server(settings, open_engine, ready=lambda url: ready.set()))
        served = Served(server, portal, portal.start_task_soon(server.run))
        try:
            if wait:
                assert ready.wait(PATIENCE_S), "never ready"
            yield served
        finally:
            if not served.ended.done():
                if not served.stopped:  # a second time would cut what the first one lets end
                    served.stop()
                served.ended.result(PATIENCE_S)
