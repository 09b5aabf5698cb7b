"""`streamengine profile`: a load, a window of steps under it, and what it cost as profile.json, trace and report.

The engine is a user's, with its core in a process of its own; its clients are here. The figures are of a window
without torch's profiler, whose trace is taken in a few more steps afterwards.
"""

import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import anyio
import msgspec
import typer

from compiled.timeline import MAX_STEPS
from streamengine import compose
from streamengine.config import EngineConfig
from streamengine.engine import Engine
from streamengine.errors import InvalidRequest, StreamEngineError
from streamengine.generate import Asked
from streamengine.options import ENGINE, takes
from streamengine.profile import diff, report
from streamengine.profile.record import Profile, encode
from streamengine.sampling import SamplingParams
from streamengine.terminal import open_engine

Name = Literal["decode", "prefill", "mixed", "prefix", "guided", "startup"]

TRACED = 5
"""Steps in the Chrome trace: each is hundreds of events."""

TIMEOUT_S = 1800.0
SUFFIX = 16
"""Tokens of each prompt that no other has, in the scenario ``prefix``."""

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """``batch`` clients, each with a request at a time of ``context`` tokens. The window begins when the clients that
    decode, ``decoding`` of them, have had their first token."""

    batch: int
    decoding: int
    context: int
    tokens: int
    guided: bool = False
    shared: bool = False


def load_of(scenario: Name, batch: int, context: int | None, tokens: int) -> Load:
    """What clients do in ``scenario``, whose window has ``tokens`` decoding steps about."""
    match scenario:
        case "decode" | "startup":
            return Load(batch=batch, decoding=batch, context=context or 128, tokens=tokens)
        case "guided":
            return Load(batch=batch, decoding=batch, context=context or 128, tokens=tokens, guided=True)
        case "prefill":
            return Load(batch=batch, decoding=0, context=context or 512, tokens=1)
        case "mixed":
            return Load(batch=batch, decoding=batch // 2, context=context or 256, tokens=tokens)
        case "prefix":
            return Load(batch=batch, decoding=0, context=context or 512, tokens=1, shared=True)


app = typer.Typer(name="profile", help="What each compiled piece costs; `diff` compares two of them.")
app.command("diff")(diff.command)
app.command("report")(report.command)


@app.callback(invoke_without_command=True)
@takes(ENGINE)
def profile(
    config: EngineConfig,
    *,
    context: typer.Context,
    scenario: Annotated[Name, typer.Option("--scenario", help="What the model is doing meanwhile.")] = "decode",
    steps: Annotated[int, typer.Option("--steps", min=1, max=MAX_STEPS, help="Steps to measure.")] = 32,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests at once.")] = 8,
    prompt: Annotated[int | None, typer.Option("--context", min=1, help="Tokens of each prompt.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for profile.json, trace.json and report.html.")] = Path(
        "profile"
    ),
) -> None:
    """Measure a scenario's steps, call by call; prints the path of the report."""
    if context.invoked_subcommand is not None:
        return
    if batch > config.max_num_seqs:
        raise InvalidRequest(f"batch is {batch}, and max_num_seqs {config.max_num_seqs}", param="batch")
    if scenario == "mixed" and batch < 2:
        raise InvalidRequest("mixed needs two requests at once: one that decodes, one that comes", param="batch")
    out.mkdir(parents=True, exist_ok=True)
    load = load_of(scenario, batch, prompt, 2 * steps + 2 * TRACED)
    config = msgspec.structs.replace(config, enable_prefix_caching=load.shared)
    with _empty_cache(config) if scenario == "startup" else nullcontext(config) as there:
        found = anyio.run(_profile, there, load, steps, out)
    found = msgspec.structs.replace(found, scenario=scenario, model=config.model)
    (out / "profile.json").write_bytes(encode(found))
    (out / "report.html").write_text(report.render(found), encoding="utf-8")
    typer.echo(_line(found), err=True)
    typer.echo(out / "report.html")


@contextmanager
def _empty_cache(config: EngineConfig) -> Iterator[EngineConfig]:
    """Nothing is compiled in here yet, but a checkpoint that must be converted or downloaded is there."""
    named = msgspec.structs.replace(config, model=compose.model_folder(config, lambda progress: None))
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # the core inherits it
        try:
            yield named
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


async def _profile(config: EngineConfig, load: Load, steps: int, out: Path) -> Profile:
    async with open_engine(config) as engine, _clients(engine, load, _room(engine, load)):
        found = await engine.profile(steps, plain_steps=steps, timeout_s=TIMEOUT_S)
        trace = (out / "trace.json").resolve()  # the core writes it
        await engine.profile(TRACED, ceilings=False, trace=trace, timeout_s=TIMEOUT_S)
    return msgspec.structs.replace(found, trace="trace.json")


def _room(engine: Engine, load: Load) -> int:
    """Tokens of an answer that never ends within the window: as many as the model and each one's share of the pool
    allow. Raises `InvalidRequest` where that is less than the window needs."""
    length, page = load.context + load.tokens + SUFFIX, engine.kv.page_size
    if length > engine.model.max_model_len:
        most = engine.model.max_model_len
        raise InvalidRequest(f"prompt and answer take {length} tokens, the model {most}", param="context")
    needed, there = load.batch * -(-length // page), engine.kv.pages - 1
    if needed > there:
        raise InvalidRequest(
            f"{load.batch} requests of {length} tokens need {needed} KV pages, not {there}", param="batch"
        )
    return min(engine.model.max_model_len, there // load.batch * page) - load.context - SUFFIX


@asynccontextmanager
async def _clients(engine: Engine, load: Load, room: int) -> AsyncIterator[None]:
    """Requests are there all the time, inside; at first those that decode have come to their answer."""
    source, failures = random.Random(0), list[StreamEngineError]()
    prefix = _ids(source, engine, load.context) if load.shared else ()
    if load.shared:
        await engine.generate(token_ids=prefix, sampling=SamplingParams(max_tokens=1))
    async with anyio.create_task_group() as tasks:

        async def ask_on(tokens: int, started: anyio.Event) -> None:
            while True:
                ids = (*prefix, *_ids(source, engine, SUFFIX if load.shared else load.context))
                async with engine.stream(**_asked(load, ids, tokens)) as stream:
                    async for _ in stream:
                        started.set()

        async def client(tokens: int, started: anyio.Event) -> None:
            try:
                await ask_on(tokens, started)
            except StreamEngineError as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

        try:
            begun = [anyio.Event() for _ in range(load.batch)]
            for number, started in enumerate(begun):
                tasks.start_soon(client, room if number < load.decoding else 1, started)
            for started in begun[: load.decoding]:
                await started.wait()
            yield
        except StreamEngineError as error:
            failures.append(error)
        tasks.cancel_scope.cancel()
    if failures:  # out of the group before one is raised, or the group would wrap it
        raise failures[0]


def _asked(load: Load, ids: tuple[int, ...], tokens: int) -> Asked:
    if load.guided:
        schema = {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA, "strict": True}}
        sampling = SamplingParams(max_tokens=tokens, temperature=0)
        return {"token_ids": ids, "sampling": sampling, "response_format": schema}
    return {"token_ids": ids, "sampling": SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)}


def _ids(source: random.Random, engine: Engine, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(engine.model.vocab_size) for _ in range(count))


def _line(found: Profile) -> str:
    ceilings, step = found.ceilings, found.step_s
    roof = "" if ceilings is None else f", {ceilings.read_gbps:.1f} GB/s, {ceilings.product_gflops:.0f} GFLOP/s at best"
    cost = "" if found.overhead is None else f"; {1e3 * found.overhead.off_s:.2f} ms unmeasured"
    return (
        f"{found.steps} steps of {1e3 * step.p50:.2f} ms (median){cost}; "
        f"{100 * found.host.share:.1f} % host/other{roof}"
    )
