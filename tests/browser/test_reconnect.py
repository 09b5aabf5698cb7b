"""The browser client against the real server, over connections that are cut."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from compiled.step import Sampling
from tests.fakes import FakeRunner, formula, oracle
from tests.serving import PATIENCE_S, Served, engine_over, eventually, roomy_runner, serving

pytestmark = pytest.mark.browser

STREAMS, TOKENS = 8, 150
LIFE_S = 0.2


def paced(context: Any, sampling: Sampling) -> int:
    """So slow that an answer outlives several connections."""
    time.sleep(0.001)
    return formula(context, sampling)


@pytest.fixture(scope="module")
def runner() -> FakeRunner:
    return roomy_runner(answer=paced)


@pytest.fixture(scope="module")
def site(runner: FakeRunner) -> Iterator[Served]:
    with serving(engine_over(runner)) as served:
        yield served


class Cutter:
    """Before servers: every WebSocket is cut ``life_s`` after it was opened, in the middle of whatever it says.

    The next one then leads to the next server.
    """

    def __init__(self, *ports: int, life_s: float = LIFE_S) -> None:
        self._ports = ports
        self._life_s = life_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        port = self._ports[self.cuts % len(self._ports)]
        with client, socket.create_connection(("127.0.0.1", port)) as server, suppress(OSError):
            head = client.recv(65536)
            server.sendall(head)
            streams = head.startswith(b"GET /v1/stream")
            pairs = [(server, client), (client, server)]
            copies = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in pairs]
            for copy in copies:
                copy.start()
            copies[0].join(self._life_s if streams else PATIENCE_S)
            self.cuts += streams
            for end in (client, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for copy in copies:
                copy.join(PATIENCE_S)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def tab(browser: Any, url: str) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    page.goto(f"{url}/ready")
    page.evaluate("""(async () => {
      const { StreamEngine } = await import("/client.js");
      window.client = new StreamEngine();
    })()""")
    yield page
    context.close()


def test_eight_streams_come_whole_over_a_socket_that_is_cut_every_200_ms(browser: Any, site: Served) -> None:
    """The client itself refuses gaps, repeats and a wrong checksum."""
    prompts = [f"prompt {number}" for number in range(STREAMS)]
    cutter = Cutter(site.port)
    try:
        with tab(browser, f"http://127.0.0.1:{cutter.port}") as page:
            results = page.evaluate(
                """([prompts, max_tokens]) => Promise.all(prompts.map((prompt) =>
                  client.stream({ prompt, max_tokens, temperature: 0, ignore_eos: true }).result()))""",
                [prompts, TOKENS],
            )
    finally:
        cutter.close()
    for prompt, result in zip(prompts, results, strict=True):
        assert result["text"] == bytes(oracle(list(prompt.encode()), TOKENS)).decode()
        assert result["done"]["usage"]["completion_tokens"] == TOKENS
    assert cutter.cuts >= 3
    assert max(result["done"]["delivery"]["attaches"] for result in results) >= 3


def test_no_more_than_the_window_is_ever_under_way(browser: Any, site: Served) -> None:
    window, acked, sent, most = 16, 0, 0, 0

    def heard(frame: str) -> None:
        nonlocal sent, most
        message = json.loads(frame)
        for event in message.get("events", [message]):
            if event["type"] == "delta":
                sent = event["seq"]
                most = max(most, sent - acked)

    def said(frame: str) -> None:
        nonlocal acked
        message = json.loads(frame)
        if message["type"] == "ack":
            acked = message["seq"]

    def opened(connection: Any) -> None:
        connection.on("framereceived", lambda frame: heard(frame))
        connection.on("framesent", lambda frame: said(frame))

    with tab(browser, site.url) as page:
        page.on("websocket", lambda connection: opened(connection))
        request = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "delivery": {"window": window}}
        page.evaluate("(request) => { window.stream = client.stream(request); }", request)
        page.evaluate("(async () => { while ((await stream.next()).value.type !== 'delta'); })()")
        eventually(lambda: (page.evaluate("0"), sent - acked == window)[1])
        page.evaluate("stream.text()")
    assert (sent, most) == (100, window)


@pytest.mark.parametrize("how", ["new AbortController()", "break", "cancel"])
def test_whoever_stops_reading_stops_the_work(browser: Any, site: Served, how: str) -> None:
    before = site.get("/v1/stats")[2].get("engine_ended_cancelled", 0)
    with tab(browser, site.url) as page:
        seen = page.evaluate(
            """async (how) => {
              const controller = new AbortController();
              const request = { prompt: "hi", max_tokens: 200, ignore_eos: true };
              const stream = client.stream(request, { signal: controller.signal });
              let last;
              try {
                for await (const event of stream) {
                  last = event.type;
                  if (last !== "delta") continue;
                  if (how === "break") break;
                  how === "cancel" ? stream.cancel() : controller.abort();
                }
              } catch (error) {
                return error.name;
              }
              return last;
            }""",
            how,
        )
        assert seen == {"new AbortController()": "AbortError", "break": "delta", "cancel": "done"}[how]
        eventually(lambda: site.get("/v1/stats")[2].get("engine_ended_cancelled", 0) == before + 1)
    assert site.get("/v1/stats")[2]["engine_open"] == 0
