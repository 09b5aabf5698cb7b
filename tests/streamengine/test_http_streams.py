"""Streams over HTTP from outside: events that can be resumed, one JSON object, and the end on request."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.fakes import FakeRunner, fake_model, oracle
from tests.schema import validate
from tests.serving import PATIENCE_S, Served, engine_over, eventually, roomy_runner, serving

ASK = {"prompt": "hello", "temperature": 0, "max_tokens": 20}
ANSWER = bytes(oracle(b"hello", 20)).decode()
EVENTS = {"accept": "text/event-stream"}


@pytest.fixture
def runner() -> FakeRunner:
    return roomy_runner()


def endless() -> FakeRunner:
    """Says so much that a test is over long before."""

    def answer(context: Any, sampling: Any) -> int:
        time.sleep(0.001)
        return ord("x")

    return roomy_runner(model=fake_model(max_model_len=30_000), answer=answer)


@pytest.fixture
def served(runner: FakeRunner) -> Iterator[Served]:
    with serving(engine_over(runner)) as served:
        yield served


@contextmanager
def asked(
    served: Served, method: str, path: str, body: Any = None, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, data, named)
    try:
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def ask(served: Served, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    with asked(served, method, path, body, **headers) as response:
        data = response.read()
        return response.status, json.loads(data) if data else None


def refused(served: Served, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str, str]:
    status, answer = ask(served, method, path, body, **headers)
    return status, answer["error"]["code"], answer["error"]["param"]


def next_event(response: http.client.HTTPResponse) -> dict[str, Any] | None:
    """Its message with the event's own id as ``event_id``; held against the schema. None at the end."""
    fields = {}
    while line := response.readline().decode():
        name, _, value = line.rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            message = json.loads(fields["data"])
            assert message["type"] == fields["event"]
            validate("server", message)
            return {**message, "event_id": fields.get("id")}
    return None


def all_events(response: http.client.HTTPResponse) -> list[dict[str, Any]]:
    events = []
    while (event := next_event(response)) is not None:
        events.append(event)
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["type"] == "delta")


def opened(response: http.client.HTTPResponse) -> str:
    first = next_event(response)
    assert first is not None
    assert (first["type"], first["event_id"]) == ("accepted", f"{first['stream']}:0")
    return str(first["stream"])


def attached(served: Served) -> float:
    streams = served.server.service.streams
    assert streams is not None
    return served.portal.call(streams.statistics)["streams_attached"]


def running(served: Served) -> float:
    engine = served.server.service.engine
    assert engine is not None
    return served.portal.call(lambda: len(engine._answers))


def test_events_are_the_protocol_s_and_numbered_by_stream_and_token(served: Served) -> None:
    with asked(served, "POST", "/v1/generate", ASK, **EVENTS) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        stream = opened(response)
        events = all_events(response)
    assert text_of(events) == ANSWER
    assert {event["id"] for event in events} == {stream}
    for delta in (event for event in events if event["type"] == "delta"):
        assert delta["event_id"] == f"{stream}:{delta['seq']}"
    done = events[-1]
    assert (done["type"], done["finish_reason"], done["event_id"]) == ("done", "length", f"{stream}:21")
    assert done["check"] == {"bytes": 20, "crc32": crc32(ANSWER.encode())}


def test_without_events_the_answer_is_one_object(served: Served) -> None:
    ask_all = {**ASK, "logprobs": True, "top_logprobs": 1, "delivery": {"token_ids": True}}
    status, answer = ask(served, "POST", "/v1/generate", ask_all)
    assert (status, answer["state"], answer["text"], answer["seq"]) == (200, "done", ANSWER, 20)
    assert bytes(answer["tokens"]).decode() == ANSWER
    assert len(answer["logprobs"]) == 20
    assert answer["end"]["usage"]["total_tokens"] == 25
    assert ask(served, "GET", f"/v1/streams/{answer['stream']}")[1]["text"] == ANSWER


@pytest.mark.parametrize("how", ["header", "query", "both"])
def test_a_stream_goes_on_where_a_client_lost_it(served: Served, runner: FakeRunner, how: str) -> None:
    runner.hold()
    with asked(served, "POST", "/v1/generate", ASK, **EVENTS) as response:
        stream = opened(response)
        runner.release()
        before: list[dict[str, Any]] = []
        while not text_of(before):
            event = next_event(response)
            assert event is not None
            before.append(event)
    last = before[-1]["event_id"]
    seq = last.rpartition(":")[2]
    path = f"/v1/streams/{stream}/events" + {"header": "", "query": f"?after={seq}", "both": "?after=1"}[how]
    headers = {} if how == "query" else {"last_event_id": last}
    with asked(served, "GET", path, **headers) as response:
        after = all_events(response)
    assert text_of(before) + text_of(after) == ANSWER
    assert (after[0]["type"], after[0]["after"], after[-1]["type"]) == ("accepted", int(seq), "done")
    # A browser asks again until it is told that there is no more.
    assert ask(served, "GET", path, last_event_id=after[-1]["event_id"]) == (204, None)


def test_a_resumed_stream_takes_the_wishes_of_its_reader(served: Served) -> None:
    stream = ask(served, "POST", "/v1/generate", ASK)[1]["stream"]
    with asked(served, "GET", f"/v1/streams/{stream}/events?token_ids=true&coalesce_tokens=1024") as response:
        events = all_events(response)
    assert bytes(token for event in events if event["type"] == "delta" for token in event["tokens"]).decode() == ANSWER


@pytest.mark.parametrize(
    ("query", "last", "param"),
    [
        ("?after=21", None, "after"),
        ("?after=-1", None, "after"),
        ("?after=x", None, "after"),
        ("?after=" + "1" * 5000, None, "after"),
        ("", "st_other:3", "last-event-id"),
        ("", "3", "last-event-id"),
        ("?surprise=1", None, "surprise"),
        ("?coalesce_ms=x", None, "coalesce_ms"),
        ("?window=4", None, "delivery.window"),
    ],
)
def test_a_place_that_is_none_is_refused(served: Served, query: str, last: str | None, param: str) -> None:
    stream = ask(served, "POST", "/v1/generate", {**ASK, "max_tokens": 5})[1]["stream"]
    headers = {} if last is None else {"last_event_id": last}
    status, _, named = refused(served, "GET", f"/v1/streams/{stream}/events{query}", **headers)
    assert (status // 100, named) == (4, param)


def test_a_client_that_goes_leaves_a_stream_that_lingers_and_is_then_cancelled() -> None:
    with serving(engine_over(endless()), linger_s=0.2) as served:
        with asked(served, "POST", "/v1/generate", {"prompt": "hello"}, **EVENTS) as response:
            stream = opened(response)
        eventually(lambda: attached(served) == 0)
        assert running(served) == 1
        eventually(lambda: running(served) == 0)
        end = ask(served, "GET", f"/v1/streams/{stream}")[1]["end"]
        assert (end["finish_reason"], end["cause"]) == ("cancelled", "disconnect")


def test_where_nothing_lingers_a_stream_is_still_read_to_its_end(runner: FakeRunner) -> None:
    with serving(engine_over(runner), linger_s=0) as served:
        assert ask(served, "POST", "/v1/generate", ASK)[1]["text"] == ANSWER
        with asked(served, "POST", "/v1/generate", ASK, **EVENTS) as response:
            assert text_of(all_events(response)) == ANSWER


@pytest.mark.parametrize("headers", [{}, EVENTS])
def test_a_client_that_goes_ends_what_it_said_is_not_to_linger(headers: dict[str, str]) -> None:
    body = {"prompt": "hello", **({"delivery": {"on_disconnect": "cancel"}} if headers else {})}
    with serving(engine_over(endless())) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/generate", json.dumps(body), headers)
        eventually(lambda: attached(served) == 1)
        connection.close()
        eventually(lambda: running(served) == 0)


def test_a_stream_ends_on_request_and_the_answer_comes_when_it_has() -> None:
    with serving(engine_over(endless())) as served:
        with asked(served, "POST", "/v1/generate", {"prompt": "hello"}, **EVENTS) as response:
            stream = opened(response)
            eventually(lambda: ask(served, "GET", f"/v1/streams/{stream}")[1]["state"] == "decode")
            _, state = ask(served, "DELETE", f"/v1/streams/{stream}")
            assert running(served) == 0
            assert (state["state"], state["end"]["finish_reason"]) == ("done", "cancelled")
            events = all_events(response)
            assert text_of(events) == state["text"]
            assert events[-1]["cause"] == state["end"]["cause"] == "client"
        assert ask(served, "DELETE", f"/v1/streams/{stream}")[1] == state


def test_a_key_makes_a_repeated_request_the_same_stream(served: Served) -> None:
    body = {**ASK, "key": "once-only"}
    first, second = (ask(served, "POST", "/v1/generate", body)[1] for _ in range(2))
    assert (first["stream"], first["text"]) == (second["stream"], second["text"])


def test_an_error_is_the_last_event_and_nothing_is_asked_again(served: Served, runner: FakeRunner) -> None:
    runner.fail()
    with asked(served, "POST", "/v1/generate", ASK, **EVENTS) as response:
        stream = opened(response)
        error = all_events(response)[-1]
    assert (error["type"], error["code"]) == ("error", "engine_error")
    path = f"/v1/streams/{stream}/events"
    assert ask(served, "GET", path, last_event_id=error["event_id"]) == (204, None)
    assert ask(served, "GET", f"/v1/streams/{stream}")[1]["end"]["code"] == "engine_error"
    runner.fail()
    assert refused(served, "POST", "/v1/generate", ASK)[:2] == (500, "engine_error")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({**ASK, "id": "r1"}, 400, "id"),
        ({**ASK, "type": "cancel"}, 400, "type"),
        ({**ASK, "temprature": 1}, 400, "temprature"),
        ({**ASK, "temperature": -1}, 400, "temperature"),
        ({**ASK, "model": "other"}, 404, "model"),
        ({**ASK, "token_ids": [1]}, 400, "token_ids"),
        ({"max_tokens": 1}, 400, "prompt"),
        ({**ASK, "delivery": {"window": 5}}, 422, "delivery.window"),
        ({**ASK, "delivery": {"pad": 5}}, 422, "delivery.pad"),
        ({**ASK, "delivery": {"surprise": 5}}, 400, "delivery.surprise"),
        ([], 400, None),
    ],
)
def test_a_bad_request_is_refused_by_name(served: Served, body: Any, status: int, param: str | None) -> None:
    for headers in ({}, EVENTS):
        found, _, named = refused(served, "POST", "/v1/generate", body, **headers)
        assert (found, named) == (status, param)


def test_a_request_may_carry_fields_of_its_own(served: Served) -> None:
    assert ask(served, "POST", "/v1/generate", {**ASK, "type": "generate", "x_trace": "7"})[0] == 200


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("DELETE", ""), ("GET", "/events")])
def test_a_stream_is_there_for_its_own_principal_only(
    tmp_path: Path, runner: FakeRunner, method: str, path: str
) -> None:
    (tmp_path / "keys.toml").write_text('[alice]\nkey = "alice-key"\n[bob]\nkey = "bob-key-1"\n')
    with serving(engine_over(runner), api_key_file=str(tmp_path / "keys.toml")) as served:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in ("alice-key", "bob-key-1"))
        stream = ask(served, "POST", "/v1/generate", ASK, **alice)[1]["stream"]
        where = f"/v1/streams/{stream}{path}"
        assert refused(served, method, where, **bob) == (404, "stream_not_found", "stream")
        assert refused(served, method, "/v1/streams/st_" + "x" * 22 + path, **bob)[:2] == (404, "stream_not_found")
        assert refused(served, method, where)[0] == 401
        with asked(served, method, where, **alice) as response:
            assert response.status == 200


def test_an_answer_that_another_server_began_goes_on_over_http(served: Served) -> None:
    body = {**ASK, "continues": list(ANSWER[:7].encode())}
    with asked(served, "POST", "/v1/generate", body, **EVENTS) as response:
        events = all_events(response)
    assert (events[0]["type"], events[0]["after"]) == ("accepted", 7)
    assert text_of(events) == ANSWER[7:]
    assert (events[-1]["check"]["bytes"], events[-1]["usage"]["completion_tokens"]) == (20, 20)
    assert events[-1]["timing"]["continued_tokens"] == 7
    status, answer = ask(served, "POST", "/v1/generate", body)
    assert (status, answer["text"]) == (200, ANSWER)
    assert refused(served, "POST", "/v1/generate", {**ASK, "continues": [9] * 21}) == (
        400,
        "invalid_request",
        "continues",
    )
