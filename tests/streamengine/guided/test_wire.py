"""Formats, values and verdicts as clients see them: the session in memory, the SDK on it, and server-sent events."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anyio
import jsonschema
import pytest

from streamengine_sdk import Backoff, RequestError
from streamengine_sdk.events import Delta, Value
from tests.serving import Served, engine_over, serving
from tests.sessions import Connected, Message, connect, end, hub, say
from tests.streamengine.guided.drawn import client_of, runner_in, values_of

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 9},
        "n": {"type": "integer", "minimum": 10, "maximum": 900},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
VALUES: Any = {"response_format": {"type": "json_object"}, "delivery": {"values": True}}


async def next_ones(it: Connected, count: int) -> list[tuple[Any, ...]]:
    """Deltas and values as they come."""
    found: list[tuple[Any, ...]] = []
    while len(found) < count:
        match await it.client.next("hello", "accepted", "progress"):
            case {"type": "value", "seq": seq, "path": path, "value": value}:
                found.append((seq, path, value))
            case {"type": "delta", "seq": seq, "text": text}:
                found.append((seq, text))
    return found


async def test_values_come_right_before_the_delta_that_completes_them() -> None:
    async with connect() as it:
        log = await it.started(**VALUES)
        log.json = True
        say(log, '{"a"')
        assert await next_ones(it, 1) == [(4, '{"a"')]
        say(log, ': [1, "x"]')
        assert await next_ones(it, 4) == [(14, "/a/0", 1), (14, "/a/1", "x"), (14, "/a", [1, "x"]), (14, ': [1, "x"]')]
        say(log, "}")
        end(log)
        assert await next_ones(it, 2) == [(15, "", {"a": [1, "x"]}), (15, "}")]
        assert (await it.client.next())["seq"] == 16


@pytest.mark.parametrize(("reason", "told"), [("stop", [(2, "", 12)]), ("length", []), ("cancelled", [])])
async def test_a_number_that_ends_the_answer_is_a_value_if_it_was_not_cut(reason: str, told: list[Any]) -> None:
    async with connect() as it:
        log = await it.started(**VALUES)
        say(log, "12")
        end(log, reason, "client" if reason == "cancelled" else None)
        messages = await it.client.until("done", "r1")
        assert [(m["seq"], m["path"], m["value"]) for m in messages if m["type"] == "value"] == told


async def test_who_attaches_later_is_told_the_values_that_are_complete_after_that() -> None:
    async with hub() as it:
        first = it.connect()
        log = await first.started(**VALUES)
        log.json = True
        say(log, '{"a": 1, "b": "x')
        second = it.connect()
        await second.attached(log.id, 13, delivery={"values": True})
        say(log, 'y"}')
        end(log)
        messages = await second.client.until("done", "r1")
        assert [(m["path"], m["value"]) for m in messages if m["type"] == "value"] == [
            ("/b", "xy"),
            ("", {"a": 1, "b": "xy"}),
        ]


@pytest.mark.parametrize("response_format", [None, {"type": "text"}, {"type": "regex", "regex": "a"}])
async def test_values_of_what_is_no_json_are_refused_by_name(response_format: Message | None) -> None:
    async with connect() as it:
        await it.client.next()
        more = {} if response_format is None else {"response_format": response_format}
        it.client.generate("r1", delivery={"values": True}, **more)
        error = await it.client.next()
        assert (error["code"], error["param"]) == ("unsupported_feature", "delivery.values")
        log = await it.started()
        error = await it.attached(log.id, id="r2", delivery={"values": True})
        assert (error["code"], error["param"], error["id"]) == ("unsupported_feature", "delivery.values", "r2")


async def test_each_value_is_seen_once_over_connections_that_drop(tmp_path: Path) -> None:
    async with client_of(tmp_path, reconnect=Backoff(first=1e-6, longest=1e-6), window=4) as (client, peers, _):
        for seed in range(5):
            seen: list[tuple[str, Any]] = []
            asked: Any = {"output": SCHEMA, "seed": seed, "max_tokens": 400, "logprobs": True, "return_token_ids": True}
            async with client.stream("?", **asked) as stream:
                async for event in stream:
                    if isinstance(event, Value):
                        seen.append((event.path, event.value))
                    elif isinstance(event, Delta) and event.seq % 7 == seed:
                        peers[-1].drop(1006)
                result = await stream.result()
            jsonschema.validate(result.parsed, SCHEMA)
            assert seen == list(values_of(result.parsed))
            assert len(result.logprobs or ()) == len(result.token_ids or ()) == result.seq
        assert len(peers) > 5


async def test_choices_come_back_as_they_were_given(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, _, _):
        for seed in range(4):
            assert (await client.generate("?", output=Literal["yes", "no"], seed=seed)).parsed in ("yes", "no")
            parsed = (await client.generate("?", output=Literal["yes", 7, None, True], seed=seed)).parsed
            assert parsed in ("yes", 7, None, True)


async def test_tokens_without_a_choice_are_counted(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, _, engine):
        result = await client.generate("?", response_format={"type": "regex", "regex": "[ab]forced!"})
        assert (result.timing and result.timing.forced_tokens, result.seq) == (7, 8)
        assert (await client.generate("?", max_tokens=3)).timing.forced_tokens == 0  # type: ignore[union-attr]
        assert engine.status == "ready"


async def test_a_document_is_closed_where_that_is_asked(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, _, _):
        asked: Any = {"output": {"type": "array", "items": {"type": "string"}}, "max_tokens": 30, "seed": 1}
        assert (await client.generate("?", **asked, close_document=True)).parsed is not None
        with pytest.raises(RequestError) as refused:
            await client.generate("?", close_document=True)
        assert refused.value.param == "close_document"


UNENFORCED = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}


def leniently(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}


async def test_what_a_lenient_schema_loses_is_told_and_so_is_the_verdict(tmp_path: Path) -> None:
    verdicts = set()
    async with client_of(tmp_path) as (client, _, _):
        for seed in range(8):
            result = await client.generate("?", response_format=leniently(UNENFORCED), seed=seed)
            assert result.guided is not None
            assert result.guided.warnings == ['Unimplemented keys: ["uniqueItems"]']
            assert result.guided.valid == (len(set(json.loads(result.text))) == 2)
            verdicts.add(result.guided.valid)
        cut = await client.generate("?", response_format=leniently(UNENFORCED), max_tokens=2)
        assert cut.guided is not None
        assert (cut.finish_reason, cut.guided.valid) == ("length", False)
        assert (await client.generate("?", output=SCHEMA, seed=1)).guided is None
    assert verdicts == {True, False}


HOSTILE: list[Any] = [
    {"const": "a" * 40, "not": {"pattern": "^(a|a)*b$"}},  # backtracks for ever
    {
        "const": 1,
        "not": {"$ref": "#/$defs/d0"},
        "$defs": {
            **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)},
            "d40": {"type": "integer"},
        },
    },
]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_verdict_that_cannot_be_reached_is_none_and_holds_up_nobody(tmp_path: Path) -> None:
    async with client_of(tmp_path) as (client, _, _), anyio.create_task_group() as tasks:
        results = []

        async def lenient(schema: Any) -> None:
            results.append(await client.generate("?", response_format=leniently(schema)))

        for schema in HOSTILE:
            tasks.start_soon(lenient, schema)
        assert (await client.generate("?", output=SCHEMA, seed=2)).parsed
        assert not results
    assert [(result.finish_reason, result.guided and result.guided.valid) for result in results] == [("stop", None)] * 2


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"const": 1, "not": {"$ref": "http://127.0.0.1:1/schema"}}, "does not fetch"),
    ],
)
async def test_a_lenient_schema_that_does_not_compile_is_refused_at_once(tmp_path: Path, schema: Any, why: str) -> None:
    async with client_of(tmp_path) as (client, _, engine):
        with pytest.raises(RequestError, match=why) as refused:
            await client.generate("?", response_format=leniently(schema))
        assert (refused.value.code, refused.value.param) == ("grammar_error", "response_format")
        assert (await engine.statistics())["engine_submitted"] == 0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(engine_over(runner_in(tmp_path))) as served:
        yield served


def events_of(body: bytes) -> list[tuple[str | None, Message]]:
    """``(id, message)`` of server-sent events."""
    found = []
    for block in body.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields.get("id"), json.loads(fields["data"])))
    return found


def test_values_come_as_server_sent_events_without_a_number(served: Served) -> None:
    status, events = generate_events(served, response_format=FORMAT, seed=3, max_tokens=300)
    assert status == 200
    text = "".join(message["text"] for _, message in events if message["type"] == "delta")
    jsonschema.validate(json.loads(text), SCHEMA)
    values = [(id, message) for id, message in events if message["type"] == "value"]
    assert [(m["path"], m["value"]) for _, m in values] == list(values_of(json.loads(text)))
    assert {id for id, _ in values} == {None}
    stream = events[0][1]["stream"]
    status, _, body = served.get(f"/v1/streams/{stream}/events?values=true&after=20")
    again = [(m["path"], m["value"]) for _, m in events_of(body) if m["type"] == "value"]
    assert again == [(m["path"], m["value"]) for _, m in values if m["seq"] > 20]


def test_values_over_http_of_what_is_no_json_are_refused_by_name(served: Served) -> None:
    status, events = generate_events(served)
    assert (status, events[0][1]["error"]["param"]) == (422, "delivery.values")


def generate_events(served: Served, **fields: Any) -> tuple[int, list[tuple[str | None, Message]]]:
    body = json.dumps({"prompt": "hi", "delivery": {"values": True}, **fields}).encode()
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    request = urllib.request.Request(served.url + "/v1/generate", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, events_of(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, [(None, json.loads(error.read()))]
