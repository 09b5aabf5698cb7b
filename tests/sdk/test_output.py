"""Answers that are values: what is asked for, what is seen while it comes, what it is in the end."""

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

import pytest

from streamengine_sdk import AsyncClient, InvalidRequest, OutputInvalid, wire
from streamengine_sdk.output import Output
from tests.sdk.scripted import Answer, ScriptedServer

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def client(server: ScriptedServer) -> AsyncClient:
    return AsyncClient("http://scripted", transport=server)


async def answer_to(server: ScriptedServer, texts: Sequence[str], **done: Any) -> Answer:
    answer = (await (await server.peer()).request()).accept()
    for text in texts:
        answer.delta(text)
    answer.done(**done)
    return answer


async def test_a_schema_goes_out_as_response_format_and_a_value_comes_back(
    server: ScriptedServer, client: AsyncClient
) -> None:
    async with client, client.stream("where?", output=SCHEMA) as stream:
        answer = await answer_to(server, ['{"city": "', "東京", '"}'])
        assert answer.request.response_format == {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
        }
        assert answer.request.delivery.values
        assert (await stream.result()).parsed == {"city": "東京"}


async def test_one_of_some_words_is_that_word(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("yes?", output=Literal["yes", "no"]) as stream:
        answer = await answer_to(server, ["n", "o"])
        assert answer.request.response_format == {"type": "choice", "choice": ["yes", "no"]}
        assert not answer.request.delivery.values
        assert (await stream.result()).parsed == "no"


@pytest.mark.parametrize(("text", "value"), [('"no"', "no"), ("1", 1), ("true", True), ("null", None)])
async def test_one_of_some_values_is_that_value(
    server: ScriptedServer, client: AsyncClient, text: str, value: Any
) -> None:
    async with client, client.stream("yes?", output=Literal[1, "no", True, None]) as stream:
        answer = await answer_to(server, [text])
        assert isinstance(answer.request.response_format, dict)
        assert answer.request.response_format["json_schema"]["schema"] == {"enum": [1, "no", True, None]}
        parsed = (await stream.result()).parsed
        assert (parsed, type(parsed)) == (value, type(value))


class Color(Enum):
    RED = "r"
    BLUE = "b"


class Level(Enum):
    LOW = 1
    NONE = None


@pytest.mark.parametrize(
    ("wanted", "sent", "text", "member"),
    [
        (Literal[Color.RED, Color.BLUE], {"type": "choice", "choice": ["r", "b"]}, "b", Color.BLUE),
        (Literal[Level.LOW, Level.NONE, Color.RED], {"enum": [1, None, "r"]}, "null", Level.NONE),
    ],
)
def test_a_member_of_an_enumeration_goes_out_as_its_value_and_comes_back_as_itself(
    wanted: Any, sent: Any, text: str, member: Enum
) -> None:
    output = Output.of(wanted)
    assert sent in (output.response_format, output.response_format.get("json_schema", {}).get("schema"))
    assert output.parse(text) is member


@pytest.mark.parametrize("wanted", [Literal[b"x"], Literal["a", b"x"]])
def test_a_choice_that_json_cannot_write_is_refused_before_anything_is_sent(wanted: Any) -> None:
    with pytest.raises(TypeError, match="output cannot be b'x'"):
        Output.of(wanted)


async def test_a_pydantic_class_is_made_once_at_the_end(server: ScriptedServer, client: AsyncClient) -> None:
    pydantic = pytest.importorskip("pydantic")
    Plan = pydantic.create_model("Plan", steps=(list[str], ...), eta_days=(int, ...))
    async with client, client.stream("plan", output=Plan) as stream:
        answer = await answer_to(server, ['{"steps": ["dig"', '], "eta_days": 2}'])
        assert isinstance(answer.request.response_format, dict)
        assert answer.request.response_format["json_schema"]["name"] == "Plan"
        assert answer.request.response_format["json_schema"]["schema"] == Plan.model_json_schema()
        assert (await stream.result()).parsed == Plan(steps=["dig"], eta_days=2)


async def test_the_value_so_far_grows_with_the_text(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("where?", output=SCHEMA) as stream:
        await answer_to(server, [" ", '{"ci', 'ty": "Ro', 'me", "', 'pop": [2.8, ', "9]}"])
        assert stream.json is None
        seen = [stream.json async for _ in stream.text]
        assert seen == [
            None,
            {},
            {"city": "Ro"},
            {"city": "Rome"},
            {"city": "Rome", "pop": [2.8]},
            {"city": "Rome", "pop": [2.8, 9]},
        ]


async def test_values_are_seen_as_soon_as_each_is_complete(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("where?", output=SCHEMA) as stream:
        peer = await server.peer()
        answer = (await peer.request()).accept()
        answer.delta('{"city": "Rome"')
        peer.say(wire.Value(id=answer.id, seq=1, path="/city", value="Rome"))
        answer.delta("}")
        peer.say(wire.Value(id=answer.id, seq=2, path="", value={"city": "Rome"}))
        answer.done()
        assert [item async for item in stream.values] == [("/city", "Rome"), ("", {"city": "Rome"})]


@pytest.mark.parametrize(
    ("output", "text"),
    [(SCHEMA, '{"city"'), (Literal["yes", "no"], "maybe"), (Literal["yes", 1], "yes"), (Literal["yes", 1], "2")],
)
async def test_an_answer_that_is_not_what_was_asked_for_is_an_error_with_the_answer(
    server: ScriptedServer, client: AsyncClient, output: Any, text: str
) -> None:
    async with client, client.stream("hi", output=output) as stream:
        await answer_to(server, [text])
        with pytest.raises(OutputInvalid, match="is not the") as caught:
            await stream.result()
        assert caught.value.partial is not None
        assert (caught.value.partial.text, caught.value.partial.finish_reason) == (text, "stop")


async def test_an_answer_that_was_cut_is_no_value_and_no_error(server: ScriptedServer, client: AsyncClient) -> None:
    async with client, client.stream("hi", output=SCHEMA) as stream:
        await answer_to(server, ['{"city'], finish_reason="length")
        result = await stream.result()
        assert (result.text, result.parsed, result.finish_reason) == ('{"city', None, "length")


def test_an_output_that_is_none_is_refused(client: AsyncClient) -> None:
    for wrong in (str, "text", 5, dict):
        with pytest.raises(TypeError, match="output must be a JSON schema"):
            client.stream("hi", output=wrong)
    with pytest.raises(InvalidRequest, match="not both"):
        client.stream("hi", output=SCHEMA, response_format={"type": "text"})


def test_a_schema_is_sent_as_it_was_when_it_was_given() -> None:
    schema = dict(SCHEMA)
    output = Output.of(schema)
    schema["type"] = "array"
    assert json.loads(json.dumps(output.response_format))["json_schema"]["schema"]["type"] == "object"


async def test_tools_go_out_and_their_calls_come_back(server: ScriptedServer, client: AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    options = {"enable_thinking": False}
    more: Any = {"tools": tools, "tool_choice": "auto", "chat_template_kwargs": options}
    async with client, client.stream("sun?", **more) as stream:
        answer = (await (await server.peer()).request()).accept()
        assert (answer.request.tools, answer.request.tool_choice) == (tools, "auto")
        assert answer.request.chat_template_kwargs == options
        call = wire.Call(index=0, id="c0", name="weather")
        answer.delta('{"city":"Rome"}', channel="tool", call=call)
        answer.done("tool_calls")
        assert [text async for text in stream.text] == []
        (made,) = (await stream.result()).tool_calls
        assert (made.id, made.name, json.loads(made.arguments)) == ("c0", "weather", {"city": "Rome"})
