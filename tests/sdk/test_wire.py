"""The wire: what is encoded fits the published schema, what is decoded is checked, field by field."""

import json
import time
from contextlib import suppress
from typing import Any, get_args

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from streamengine_sdk import wire
from tests.schema import SCHEMA, validate

STREAM = "st_3Qw9xV7cR1tYb2nM"
USAGE = wire.Usage(prompt_tokens=9, completion_tokens=7, total_tokens=16, cached_tokens=4)

CLIENT_MESSAGES: list[wire.ClientMessage] = [
    wire.Init(),
    wire.Init(token="s3cret", client="test/1", batch=True),
    wire.Attach(id="r1", stream=STREAM, after=0),
    wire.Attach(id="r1", stream=STREAM, after=5, delivery=wire.Delivery(coalesce_ms=25, window=256)),
    wire.Ack(id="r1", seq=0),
    wire.Ack(id="r1", seq=512),
    wire.Generate(id="r1", prompt="hi"),
    wire.Generate(id="r1", token_ids=[1, 2], delivery=wire.Delivery(token_ids=True)),
    wire.Generate(
        id="a.B_c:1-2",
        messages=[{"role": "user", "content": "hi"}],
        model="m",
        key="12345678",
        max_tokens=64,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        typical_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        seed=7,
        stop=["END"],
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        bad_words=["no", [1, 2]],
        allowed_token_ids=[1, 2],
        logprobs=True,
        top_logprobs=3,
        logit_bias={"5": -1.0},
        response_format={"type": "text"},
        close_document=True,
        tools=[],
        tool_choice="none",
        chat_template_kwargs={"enable_thinking": False},
        priority=1,
        timeouts=wire.Timeouts(queue_s=1.5, total_s=60),
        metadata={"user": "me"},
        delivery=wire.Delivery(coalesce_ms=25, coalesce_tokens=4, window=256, linger_s=5, values=True, pad=32),
    ),
    wire.Cancel(id="r1"),
    wire.Cancel(id="r1", reason="enough"),
    wire.Ping(),
    wire.Ping(t=1.5),
]

SERVER_MESSAGES: list[wire.ServerMessage] = [
    wire.Hello(
        protocol=wire.PROTOCOL,
        epoch="9f3a",
        auth="ok",
        limits=wire.Limits(
            max_message_bytes=4194304,
            max_streams=64,
            heartbeat_s=15,
            max_queue=512,
            max_log_bytes=8388608,
            max_principal_log_bytes=67108864,
            max_connections=32,
            max_attachments=4,
            max_linger_s=600,
            max_session_s=86400,
            retain_s=60,
            ack_stall_s=60,
            idle_s=600,
            messages_per_s=50,
            message_burst=200,
        ),
        session="s",
        server={"name": "streamengine", "version": "0.1.0"},
        models=["m"],
        features=["coalesce"],
    ),
    wire.Accepted(id="r1", stream=STREAM, after=0),
    wire.Accepted(id="r1", stream=STREAM, after=5, model="m", created=1.5, replay=True),
    wire.Progress(id="r1", phase="queued", queue_position=3),
    wire.Progress(id="r1", phase="prefill", prompt_tokens=9, prefilled_tokens=4, cached_tokens=0),
    wire.Delta(id="r1", seq=1, text="Hello"),
    wire.Delta(
        id="r1",
        seq=1,
        text="H",
        logprobs=[wire.Logprob(token=5, text="H", logprob=-0.5, top=[wire.Logprob(token=6, b64="4oI=", logprob=-1)])],
    ),
    wire.Delta(id="r1", seq=5, n=4, text=" there, how are", channel="reasoning", tokens=[1, 2, 3, 4]),
    wire.Delta(
        id="r1", seq=6, text='{"city', channel="tool", call=wire.Call(index=0, id="c1", name="weather"), pad="xx"
    ),
    wire.Delta(id="r1", seq=7, text='":', channel="tool", call=wire.Call(index=0)),
    wire.Value(id="r1", seq=7, path="/city", value=["Rome", None, {"pop": 2.8}]),
    wire.Value(id="r1", seq=7, path="", value=None),
    wire.Done(id="r1", seq=8, finish_reason="stop", usage=USAGE, check=wire.Check(bytes=25, crc32=1960080510)),
    wire.Done(
        id="r1",
        seq=8,
        finish_reason="cancelled",
        usage=USAGE,
        check=wire.Check(bytes=0, crc32=0),
        stream=STREAM,
        delivery=wire.DeliveryStats(frames=7, max_lag=3, attaches=2),
        cause="client",
        stop_sequence="END",
        timing=wire.Timing(
            total_ms=9, ttft_ms=3, itl_ms=wire.InterToken(p50=1, p99=2, max=3), tokens_per_s=20, forced_tokens=4
        ),
        guided=wire.Guided(valid=None, warnings=["not"]),
    ),
    wire.Error(code="invalid_json", message="no", status=400, retryable=False, ref="r1", param="x"),
    wire.Error(
        code="engine_error",
        message="no",
        status=500,
        retryable=True,
        retry_after_ms=5,
        id="r1",
        stream=STREAM,
        seq=4,
        usage=USAGE,
        fatal=False,
    ),
    wire.Error(code="resume_gap", message="no", status=410, retryable=False, id="r1", available_from=12),
    wire.Error(
        code="context_length_exceeded", message="no", status=400, retryable=False, id="r1", prompt_tokens=9, limit=8
    ),
    wire.Batch(events=[wire.Delta(id="r1", seq=1, text="a"), wire.Delta(id="r2", seq=1, text="b"), wire.Heartbeat()]),
    wire.GoAway(reason="shutdown", deadline_ms=30000, reconnect=True),
    wire.Heartbeat(),
    wire.Heartbeat(t=1.5),
    wire.Pong(t=1.5),
    wire.Pong(t=1.5, server_t=2.5),
]


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda message: type(message).__name__)
def test_a_client_message_fits_the_schema_and_comes_back_equal(message: wire.ClientMessage) -> None:
    text = wire.encode(message)
    validate("client", text)
    assert wire.decode_client(text) == message


@pytest.mark.parametrize("message", SERVER_MESSAGES, ids=lambda message: type(message).__name__)
def test_a_server_message_fits_the_schema_and_comes_back_equal(message: wire.ServerMessage) -> None:
    text = wire.encode(message)
    validate("server", text)
    assert wire.decode_server(text) == message


def test_every_type_is_tried_above() -> None:
    assert {type(message) for message in CLIENT_MESSAGES} == set(get_args(wire.ClientMessage))
    assert {type(message) for message in SERVER_MESSAGES} == set(get_args(wire.ServerMessage))


@pytest.mark.parametrize("kind", [*get_args(wire.ClientMessage), *get_args(wire.ServerMessage)])
def test_the_schema_knows_every_field(kind: type[msgspec.Struct]) -> None:
    side = "client" if kind in get_args(wire.ClientMessage) else "server"
    known = SCHEMA["$defs"][side][kind.__struct_config__.tag]["properties"]
    assert set(kind.__struct_fields__) <= known.keys()


def test_a_delta_of_one_token_is_short() -> None:
    text = wire.encode(wire.Delta(id="r1", seq=1, text="Hello"))
    assert text == '{"type":"delta","id":"r1","seq":1,"text":"Hello"}'


# what a server refuses

PROMPT = '{"type":"generate","id":"r1","prompt":"hi"'


@pytest.mark.parametrize(
    ("frame", "code", "param", "id", "ref"),
    [
        ("", "invalid_json", None, None, None),
        ("{", "invalid_json", None, None, None),
        (PROMPT + "} {}", "invalid_json", None, None, None),
        (PROMPT + ',"temperature":NaN}', "invalid_json", None, None, "r1"),
        (PROMPT + ',"temperature":-Infinity}', "invalid_json", None, None, "r1"),
        (PROMPT + ',"temperature":1e999}', "invalid_json", None, None, "r1"),
        (PROMPT + ',"seed":' + "1" * 5000 + "}", "invalid_json", None, None, None),
        (PROMPT + r',"model":"\ud800"}', "invalid_json", None, None, "r1"),
        (PROMPT + ',"model":"\ud800"}', "invalid_json", None, None, "r1"),
        (PROMPT + ',"prompt":"ho"}', "invalid_json", None, None, "r1"),
        (PROMPT + r',"\u0070rompt":"ho"}', "invalid_json", None, None, "r1"),
        (PROMPT + ',"response_format":{"type":"text","a":{"b":1,"b":2}}}', "invalid_json", None, None, "r1"),
        (PROMPT + ',"x_a":{"b":1,"b":2}}', "invalid_json", None, None, "r1"),
        (PROMPT + ',"tool_choice":' + "[" * 64 + "]" * 64 + "}", "invalid_json", None, None, "r1"),
        (PROMPT + ',"tool_choice":' + '[{"a":' * 32 + "1" + "}]" * 32 + "}", "invalid_json", None, None, "r1"),
        (PROMPT + ',"tool_choice":[' + "[]," * 100_000 + "1]}", "invalid_json", None, None, None),
        (PROMPT + ',"tool_choice":' + "[" * 100_000 + "]" * 100_000 + "}", "invalid_json", None, None, None),
        (b"{}", "invalid_message", None, None, None),
        ("[]", "invalid_message", None, None, None),
        ("null", "invalid_message", None, None, None),
        ("{}", "invalid_message", "type", None, None),
        ('{"type":1,"id":"r1"}', "invalid_message", "type", None, "r1"),
        ('{"type":"generate","prompt":"hi"}', "invalid_message", "id", None, None),
        ('{"type":"generate","id":7,"prompt":"hi"}', "invalid_message", "id", None, None),
        ('{"type":"generate","id":"a b","prompt":"hi"}', "invalid_message", "id", None, "a b"),
        ('{"type":"generate","id":"a\\n","prompt":"hi"}', "invalid_message", "id", None, "a\n"),
        ('{"type":"cancel","id":"r1","why":"so"}', "invalid_message", "why", None, "r1"),
        ('{"type":"ping","t":"now"}', "invalid_message", "t", None, None),
        ('{"type":"attach","id":"r1","stream":"st_1","after":0}', "invalid_request", "stream", "r1", None),
        ('{"type":"attach","id":"r1","stream":"st_0123456789abcdef"}', "invalid_request", "after", "r1", None),
        (
            '{"type":"attach","id":"r1","stream":"st_0123456789abcdef\\n","after":0}',
            "invalid_request",
            "stream",
            "r1",
            None,
        ),
        ('{"type":"attach","id":"a b","stream":"st_0123456789abcdef","after":0}', "invalid_message", "id", None, "a b"),
        ('{"type":"ack","id":"r1","seq":-1}', "invalid_message", "seq", None, "r1"),
        ('{"type":"init","key":"12345678"}', "invalid_message", "key", None, None),
        ('{"type":"delta","id":"r1","seq":1,"text":"x"}', "unknown_type", "type", None, "r1"),
        ('{"type":"generate","id":"r1"}', "invalid_request", "prompt", "r1", None),
        (PROMPT + ',"token_ids":[1]}', "invalid_request", "token_ids", "r1", None),
        ('{"type":"generate","id":"r1","messages":[]}', "invalid_request", "messages", "r1", None),
        ('{"type":"generate","id":"r1","messages":["hi"]}', "invalid_request", "messages[0]", "r1", None),
        ('{"type":"generate","id":"r1","token_ids":[]}', "invalid_request", "token_ids", "r1", None),
        ('{"type":"generate","id":"r1","token_ids":[1,-1]}', "invalid_request", "token_ids[1]", "r1", None),
        (PROMPT + ',"temprature":1}', "invalid_request", "temprature", "r1", None),
        (PROMPT + ',"x_mine":1,"temprature":1}', "invalid_request", "temprature", "r1", None),
        (PROMPT + ',"temperature":"hot"}', "invalid_request", "temperature", "r1", None),
        (PROMPT + ',"temperature":null}', "invalid_request", "temperature", "r1", None),
        (PROMPT + ',"max_tokens":1.5}', "invalid_request", "max_tokens", "r1", None),
        (PROMPT + ',"stop":"END"}', "invalid_request", "stop", "r1", None),
        (PROMPT + ',"top_k":5.5}', "invalid_request", "top_k", "r1", None),
        (PROMPT + ',"min_tokens":true}', "invalid_request", "min_tokens", "r1", None),
        (PROMPT + ',"n":2}', "invalid_request", "n", "r1", None),
        (PROMPT + ',"tenant":"me"}', "invalid_request", "tenant", "r1", None),
        (PROMPT + ',"bad_words":[5]}', "invalid_request", "bad_words[0]", "r1", None),
        (PROMPT + ',"metadata":{"a":1}}', "invalid_request", "metadata", "r1", None),
        (PROMPT + ',"timeouts":{"queue_s":0}}', "invalid_request", "timeouts.queue_s", "r1", None),
        (PROMPT + ',"delivery":{"pad":-1}}', "invalid_request", "delivery.pad", "r1", None),
        (PROMPT + ',"delivery":{"padding":1}}', "invalid_request", "delivery.padding", "r1", None),
    ],
)
def test_a_bad_frame_is_refused_by_code_and_field(
    frame: str | bytes, code: str, param: str | None, id: str | None, ref: str | None
) -> None:
    with pytest.raises(wire.BadMessage) as caught:
        wire.decode_client(frame)
    bad = caught.value
    assert (bad.code, bad.param, bad.id, bad.ref) == (code, param, id, ref)
    answer = bad.error
    assert (answer.code, answer.status, answer.message) == (code, 400, str(bad))
    assert (answer.id or None, answer.ref or None, answer.param or None) == (id, ref, param)
    validate("server", wire.encode(answer))


def test_a_field_that_starts_with_x_is_free() -> None:
    assert wire.decode_client(PROMPT + ',"x_trace":{"a":[1]}}') == wire.Generate(id="r1", prompt="hi")
    assert wire.decode_client('{"type":"ping","x_trace":1}') == wire.Ping()


def test_sixty_four_levels_are_deep_enough_and_brackets_in_strings_are_none() -> None:
    # The message itself is the first level.
    text = PROMPT + ',"tool_choice":' + "[" * 63 + "]" * 63 + "}"
    assert isinstance(wire.decode_client(text), wire.Generate)
    prompt = '[{"\\' * 1000
    message = wire.Generate(id="r1", prompt=prompt)
    assert wire.decode_client(wire.encode(message)) == message


def test_an_answer_is_not_as_long_as_the_frame_it_answers() -> None:
    with pytest.raises(wire.BadMessage) as caught:
        wire.decode_client(PROMPT + f',"{"a" * 1_000_000}":1}}')
    assert len(wire.encode(caught.value.error)) < 1000


def test_a_lone_surrogate_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        wire.encode(wire.Generate(id="r1", prompt="\ud800"))


def test_a_client_reads_unknown_types_and_fields_but_no_broken_ones() -> None:
    weather = {"type": "weather", "text": "rain"}
    assert wire.decode_server(json.dumps(weather)) == wire.Unknown(type="weather", fields=weather)
    assert wire.decode_server('{"type":"pong","t":1,"mood":"good"}') == wire.Pong(t=1)
    for text in ("", "[]", "{}", '{"type":"delta"}', '{"type":"delta","id":"r1","seq":"1","text":""}'):
        with pytest.raises(wire.BadMessage):
            wire.decode_server(text)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("progress", "phase"),
        ("delta", "channel"),
        ("done", "finish_reason"),
        ("done", "cause"),
        ("error", "code"),
        ("goaway", "reason"),
        ("hello", "auth"),
    ],
)
def test_a_word_from_a_newer_server_is_handed_on(kind: str, field: str) -> None:
    texts = [text for text in map(wire.encode, SERVER_MESSAGES) if json.loads(text)["type"] == kind]
    assert texts
    for text in texts:
        assert getattr(wire.decode_server(json.dumps(json.loads(text) | {field: "invented_later"})), field) == (
            "invented_later"
        )


def test_a_batch_is_read_without_what_the_client_does_not_know() -> None:
    one, two = wire.Delta(id="r1", seq=1, text="a"), wire.Pong(t=1)
    events = [{"type": "weather"}, json.loads(wire.encode(one)) | {"mood": 1}, json.loads(wire.encode(two))]
    assert wire.decode_server(json.dumps({"type": "batch", "events": events})) == wire.Batch(events=[one, two])
    wrong: list[Any] = [[{"type": "batch", "events": []}], [{"type": "pong"}], [5], [{}], {}, [{"type": "weather"}, {}]]
    for bad in wrong:
        with pytest.raises(wire.BadMessage):
            wire.decode_server(json.dumps({"type": "batch", "events": bad}))


def test_messages_in_a_batch_are_held_against_the_schema_too() -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate("server", {"type": "batch", "events": [{"type": "delta", "id": "r1", "seq": 0, "text": ""}]})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([wire.encode(message) for message in CLIENT_MESSAGES]),
    st.dictionaries(
        st.sampled_from([*wire.Generate.__struct_fields__, "type", "x_free", "nonsense"]), JSON, max_size=3
    ),
)
def test_a_frame_is_a_message_or_a_bad_message_whatever_is_in_it(text: str, changes: dict[str, Any]) -> None:
    frame = json.dumps(json.loads(text) | changes)
    try:
        message = wire.decode_client(frame)
    except wire.BadMessage as bad:
        validate("server", wire.encode(bad.error))
    else:
        assert not {"nonsense"} & changes.keys()
        assert wire.decode_client(msgspec.json.encode(message).decode()) == message


@given(st.text())
def test_text_survives_the_wire(text: str) -> None:
    delta = wire.Delta(id="r1", seq=1, text=text)
    assert wire.decode_server(wire.encode(delta)) == delta
    assert delta.tokens is UNSET


@pytest.mark.parametrize(
    "value",
    [
        '"' + "[" * 1000 + '"',
        r'"\\" ,"x_b":"\"' + "[{" * 1000 + r'\\"',
        "[" + "[],{}," * 1000 + "1]",
        "[" * 63 + "]" * 63,
    ],
)
def test_brackets_in_strings_and_beside_each_other_are_no_depth(value: str) -> None:
    assert wire.decode_client(f'{{"type":"ping","x_a":{value}}}') == wire.Ping()


def test_many_keys_and_many_brackets_are_read_in_linear_time() -> None:
    def seconds(text: str) -> float:
        begin = time.perf_counter()
        with suppress(wire.BadMessage):
            wire.decode_client(text)
        return time.perf_counter() - begin

    keys = ",".join(f'"x_{i}":1' for i in range(100_000))
    assert seconds(f'{{"type":"ping",{keys},"x_0":1}}') < 10
    assert seconds('{"type":"ping","x_a":[' + "[]," * 1_300_000 + "1]}") < 10
