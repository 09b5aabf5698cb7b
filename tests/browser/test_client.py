"""The browser client in a real browser, against a server that the test plays itself, message by message."""

import json
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.schema import validate
from tests.serving import Served, engine_over, eventually, roomy_runner, serving

pytestmark = pytest.mark.browser

STREAM_ID = "st_0123456789abcdef"
HELLO = {
    "type": "hello",
    "protocol": "streamengine.v1",
    "epoch": "e",
    "auth": "none",
    "limits": {"max_message_bytes": 1000, "max_streams": 8, "heartbeat_s": 15},
}
ACCEPTED = {"type": "accepted", "stream": STREAM_ID, "after": 0}

# Runs one stream to its end and tells everything that the caller of the client sees.
STREAM = """
const { StreamEngine } = await import("/client.js");
window.StreamEngine = StreamEngine;
window.client ??= new StreamEngine();
window.run = (request, options = {}) => watch(client.stream(request, options), options);
window.watch = async (stream, { leaveAfter } = {}) => {
  const seen = [];
  try {
    for await (const event of stream) {
      seen.push(event);
      if (seen.length === leaveAfter) break;
    }
  } catch (error) {
    seen.push({ type: "thrown", name: error.name, code: error.code, message: error.message, param: error.param,
                partial: error.partial });
  }
  return seen;
};
"""


class PlayedServer:
    """Answers each `generate` and `attach` with the messages of the next script, the last one again and again.

    A number closes the socket with that code; a string is the epoch of the server that is there from then on.
    Remembers everything that it was sent.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.scripts: list[list[Any]] = []
        self.hello: dict[str, Any] = HELLO
        self.received: list[dict[str, Any]] = []
        self.sockets: list[Any] = []
        page.route_web_socket("**/v1/stream", self._connected)

    def _connected(self, socket: Any) -> None:
        self.sockets.append(socket)
        socket.on_message(lambda text: self._receive(socket, json.loads(text)))
        socket.send(json.dumps(self.hello))

    def _receive(self, socket: Any, message: dict[str, Any]) -> None:
        self.received.append(validate("client", message))
        if message["type"] not in ("generate", "attach"):
            return
        for reply in self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]:
            if isinstance(reply, int):
                socket.close(code=reply)
            elif isinstance(reply, str):
                self.hello = {**HELLO, "epoch": reply}
            else:
                socket.send(json.dumps({"id": message["id"], **reply}))

    def run(self, *script: Any, options: str = "{}", **request: Any) -> list[dict[str, Any]]:
        return self.play([list(script)], f"run({json.dumps({'prompt': 'hi', **request})}, {options})")

    def play(self, scripts: list[list[Any]], expression: str) -> Any:
        self.scripts = scripts
        return self.page.evaluate(expression)

    def sent(self, type: str) -> list[dict[str, Any]]:
        """The client's messages of one type; a ping through the page makes sure that they have arrived."""
        self.page.evaluate("new Promise((wake) => queueMicrotask(wake))")
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
    script = [delta(1, "a"), done(2, "a")]
    answers = played.play([script], "Promise.all([1, 2, 3].map((n) => run({ prompt: `p${n}` })))")
    assert [answer[-1]["type"] for answer in answers] == ["done"] * 3
    assert len(played.sockets) == 1
    assert len({message["id"] for message in played.sent("generate")}) == 3


def asked(played: PlayedServer, count: int) -> bool:
    return len(played.sent("generate")) == count


def test_more_streams_than_the_server_takes_wait_for_others_to_end(played: PlayedServer) -> None:
    played.play([[]], "void (window.all = Array.from({ length: 10 }, (_, n) => run({ prompt: `p${n}` })))")
    for n in range(10):
        eventually(partial(asked, played, min(8 + n, 10)))
        request = played.sent("generate")[n]
        assert request["prompt"] == f"p{n}"
        played.sockets[0].send(json.dumps({"id": request["id"], **done(1, "")}))
    assert [answer[-1]["type"] for answer in played.page.evaluate("Promise.all(all)")] == ["done"] * 10


def test_one_that_was_left_counts_until_the_server_has_let_go_of_it(played: PlayedServer) -> None:
    played.play([[]], "void (window.all = Array.from({ length: 7 }, (_, n) => run({ prompt: `p${n}` })))")
    eventually(partial(asked, played, 7))
    played.scripts = [[delta(1, "a")], []]
    left = played.page.evaluate("run({ prompt: 'left' }, { leaveAfter: 1 })")
    assert left[-1]["type"] == "delta"
    played.page.evaluate("void (window.last = run({ prompt: 'last' }))")
    eventually(lambda: len(played.sent("cancel")) == 1)
    assert len(played.sent("generate")) == 8
    (cancel,) = played.sent("cancel")
    played.sockets[0].send(json.dumps({"id": cancel["id"], **done(2, "a", finish_reason="cancelled")}))
    eventually(lambda: played.sent("generate")[-1]["prompt"] == "last")


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
    signal = "{ signal: (window.aborting = new AbortController()).signal }"
    played.play([[]], f"void (window.seen = run({{ prompt: 'hi' }}, {signal}))")
    eventually(partial(asked, played, 1))
    (thrown,) = played.page.evaluate("aborting.abort(new DOMException('late', 'TimeoutError')), seen")
    assert thrown["name"] == "TimeoutError"
    assert len(played.sent("cancel")) == 1


def test_a_stream_goes_on_over_the_next_connection_after_its_last_token(played: PlayedServer) -> None:
    again = [{**ACCEPTED, "after": 2}, delta(3, "c"), done(4, "abc")]
    seen = played.play([[ACCEPTED, delta(2, "ab", n=2), 1012], again], "run({ prompt: 'hi' })")
    assert "".join(event.get("text", "") for event in seen) == "abc"
    assert seen[-1]["type"] == "done"
    (attach,) = played.sent("attach")
    assert (attach["stream"], attach["after"]) == (STREAM_ID, 2)
    assert attach["delivery"] == played.sent("generate")[0]["delivery"]


def test_a_request_that_was_lost_before_it_was_accepted_is_repeated_with_its_key(played: PlayedServer) -> None:
    seen = played.play([[1012], [ACCEPTED, delta(1, "a"), done(2, "a")]], "run({ prompt: 'hi' })")
    assert seen[-1]["type"] == "done"
    first, second = played.sent("generate")
    assert first == second and len(first["key"]) >= 8


def test_a_restarted_server_fails_what_was_begun_and_is_asked_again_for_what_was_not(played: PlayedServer) -> None:
    played.scripts = [[ACCEPTED, delta(1, "a")], [ACCEPTED], [ACCEPTED, delta(1, "b"), done(2, "b")]]
    played.page.evaluate("window.both = Promise.all([run({ prompt: 'begun' }), run({ prompt: 'not begun' })]), 0")
    eventually(lambda: len(played.sent("generate")) == 2)
    played.hello = {**HELLO, "epoch": "another"}
    played.sockets[0].close(code=1012)
    begun, not_begun = played.page.evaluate("both")
    assert begun[-1]["code"] == "stream_lost"
    assert [event.get("text") for event in not_begun] == [None, None, "b", None]
    assert [message["prompt"] for message in played.sent("generate")] == ["begun", "not begun", "not begun"]
    assert played.sent("attach") == []


@pytest.mark.parametrize("code", [1000, 1009, 4400, 4429])
def test_after_some_close_codes_nobody_comes_back(played: PlayedServer, code: int) -> None:
    (*_, thrown) = played.run(ACCEPTED, code)
    assert thrown["code"] == "connection_lost"
    assert len(played.sockets) == 1


def test_a_key_that_is_refused_ends_everything_with_the_reason(played: PlayedServer) -> None:
    fatal = {"type": "error", "code": "unauthorized", "message": "no", "status": 401, "retryable": False, "fatal": True}
    played.hello = {**HELLO, "auth": "required"}
    assert played.run({**fatal, "id": None})[-1]["code"] == "unauthorized"
    assert len(played.sockets) == 1


def test_several_messages_may_come_in_one(played: PlayedServer) -> None:
    def named(message: dict[str, Any]) -> dict[str, Any]:
        return {"id": "r1", **message}

    events = [named(ACCEPTED), named(delta(1, "a")), {"type": "weather"}, named(done(2, "a"))]
    seen = played.run({"type": "batch", "events": events})
    assert [event["type"] for event in seen] == ["accepted", "delta", "done"]
    assert played.sent("init")[0]["batch"] is True


def test_an_error_about_a_message_harms_no_stream(played: PlayedServer) -> None:
    error = {"type": "error", "code": "rate_limited", "message": "slower", "status": 429, "retryable": True}
    about = {**error, "id": None, "ref": "r1"}
    seen = played.run(ACCEPTED, about, delta(1, "a"), done(2, "a"))
    assert seen[-1]["type"] == "done"


@pytest.mark.parametrize("more", [{"code": "slow_consumer", "stream": STREAM_ID}, {"code": "too_many_streams"}])
def test_a_stream_that_the_server_stopped_showing_is_asked_for_again(
    played: PlayedServer, more: dict[str, Any]
) -> None:
    error = {"type": "error", "message": "no", "status": 429, "retryable": True, "retry_after_ms": 1, **more}
    again = [{**ACCEPTED, "after": 1}, delta(2, "b"), done(3, "ab")]
    seen = played.play([[ACCEPTED, delta(1, "a"), error], again], "run({ prompt: 'hi' })")
    assert "".join(event.get("text", "") for event in seen) == "ab"
    assert seen[-1]["type"] == "done"


def test_what_was_taken_is_acknowledged_and_nothing_else(played: PlayedServer) -> None:
    played.scripts = [[ACCEPTED, *(delta(seq, "a") for seq in range(1, 9))]]
    take = "(async () => { for (let i = 0; i < %d; i++) await stream.next(); })()"
    played.page.evaluate("window.stream = client.stream({ prompt: 'hi', delivery: { window: 8 } }), undefined")
    played.page.evaluate(take % 4)
    assert played.sent("ack") == []
    played.page.evaluate(take % 1)
    assert [ack["seq"] for ack in played.sent("ack")] == [4]
    played.page.evaluate(take % 4)
    assert [ack["seq"] for ack in played.sent("ack")] == [4, 8]


def test_a_stream_goes_on_in_another_client_and_is_checked_to_its_end(played: PlayedServer) -> None:
    played.scripts = [[ACCEPTED, delta(2, "hé", n=2)], [{**ACCEPTED, "after": 2}, delta(3, "!"), done(4, "hé!")]]
    position = played.page.evaluate("""(async () => {
      const stream = client.stream({ prompt: "hi" });
      await stream.next();
      await stream.next();
      return { ...stream.position };
    })()""")
    assert position == {"stream": STREAM_ID, "seq": 2, "bytes": 3, "crc32": zlib.crc32("hé".encode())}
    resume = f"watch(new StreamEngine().resume({json.dumps(position)}))"
    assert [event.get("text") for event in played.page.evaluate(resume)] == [None, "!", None]
    played.scripts = [[{**ACCEPTED, "after": 2}, delta(3, "?"), done(4, "hé!")]]
    assert played.page.evaluate(resume)[-1]["code"] == "protocol_error"


def test_the_whole_answer_is_a_promise(played: PlayedServer) -> None:
    script = [ACCEPTED, delta(1, "hm", channel="reasoning"), delta(2, "a"), delta(3, "b"), done(4, "hmab")]
    assert played.play([script], "client.stream({ prompt: 'hi' }).text()") == "ab"
    result = played.play([script], "client.stream({ prompt: 'hi' }).result()")
    assert (result["reasoning"], result["done"]["seq"]) == ("hm", 4)


def test_waiting_for_the_next_attempt_ends_when_the_network_is_back(played: PlayedServer) -> None:
    """The clock stands still, so nothing but the event can bring it back."""
    played.page.clock.install()
    played.page.clock.pause_at(2_000_000_000)
    again = [{**ACCEPTED, "after": 1}, delta(2, "b"), done(3, "ab")]
    played.scripts = [[ACCEPTED, delta(1, "a"), 1012], again]
    played.page.evaluate("window.one = run({ prompt: 'hi' }), undefined")
    eventually(lambda: played.page.evaluate("client.state") == "waiting")
    played.page.evaluate("dispatchEvent(new Event('online'))")
    assert played.page.evaluate("one")[-1]["type"] == "done"


def test_silence_is_death_and_a_page_that_slept_finds_out_at_once(played: PlayedServer) -> None:
    played.page.clock.install()
    played.page.clock.pause_at(2_000_000_000)
    again = [{**ACCEPTED, "after": 1}, delta(2, "b")]
    last = [{**ACCEPTED, "after": 2}, delta(3, "c"), done(4, "abc")]
    played.scripts = [[ACCEPTED, delta(1, "a")], again, last]
    played.page.evaluate("window.one = run({ prompt: 'hi' }), undefined")
    eventually(lambda: len(played.sent("generate")) == 1)
    played.page.clock.run_for(37_000)
    assert len(played.sockets) == 1
    played.page.clock.run_for(1_000)  # 2.5 heartbeats, and then the wait before the next attempt
    eventually(lambda: len(played.sent("attach")) == 1)
    # Looked at again, it asks whether anybody is there, and waits for seconds in place of heartbeats.
    played.page.evaluate("dispatchEvent(new Event('pageshow'))")
    assert len(played.sent("ping")) == 1
    played.page.clock.run_for(5_000)
    assert played.page.evaluate("one")[-1]["type"] == "done"


def test_nothing_is_tried_for_ever(played: PlayedServer) -> None:
    played.page.clock.install()
    played.page.clock.pause_at(2_000_000_000)
    played.scripts = [[ACCEPTED]]
    played.page.evaluate("window.one = run({ prompt: 'hi' }), undefined")
    eventually(lambda: len(played.sent("generate")) == 1)
    dead = "class { close() {} constructor() { setTimeout(() => this.onclose({ code: 1006, reason: '' })); } }"
    played.page.evaluate(f"window.WebSocket = {dead}, 0")
    played.sockets[0].close(code=1012)
    played.page.clock.run_for(80_000)
    assert played.page.evaluate("one")[-1]["code"] == "connection_lost"
    assert played.page.evaluate("client.state") == "idle"


def test_a_client_that_is_closed_cancels_what_is_open(played: PlayedServer) -> None:
    played.scripts = [[ACCEPTED, delta(1, "a")]]
    codes: list[int | None] = []
    played.page.evaluate("window.one = run({ prompt: 'hi' }), undefined")
    eventually(lambda: len(played.sent("generate")) == 1)
    played.sockets[0].on_close(lambda code, reason: codes.append(code))
    played.page.evaluate("client.close()")
    assert played.page.evaluate("one")[-1]["code"] == "connection_lost"
    eventually(lambda: len(played.sent("generate")) == 1 and codes == [1000])


def test_after_goaway_new_streams_open_another_socket(played: PlayedServer) -> None:
    goaway = {"type": "goaway", "reason": "shutdown", "deadline_ms": 1, "reconnect": True}
    for _ in range(2):
        assert played.run(goaway, delta(1, "a"), done(2, "a"))[-1]["type"] == "done"
    assert len(played.sockets) == 2


def test_half_a_character_is_refused_and_not_sent_as_what_no_server_reads(played: PlayedServer) -> None:
    (thrown,) = played.run(delta(1, "a"), done(2, "a"), prompt="\ud800")
    assert thrown["code"] == "invalid_request"
    assert played.run(delta(1, "a"), done(2, "a"), prompt="\\ud800 \U0001f4a9")[-1]["type"] == "done"
    assert len(played.sent("generate")) == 1


def test_a_message_above_the_servers_limit_is_not_sent(played: PlayedServer) -> None:
    played.run(delta(1, "a"), done(2, "a"))
    (thrown,) = played.run(prompt="é" * 600)
    assert thrown["code"] == "message_too_large"
    assert len(played.sent("generate")) == 1
