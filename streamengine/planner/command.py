"""``streamengine plan``: what a number of replicas would do with a load, before anybody pays for them."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Annotated

import msgspec
import typer

from compiled.step import KVSpec, ModelSpec
from streamengine.config import EngineConfig
from streamengine.errors import StartupError
from streamengine.options import ENGINE, Group, takes
from streamengine.planner import times
from streamengine.planner.fleet import Fleet
from streamengine.planner.report import Report, Targets, table
from streamengine.planner.state import Plan
from streamengine.planner.workload import Load

MOST_REPLICAS = 10_000

_SCHEDULING = (
    "page_size",
    "kv_pages",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_queue",
    "enable_prefix_caching",
    "prefix_quota",
    "long_prefill_token_threshold",
    "target_itl_ms",
    "priority_ageing_s",
    "debug",
)
SCHEDULER = Group(EngineConfig, "Engine", {name: ENGINE.help[name] for name in _SCHEDULING}, ENGINE.names)
"""Of the engine's options those that bear on what a simulation does."""

LOAD = Group(
    Load,
    "Load",
    {
        "workload": "Requests out of a file: what `serve --trace` has written, or Mooncake's format.",
        "rate": "Requests per second that come to the fleet, at random (Poisson).",
        "seconds": "For so long requests come; then they are answered to the end.",
        "prompt_tokens": "Mean length of a prompt.",
        "prompt_cv": "Its standard deviation over its mean, log-normal; 0 is always the mean.",
        "answer_tokens": "Mean length of an answer.",
        "answer_cv": "Its standard deviation over its mean.",
        "shared_tokens": "Tokens at the beginning of a prompt that it shares with others.",
        "prefixes": "So many different shared beginnings there are.",
        "seed": "Of all that is drawn; the same one gives the same figures.",
    },
    {},
    environment=False,
)


@takes(SCHEDULER, LOAD)
def command(
    config: EngineConfig,
    load: Load,
    *,
    step_times: Annotated[
        str,
        typer.Option(
            "--times",
            metavar="FILE",
            help="A trace, the JSON of `bench steps`, or step times that --times-only printed.",
        ),
    ],
    replicas: Annotated[str, typer.Option(help="How many that answer, or several numbers to compare: 1,2,4.")] = "1",
    prefill: Annotated[str, typer.Option(help="How many more that compute prompts for those; likewise.")] = "0",
    prefill_threshold: Annotated[
        int | None, typer.Option(min=1, help="Uncached prompt tokens from which on those do; by default as observed.")
    ] = None,
    link_gbps: Annotated[float, typer.Option(min=1e-3, help="Speed of each engine's link, in GB/s.")] = 10.0,
    link_us: Annotated[float, typer.Option(min=0, help="Latency between two engines, in microseconds.")] = 100.0,
    token_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of KV cache of one token, where the step times do not say it.")
    ] = None,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Good is a request with its first token by then …")] = 1000.0,
    itl_ms: Annotated[float, typer.Option(min=0, help="… and the others, on average, every so many ms.")] = 100.0,
    mtbf_s: Annotated[float | None, typer.Option(min=1e-3, help="Mean time between failures of a replica.")] = None,
    repair_s: Annotated[float, typer.Option(min=0, help="Seconds until a replica that failed is back.")] = 30.0,
    times_only: Annotated[
        bool, typer.Option("--times-only", help="Print the step times as JSON, and do no more.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate replicas under a load: the real scheduler and caches, a virtual clock, step times that were measured."""
    found = times.read(step_times)
    if times_only:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    load.check()
    model, kv = engine_of(config, found, token_bytes)
    _tell_differences(config, found.config)
    reports: list[Report] = []
    for count, prefills in product(_numbers(replicas, "replicas", 1), _numbers(prefill, "prefill", 0)):
        if prefills and not kv.page_bytes:
            raise StartupError("the step times do not say how large a page is; give token_bytes", param="token_bytes")
        plan = Plan(
            config=config,
            model=model,
            kv=kv,
            times=found,
            targets=Targets(ttft_ms, itl_ms),
            replicas=count,
            prefill=prefills,
            prefill_threshold=prefill_threshold,
            bytes_per_s=1e9 * link_gbps,
            latency_s=1e-6 * link_us,
            seed=load.seed,
            mtbf_s=math.inf if mtbf_s is None else mtbf_s,
            repair_s=repair_s,
            in_phase=load.workload == step_times,
        )
        with _quiet():
            reports.append(Fleet(plan, load.open()).run())
        if not as_json:
            typer.echo("\n".join(reports[-1].lines()))
    if as_json:
        typer.echo(msgspec.json.encode({"label": reports[0].label, "reports": reports}).decode())
        return
    if len(reports) > 1:
        typer.echo("\n".join(("", *table(reports))))
    typer.echo(f"\n{reports[0].label}; {reports[0].workload}")


@contextmanager
def _quiet() -> Iterator[None]:
    """What fails in a simulated transfer is counted; a thousand engines would log it a thousand times."""
    logger = logging.getLogger("streamengine.transfer")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _tell_differences(config: EngineConfig, measured: EngineConfig | None) -> None:
    for name in _SCHEDULING if measured is not None else ():
        planned, was = getattr(config, name), getattr(measured, name)
        if planned != was and name not in {"kv_pages", "max_model_len", "debug"}:
            typer.echo(f"{name} is {planned} in this plan; the engine that was measured had {was}", err=True)


def engine_of(config: EngineConfig, found: times.StepTimes, token_bytes: int | None = None) -> tuple[ModelSpec, KVSpec]:
    """As it is asked for, or as it was measured."""
    measured = found.kv
    pages = config.kv_pages
    if pages is None:
        if measured is None:
            raise StartupError(
                "the step times do not say how many pages an engine has; give kv_pages", param="kv_pages"
            )
        pages = 1 + (measured.pages - 1) * measured.page_size // config.page_size
    length = config.max_model_len or found.max_model_len or (pages - 1) * config.page_size
    if token_bytes is None:
        token_bytes = 0 if measured is None else measured.page_bytes // measured.page_size
    window = None if measured is None else measured.window
    model = ModelSpec("planned", "", "", "", vocab_size=2**63, max_model_len=length, eos_token_ids=())
    return model, KVSpec(pages, config.page_size, token_bytes * config.page_size, window)


def _numbers(text: str, name: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number <= MOST_REPLICAS for number in numbers):
        raise StartupError(
            f"{name} must be numbers from {least} to {MOST_REPLICAS}, as 1,2,4, not {text!r}", param=name
        )
    return numbers
