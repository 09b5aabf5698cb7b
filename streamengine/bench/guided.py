"""What grammars cost: a step's bitmasks, beside the model and alone; compiling; and hostile schemas, to the others.

Steps with and without masks are timed in turns, so that what else the machine does falls on both. Processor time is the
whole process's: masks that are made beside the model are in it.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import numpy as np
from msgspec import structs

from compiled.step import LoadError, Row, Runner, Sampling, Step
from streamengine import compose
from streamengine.config import EngineConfig
from streamengine.engine import Engine, Result
from streamengine.errors import RequestError, StartupError
from streamengine.guided.formats import read_format
from streamengine.guided.grammar import Grammar
from streamengine.guided.guide import load_vocabulary
from streamengine.guided.masks import MaskMaker
from streamengine.guided.matcher import Matcher, Vocabulary
from streamengine.link import Progress
from streamengine.sampling import SamplingParams

BATCHES = (1, 8, 32)
CONTEXT = 128
REPEATS = 61
COMPILES = 40
OTHERS, TOKENS = 4, 80

TEXT = {"type": "string"}
ADDRESS = {"type": "object", "properties": {"street": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["friend", "colleague", "family"]}, "maxItems": 5},
        "address": ADDRESS,
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON, with a name, an age, tags and an address."
BEGUN = '{"name": "'
"""Within a string, where most tokens are allowed."""
TEMPERATURES = (0.0, 0.8)
"""The highest logit is looked up in the mask; a distribution to draw from needs all of it."""

HOSTILE: dict[str, Any] = {
    "thirty patterns": {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)], "type": "string"},
    "repeats": {"type": "string", "pattern": "^((a{0,100}){0,100}){0,100}$"},
    "400 properties": {"properties": {f"p{i}": ADDRESS for i in range(400)}},
    "10,000 values": {"enum": [f"value {i}" for i in range(10_000)]},
    "no end": {"$ref": "#"},
    "a number": {"type": "integer", "multipleOf": 2**31},
}
Show = Callable[[str], None]


def measure(config: EngineConfig, report: Callable[[Progress], None], show: Show) -> dict[str, Any]:
    try:
        runner = compose.build_runner(config, report)
    except LoadError as error:
        raise StartupError(str(error), param="model") from error
    report(Progress("warm-up"))
    runner.warmup()
    vocabulary = load_vocabulary(runner.model)
    result = {
        "batches": [
            _masks(runner, vocabulary, batch, temperature, show) for temperature in TEMPERATURES for batch in BATCHES
        ],
        "compile": _compile(vocabulary, show),
    }
    del runner  # its memory is for the engine
    return {**result, "hostile": anyio.run(partial(_hostile, config, report, show))}


def _masks(
    runner: Runner, vocabulary: Vocabulary, batch: int, temperature: float, show: Show
) -> dict[str, float | str]:
    maker, first = MaskMaker(vocabulary), vocabulary.compile(_grammar(PERSON))
    begun = vocabulary.tokenizer.tokenize_str(BEGUN)
    assert all(map(first.advance, begun)), first.error
    matchers = [first.copy() for _ in range(batch)]
    pages = -(-(CONTEXT + 1) // runner.kv.page_size)
    if runner.kv.pages <= batch * pages:
        raise StartupError(f"the benchmark needs {batch * pages + 1} KV pages", param="kv_pages")
    tables = [tuple(range(1 + i * pages, 1 + (i + 1) * pages)) for i in range(batch)]
    prompt = vocabulary.tokenizer.tokenize_str(PROMPT) * CONTEXT
    known = (*prompt[: CONTEXT + 1 - len(begun)], *begun)
    for i, table in enumerate(tables):
        runner.submit(Step(0, (Row(i, known[:-1], 0, table),))).wait()
    sampling = Sampling(temperature=temperature)
    rows = tuple(Row(i, known[-1:], CONTEXT, table, sampling) for i, table in enumerate(tables))
    masked = tuple(replace(row, mask=i) for i, row in enumerate(rows))
    places = [(matcher, i, ()) for i, matcher in enumerate(matchers)]
    bitmask = np.zeros((batch, vocabulary.words), np.int32)
    work: dict[str, Callable[[], Any]] = {
        "mask": lambda: vocabulary.fill(places, bitmask),
        "plain": lambda: runner.submit(Step(0, rows)).wait(),
        "guided": lambda: runner.submit(Step(0, masked, masks=maker.start(places, batch))).wait(),
    }
    walls: dict[str, list[float]] = {name: [] for name in work}
    processor: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(REPEATS):
        for name, do in work.items():
            started = time.process_time()
            walls[name].append(_seconds(do))
            processor[name].append(time.process_time() - started)
    maker.close()
    mask, plain, guided = (statistics.median(walls[name]) * 1e3 for name in work)
    _, plain_cpu, guided_cpu = (statistics.median(processor[name]) * 1e3 for name in work)
    kind = "drawn" if temperature else "greedy"
    show(
        f"masks     batch {batch:>3} {kind:>6}  {mask * 1e3 / batch:6.1f} µs a row; a step of {plain:6.1f} ms takes "
        f"{guided - plain:+6.2f} ms ({100 * (guided / plain - 1):+.2f} %), of processor time "
        f"{100 * (guided_cpu / plain_cpu - 1):+.2f} %"
    )
    return {
        "batch": batch,
        "kind": kind,
        "mask_us_per_row": mask * 1e3 / batch,
        "plain_ms": plain,
        "guided_ms": guided,
        "plain_cpu_ms": plain_cpu,
        "guided_cpu_ms": guided_cpu,
    }


def _compile(vocabulary: Vocabulary, show: Show) -> dict[str, float]:
    def compile_one(number: int) -> Matcher:
        schema = {**PERSON, "properties": {f"id{number}": {"type": "integer"}, **PERSON["properties"]}}
        return vocabulary.compile(_grammar(schema))

    times = sorted(_seconds(partial(compile_one, number)) * 1e3 for number in range(COMPILES))
    found = {"p50_ms": times[COMPILES // 2], "p99_ms": times[-1]}
    show(f"compile   {found['p50_ms']:.2f} ms (median), {found['p99_ms']:.2f} ms (longest of {COMPILES})")
    return found


async def _hostile(config: EngineConfig, report: Callable[[Progress], None], show: Show) -> dict[str, Any]:
    found: dict[str, Any] = {}
    config = structs.replace(config, max_num_seqs=OTHERS + len(HOSTILE))
    async with compose.open_engine(config, progress=report) as engine:
        cases = {"nothing": {}, **{name: {name: schema} for name, schema in HOSTILE.items()}, "all of these": HOSTILE}
        for name, schemas in cases.items():
            results: list[Result] = []
            async with anyio.create_task_group() as tasks:
                for number in range(OTHERS):
                    tasks.start_soon(_other, engine, number, results)
                for schema in schemas.values():
                    # Told apart, or it would be remembered from the case before.
                    tasks.start_soon(_ask, engine, {**schema, "title": name})
            gaps = [(result.timing.itl_p50_ms or 0, result.timing.itl_max_ms or 0) for result in results]
            found[name] = {"p50_ms": statistics.median(p50 for p50, _ in gaps), "max_ms": max(most for _, most in gaps)}
            show(
                f"hostile   {OTHERS} streams beside {name:>15}: {found[name]['p50_ms']:6.1f} ms a token (median), "
                f"{found[name]['max_ms']:6.1f} ms at most"
            )
    return found


async def _other(engine: Engine, number: int, results: list[Result]) -> None:
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number)
    results.append(await engine.generate(f"Stream {number}:", sampling=sampling))


async def _ask(engine: Engine, schema: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    with contextlib.suppress(RequestError):  # as it should
        await engine.generate("Answer:", sampling=SamplingParams(max_tokens=20), response_format=wanted)


def _grammar(schema: Any) -> Grammar:
    grammar = read_format({"type": "json_schema", "json_schema": {"schema": schema}})
    assert grammar is not None, "a schema is a grammar"
    return grammar


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
