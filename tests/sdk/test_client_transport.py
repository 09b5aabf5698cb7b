"""The client on real sockets, against the server of another library, which runs in a thread of its own."""

import asyncio  # noqa: TID251 - the server is asyncio's, whatever the client runs on
import base64
import shutil
import socket
import ssl
import subprocess
import threading
import traceback
import zlib
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from queue import Queue

import anyio
import anyio.to_thread
import pytest
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from streamengine_sdk import (
    AsyncClient,
    ConnectError,
    ConnectionLost,
    Endpoint,
    Unauthorized,
    WebSocketTransport,
    wire,
)
from tests.sdk.scripted import PATIENCE_S

TOKEN = "s3cret"
WORDS = ["Grüße", " aus", " 東京", "! "]


class SocketServer:
    """Says `WORDS` to every prompt, then waits for a cancel where the prompt is "forever"."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl_context = ssl_context
        self.heard: Queue[wire.ClientMessage | str] = Queue()
        self.paths: Queue[str | None] = Queue()
        self.port = 0
        self.refusal: HTTPStatus | None = None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    def __enter__(self) -> "SocketServer":
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _serve(self) -> None:
        async with serve(
            self._talk,
            "127.0.0.1",
            0,
            subprotocols=[wire.PROTOCOL],  # type: ignore[list-item]
            process_request=self._authorize,
            ping_interval=0.02,
            ssl=self._ssl_context,
        ) as server:
            assert isinstance(server, Server)
            self.port = next(iter(server.sockets)).getsockname()[1]
            self._ready.set()
            await self._stop.wait()

    def _authorize(self, _: ServerConnection, request: Request) -> Response | None:
        self.paths.put(request.path)
        if self.refusal is not None:
            return Response(self.refusal, "", Headers({"Content-Length": "0"}), b"")
        if request.headers.get("Authorization") == f"Bearer {TOKEN}":
            return None
        return Response(HTTPStatus.UNAUTHORIZED, "Unauthorized", Headers({"Content-Length": "9"}), b"no token!")

    async def _talk(self, connection: ServerConnection) -> None:
        limits = wire.Limits(max_message_bytes=1_000_000, max_streams=64, heartbeat_s=15)
        await connection.send(wire.encode(wire.Hello(protocol=wire.PROTOCOL, epoch="e", auth="ok", limits=limits)))
        try:
            async for frame in connection:
                message = wire.decode_client(frame)
                self.heard.put(message)
                if isinstance(message, wire.Generate):
                    await self._answer(connection, message)
        except ConnectionClosed:
            pass
        self.heard.put(f"closed {connection.close_code}")

    async def _answer(self, connection: ServerConnection, request: wire.Generate) -> None:
        if request.prompt == "drop":
            connection.transport.abort()
            return
        for seq, word in enumerate(WORDS, 1):
            frame = wire.encode(wire.Delta(id=request.id, seq=seq, text=word))
            # In fragments, which a proxy may make of any message.
            await connection.send([frame[:7], frame[7:]])
        if request.prompt != "forever":
            data = "".join(WORDS).encode()
            usage = wire.Usage(prompt_tokens=1, completion_tokens=4, total_tokens=5)
            check = wire.Check(bytes=len(data), crc32=zlib.crc32(data))
            done = wire.Done(id=request.id, seq=5, finish_reason="stop", usage=usage, check=check)
            await connection.send(wire.encode(done))

    async def next_heard(self) -> wire.ClientMessage | str:
        heard = await anyio.to_thread.run_sync(lambda: self.heard.get(timeout=PATIENCE_S))
        return await self.next_heard() if isinstance(heard, wire.Init) else heard


@pytest.fixture
def server() -> Iterator[SocketServer]:
    with SocketServer() as running:
        yield running


@pytest.fixture
def client(server: SocketServer) -> AsyncClient:
    return AsyncClient(f"http://127.0.0.1:{server.port}", token=TOKEN, reconnect=None)


@pytest.mark.anyio
async def test_an_answer_comes_over_a_real_socket(server: SocketServer, client: AsyncClient) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with client:
            assert (await client.generate("hi")).text == "".join(WORDS)
            assert server.paths.get_nowait() == "/v1/stream"
            async with client.stream("again") as stream:
                assert [text async for text in stream.text] == WORDS
        assert isinstance(await server.next_heard(), wire.Generate)
        assert isinstance(await server.next_heard(), wire.Generate)
        assert await server.next_heard() == "closed 1000"


@pytest.mark.anyio
async def test_a_break_reaches_a_real_server(server: SocketServer, client: AsyncClient) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with client:
            async for _ in client.stream("forever"):
                break
            assert isinstance(await server.next_heard(), wire.Generate)
            assert await server.next_heard() == wire.Cancel(id="r1")


@pytest.mark.anyio
async def test_a_cancelled_scope_around_the_client_says_goodbye(server: SocketServer, client: AsyncClient) -> None:
    with anyio.move_on_after(PATIENCE_S) as scope:
        async with client:
            async for event in client.stream("forever"):
                if event.seq == len(WORDS):  # type: ignore[union-attr]
                    scope.cancel()
    assert isinstance(await server.next_heard(), wire.Generate)
    assert await server.next_heard() in (wire.Cancel(id="r1"), "closed 1000")


@pytest.mark.anyio
async def test_a_broken_socket_is_a_lost_connection(server: SocketServer, client: AsyncClient) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with client:
            with pytest.raises(ConnectionLost) as caught:
                await client.generate("drop")
            assert caught.value.close_code == 1006
            assert (await client.generate("hi")).text == "".join(WORDS)


@pytest.mark.anyio
async def test_a_missing_token_is_unauthorized(server: SocketServer) -> None:
    with anyio.fail_after(PATIENCE_S):
        async with AsyncClient(f"ws://127.0.0.1:{server.port}") as client:
            with pytest.raises(Unauthorized, match="no token!") as caught:
                await client.generate("hi")
            assert caught.value.status == 401


@pytest.mark.parametrize(("status", "again"), [(403, False), (404, False), (429, True), (500, True), (503, True)])
@pytest.mark.anyio
async def test_what_a_handshake_is_answered_by_says_whether_another_may_do_better(
    server: SocketServer, client: AsyncClient, status: int, again: bool
) -> None:
    server.refusal = HTTPStatus(status)
    with anyio.fail_after(PATIENCE_S):
        async with client:
            with pytest.raises(ConnectError, match=f"answered HTTP {status}") as caught:
                await client.generate("hi")
    assert caught.value.retryable == again


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.anyio
async def test_a_port_where_nobody_listens_is_one_short_connect_error(host: str) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with anyio.fail_after(PATIENCE_S):
            async with AsyncClient(f"http://{host}:{reserved.getsockname()[1]}") as client:
                with pytest.raises(ConnectError, match=r"no connection to ws://.*(refused|111)") as caught:
                    await client.generate("hi")
    shown = "".join(traceback.format_exception(caught.value))
    assert "ExceptionGroup" not in shown
    assert shown.count("Traceback") == 1


@pytest.mark.anyio
async def test_a_server_of_another_kind_is_a_connect_error() -> None:
    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"SSH-2.0-OpenSSH_9.6\r\n")

    with anyio.fail_after(PATIENCE_S):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, answer)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            async with AsyncClient(f"http://127.0.0.1:{port}") as client:
                with pytest.raises(ConnectError, match="is no WebSocket"):
                    await client.generate("hi")
            tasks.cancel_scope.cancel()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for localhost that signs itself, with its key, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path / "localhost.pem"
    command = [openssl, "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(tmp_path / "key"), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    path.write_text(path.read_text() + (tmp_path / "key").read_text())
    return path


@pytest.mark.anyio
async def test_wss_works_where_the_certificate_is_trusted_and_nowhere_else(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))

    def transport(endpoint: Endpoint) -> WebSocketTransport:
        return WebSocketTransport(endpoint, ssl_context=trusting)

    with SocketServer(context) as server, anyio.fail_after(2 * PATIENCE_S):
        url = f"https://localhost:{server.port}"
        async with AsyncClient(url, token=TOKEN, transport=transport) as client:
            assert (await client.generate("hi")).text == "".join(WORDS)
        async with AsyncClient(url, token=TOKEN) as client:
            with pytest.raises(ConnectError, match="certificate"):
                await client.generate("hi")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", "ws://h/v1/stream"),
        ("https://h:8443/", "wss://h:8443/v1/stream"),
        ("ws://[::1]:8000", "ws://[::1]:8000/v1/stream"),
        ("wss://h/deep/path?x=1", "wss://h/deep/path?x=1"),
    ],
)
def test_urls_of_http_and_ws_mean_the_same(url: str, expected: str) -> None:
    assert Endpoint.parse(url).url == expected


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:port", "http://me:pw@h", "http://h#x"])
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        AsyncClient(url)


@pytest.mark.parametrize("token", ["", "two words", "line\r\nX-Evil: 1", "schlüssel"])
def test_a_token_that_would_break_the_header_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        AsyncClient("http://h", token=token)


def test_a_token_is_not_shown() -> None:
    endpoint = Endpoint.parse("http://h", TOKEN)
    assert endpoint.headers == {"Authorization": f"Bearer {TOKEN}"}
    assert TOKEN not in repr(endpoint)
    assert base64.b64encode(TOKEN.encode()).decode() not in repr(endpoint)
