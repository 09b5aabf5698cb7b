"""Who may come in, from outside: every route, every way to bring a key, and what is written about it."""

import base64
import json
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from streamengine.config import ServerConfig
from streamengine.errors import StartupError
from streamengine.server import Server, protocols
from streamengine.server.app import routes
from streamengine.server.gate import OPEN
from streamengine.server.logs import JSONLines, TextLines
from streamengine.server.service import Service
from tests.serving import PATIENCE_S, Client, Served, engine_over, eventually, roomy_runner, serving, text_of

KEYS = """
[alice]
key = "sk-alice-1"

[root]
key = "sk-root-01"
admin = true
"""
ALICE = "Authorization: Bearer sk-alice-1"

CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUL9PmBM2HNDUoMYoSd9WELSYrmfEwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTE4MjcyMFoYDzIxMjYxMTA1
MTgyNzIwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASZ80UA/7qRiffufAWXIOuIa5Er3Ta4MtuzhxUfDpJ762H7gpbRdCwp
yJhrfS/1dL9Vv/I6xinC/1LaWm4+rNEio28wbTAdBgNVHQ4EFgQUQfamCG6XUix9
VKvXi8n4pGzTuT0wHwYDVR0jBBgwFoAUQfamCG6XUix9VKvXi8n4pGzTuT0wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAM+YBA7h64tx+bh3kGkPhG7Z5siVHHQzDizIRdgp5ABaAiB8
Q5yGxnP3nC4+O7Yam3ucyPFmXfeF+Pf9y2z0bDn+Jw==
-----END CERTIFICATE-----
"""
CERTIFICATE_KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgItY82Ev8TC/h/Pmz
S6MD4yOloQfNRsQzUhWF5PDGROmhRANCAASZ80UA/7qRiffufAWXIOuIa5Er3Ta4
MtuzhxUfDpJ762H7gpbRdCwpyJhrfS/1dL9Vv/I6xinC/1LaWm4+rNEi
-----END PRIVATE KEY-----
"""


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return str(path)


@pytest.fixture
def guarded(key_file: str) -> Iterator[Served]:
    with serving(engine_over(roomy_runner()), api_key_file=key_file, max_principal_connections=2) as served:
        yield served


def offered(token: str) -> str:
    encoded = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return f"Sec-WebSocket-Protocol: streamengine.v1, streamengine.auth.{encoded}"


def talk(served: Served, *headers: str, path: str = "/v1/stream") -> tuple[list[Any], int]:
    """What a connection that was upgraded hears without saying anything, and its close code; 0 if it stays open."""
    messages: list[Any] = []
    options = dict(header.split(": ", 1) for header in headers)
    protocols = [Subprotocol(name) for name in options.pop("Sec-WebSocket-Protocol", "streamengine.v1").split(", ")]
    url = f"ws{served.url.removeprefix('http')}{path}"
    with connect(url, subprotocols=protocols, additional_headers=options) as connection:
        client = Client(connection)
        try:
            while not messages or messages[-1]["type"] != "hello":
                messages.append(client.next())
        except ConnectionClosed:
            return messages, connection.protocol.close_code or 0
    return messages, 0


# every route


def test_every_route_needs_a_key_but_those_that_are_meant_to_be_open(guarded: Served) -> None:
    asked = 0
    for route in routes(Service(ServerConfig())):
        path = re.sub(r"{[^}]*}", "x", route.path)  # type: ignore[attr-defined]
        if not isinstance(route, Route):
            assert guarded.handshake("Authorization: Bearer wrong", path=path)[0] == 401
            continue
        for method in sorted(route.methods or {"GET"}):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sk-alice-1"}):
                status, answered, body = guarded.ask(method, path, **headers)
                if path in OPEN | {"/metrics"}:
                    assert status == 200
                else:
                    assert (status, answered["www-authenticate"]) == (401, "Bearer"), f"{method} {path}"
                    assert method == "HEAD" or body["error"]["code"] == "unauthorized"
                asked += 1
    assert asked > 30
    assert guarded.ask("GET", "/v1/models", Authorization="Bearer sk-alice-1")[0] == 200
    assert guarded.ask("GET", "/nothing", Authorization="Bearer sk-alice-1")[0] == 404


def test_statistics_are_for_admins_and_metrics_can_be_closed(key_file: str) -> None:
    with serving(engine_over(roomy_runner()), api_key_file=key_file, protect_metrics=True) as served:
        assert served.ask("GET", "/v1/stats", Authorization="Bearer sk-alice-1")[0] == 403
        assert served.ask("GET", "/v1/stats", Authorization="Bearer sk-root-01")[0] == 200
        assert served.ask("GET", "/metrics")[0] == 401
        assert served.ask("GET", "/metrics", Authorization="Bearer sk-alice-1")[0] == 200


# every way to bring a key to a WebSocket


def test_a_bearer_or_a_token_among_the_subprotocols_is_enough(guarded: Served) -> None:
    for header in (ALICE, offered("sk-alice-1")):
        messages, code = talk(guarded, header)
        assert (messages[0]["auth"], code) == ("ok", 0)


def test_a_token_among_the_subprotocols_is_never_sent_back(guarded: Served) -> None:
    status, head = guarded.handshake(offered("sk-alice-1"))
    assert status == 101
    assert "sec-websocket-protocol: streamengine.v1\r\n" in (head + "\r\n").lower()
    assert "streamengine.auth" not in head


@pytest.mark.parametrize("token", ["wrong", "", "sk-alice-1 ", "é"])
def test_a_browser_can_read_why_its_token_is_refused(guarded: Served, token: str) -> None:
    messages, code = talk(guarded, offered(token))
    assert ([(message["code"], message["fatal"]) for message in messages], code) == ([("unauthorized", True)], 4401)


def test_a_token_that_is_not_encoded_is_refused_the_same_way(guarded: Served) -> None:
    assert talk(guarded, "Sec-WebSocket-Protocol: streamengine.v1, streamengine.auth.!")[1] == 4401


def test_a_token_alone_is_no_known_subprotocol_and_is_not_quoted(guarded: Served) -> None:
    header = offered("sk-alice-1").replace("streamengine.v1, ", "")
    status, body = guarded.refusal(header)
    assert status == 400
    assert "auth" not in body


def test_a_wrong_bearer_is_refused_before_the_upgrade(guarded: Served) -> None:
    assert guarded.handshake("Authorization: Bearer wrong")[0] == 401
    assert guarded.handshake("Authorization: Bearer wrong", offered("sk-alice-1"))[0] == 401


def test_without_a_key_the_first_message_must_bring_it(guarded: Served) -> None:
    with guarded.connect() as client:
        client.send("init", token="sk-alice-1")
        client.generate(max_tokens=5)
        assert len(text_of(client.until("done", "error"))) == 5
    with guarded.connect() as client:
        client.generate()
        assert client.next()["code"] == "unauthorized"


def ticket(served: Served) -> str:
    status, headers, body = served.ask("POST", "/v1/tickets", Authorization="Bearer sk-alice-1")
    assert (status, headers["cache-control"], body["expires_in"]) == (200, "no-store", 60)
    found: str = body["ticket"]
    return found


def test_a_ticket_opens_one_connection(guarded: Served) -> None:
    path = f"/v1/stream?ticket={ticket(guarded)}"
    messages, code = talk(guarded, path=path)
    assert (messages[0]["auth"], code) == ("ok", 0)
    assert guarded.handshake(path=path)[0] == 401


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("ticket=sk-alice-1", 401),
        ("ticket=", 401),
        ("token=sk-alice-1", 400),
        ("api_key=sk-alice-1", 400),
        ("access_token=sk-alice-1", 400),
    ],
)
def test_a_key_in_a_url_is_refused(guarded: Served, query: str, status: int) -> None:
    assert guarded.handshake(path=f"/v1/stream?{query}")[0] == status
    assert guarded.handshake(ALICE, path=f"/v1/stream?{query}")[0] == (status if status == 400 else 101)


def test_a_principal_has_so_many_connections_however_it_brings_its_key(guarded: Served) -> None:
    with guarded.connect(additional_headers={"Authorization": "Bearer sk-alice-1"}), guarded.connect() as second:
        second.send("init", token="sk-alice-1")
        second.generate(max_tokens=1)
        second.until("done")
        assert guarded.handshake(ALICE)[0] == 429
        with guarded.connect() as third:
            third.send("init", token="sk-alice-1")
            error = third.next()
            assert (error["code"], error["fatal"]) == ("rate_limited", True)
            with pytest.raises(ConnectionClosed) as closed:
                third.next()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 4429
        assert guarded.handshake("Authorization: Bearer sk-root-01")[0] == 101
    eventually(lambda: guarded.handshake(ALICE)[0] == 101)


def test_a_key_that_is_taken_out_of_the_file_opens_nothing_more(guarded: Served, key_file: str) -> None:
    assert guarded.handshake(ALICE)[0] == 101
    Path(key_file).write_text('[bob]\nkey = "sk-bob-0001"\n')
    assert guarded.handshake(ALICE)[0] == 401
    assert guarded.handshake("Authorization: Bearer sk-bob-0001")[0] == 101


# pages of others


def test_a_foreign_page_can_neither_post_nor_read() -> None:
    with serving(engine_over(roomy_runner()), allow_origins=("https://app.example",)) as served:
        for origin, status in (("https://evil.example", 403), ("null", 403), ("https://app.example", 200)):
            assert served.ask("POST", "/v1/tickets", Origin=origin)[0] == status
        _, headers, _ = served.ask("GET", "/v1/models", Origin="https://app.example")
        assert headers["access-control-allow-origin"] == "https://app.example"
        _, headers, _ = served.ask("GET", "/v1/models", Origin="https://evil.example")
        assert "access-control-allow-origin" not in headers


def test_a_browser_may_ask_without_a_key_whether_it_may_send_one(key_file: str) -> None:
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    origins = ("https://app.example",)
    with serving(engine_over(roomy_runner()), allow_origins=origins, api_key_file=key_file) as served:
        status, headers, _ = served.ask("OPTIONS", "/v1/chat/completions", Origin="https://app.example", **wish)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
        status, headers, _ = served.ask("OPTIONS", "/v1/chat/completions", Origin="https://evil.example", **wish)
        assert (status, "access-control-allow-origin" in headers) == (400, False)


# bounds on requests


def test_headers_above_the_limit_are_refused(guarded: Served) -> None:
    assert guarded.ask("GET", "/health", **{"X-Long": "x" * 20_000})[0] == 200
    assert guarded.ask("GET", "/health", **{"X-Long": "x" * 40_000})[0] == 431
    assert guarded.handshake(ALICE, "X-Long: " + "x" * 40_000)[0] == 431


def test_headers_that_never_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "HEAD_S", 0.2)
    with serving(engine_over(roomy_runner())) as served, socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.settimeout(PATIENCE_S)
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        assert slow.recv(100) == b""


# TLS


def test_over_tls_streams_come_whole_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(CERTIFICATE_KEY)
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    with serving(engine_over(roomy_runner()), tls_cert=str(certificate), tls_key=str(key)) as served:
        assert served.url.startswith("https://")
        with served.connect(ssl=trusting) as client:
            client.generate(max_tokens=50)
            assert len(text_of(client.until("done", "error"))) == 50
    key.write_text("no key")
    with pytest.raises(StartupError, match="TLS"):
        Server(ServerConfig(port=0, tls_cert=str(certificate), tls_key=str(key)), engine_over(roomy_runner()))
    with pytest.raises(StartupError, match="tls_key is missing"):
        ServerConfig(tls_cert="cert.pem")


# what is written


def test_no_key_no_ticket_no_stream_id_and_no_prompt_is_logged(
    guarded: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    used = ticket(guarded)
    with guarded.connect(query=f"?ticket={used}") as client:
        client.generate(prompt="a secret prompt", max_tokens=5)
        stream = client.until("done")[0]["stream"]
    talk(guarded, offered("sk-alice-1"))
    talk(guarded, offered("sk-wrong-1"))
    guarded.ask("GET", f"/v1/streams/{stream}", Authorization="Bearer sk-alice-1")
    eventually(lambda: "a connection ended" in caplog.text)
    records = [
        record for record in caplog.records if not record.name.startswith("websockets")
    ]  # those are the client's
    lines = [JSONLines().format(record) for record in records]
    lines += [TextLines("%(message)s").format(record) for record in records]
    encoded = [base64.urlsafe_b64encode(key).decode().rstrip("=") for key in (b"sk-alice-1", b"sk-wrong-1")]
    for secret in ("sk-alice-1", "sk-wrong-1", used, stream, "secret prompt", *encoded):
        assert not [line for line in lines if secret in line]
    answered = [json.loads(line) for line in lines if '"a request was answered"' in line]
    assert {"path": "/v1/tickets", "status": 200, "principal": "alice"}.items() <= answered[0].items()


def test_lines_are_json_where_that_is_asked_for() -> None:
    script = """
import logging
from streamengine.config import ServerConfig
from streamengine.server.logs import configure_logging
configure_logging(ServerConfig(log_format="json", log_level="info"))
try:
    raise ValueError("a\\nb")
except ValueError:
    logging.getLogger("x").exception("failed", extra={"facts": {"status": 3}})
logging.getLogger("x").debug("not this")
logging.getLogger("uvicorn.error").info("nor this")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment)
    (line,) = map(json.loads, ran.stderr.splitlines())
    assert {"level": "error", "logger": "x", "message": "failed", "status": 3}.items() <= line.items()
    assert "ValueError" in line["traceback"]
