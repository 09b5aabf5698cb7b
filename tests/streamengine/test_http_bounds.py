"""What a connection may cost whose client neither sends nor reads as it should."""

import gzip
import json
import socket
import time
from typing import Any

import pytest

from streamengine.server import protocols
from tests.fakes import fake_model
from tests.serving import PATIENCE_S, Served, engine_over, eventually, roomy_runner, serving


def opened(served: Served, *, window: int | None = None) -> socket.socket:
    sock = socket.socket()
    if window is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    sock.settimeout(PATIENCE_S)
    sock.connect(("127.0.0.1", served.port))
    return sock


def post(body: bytes, *more: str, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *more, "", ""]
    return "\r\n".join(head).encode() + body


def read_to_end(client: socket.socket, pause_s: float = 0.0) -> bytes:
    received = b""
    while data := client.recv(3000):
        received += data
        time.sleep(pause_s)
    return received


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent() -> None:
    with serving(engine_over(roomy_runner())) as served, opened(served) as client:
        client.sendall(post(b"", "Expect: 100-continue", length=10**9))
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_is_compressed_is_refused_by_the_name_of_its_header() -> None:
    with serving(engine_over(roomy_runner())) as served, opened(served) as client:
        client.sendall(post(gzip.compress(b'{"prompt": "hello"}'), "Content-Encoding: gzip"))
        answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "content-encoding"


def test_a_body_that_says_that_it_is_not_compressed_is_read_however_that_is_spelt() -> None:
    with serving(engine_over(roomy_runner())) as served, opened(served) as client:
        client.sendall(post(b'{"prompt": "hello", "max_tokens": 1}', "Content-Encoding: Identity"))
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


HTTP_2 = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"
"""What Java's client sends with every request that is not encrypted."""


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_a_client_that_would_rather_speak_http_2_is_answered_as_if_it_had_not_said_so(size: int) -> None:
    asked = post(b'{"prompt": "hello", "max_tokens": 1}', *HTTP_2)
    asked += asked + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with serving(engine_over(roomy_runner())) as served, opened(served) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(asked), size):
            client.sendall(asked[at : at + size])
        answers = read_to_end(client)
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"HTTP/1.1") == 3
    assert answers.endswith(b'{"status":"ok"}')


UPGRADE = "\r\n".join(
    [
        *("GET /v1/stream HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket"),
        *("Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: YWFhYWFhYWFhYWFhYWFhYQ==", ""),
    ]
)


@pytest.mark.parametrize(
    ("more", "status"),
    [("X: a\r\n" * 200, 431), (f"Cookie: {'a' * 9000}\r\n", 431), ("Content-Length: 1\r\n\r\na", 400)],
    ids=["headers", "cookie", "body"],
)
def test_an_upgrade_that_only_websockets_find_at_fault_is_refused_and_not_forgotten(more: str, status: int) -> None:
    with serving(engine_over(roomy_runner())) as served, opened(served) as client:
        client.sendall(f"{UPGRADE}{more}\r\n".encode())
        assert read_to_end(client).startswith(f"HTTP/1.1 {status} ".encode())


def test_an_upgrade_that_is_refused_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with serving(engine_over(roomy_runner())) as served, opened(served) as client:
        client.sendall(f"{UPGRADE}Sec-WebSocket-Protocol: other\r\n\r\n".encode())
        assert read_to_end(client).startswith(b"HTTP/1.1 400 ")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "BODY_S", 0.2)
    with serving(engine_over(roomy_runner())) as served, opened(served) as client:
        client.sendall(post(b'{"prompt": "hel', length=100))
        answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert client.recv(1000) == b""


def test_a_client_that_reads_nothing_of_its_answer_is_cut_and_nothing_is_kept_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocols, "STALL_S", 0.3)

    def answer(context: Any, sampling: Any) -> int:
        time.sleep(0.0005)
        return ord("x")

    runner = roomy_runner(model=fake_model(max_model_len=30_000), answer=answer)
    body = {"prompt": "hello", "ignore_eos": True, "max_tokens": 20_000, "stream": True}
    with serving(engine_over(runner)) as served, opened(served, window=2048) as client:
        client.sendall(post(json.dumps(body).encode()))
        eventually(lambda: served.get("/v1/stats")[2]["streams_attached"] == 1)
        eventually(lambda: served.get("/v1/stats")[2]["streams_attached"] == 0)
        assert b"[DONE]" not in read_to_end(client)


def test_a_client_that_reads_slowly_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "STALL_S", 0.3)
    runner = roomy_runner(model=fake_model(max_model_len=30_000))
    body = {"prompt": "hello", "ignore_eos": True, "max_tokens": 2000, "stream": True, "logprobs": 1}
    with serving(engine_over(runner)) as served, opened(served, window=4096) as client:
        client.sendall(post(json.dumps(body).encode(), "Connection: close"))
        assert read_to_end(client, 0.002).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
