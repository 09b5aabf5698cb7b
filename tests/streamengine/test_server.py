"""The server from outside: raw HTTP and WebSocket clients against a real socket, an engine over a fake runner."""

import contextlib
import gzip
import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from compiled.step import LoadError, Sampling
from streamengine.config import ServerConfig
from streamengine.core import MAX_FAILED_STEPS
from streamengine.errors import EngineFailure, ShuttingDown, StartupError
from streamengine.link import Progress
from streamengine.server import Server, protocols
from streamengine.server import run as server_run
from streamengine.server.page import FILES
from tests.fakes import FakeRunner
from tests.serving import PATIENCE_S, Client, Served, engine_over, eventually, roomy_runner, serving, text_of


@pytest.fixture
def runner() -> FakeRunner:
    return roomy_runner()


@pytest.fixture
def served(runner: FakeRunner) -> Iterator[Served]:
    with serving(engine_over(runner)) as served:
        yield served


# streams


def test_a_stream_arrives_whole_and_unbroken(served: Served) -> None:
    with served.connect() as client:
        client.generate(max_tokens=50)
        messages = client.until("done", "error")
        assert messages[-1]["finish_reason"] == "length"
        assert len(text_of(messages)) == 50


def test_many_streams_share_one_socket(served: Served) -> None:
    with served.connect() as client:
        for number in range(20):
            client.generate(f"r{number}", prompt=f"prompt {number}", max_tokens=30)
        streams: dict[str, list[Any]] = {}
        while sum(messages[-1]["type"] == "done" for messages in streams.values()) < 20:
            message = client.next()
            streams.setdefault(message["id"], []).append(message)
        assert {len(text_of(messages)) for messages in streams.values()} == {30}


def test_a_client_that_talks_while_it_is_streamed_to_still_answers_pings(
    runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_run, "PING_S", 0.5)
    runner.answer = slowly(0.01)
    with serving(engine_over(runner)) as served, served.connect() as client:
        client.generate(max_tokens=200)
        for number in range(100):
            client.send("ping", t=number)
        messages = client.until("done", "error")
        assert len(text_of(messages)) == 200
        assert [message["t"] for message in messages if message["type"] == "pong"] == list(range(100))


def slowly(seconds: float) -> Callable[[Any, Sampling], int]:
    def answer(context: Any, sampling: Sampling) -> int:
        time.sleep(seconds)
        return ord("a") + len(context) % 26

    return answer


def test_a_disconnect_frees_the_slot(served: Served, runner: FakeRunner) -> None:
    runner.hold()
    with served.connect() as client:
        client.generate("a", max_tokens=200)
        client.generate("b", max_tokens=200)
        assert runner.holding.wait(PATIENCE_S)
    runner.release()
    eventually(lambda: statistic(served, "engine_open") == 0)
    eventually(lambda: statistic(served, "engine_ended_cancelled") == 2)
    assert statistic(served, "kv_pages_used") == 0


def reset(client: Client) -> None:
    """End the connection without a closing handshake; what is unread then is answered by a reset."""
    client.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.connection.socket.shutdown(socket.SHUT_RDWR)


def test_after_a_reset_another_connection_takes_the_stream_up(served: Served, runner: FakeRunner) -> None:
    runner.answer = slowly(0.002)
    with contextlib.suppress(ConnectionClosed), served.connect() as first:
        first.generate(max_tokens=150)
        before = first.until("delta")
        reset(first)
    accepted, (delta,) = before[0], before[-1:]
    with served.connect() as second:
        second.send("attach", id="again", stream=accepted["stream"], after=delta["seq"])
        after = second.until("done", "error")
        assert len(text_of([delta, *after])) == 150
        assert after[-1]["delivery"]["attaches"] == 2


def test_after_a_reset_a_stream_lingers_and_then_its_slot_is_free(runner: FakeRunner) -> None:
    runner.answer = slowly(0.02)
    with serving(engine_over(runner), linger_s=0.2) as served:
        with contextlib.suppress(ConnectionClosed), served.connect() as client:
            client.generate(max_tokens=200)
            client.until("delta")
            reset(client)
        assert statistic(served, "engine_open") == 1
        eventually(lambda: statistic(served, "engine_ended_cancelled") == 1)
        assert statistic(served, "kv_pages_used") == 0


def test_a_client_that_never_reads_costs_a_few_buffers(served: Served) -> None:
    with socket.socket() as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.connect(("127.0.0.1", served.port))
        with served.connect(sock=small, max_queue=1) as slow:
            for number in range(60):
                slow.generate(f"r{number}", max_tokens=200, delivery={"token_ids": True, "pad": 256})
            eventually(lambda: statistic(served, "engine_ended_length") == 60)
            connections = served.server._uvicorn.server_state.connections
            transports = [each.transport for each in connections if isinstance(each, protocols.StreamProtocol)]
            assert transports
            sizes = [served.portal.call(transport.get_write_buffer_size) for transport in transports]
            assert max(sizes) < 3 * protocols.BUFFER_BYTES
            for transport in transports:
                sock = transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == protocols.BUFFER_BYTES


def statistic(served: Served, name: str) -> float:
    status, _, values = served.get("/v1/stats")
    assert status == 200
    # What has not happened yet is not listed.
    return values.get(name, 0) if name.startswith("engine_ended_") else values[name]


def test_a_reader_that_does_not_read_holds_up_nobody_and_gets_the_rest_in_fewer_pieces(served: Served) -> None:
    with socket.socket() as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.connect(("127.0.0.1", served.port))
        with served.connect(sock=small, max_queue=1) as slow, served.connect() as quick:
            streams: dict[str, list[Any]] = {f"slow{number}": [] for number in range(10)}
            for id in streams:
                slow.generate(id, max_tokens=200, delivery={"token_ids": True})
            quick.generate(max_tokens=200)
            assert len(text_of(quick.until("done", "error"))) == 200
            eventually(lambda: statistic(served, "engine_open") == 0)
            while any(not messages or messages[-1]["type"] != "done" for messages in streams.values()):
                message = slow.next()
                streams[message["id"]].append(message)
            assert {len(text_of(messages)) for messages in streams.values()} == {200}
            assert sum(len(messages) for messages in streams.values()) < 1500


def drained(client: Client, first: Callable[[], None] = lambda: None) -> tuple[list[Any], int]:
    """Everything that still comes, and the close code; ``first`` may already meet the close."""
    messages: list[Any] = []
    try:
        first()
        while True:
            messages += [client.next()]
    except ConnectionClosed as closed:
        close = closed.rcvd
    assert close is not None, "cut without a close"
    return messages, close.code


def test_a_message_above_the_limit_closes_that_socket_alone(served: Served) -> None:
    with served.connect() as other:
        with served.connect() as client:
            assert drained(client, lambda: client.generate(prompt="x" * 5_000_000)) == ([], 1009)
        other.generate(max_tokens=5)
        assert len(text_of(other.until("done", "error"))) == 5


def test_bad_messages_close_the_socket_with_its_code(served: Served) -> None:
    with served.connect() as client:
        for _ in range(3):
            client.connection.send("{")
        messages, code = drained(client)
        assert ([message["code"] for message in messages], code) == (["invalid_json"] * 3, 4400)


def test_one_connection_too_many_is_refused_before_the_upgrade(runner: FakeRunner) -> None:
    with serving(engine_over(runner), max_connections=2) as served:
        with served.connect(), served.connect():
            assert served.handshake()[0] == 503
        eventually(lambda: served.handshake()[0] == 101)


# the upgrade


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 101),
        ("http://127.0.0.1:{port}", 101),
        ("http://127.0.0.1:1", 403),
        ("http://127.0.0.1", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://", 403),
        ("https://app.example", 101),
        ("https://APP.example", 101),
        ("http://app.example", 403),
    ],
)
def test_an_upgrade_is_only_for_our_own_and_allowed_origins(
    runner: FakeRunner, origin: str | None, status: int
) -> None:
    with serving(engine_over(runner), allow_origins=("https://app.example",)) as served:
        headers = [] if origin is None else [f"Origin: {origin.format(port=served.port)}"]
        assert served.handshake(*headers)[0] == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 101),
        ("localhost:{port}", 101),
        ("[::1]:{port}", 101),
        ("LOCALHOST", 101),
        ("my.name:{port}", 101),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("[", 403),
    ],
)
def test_on_loopback_only_known_names_are_answered(runner: FakeRunner, host: str, status: int) -> None:
    with serving(engine_over(runner), allow_hosts=("my.name",)) as served:
        host = host.format(port=served.port)
        assert served.handshake(host=host)[0] == status
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        connection.request("GET", "/health", headers={"Host": host})
        assert connection.getresponse().status == (200 if status == 101 else 403)
        connection.close()


@pytest.mark.parametrize(
    ("offered", "status", "chosen"),
    [
        (None, 101, False),
        ("streamengine.v1", 101, True),
        ("other, streamengine.v1", 101, True),
        ("streamengine.v2", 400, False),
    ],
)
def test_a_subprotocol_is_chosen_from_what_is_offered(
    served: Served, offered: str | None, status: int, chosen: bool
) -> None:
    code, head = served.handshake(*([] if offered is None else [f"Sec-WebSocket-Protocol: {offered}"]))
    assert code == status
    assert ("sec-websocket-protocol: streamengine.v1" in head.lower()) is chosen


def test_compression_is_not_agreed_to(served: Served) -> None:
    status, head = served.handshake("Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits")
    assert (status, "extensions" in head.lower()) == (101, False)


# HTTP


def test_the_page_comes_under_a_strict_policy(served: Served) -> None:
    for path in FILES:
        status, headers, body = served.get(path)
        assert (status, len(body) > 100, headers["x-content-type-options"]) == (200, True, "nosniff")
        assert headers["content-security-policy"].startswith("default-src 'self';")
    html = served.get("/")[2].decode()
    assert "style=" not in html and "<style" not in html and "onclick" not in html
    assert html.count("<script") == html.count('<script type="module" src=') == 1


def test_the_page_is_sent_small_and_once(served: Served) -> None:
    status, headers, packed = served.ask("GET", "/client.js", **{"accept-encoding": "gzip"})
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert gzip.decompress(packed) == served.get("/client.js")[2]
    status, _, body = served.ask("GET", "/client.js", **{"if-none-match": headers["etag"]})
    assert (status, body) == (304, b"")


def test_what_is_not_there_is_not_found(served: Served) -> None:
    for path in ("/nothing", "/../streamengine/server/run.py", "/index.html"):
        status, _, body = served.get(path)
        assert (status, body["error"]["code"]) == (404, "not_found")
    status, headers, body = served.ask("PUT", "/v1/models")
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")
    assert set(headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert served.handshake(path="/v1/other")[0] in (403, 404)


def test_models_and_statistics(served: Served) -> None:
    (model,) = served.get("/v1/models")[2]["data"]
    assert (model["id"], model["max_model_len"]) == ("fake", 256)
    assert statistic(served, "engine_open") == 0


def test_readiness_follows_the_engine(runner: FakeRunner) -> None:
    go_on = threading.Event()

    def build(report: Callable[[Progress], None]) -> FakeRunner:
        report(Progress("compile", 3, 10))
        go_on.wait(PATIENCE_S)
        return runner

    with serving(engine_over(build), wait=False, drain_s=PATIENCE_S) as served:
        loading = {"status": "starting", "phase": "compile", "done": 3, "total": 10}
        eventually(lambda: served.get("/ready")[2] == loading)
        assert [served.get(path)[0] for path in ("/health", "/ready", "/v1/models", "/v1/stats")] == [
            200,
            503,
            503,
            503,
        ]
        assert served.handshake()[0] == 503
        assert served.get("/")[0] == 200
        go_on.set()
        eventually(lambda: served.get("/ready")[0] == 200)
        with served.connect() as client:
            runner.hold()
            client.generate(max_tokens=20)
            assert runner.holding.wait(PATIENCE_S)
            served.stop()
            assert "goaway" in {message["type"] for message in client.until("goaway")}
            assert served.get("/ready")[2] == {"status": "draining"}
            assert served.get("/health")[0] == 200
            assert served.handshake()[0] == 503
            runner.release()
            assert len(text_of(client.until("done", "error"))) == 20
        served.ended.result(PATIENCE_S)


# the end


def test_at_the_deadline_what_still_runs_is_cancelled(runner: FakeRunner) -> None:
    runner.answer = slowly(0.02)
    with serving(engine_over(runner), drain_s=0.1) as served, served.connect() as client, served.connect() as idle:
        client.generate(max_tokens=200)
        client.until("delta")
        served.stop()
        messages, code = drained(client)
        assert (messages[-1]["finish_reason"], messages[-1]["cause"], code) == ("cancelled", "shutdown", 1012)
        assert [message["type"] for message in messages].count("goaway") == 1
        assert drained(idle)[1] == 1001
        served.ended.result(PATIENCE_S)


def test_a_second_stop_ends_at_once(runner: FakeRunner) -> None:
    runner.answer = slowly(0.02)
    with serving(engine_over(runner), drain_s=1000) as served, served.connect() as client:
        client.generate(max_tokens=200)
        client.until("delta")
        served.stop()
        client.until("goaway")
        served.stop()
        messages, code = drained(client)
        # "At once" does not wait for goodbyes: a busy machine may cut the socket before they are sent.
        assert code in (1012, 1006), messages
        assert "done" not in {message["type"] for message in messages}
        assert [message["code"] for message in messages if message["type"] == "error"] in (["shutting_down"], [])
        with pytest.raises(ShuttingDown, match="a second time: the drain was cut off"):
            served.ended.result(PATIENCE_S)


def test_the_death_of_the_core_ends_every_stream_and_the_server(runner: FakeRunner) -> None:
    with serving(engine_over(runner)) as served, served.connect() as client:
        runner.fail(times=MAX_FAILED_STEPS)
        for number in range(MAX_FAILED_STEPS):
            client.generate(f"r{number}", max_tokens=20)
            assert client.until("error")[-1]["code"] == "engine_error"
        messages, code = drained(client)
        assert ([message["type"] for message in messages], code) == (["goaway"], 1001)
        with pytest.raises(EngineFailure):
            served.ended.result(PATIENCE_S)


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason() -> None:
    def build(report: Callable[[Progress], None]) -> FakeRunner:
        raise LoadError("no such model")

    with serving(engine_over(build), wait=False) as served, pytest.raises(StartupError, match="no such model"):
        served.ended.result(PATIENCE_S)


def test_a_stop_while_the_engine_starts_ends_at_once(runner: FakeRunner) -> None:
    starting, go_on = threading.Event(), threading.Event()

    def build(report: Callable[[Progress], None]) -> FakeRunner:
        starting.set()
        go_on.wait(PATIENCE_S)
        return runner

    with serving(engine_over(build), wait=False, drain_s=1000) as served:
        assert starting.wait(PATIENCE_S)
        served.stop()
        go_on.set()
        served.ended.result(PATIENCE_S)


def test_a_taken_port_is_known_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is in use") as refused:
            Server(ServerConfig(port=port), engine_over(roomy_runner()))
        assert refused.value.param == "port"


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 64 + ".example", "a\0b"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=r"^host .* is no address|^cannot listen on") as refused:
        Server(ServerConfig(host=host, port=0), engine_over(roomy_runner()))
    assert refused.value.param == "host"


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
SERVE = """
import sys, time, anyio
from functools import partial
from streamengine.config import ServerConfig
from streamengine.core import MAX_FAILED_STEPS
from streamengine.server import Server
from tests.serving import engine_over, roomy_runner

def answer(context, sampling):
    time.sleep(0.01)
    return ord("a") + len(context) % 26

opens = engine_over(roomy_runner(answer=answer))
server = Server(ServerConfig(port=0, drain_s=30), opens, ready=partial(print, flush=True))
anyio.run(partial(server.run, signals=True), backend_options={"use_uvloop": True})
"""


def test_sigterm_in_the_middle_of_a_stream_loses_no_token() -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with connect(f"ws{url.removeprefix('http')}/v1/stream") as connection:
            client = Client(connection)
            client.generate(max_tokens=150)
            before = client.until("delta")[1:]
            process.send_signal(signal.SIGTERM)
            after, code = drained(client)
            assert "goaway" in {message["type"] for message in after}
            assert (len(text_of(before + after)), code) == (150, 1001)
            assert after[-1]["finish_reason"] == "length"
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_text_that_is_no_utf_8_closes_with_1007_and_leaves_the_log_alone(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with served.connect() as client, pytest.raises(ConnectionClosed) as closed:
        # As bytes under a text's opcode: the library would not send a broken one.
        client.connection.send(b"\xff\xfe", text=True)
        client.connection.recv(PATIENCE_S)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
