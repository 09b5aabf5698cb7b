"""Many requests on one connection, and what becomes of them when it ends."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from msgspec import UNSET

import streamengine_sdk
from streamengine_sdk import (
    AsyncClient,
    ConnectError,
    ConnectionLost,
    ContextLengthExceeded,
    EngineError,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    RateLimited,
    RequestError,
    StreamLost,
    Timeout,
    Timeouts,
    Unauthorized,
    UnsupportedFeature,
    wire,
)
from tests.sdk.scripted import PATIENCE_S, ScriptedServer

USUAL: Any = {"delivery": wire.Delivery(window=1024, token_ids=True)}


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def client(server: ScriptedServer) -> AsyncClient:
    return AsyncClient("http://scripted", transport=server, reconnect=None)


# one socket, many requests


@pytest.mark.anyio
async def test_two_streams_are_interleaved_on_one_socket(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("one") as one, client.stream("two") as two:
        peer = await server.peer()
        first, second = await peer.request(), await peer.request()
        assert (first.request.prompt, second.request.prompt) == ("one", "two")
        for answer in (first, second, second, first):
            answer.delta(f"{answer.request.prompt} ")
        second.done()
        assert (await two.result()).text == "two two "
        first.done()
        assert (await one.result()).text == "one one "
    assert len(server.endpoints) == 1


@pytest.mark.anyio
async def test_requests_that_start_together_share_one_connect(server: ScriptedServer, client: AsyncClient) -> None:
    server.connectable = anyio.Event()
    async with client, anyio.create_task_group() as tasks:
        for prompt in "abc":
            tasks.start_soon(client.generate, prompt)
        await anyio.wait_all_tasks_blocked()
        server.connectable.set()
        peer = await server.peer()
        assert {(await peer.request()).request.prompt for _ in "abc"} == {"a", "b", "c"}
        assert len(server.endpoints) == 1
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_connect_that_is_cancelled_is_done_by_the_next_in_line(
    server: ScriptedServer, client: AsyncClient
) -> None:
    server.connectable = anyio.Event()
    async with client, anyio.create_task_group() as tasks:

        async def give_up() -> None:
            with anyio.move_on_after(0.01):
                await client.generate("impatient")
            server.connectable.set()

        tasks.start_soon(give_up)
        await anyio.wait_all_tasks_blocked()
        async with client.stream("patient"):
            assert (await (await server.peer()).request()).request.prompt == "patient"


@pytest.mark.anyio
async def test_two_clients_in_one_process_know_nothing_of_each_other() -> None:
    servers = ScriptedServer(), ScriptedServer()
    async with (
        AsyncClient("http://scripted", transport=servers[0]) as one,
        AsyncClient("http://scripted", transport=servers[1]) as two,
        one.stream("one"),
        two.stream("two"),
    ):
        for server, prompt in zip(servers, ("one", "two"), strict=True):
            assert (await (await server.peer()).request()).request.prompt == prompt


@pytest.mark.anyio
async def test_unknown_types_and_unknown_fields_are_ignored(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        peer.say({"type": "weather", "id": answer.id, "text": "rain"})
        peer.say({"type": "delta", "id": answer.id, "seq": 1, "text": "", "mood": ["good"]})
        answer.seq = 1
        answer.delta("Hello")
        answer.done()
        assert (await stream.result()).text == "Hello"


@pytest.mark.anyio
async def test_ping_measures_a_round_trip(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, anyio.create_task_group() as tasks:

        async def serve() -> None:
            peer = await server.peer()
            ping = await peer.heard()
            assert isinstance(ping, wire.Ping)
            peer.say(wire.Pong(t=ping.t))

        tasks.start_soon(serve)
        assert 0 <= await client.ping() < PATIENCE_S


# the end of a connection


@pytest.mark.anyio
async def test_after_a_lost_connection_the_next_request_opens_another(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client:
        async with client.stream("one") as one, client.stream("two") as two:
            peer = await server.peer()
            (await peer.request()).accept().delta("part")
            await peer.request()
            peer.drop()
            lost = []
            for stream in (one, two):
                with pytest.raises(ConnectionLost) as caught:
                    await stream.result()
                lost.append(caught.value)
            assert [error.partial and error.partial.text for error in lost] == ["part", ""]
        async with client.stream("three") as three:
            answer = await (await server.peer()).request()
            assert answer.request.prompt == "three"
            answer.done()
            await three.result()
        assert peer.closed
    assert len(server.endpoints) == 2


@pytest.mark.anyio
async def test_a_silent_connection_is_dead_after_two_and_a_half_heartbeats() -> None:
    server = ScriptedServer(heartbeat_s=0.02)
    async with (
        AsyncClient("http://scripted", transport=server, reconnect=None) as client,
        client.stream("hi") as stream,
    ):
        peer = await server.peer()
        for _ in range(5):
            await anyio.sleep(0.02)
            peer.say(wire.Heartbeat())
        assert stream.stream_id is None
        with anyio.fail_after(PATIENCE_S), pytest.raises(ConnectionLost, match=r"nothing was heard for 0\.05 s"):
            await stream.result()


@pytest.mark.anyio
async def test_a_ping_on_a_dying_connection_ends_with_it(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, anyio.create_task_group() as tasks:

        async def serve() -> None:
            peer = await server.peer()
            await peer.heard()
            peer.drop()

        tasks.start_soon(serve)
        with pytest.raises(ConnectionLost):
            await client.ping()


@pytest.mark.anyio
async def test_leaving_the_client_ends_its_streams_and_closes_the_socket(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client:
        stream = client.stream("hi")
        await stream.__aenter__()
        peer = await server.peer()
    assert peer.closed
    with pytest.raises(ConnectionLost, match="the client was closed"):
        await stream.result()
    with pytest.raises(RuntimeError, match="not open"):
        await client.generate("hi")


@pytest.mark.anyio
async def test_an_exception_leaves_the_client_as_it_is(server: ScriptedServer, client: AsyncClient) -> None:
    with pytest.raises(KeyError):
        async with client, client.stream("hi"):
            raise KeyError


@pytest.mark.anyio
async def test_a_cancelled_scope_around_the_client_leaves_it(server: ScriptedServer, client: AsyncClient) -> None:
    with anyio.move_on_after(0.02) as scope:
        async with client:
            await client.generate("hi")
    assert scope.cancelled_caught
    assert (await server.peer()).closed


@pytest.mark.anyio
async def test_goaway_sends_new_requests_to_a_new_socket_and_lets_old_ones_finish(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("old") as old:
        leaving = await server.peer()
        running = await leaving.request()
        leaving.say(wire.GoAway(reason="shutdown", deadline_ms=30000, reconnect=True))
        running.delta("still ")
        await anext(old)
        async with client.stream("new") as new:
            answer = await (await server.peer()).request()
            answer.done()
            assert (await new.result()).text == ""
        running.delta("here")
        running.done()
        assert (await old.result()).text == "still here"


@pytest.mark.anyio
async def test_goaway_without_reconnect_refuses_new_requests(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("old") as old:
        peer = await server.peer()
        answer = await peer.request()
        peer.say(wire.GoAway(reason="shutdown", deadline_ms=30000, reconnect=False))
        answer.done()
        await old.result()
        with pytest.raises(Overloaded) as caught:
            await client.generate("new")
        assert (caught.value.code, caught.value.retryable) == ("shutting_down", True)


# no connection at all


@pytest.mark.anyio
async def test_a_refused_connection_is_raised_by_the_stream_and_may_be_tried_again(
    server: ScriptedServer, client: AsyncClient
) -> None:
    server.refusal = ConnectError("no", status=503)
    async with client:
        with pytest.raises(ConnectError) as caught:
            await client.generate("hi")
        assert (caught.value.status, caught.value.partial) == (503, None)
        server.refusal = None
        async with client.stream("hi"):
            await (await server.peer()).request()


@pytest.mark.anyio
async def test_a_connection_that_does_not_come_about_is_a_timeout(server: ScriptedServer) -> None:
    server.connectable = anyio.Event()
    async with AsyncClient("http://scripted", transport=server, timeouts=Timeouts(connect=0.02)) as client:
        with anyio.fail_after(PATIENCE_S), pytest.raises(Timeout) as caught:
            await client.generate("hi")
        assert caught.value.kind == "connect"


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (wire.Heartbeat(), ProtocolError),
        ("no JSON", ProtocolError),
        ("[]", ProtocolError),
        ({"type": "hello", "protocol": "chat.v9"}, ProtocolError),
        (
            {"type": "hello", "protocol": "streamengine.v9", "epoch": "e", "auth": "ok"}
            | {"limits": {"max_message_bytes": 1, "max_streams": 1, "heartbeat_s": 1}},
            ProtocolError,
        ),
        (
            {"type": "hello", "protocol": "streamengine.v1", "epoch": "e", "auth": "required"}
            | {"limits": {"max_message_bytes": 1, "max_streams": 1, "heartbeat_s": 1}},
            Unauthorized,
        ),
        (
            wire.Error(code="unauthorized", message="who are you", status=401, retryable=False, fatal=True),
            Unauthorized,
        ),
    ],
)
@pytest.mark.anyio
async def test_a_server_that_does_not_greet_as_agreed_is_left(
    server: ScriptedServer, client: AsyncClient, first: wire.ServerMessage | str, expected: type[EngineError]
) -> None:
    server.hello = None
    async with client, client.stream("hi") as stream:
        peer = await server.peer()
        peer.say(first)
        with anyio.fail_after(PATIENCE_S), pytest.raises(expected):
            await stream.result()


@pytest.mark.anyio
async def test_a_socket_closed_for_a_bad_token_is_unauthorized(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi") as stream:
        (await server.peer()).drop(4401, "bad token")
        with pytest.raises(Unauthorized, match="bad token"):
            await stream.result()


# requests that cannot be sent


@pytest.mark.parametrize("greeted_first", [True, False])
@pytest.mark.anyio
async def test_a_request_that_is_too_large_is_refused_here_and_harms_no_other(
    server: ScriptedServer, client: AsyncClient, greeted_first: bool
) -> None:
    async with client:
        if greeted_first:
            async with client.stream("other") as other:
                answer = await (await server.peer()).request()
                with pytest.raises(InvalidRequest, match="at most 4194304") as caught:
                    await client.generate("ü" * 2_500_000)
                answer.done()
                await other.result()
        else:
            with pytest.raises(InvalidRequest, match="at most 4194304") as caught:
                await client.generate("x" * 5_000_000)
        assert (caught.value.code, caught.value.status) == ("message_too_large", 413)
        async with client.stream("x" * 4_000_000):
            peer = (await server.peer()) if not greeted_first else answer._peer
            assert len((await peer.request()).request.prompt or "") == 4_000_000


def test_exactly_one_of_prompt_messages_and_token_ids_is_needed(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="not none"):
        client.stream()
    with pytest.raises(InvalidRequest, match="not prompt and token_ids"):
        client.stream("hi", token_ids=[1])


def test_an_option_that_does_not_exist_is_a_type_error(client: AsyncClient) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.stream("hi", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="beam_width"):
        client.stream("hi", beam_width=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", b"bytes"),
        ("prompt", 5),
        ("temperature", float("nan")),
        ("top_p", "much"),
        ("max_tokens", 1.5),
        ("seed", True),
        ("stop", 5),
        ("stop", [5]),
        ("token_ids", [1.5]),
        ("token_ids", "ab"),
        ("stop_token_ids", 5),
        ("bad_words", [5]),
        ("logit_bias", [5]),
        ("logit_bias", {5: float("inf")}),
        ("messages", "hi"),
        ("messages", ["hi"]),
        ("messages", 5),
        ("return_token_ids", 1),
    ],
)
def test_an_argument_that_is_no_such_thing_is_refused_by_name_before_anything_is_sent(
    client: AsyncClient, field: str, value: Any
) -> None:
    prompt = {} if field in ("token_ids", "messages") else {"prompt": "hi"}
    with pytest.raises(InvalidRequest) as caught:
        client.stream(**{**prompt, field: value})
    assert (caught.value.param or "").split("[")[0].split(".")[-1] == field.removeprefix("return_")
    assert field.removeprefix("return_") in caught.value.message


def test_timeouts_must_be_timeouts_of_real_seconds(client: AsyncClient) -> None:
    wrong: list[Any] = [5, 0, {}]
    for timeouts in wrong:
        with pytest.raises(TypeError, match="timeouts must be Timeouts"):
            client.stream("hi", timeouts=timeouts)
    wrong = [0, float("nan"), float("inf"), "5"]
    for seconds in wrong:
        with pytest.raises(ValueError, match="timeouts total"):
            Timeouts(total=seconds)


def test_what_json_cannot_hold_is_refused_at_once(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="no JSON"):
        client.stream("half an emoji: \ud83d")


@pytest.mark.anyio
async def test_options_go_out_under_their_own_names(server: ScriptedServer, client: AsyncClient) -> None:
    options: Any = {"model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9}
    options |= {"top_k": 3, "min_p": 0.1, "seed": 7, "min_tokens": 2, "typical_p": 0.9, "ignore_eos": True}
    options |= {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "priority": 3}
    options |= {"include_stop_str_in_output": True, "logprobs": True, "top_logprobs": 2}
    lists: Any = {"stop_token_ids": (3,), "allowed_token_ids": (4, 5), "bad_words": ("no", (6, 7))}
    async with client, client.stream(token_ids=(1, 2), stop="END", logit_bias={5: -1}, **lists, **options):
        request = (await (await server.peer()).request()).request
    on_the_wire: Any = {"stop_token_ids": [3], "allowed_token_ids": [4, 5], "bad_words": ["no", [6, 7]]}
    expected = wire.Generate(
        id="r1", token_ids=[1, 2], stop=["END"], logit_bias={"5": -1}, **on_the_wire, **options, **USUAL
    )
    assert msgspec.structs.replace(request, key=UNSET) == expected


@pytest.mark.anyio
async def test_none_is_the_same_as_leaving_an_option_out(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi", temperature=None, stop=None, messages=None, timeouts=None):
        request = (await (await server.peer()).request()).request
    assert msgspec.structs.replace(request, key=UNSET) == wire.Generate(id="r1", prompt="hi", **USUAL)


# errors of the server


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("invalid_json", 400, InvalidRequest),
        ("invalid_message", 400, InvalidRequest),
        ("unknown_type", 400, InvalidRequest),
        ("invalid_request", 400, InvalidRequest),
        ("context_length_exceeded", 400, ContextLengthExceeded),
        ("unsupported_feature", 422, UnsupportedFeature),
        ("grammar_error", 422, InvalidRequest),
        ("unauthorized", 401, Unauthorized),
        ("forbidden", 403, RequestError),
        ("model_not_found", 404, ModelNotFound),
        ("stream_not_found", 404, StreamLost),
        ("duplicate_id", 409, RequestError),
        ("resume_gap", 410, StreamLost),
        ("message_too_large", 413, InvalidRequest),
        ("too_many_streams", 429, RateLimited),
        ("rate_limited", 429, RateLimited),
        ("slow_consumer", 429, RequestError),
        ("engine_error", 500, EngineFailed),
        ("internal", 500, EngineFailed),
        ("overloaded", 503, Overloaded),
        ("queue_timeout", 503, Overloaded),
        ("shutting_down", 503, Overloaded),
        ("invented_later", 418, RequestError),
        ("invented_later", 429, RateLimited),
        ("invented_later", 503, Overloaded),
        ("invented_later", 507, EngineFailed),
    ],
)
@pytest.mark.anyio
async def test_every_code_has_its_exception(
    server: ScriptedServer, client: AsyncClient, code: str, status: int, expected: type[EngineError]
) -> None:
    async with client, client.stream("hi") as stream:
        answer = await (await server.peer()).request()
        answer.error(code, status, param="temperature", retryable=True, retry_after_ms=1500)
        with pytest.raises(EngineError, match=f"it is {code}") as caught:
            await stream.result()
    error = caught.value
    assert type(error) is expected
    assert (error.code, error.status, error.param, error.retryable) == (code, status, "temperature", True)
    assert error.retry_after == 1.5


def test_the_table_above_is_the_table_of_the_package() -> None:
    source = Path(__file__).read_text()
    assert all(f'("{code}", ' in source for code in streamengine_sdk.errors.KINDS)


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    named = re.findall(r"(?:├──|└──) (\w+)", streamengine_sdk.errors.__doc__ or "")
    defined = [
        name
        for name, value in vars(streamengine_sdk.errors).items()
        if isinstance(value, type) and issubclass(value, EngineError) and value is not EngineError
    ]
    assert sorted(named) == sorted(defined)
    assert set(defined) <= set(streamengine_sdk.__all__)


def test_importing_the_sdk_imports_no_engine() -> None:
    script = "import streamengine_sdk, sys; assert not {'torch', 'streamengine', 'compiled'} & sys.modules.keys()"
    env = {"PYTHONPATH": str(Path(streamengine_sdk.__file__).parent.parent)}
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60, env=env)


def test_the_tests_of_the_sdk_need_nothing_but_the_sdk_and_their_tools() -> None:
    tools = {"anyio", "hypothesis", "jsonschema", "msgspec", "pytest", "trio", "websockets", "streamengine_sdk"}
    own = {"tests.sdk", "tests.schema"}
    for path in [*Path(__file__).parent.glob("*.py"), Path(__file__).parents[1] / "schema.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                known = name.split(".")[0] in tools | sys.stdlib_module_names
                assert known or ".".join(name.split(".")[:2]) in own, f"{path.name} imports {name}"
