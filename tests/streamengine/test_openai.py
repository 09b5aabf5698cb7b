"""OpenAI's interface from outside: the official client, and raw HTTP where it hides what is of interest."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.fakes import EOS, FakeRunner, byte_tokenizer_json, fake_kv, fake_model, oracle
from tests.serving import PATIENCE_S, Served, engine_over, eventually, roomy_runner, serving
from tests.streamengine.guided.drawn import runner_in

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]
ANSWER = "Größe: 5 €"
PROMPT = "user: hello\nassistant: "


@pytest.fixture
def runner() -> FakeRunner:
    return roomy_runner()


@pytest.fixture
def served(runner: FakeRunner) -> Iterator[Served]:
    with serving(engine_over(runner, max_n=8)) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def client_of(served: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def says(runner: FakeRunner, answer: str = ANSWER) -> None:
    """To every prompt."""
    reply = (*answer.encode(), EOS)
    prompts = {len(b"hello"): reply, 1 + len(PROMPT): reply}

    def tell(context: Any, sampling: Any) -> int:
        length = max(length for length in prompts if length <= len(context))
        return prompts[length][len(context) - length]

    runner.answer = tell


def endless() -> FakeRunner:
    """Says so much that a test is over long before."""

    def answer(context: Any, sampling: Any) -> int:
        time.sleep(0.001)
        return ord("x")

    return roomy_runner(model=fake_model(max_model_len=30_000), answer=answer)


def greedy(prompt: str, tokens: int) -> str:
    return bytes(oracle(prompt.encode(), tokens)).decode()


# the official client


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    lives: Annotated[int, pydantic.Field(ge=1, le=9)]


@pytest.fixture
def guided(tmp_path: Path) -> Iterator[openai.OpenAI]:
    with serving(engine_over(runner_in(tmp_path))) as served, client_of(served) as client:
        yield client


def test_a_pydantic_model_is_parsed(guided: openai.OpenAI) -> None:
    for seed in range(3):
        answer = guided.chat.completions.parse(model="fake", messages=HELLO, response_format=Pet, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, Pet)
        with guided.chat.completions.stream(model="fake", messages=HELLO, response_format=Pet, seed=seed) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_every_format_is_kept_and_a_lenient_one_is_judged(guided: openai.OpenAI) -> None:
    ask: Any = {"model": "fake", "messages": HELLO, "max_tokens": 100}
    objects = guided.chat.completions.create(
        **ask, response_format={"type": "json_object"}, extra_body={"close_document": True}
    )
    assert isinstance(json.loads(objects.choices[0].message.content or ""), dict)
    words = guided.completions.create(model="fake", prompt="?", extra_body={"guided_choice": ["yes", "no"]})
    assert words.choices[0].text in ("yes", "no")
    unique = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    lenient: Any = {"type": "json_schema", "json_schema": {"name": "u", "schema": unique, "strict": False}}
    judged = {"valid": False, "warnings": ['Unimplemented keys: ["uniqueItems"]']}
    answer = guided.chat.completions.create(**ask, response_format=lenient)
    assert answer.choices[0].to_dict()["guided"] == judged
    chunks = [
        choice.to_dict()
        for chunk in guided.chat.completions.create(**ask, response_format=lenient, stream=True)
        for choice in chunk.choices
    ]
    assert [chunk["guided"] for chunk in chunks if "guided" in chunk] == [judged]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", [{"type": "objekt"}, {"not": {}}, {"$ref": "#"}])
def test_a_schema_that_cannot_be_kept_is_a_bad_request_even_where_the_answer_streams(
    guided: openai.OpenAI, schema: Any, stream: bool
) -> None:
    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as bad:
        guided.chat.completions.create(model="fake", messages=HELLO, response_format=asked, stream=stream)
    assert (bad.value.param, bad.value.code) == ("response_format", "grammar_error")


def test_a_chat_is_answered(client: openai.OpenAI, runner: FakeRunner) -> None:
    says(runner)
    answer = client.chat.completions.create(model="fake", messages=HELLO)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (24, len(ANSWER.encode()) + 1)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"


def test_a_streamed_chat_is_the_same_answer_in_pieces(client: openai.OpenAI, runner: FakeRunner) -> None:
    says(runner)
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True, stream_options=options))
    *spoken, last = chunks
    assert spoken[0].choices[0].delta.role == "assistant"
    contents = [chunk.choices[0].delta.content for chunk in spoken[1:]]
    assert "".join(content or "" for content in contents) == ANSWER
    assert spoken[-1].choices[0].finish_reason == "stop"
    assert {chunk.usage for chunk in spoken} == {None}
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], len(ANSWER.encode()) + 1)


def test_usage_comes_with_every_chunk_where_that_is_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(model="fake", prompt="hello", max_tokens=9, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_a_completion_takes_several_prompts_and_gives_n_answers_to_each(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "prompt": ["one", "two!"], "n": 3, "temperature": 0, "max_tokens": 7}
    answer = client.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [greedy("one", 7)] * 3 + [greedy("two!", 7)] * 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 42)
    streamed = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == [choice.text for choice in answer.choices]


def test_ids_are_a_prompt_and_answers_are_reproducible(client: openai.OpenAI) -> None:
    ask: Any = {"model": "fake", "max_tokens": 8, "seed": 5}
    texts = {client.completions.create(prompt=prompt, **ask).choices[0].text for prompt in ("hi", [104, 105])}
    assert len(texts) == 1
    assert texts != {client.completions.create(prompt="hi", **(ask | {"seed": 6})).choices[0].text}


def test_the_best_of_several_is_given_and_all_are_counted(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", best_of=4, n=1, seed=3, max_tokens=5, logprobs=0)
    drawn = client.completions.create(model="fake", prompt="hello", n=4, seed=3, max_tokens=5, logprobs=0)
    best = max(drawn.choices, key=lambda choice: sum((choice.logprobs and choice.logprobs.token_logprobs) or [0]))
    assert [choice.text for choice in answer.choices] == [best.text]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_a_chat_gives_log_probabilities_for_each_token(client: openai.OpenAI, runner: FakeRunner) -> None:
    says(runner)
    asked: Any = {"model": "fake", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert bytes(byte for token in whole.content for byte in token.bytes or ()).decode() == ANSWER
    assert {len(token.top_logprobs) for token in whole.content} == {2}
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            streamed += logprobs.content or []
    assert streamed == whole.content


def test_an_echo_repeats_the_prompt_with_its_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"model": "fake", "prompt": "Größe €", "max_tokens": 3, "echo": True, "logprobs": 1, "temperature": 0}
    choice = client.completions.create(**asked).choices[0]
    assert choice.text == "Größe €" + greedy("Größe €", 3)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None for value in logprobs.token_logprobs[1:])
    assert len(logprobs.text_offset) == len("Größe €".encode()) + 3
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token
    pieces = list(client.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text


def test_stop_strings_end_an_answer_and_are_not_shown(client: openai.OpenAI, runner: FakeRunner) -> None:
    says(runner)
    for stop in ("5 ", ["never", "5 "]):
        choice = client.chat.completions.create(model="fake", messages=HELLO, stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Größe: ", "stop")
    stream = client.chat.completions.create(model="fake", messages=HELLO, stop="5 ", stream=True)
    contents = [chunk.choices[0].delta.content for chunk in stream]
    assert "".join(content or "" for content in contents) == "Größe: "
    assert contents[0] == ""
    assert "" not in contents[1:]


def test_extensions_reach_the_engine(client: openai.OpenAI) -> None:
    extra = {"allowed_token_ids": [120], "min_tokens": 4, "prompt_logprobs": 1, "ignore_eos": True}
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=4, extra_body=extra)
    scores: Any = answer.model_dump()["prompt_logprobs"]
    assert len(scores) == 24
    assert scores[0] is None
    assert str(ord("u")) in scores[1]


@pytest.mark.parametrize("length", [0, 30])
def test_options_of_the_template_are_a_part_of_the_prompt(client: openai.OpenAI, length: int) -> None:
    extra = {"chat_template_kwargs": {"style": "x" * length}} if length else {}
    usage = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1, extra_body=extra).usage
    assert usage is not None
    told: Any = client.post("/tokenize", body={"messages": HELLO, **extra}, cast_to=object)
    assert usage.prompt_tokens == told["count"] == 24 + (length and len("style=") + length + 1)


def test_a_prompt_that_was_computed_before_is_counted_as_cached(client: openai.OpenAI) -> None:
    def cached() -> int | None:
        usage = client.completions.create(model="fake", prompt="x" * 64, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    assert cached() == 48


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "streamengine"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("some/other")
    assert missing.value.code == "model_not_found"


# errors


def test_a_bad_value_is_a_bad_request_with_its_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert (bad.value.param, bad.value.type, bad.value.code) == (
        "temperature",
        "invalid_request_error",
        "invalid_request",
    )
    with pytest.raises(openai.BadRequestError, match="surprise"):
        client.chat.completions.create(model="fake", messages=HELLO, extra_body={"surprise": 1})
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="x" * 300)
    assert bad.value.code == "context_length_exceeded"


def test_what_the_engine_cannot_do_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model="fake", messages=HELLO, response_format={"type": "json_object"}, extra_body={"ignore_eos": True}
        )
    assert (bad.value.param, bad.value.code) == ("ignore_eos", "unsupported_feature")
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=image)
    assert bad.value.param == "messages[0].content[0].type"


NOT: Any = {"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}
MISNAMED: list[tuple[str, Any, str]] = [
    ("chat/completions", {"max_completion_tokens": 999}, "max_completion_tokens"),
    ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("chat/completions", {"max_tokens": 999}, "max_tokens"),
    ("chat/completions", {"guided_json": {"type": "objekt"}}, "guided_json"),
    ("chat/completions", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ("chat/completions", {"tools": [NOT]}, "tools[0].function.parameters"),
    ("completions", {"prompt": "a", "guided_choice": []}, "guided_choice"),
    ("completions", {"prompt": [7, 999]}, "prompt"),
    ("completions", {"prompt": [[7], [-1]]}, "prompt"),
]


def test_an_error_names_the_field_that_the_client_sent(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    runner = FakeRunner(kv=fake_kv(pages=65, page_size=16), model=fake_model(512, str(tmp_path)))
    with serving(engine_over(runner)) as served:
        for path, fields, param in MISNAMED:
            body = fields if "prompt" in fields else {"messages": HELLO, **fields}
            for stream in (False, True):
                response, payload = post(served, f"/v1/{path}", {**body, "stream": stream})
                error = json.loads(payload)["error"]
                assert (response.status, error["param"]) == (400, param), payload
                assert "response_format" not in error["message"]
                assert "token_ids" not in error["message"]


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=HELLO)
    assert missing.value.code == "model_not_found"


def test_a_failed_step_is_a_server_error_whole_and_streamed(client: openai.OpenAI, runner: FakeRunner) -> None:
    runner.fail()
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model="fake", prompt="hello")
    assert failed.value.code == "engine_error"
    runner.fail()
    stream = client.completions.create(model="fake", prompt="hello", stream=True)
    with pytest.raises(openai.APIError, match="kernel panic"):
        list(stream)
    assert client.completions.create(model="fake", prompt="hello").choices[0].text


def test_a_full_queue_says_when_to_come_back(runner: FakeRunner) -> None:
    with serving(engine_over(runner, max_num_seqs=1, max_queue=1)) as served, client_of(served) as client:
        runner.hold()
        streams = [client.completions.create(model="fake", prompt="hello", stream=True) for _ in range(2)]
        with pytest.raises(openai.InternalServerError) as full:
            client.completions.create(model="fake", prompt="hello")
        assert full.value.status_code == 503
        assert int(full.value.response.headers["retry-after"]) >= 1
        runner.release()
        for stream in streams:
            list(stream)


def test_a_key_is_needed_where_there_are_keys_and_has_limits(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[alice]\nkey = "alice-key"\n')
    with serving(engine_over(endless()), api_key_file=str(tmp_path / "keys.toml"), max_principal_streams=1) as served:
        with client_of(served, "wrong") as client, pytest.raises(openai.AuthenticationError) as unknown:
            client.models.list()
        assert unknown.value.code == "unauthorized"
        with client_of(served, "alice-key") as client:
            stream = client.completions.create(model="fake", prompt="hello", max_tokens=29_000, stream=True)
            next(stream)
            with pytest.raises(openai.RateLimitError) as limited:
                client.completions.create(model="fake", prompt="hello")
            assert (limited.value.code, limited.value.type) == ("too_many_streams", "rate_limit_error")
            assert int(limited.value.response.headers["retry-after"]) >= 1
            stream.close()


# what the client hides


def post(served: Served, path: str, body: Any, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": "application/json", **headers})
    response = connection.getresponse()
    payload = response.read()
    connection.close()
    return response, payload


def test_a_stream_is_not_buffered_on_its_way_and_ends_in_done(served: Served) -> None:
    response, body = post(served, "/v1/completions", {"prompt": "hello", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    *chunks, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    texts = [json.loads(chunk.removeprefix(b"data: "))["choices"][0]["text"] for chunk in chunks]
    assert len("".join(texts)) == 16


def test_silence_is_filled_with_comments(runner: FakeRunner) -> None:
    with serving(engine_over(runner), heartbeat_s=0.1) as served:
        runner.hold()
        with opened(served, {"prompt": "hello", "stream": True}) as sock:
            received = b""
            while received.count(b": keep-alive\n\n") < 2:
                received += sock.recv(4096)
            runner.release()
            while b"[DONE]" not in received:
                received += sock.recv(4096)


def test_an_error_in_the_middle_is_the_last_event(served: Served, runner: FakeRunner) -> None:
    runner.fail()
    _, body = post(served, "/v1/chat/completions", {"messages": HELLO, "stream": True})
    first, error, rest = body.split(b"\n\n")
    assert (b"assistant" in first, rest) == (True, b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_error"


@pytest.mark.parametrize("size", [4 * 1024 * 1024 + 1, 40 * 1024 * 1024])
def test_a_body_above_the_limit_is_refused(served: Served, size: int) -> None:
    response, body = post(served, "/v1/completions", b"x" * size)
    assert (response.status, json.loads(body)["error"]["code"]) == (413, "message_too_large")


def test_a_body_that_is_no_json_is_refused(served: Served) -> None:
    response, body = post(served, "/v1/completions", b'{"prompt": NaN}')
    assert (response.status, json.loads(body)["error"]["code"]) == (400, "invalid_json")


def test_unknown_fields_are_dropped_where_that_is_configured(runner: FakeRunner) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "router_hint": 1}}
    with serving(engine_over(runner), ignore_unknown_fields=True) as served:
        assert post(served, "/v1/completions", {"prompt": "hello", "router_hint": 1})[0].status == 200
        response, body = post(served, "/v1/completions", {"prompt": "hello", **options})
        assert (response.status, body.count(b'"usage":{')) == (200, 1)


def test_tokens_can_be_counted_and_read(served: Served) -> None:
    def ask(path: str, body: Any) -> Any:
        response, payload = post(served, path, body)
        assert response.status == 200, payload
        return json.loads(payload)

    assert ask("/v1/tokenize", {"prompt": "é"}) == {"count": 2, "max_model_len": 256, "tokens": [0xC3, 0xA9]}
    assert ask("/v1/tokenize", {"messages": HELLO})["count"] == 24
    assert ask("/v1/tokenize", {"prompt": "x" * 1_000_000})["count"] == 1_000_000
    assert ask("/v1/detokenize", {"tokens": [0xC3, 0xA9, EOS]}) == {"prompt": "é"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tokenize", {}, "prompt"),
        ("/v1/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/v1/tokenize", {"prompt": "a", "model": "b"}, "model"),
        ("/v1/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/tokenize", {"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/v1/detokenize", {"tokens": [999]}, "tokens"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(served: Served, path: str, body: Any, param: str) -> None:
    response, payload = post(served, path, body)
    assert (response.status // 100, json.loads(payload)["error"]["param"]) == (4, param)


# clients that go


def opened(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request that was sent, its answer unread."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Length: {len(data)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", served.port), PATIENCE_S)
    sock.sendall(head.encode() + data)
    return sock


def statistic(served: Served, name: str) -> float:
    status, _, values = served.get("/v1/stats")
    assert status == 200
    return values.get(name, 0)


def attached(served: Served) -> float:
    """Streams that somebody reads; known without the core, which may be held."""
    streams = served.server.service.streams
    assert streams is not None
    return served.portal.call(streams.statistics)["streams_attached"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_goes_ends_its_request_and_its_pages_come_back(
    served: Served, runner: FakeRunner, stream: bool, n: int
) -> None:
    free = statistic(served, "kv_pages_free")
    runner.hold()
    with opened(served, {"prompt": ["hello", "world"], "n": n, "max_tokens": 200, "stream": stream}):
        eventually(lambda: attached(served) == 2 * n)
        assert runner.holding.wait(PATIENCE_S)
    eventually(lambda: attached(served) == 0)
    runner.release()
    eventually(lambda: statistic(served, "engine_open") == 0)
    assert statistic(served, "engine_ended_cancelled") == 2 * n
    assert statistic(served, "kv_pages_free") == free


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_while_it_is_queued_leaves_the_queue(runner: FakeRunner, stream: bool) -> None:
    with serving(engine_over(runner, max_num_seqs=1)) as served:
        runner.hold()
        with opened(served, {"prompt": "first", "max_tokens": 5}) as first:
            assert runner.holding.wait(PATIENCE_S)
            with opened(served, {"prompt": "second", "max_tokens": 200, "stream": stream}):
                eventually(lambda: attached(served) == 2)
            eventually(lambda: attached(served) == 1)
            runner.release()
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
        eventually(lambda: statistic(served, "engine_open") == 0)
        assert statistic(served, "engine_ended_cancelled") == 1
        assert {row.request for step in runner.steps for row in step.rows} == {1}


def test_a_drain_lets_answers_finish(runner: FakeRunner) -> None:
    says(runner)
    with serving(engine_over(runner), drain_s=PATIENCE_S) as served, client_of(served) as client:
        runner.hold()
        stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        served.stop()
        eventually(lambda: served.get("/ready")[0] == 503)
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="fake", messages=HELLO)
        assert refused.value.code == "shutting_down"
        runner.release()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def test_an_answer_that_the_shutdown_cuts_says_so() -> None:
    with serving(engine_over(endless()), drain_s=0.0) as served, client_of(served) as client:
        stream = client.completions.create(model="fake", prompt="hello", max_tokens=29_000, stream=True)
        next(stream)
        served.stop()
        with pytest.raises(openai.APIError, match="shutdown"):
            list(stream)
