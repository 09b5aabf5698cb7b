"""Schemas that are meant to hurt: a clear refusal or a plain answer, in bounded time and memory, beside others."""

import re
import resource
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from streamengine.engine import Engine
from streamengine.errors import RequestError
from streamengine.sampling import SamplingParams
from tests.serving import engine_over
from tests.streamengine.guided.drawn import runner_in

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

PATIENCE_S = 60
MOST_BYTES = 768 * 2**20
"""That one schema may add to the peak of the process."""


def nested(depth: int, wrap: Any) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def branching(keyword: str, depth: int) -> dict[str, Any]:
    twice = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**twice, f"d{depth}": {"type": "object", "required": ["a"]}}}


HOSTILE: dict[str, Any] = {
    "nested arrays": nested(3000, lambda inner: {"type": "array", "items": inner}),
    "nested properties": nested(300, lambda inner: {"properties": {"a": inner}}),
    "a reference to itself": {"$ref": "#"},
    "a ring of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "no end": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a reference to the network": {"$ref": "http://127.0.0.1:1/schema"},
    "50,000 enum values": {"enum": [f"value {i}" for i in range(50_000)]},
    "50,000 short enum values": {"enum": list(range(10**9, 10**9 + 50_000))},
    "5,000 optional properties": {"properties": {f"p{i}": {} for i in range(5_000)}},
    "anyOf that doubles": branching("anyOf", 40),
    "allOf that doubles": branching("allOf", 40),
    "oneOf that doubles": branching("oneOf", 40),
    "allOf of anyOf": {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": 40 - i}]} for i in range(20)]},
    "a pattern that backtracks": {"type": "string", "pattern": "^(a+)+$"},
    "a pattern that multiplies": {"type": "string", "pattern": "^((a{0,100}){0,100}){0,100}$"},
    "a pattern that determines badly": {"type": "string", "pattern": "^[ab]*a[ab]{40}$"},
    "many of them": {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)], "type": "string"},
    "a billion letters": {"type": "string", "pattern": "^a{1000000000}$"},
    "a billion characters": {"type": "string", "minLength": 10**9},
    "a billion items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "a huge number": {"type": "integer", "multipleOf": 10**40 + 1, "minimum": 10**300},
    "no schema": "not a schema",
    "no schema either": [{"type": "object"}],
    "a schema that is none": {"type": "object", "properties": 5},
    "an empty union": {"anyOf": []},
    "nothing": {"enum": []},
    "a contradiction": {"type": "string", "const": 5},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def outcome(engine: Engine, schema: Any) -> str:
    """The refusal, or how the answer ended."""
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    try:
        result = await engine.generate(
            prompt="?", sampling=SamplingParams(max_tokens=40, seed=1), response_format=wanted
        )
    except RequestError as error:
        return f"{error.status} {error.param}: {error.message}"
    return result.finish_reason


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_schema_is_answered_within_bounds_while_others_go_on(tmp_path: Path, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = [0] * 4
    async with (
        engine_over(runner_in(tmp_path, 30_000), max_num_seqs=8)(lambda progress: None) as engine,
        anyio.create_task_group() as tasks,
    ):

        async def other(number: int) -> None:
            async for delta in engine.stream(
                prompt=f"{number}", sampling=SamplingParams(max_tokens=20_000, ignore_eos=True, seed=number)
            ):
                counts[number] += delta.n

        for number in range(4):
            tasks.start_soon(other, number)
        with anyio.fail_after(PATIENCE_S):
            while not all(counts):
                await anyio.lowlevel.checkpoint()
            started = list(counts)
            ended = await outcome(engine, HOSTILE[name])
            while not all(now > then for now, then in zip(counts, started, strict=True)):
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert re.fullmatch(r"stop|length|400 response_format: .{10,400}", ended), ended
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
