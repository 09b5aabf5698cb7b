"""OpenAI's requests and answers as pure translations: bodies to what the engine is asked for, logs to JSON."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from openai.types import completion_create_params
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from streamengine.bell import Bell
from streamengine.engine import Generate
from streamengine.errors import EngineFailure, InvalidJSON, InvalidRequest, ShuttingDown, StreamEngineError
from streamengine.log import Log, Outcome, TokenLogprob, Usage
from streamengine.request import FinishReason
from streamengine.sampling import SamplingParams
from streamengine.server.http import decode
from streamengine.server.openai.answers import ChoiceReader, Echo, Piece, Shape, usage
from streamengine.server.openai.requests import ChatRequest, CompletionRequest, lenient
from streamengine.server.openai.translate import chat_generate, check_body, completion_generates
from streamengine.timing import Timing

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Generate:
    body = decode(json.dumps({"messages": HELLO, **fields}).encode(), ChatRequest)
    check_body(body, "fake")
    return chat_generate(body)


def complete(prompt: Any = "hello", **fields: Any) -> list[Generate]:
    body = decode(json.dumps({"prompt": prompt, **fields}).encode(), CompletionRequest)
    check_body(body, "fake")
    return completion_generates(body)


# requests


def test_a_chat_asks_for_what_openai_and_vllm_name() -> None:
    generate = chat(
        model="fake",
        max_completion_tokens=9,
        n=2,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 2},
        seed=7,
        stop="end",
        logprobs=True,
        top_logprobs=3,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.5,
        min_tokens=2,
        stop_token_ids=[8],
        include_stop_str_in_output=True,
        ignore_eos=True,
        bad_words=["ugly"],
        allowed_token_ids=[1, 2],
        prompt_logprobs=0,
        priority=3,
    )
    assert generate.messages == tuple(HELLO)
    assert generate.priority == 3
    assert generate.sampling == SamplingParams(
        max_tokens=9,
        n=2,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={5: 2},
        seed=7,
        stop=("end",),
        logprobs=3,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.5,
        min_tokens=2,
        stop_token_ids=(8,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        bad_words=("ugly",),
        allowed_token_ids=(1, 2),
        prompt_logprobs=0,
    )


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, (1, 2))]),
        ([[1, 2], [3]], [(None, (1, 2)), (None, (3,))]),
    ],
)
def test_a_completion_takes_texts_and_ids_one_or_many(prompt: Any, asked: list[Any]) -> None:
    assert [(generate.prompt, generate.token_ids) for generate in complete(prompt)] == asked


def test_a_completion_is_16_tokens_long_and_a_chat_as_long_as_the_context_allows() -> None:
    assert (complete()[0].sampling.max_tokens, chat().sampling.max_tokens) == (16, None)


def test_an_echo_with_log_probabilities_asks_for_those_of_the_prompt() -> None:
    assert complete(echo=True, logprobs=2)[0].sampling.prompt_logprobs == 2
    assert complete(echo=True)[0].sampling.prompt_logprobs is None


def test_null_is_as_good_as_absent() -> None:
    names = set(ChatRequest.__struct_fields__) - {"messages"}
    assert chat(**dict.fromkeys(names)) == chat()
    names = set(CompletionRequest.__struct_fields__) - {"prompt"}
    assert complete(**dict.fromkeys(names)) == complete()


@pytest.mark.parametrize(
    ("kind", "params", "needed"),
    [
        (ChatRequest, CompletionCreateParamsBase, {"messages": HELLO}),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase, {"prompt": "hello"}),
    ],
)
def test_a_null_is_taken_for_every_field_of_openai_s_and_no_value_for_one_that_is_not_here(
    kind: Any, params: Any, needed: dict[str, Any]
) -> None:
    fields = {**dict.fromkeys(params.__annotations__), "stream": None, "surprise": None, **needed}
    assert decode(json.dumps(fields).encode(), kind) == decode(json.dumps(needed).encode(), kind)
    with pytest.raises(InvalidRequest) as refused:
        decode(json.dumps({**fields, "surprise": 0}).encode(), kind)
    assert refused.value.param == "surprise"


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "flex", "safety_identifier": "x"},
        {"store": False, "prompt_cache_key": "k", "parallel_tool_calls": True, "modalities": ["text"]},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
        {"skip_special_tokens": True, "add_generation_prompt": True, "stream_options": None},
    ],
)
def test_what_cannot_change_the_answer_is_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "response_format"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "json_object"}),
        ({"guided_json": {"a": 1}}, {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}),
        ({"guided_json": '{"a": 1}'}, {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}),
        ({"structured_outputs": {"json": {}}}, {"type": "json_schema", "json_schema": {"schema": {}}}),
        ({"guided_regex": "a+"}, {"type": "regex", "regex": "a+"}),
        ({"structured_outputs": {"grammar": "start: x"}}, {"type": "grammar", "grammar": "start: x"}),
        ({"guided_choice": ["a", "b"]}, {"type": "choice", "choice": ["a", "b"]}),
    ],
)
def test_every_name_of_a_format_means_the_same(fields: dict[str, Any], response_format: dict[str, Any]) -> None:
    assert chat(**fields, close_document=True) == structs.replace(
        chat(), response_format=response_format, close_document=True
    )
    assert complete(**fields)[0].response_format == response_format


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"audio": {}}, "audio"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": {}, "response_format": {"type": "text"}}, "guided_json"),
        ({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": "]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"tools": 5}, "tools"),
        ({"store": True}, "store"),
        ({"model": "other"}, "model"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"surprise": True}}, "stream_options.surprise"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 5.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [*HELLO, {"role": "banana", "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": "User", "content": "a"}]}, "messages[0].role"),
    ],
)
def test_a_chat_field_that_cannot_be_obeyed_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(StreamEngineError) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.status < 500) == (param, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": HELLO}, "messages"),
        ({"response_format": "json"}, "response_format"),
    ],
)
def test_a_completion_field_that_cannot_be_obeyed_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(StreamEngineError) as refused:
        complete(**fields)
    assert (refused.value.param, refused.value.status < 500) == (param, True)


NASTY: list[Any] = [0, -1, 1.5, 10**30, 1e308, 1e-320, "", "x", True, [], {}, [[]], [None], {"a": []}, ["x", 1], "\x00"]


@pytest.mark.parametrize("name", ChatRequest.__struct_fields__)
def test_no_value_of_a_chat_field_is_an_internal_error(name: str) -> None:
    for value in NASTY:
        with contextlib.suppress(StreamEngineError):
            chat(**{name: value})


@pytest.mark.parametrize("name", CompletionRequest.__struct_fields__)
def test_no_value_of_a_completion_field_is_an_internal_error(name: str) -> None:
    for value in NASTY:
        with contextlib.suppress(StreamEngineError):
            complete(**{name: value})


def test_unknown_fields_are_dropped_where_that_is_configured_but_not_wrong_ones() -> None:
    body = decode(b'{"messages": [], "surprise": 1, "n": 2}', lenient(ChatRequest))
    assert body.n == 2
    with pytest.raises(InvalidRequest):
        decode(b'{"messages": [], "n": "2"}', lenient(ChatRequest))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "user": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"prompt": "a", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "user": [' + b"[]," * 200_000 + b"[]]}",
    ],
)
def test_a_body_that_is_no_strict_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidJSON):
        decode(body, CompletionRequest)


# answers

TIMING = Timing(total_ms=1)


def ended(log: Log, reason: FinishReason = "stop", cause: str | None = None) -> Log:
    log.end(Outcome(finish_reason=reason, usage=log.usage, timing=TIMING, cause=cause))
    return log


def item(token: int, data: bytes, logprob: float = -1.0, top: Sequence[TokenLogprob] = ()) -> TokenLogprob:
    text = data.decode(errors="replace")
    return TokenLogprob(token=token, text=text, bytes=data, logprob=logprob, rank=1, top=tuple(top))


def read(reader: ChoiceReader) -> Piece:
    reader.read()
    piece = reader.take()
    assert piece is not None
    return piece


def reader_of(log: Log, shape: Shape = "text", **more: Any) -> ChoiceReader:
    return ChoiceReader(shape, 0, log, log.reader(Bell()), **more)


def euro() -> Log:
    """``a€b``, with three tokens for the middle."""
    log = Log("st", 2)
    items = [item(1, b"a"), item(2, b"\xe2"), item(3, b"\x82"), item(4, b"\xac"), item(5, b"b", float("-inf"))]
    log.append(list(zip(range(1, 6), ["a", "", "", "€", "b"], strict=True)), items)
    return ended(log)


def test_text_offsets_index_the_returned_text_also_where_characters_have_several_tokens() -> None:
    piece = read(reader_of(euro(), logprobs=True))
    assert piece.text == "a€b"
    assert piece.logprobs == {
        "tokens": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"],
        "token_logprobs": [-1.0, -1.0, -1.0, -1.0, -9999.0],
        "top_logprobs": [
            {"a": -1.0},
            {"bytes:\\xe2": -1.0},
            {"bytes:\\x82": -1.0},
            {"bytes:\\xac": -1.0},
            {"b": -9999.0},
        ],
        "text_offset": [0, 1, 1, 1, 2],
    }


def test_a_chat_s_log_probabilities_have_the_bytes_of_each_token() -> None:
    log = Log("st", 2)
    log.append([(1, "é")], [item(1, "é".encode(), -0.5, [item(1, "é".encode(), -0.5), item(2, b"\xc3", -2)])])
    piece = read(reader_of(ended(log), "chat", logprobs=True))
    first = {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}
    second = {"token": "bytes:\\xc3", "logprob": -2, "bytes": [0xC3]}
    assert piece.logprobs == {"content": [{**first, "top_logprobs": [first, second]}], "refusal": None}


def test_of_two_tokens_that_write_the_same_the_likelier_one_is_in_top_logprobs() -> None:
    log = Log("st", 2)
    log.append([(3, "x")], [item(3, b"x", -3, [item(1, b"x", -1), item(2, b"y", -2)])])
    piece = read(reader_of(ended(log), logprobs=True))
    assert piece.logprobs is not None
    assert piece.logprobs["top_logprobs"] == [{"x": -1, "y": -2}]


def test_an_echo_comes_in_front_with_its_own_log_probabilities_and_offsets() -> None:
    log = Log("st", 3)
    log.prompt_logprobs = [item(11, b"\xc3"), item(12, b"\xa9")]
    log.append([(13, "z")], [item(13, b"z")])
    echo = Echo(((10, "x"), (11, ""), (12, "é")), b"x")
    piece = read(reader_of(ended(log), logprobs=True, echo=echo))
    assert piece.text == "xéz"
    assert piece.logprobs is not None
    assert piece.logprobs["tokens"] == ["x", "bytes:\\xc3", "bytes:\\xa9", "z"]
    assert piece.logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert piece.logprobs["top_logprobs"][0] is None
    assert piece.logprobs["text_offset"] == [0, 1, 1, 2]


texts = st.lists(st.sampled_from(["", "a", "é", "€uro", "\n"]), max_size=12)


@given(texts, st.data(), st.sampled_from(["chat", "text"]))
def test_pieces_joined_are_the_whole_whatever_the_split(parts: list[str], data: st.DataObject, shape: Shape) -> None:
    log = Log("st", 1)
    reader = reader_of(log, shape, logprobs=True)
    pieces: list[Piece] = []
    while parts:
        cut = data.draw(st.integers(1, len(parts)))
        batch, parts = parts[:cut], parts[cut:]
        log.append([(1, part) for part in batch], [item(1, part.encode()) for part in batch])
        reader.read()
        if (piece := reader.take()) is not None:
            assert piece.text, "a chunk with nothing in it"
            pieces.append(piece)
    pieces.append(read_end(reader, ended(log)))
    whole = read(reader_of(log, shape, logprobs=True))
    assert "".join(piece.text for piece in pieces) == whole.text == log.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert whole.logprobs is not None
    for name, values in whole.logprobs.items():
        if isinstance(values, list):
            assert [value for piece in pieces for value in (piece.logprobs or {})[name]] == values


def read_end(reader: ChoiceReader, log: Log) -> Piece:
    assert log.ended
    return read(reader)


@pytest.mark.parametrize(("reason", "said"), [("stop", "stop"), ("length", "length")])
def test_an_end_has_openai_s_name(reason: FinishReason, said: str) -> None:
    assert read(reader_of(ended(Log("st"), reason))).finish_reason == said


@pytest.mark.parametrize(("cause", "error"), [("shutdown", ShuttingDown), ("operator", EngineFailure)])
def test_an_answer_that_was_cut_is_an_error(cause: str, error: type[StreamEngineError]) -> None:
    with pytest.raises(error, match=cause):
        read(reader_of(ended(Log("st"), "cancelled", cause)))


def test_usage_counts_a_prompt_once_and_every_answer() -> None:
    groups = [[Log("a", 5), Log("b", 5)], [Log("c", 7)]]
    groups[0][0].append([(1, "x")] * 3)
    groups[0][1].append([(1, "x")] * 2)
    groups[1][0].cached_tokens = 4
    assert usage(groups) == {
        "prompt_tokens": 12,
        "completion_tokens": 5,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert Usage(prompt_tokens=5, completion_tokens=3) == groups[0][0].usage
