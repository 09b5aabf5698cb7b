"""The browser client in a real browser, against a server that the test plays itself, message by message."""

import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import Served, engine_over, roomy_runner, serving

pytestmark = pytest.mark.browser

HELLO = {
    "type": "hello",
    "protocol": "streamengine.v1",
    "epoch": "e",
    "auth": "none",
    "limits": {"max_message_bytes": 1000, "max_streams": 8, "heartbeat_s": 15},
}

# Runs one stream to its end and tells everything that the caller of the client sees.
STREAM = """
const { StreamEngine } = await import("/client.js");
window.client ??= new StreamEngine();
window.run = async (request, { leaveAfter, signal } = {}) => {
  const seen = [];
  try {
    for await (const event of client.stream(request, { signal })) {
      seen.push(event);
      if (seen.length === leaveAfter) break;
    }
  } catch (error) {
    seen.push({ type: "thrown", name: error.name, code: error.code, message: error.message, param: error.param });
  }
  return seen;
};
"""


class PlayedServer:
    """Answers each `generate` with the messages of a script; remembers everything that it was sent."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.script: list[Any] = []
        self.received: list[dict[str, Any]] = []
        self.sockets: list[Any] = []
        page.route_web_socket("**/v1/stream", self._connected)

    def _connected(self, socket: Any) -> None:
        self.sockets.append(socket)
        socket.on_message(lambda text: self._receive(socket, json.loads(text)))
        socket.send(json.dumps(HELLO))

    def _receive(self, socket: Any, message: dict[str, Any]) -> None:
        self.received.append(message)
        if message["type"] == "generate":
            for reply in self.script:
                if reply is None:
                    socket.close(code=1012)
                else:
                    socket.send(json.dumps({"id": message["id"], **reply}))

    def run(self, *script: Any, options: str = "{}", **request: Any) -> list[dict[str, Any]]:
        self.script = list(script)
        return self.page.evaluate(f"run({json.dumps({'prompt': 'hi', **request})}, {options})")

    def sent(self, type: str) -> list[dict[str, Any]]:
        """The client's messages of one type; a ping through the page makes sure that they have arrived."""
        self.page.evaluate("new Promise((wake) => setTimeout(wake, 0))")
        return [message for message in self.received if message["type"] == type]


@pytest.fixture(scope="module")
def site() -> Iterator[Served]:
    with serving(engine_over(roomy_runner())) as served:
        yield served


@pytest.fixture
def played(browser: Any, site: Served) -> Iterator[PlayedServer]:
    context = browser.new_context()
    page = context.new_page()
    played = PlayedServer(page)
    page.goto(f"{site.url}/ready")
    page.evaluate(f"(async () => {{ {STREAM} }})()")
    yield played
    context.close()


def delta(seq: int, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "delta", "seq": seq, "text": text, **more}


def done(seq: int, text: str, **more: Any) -> dict[str, Any]:
    data = text.encode()
    return {
        "type": "done",
        "seq": seq,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 1, "completion_tokens": seq - 1, "total_tokens": seq},
        "check": {"bytes": len(data), "crc32": zlib.crc32(data)},
        **more,
    }


def test_a_stream_gives_its_text_and_ends_with_done(played: PlayedServer) -> None:
    seen = played.run(delta(1, "Hé"), delta(3, "llo 🌍", n=2), done(4, "Héllo 🌍"))
    assert "".join(event.get("text", "") for event in seen) == "Héllo 🌍"
    assert [event["n"] for event in seen if event["type"] == "delta"] in ([1, 2], [3])
    assert seen[-1]["type"] == "done"


def test_many_streams_use_one_socket(played: PlayedServer) -> None:
    played.script = [delta(1, "a"), done(2, "a")]
    answers = played.page.evaluate("Promise.all([1, 2, 3].map((n) => run({ prompt: `p${n}` })))")
    assert [answer[-1]["type"] for answer in answers] == ["done"] * 3
    assert len(played.sockets) == 1
    assert len({message["id"] for message in played.sent("generate")}) == 3


@pytest.mark.parametrize(
    "script",
    [
        [delta(1, "a"), delta(3, "c"), done(4, "ac")],
        [delta(1, "a"), delta(1, "a"), done(2, "a")],
        [delta(1, "a"), done(3, "a")],
        [delta(1, "a"), done(2, "b")],
    ],
)
def test_a_gap_a_repeat_or_a_lost_end_is_an_error(played: PlayedServer, script: list[Any]) -> None:
    assert played.run(*script)[-1]["code"] == "protocol_error"


def test_an_error_of_the_server_is_thrown_with_its_code(played: PlayedServer) -> None:
    error = {"type": "error", "code": "invalid_request", "message": "no", "status": 400, "retryable": False}
    (thrown,) = played.run({**error, "param": "temperature"})
    assert (thrown["name"], thrown["code"], thrown["param"]) == ("StreamEngineError", "invalid_request", "temperature")


def test_what_a_newer_server_says_is_ignored(played: PlayedServer) -> None:
    seen = played.run({"type": "weather"}, delta(1, "a", mood="good"), done(2, "a"))
    assert [event["type"] for event in seen] == ["delta", "done"]


def test_leaving_the_loop_cancels(played: PlayedServer) -> None:
    played.run(delta(1, "a"), options="{ leaveAfter: 1 }")
    (cancel,) = played.sent("cancel")
    assert cancel["id"] == played.sent("generate")[0]["id"]


def test_an_abort_signal_cancels_and_throws_its_reason(played: PlayedServer) -> None:
    (thrown,) = played.run(options="{ signal: AbortSignal.timeout(50) }")
    assert thrown["name"] == "TimeoutError"
    assert len(played.sent("cancel")) == 1


def test_a_lost_connection_ends_its_streams_and_the_next_one_opens_another(played: PlayedServer) -> None:
    assert played.run(delta(1, "a"), None)[-1]["code"] == "connection_lost"
    assert played.run(delta(1, "b"), done(2, "b"))[-1]["type"] == "done"
    assert len(played.sockets) == 2


def test_after_goaway_new_streams_open_another_socket(played: PlayedServer) -> None:
    goaway = {"type": "goaway", "reason": "shutdown", "deadline_ms": 1, "reconnect": True}
    for _ in range(2):
        assert played.run(goaway, delta(1, "a"), done(2, "a"))[-1]["type"] == "done"
    assert len(played.sockets) == 2


def test_a_message_above_the_servers_limit_is_not_sent(played: PlayedServer) -> None:
    played.run(delta(1, "a"), done(2, "a"))
    (thrown,) = played.run(prompt="é" * 600)
    assert thrown["code"] == "message_too_large"
    assert len(played.sent("generate")) == 1
