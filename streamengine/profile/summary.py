"""A window of measured steps → the document. Pure: no clock, no files.

Nothing is left out: what no call covers of a step's seconds is host time, and the median step is shown whole.
"""

import re
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled.step import ModelSpec
from compiled.timeline import MeasuredStep, PieceAbout, Place, Span, Window
from streamengine.histogram import COUNTS
from streamengine.profile.record import (
    Bucket,
    Call,
    Ceilings,
    Compile,
    Event,
    Hardware,
    Host,
    Kernel,
    Overhead,
    Piece,
    Profile,
    Scenario,
    StepTime,
    Timeline,
)

MAX_TEXT = 200_000
"""Characters of one graph or source that are kept."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What is to be known beside the window. ``statistics`` are the runner's."""

    model: ModelSpec
    eager: bool
    scenario: Scenario
    created: str
    hardware: Hardware
    ceilings: Ceilings | None
    statistics: Mapping[str, float] = field(default_factory=dict)


def summarise(window: Window, there: Circumstances) -> Profile:
    """The document of ``window``, which has at least one step."""
    steps = window.steps
    total = sum(step.seconds for step in steps)
    calls = tuple(_calls(window, total, there.ceilings))
    covered = sum(call.total_s for call in calls)
    seconds = [step.seconds for step in steps]
    median = statistics.median(seconds)
    return Profile(
        model=there.model.name,
        architecture=there.model.architecture,
        dtype=there.model.dtype,
        eager=there.eager,
        scenario=there.scenario,
        created=there.created,
        hardware=there.hardware,
        ceilings=there.ceilings,
        steps=len(steps),
        step_s=StepTime(total=total, mean=total / len(steps), p50=median, min=min(seconds), max=max(seconds)),
        rows=_histogram(step.rows for step in steps),
        tokens=_histogram(step.tokens for step in steps),
        ledger=_ledger(there.statistics),
        startup=_startup(there.statistics),
        calls=calls,
        host=Host(seconds=total - covered, share=(total - covered) / total),
        pieces=tuple(map(_piece, window.pieces)),
        timeline=_timeline(window.places, sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]),
        overhead=Overhead(off_s=statistics.median(window.plain), on_s=median) if window.plain else None,
        trace=window.trace,
    )


def _calls(window: Window, total: float, ceilings: Ceilings | None) -> Iterable[Call]:
    """In the order of a step, for each bucket of tokens."""
    spans: dict[tuple[int, int], list[Span]] = {}
    for step in window.steps:
        for span in step.spans:
            spans.setdefault((step.bucket, span.place), []).append(span)
    for (bucket, number), found in sorted(spans.items()):
        place, each = window.places[number], [span.seconds for span in found]
        seconds = sum(each)
        moved = _sum([span.bytes for span in found])
        flops = _sum([span.flops for span in found])
        yield Call(
            name=place.name,
            kind=place.kind,
            tokens=bucket,
            calls=len(found),
            total_s=seconds,
            mean_s=seconds / len(found),
            share=seconds / total,
            p50_s=statistics.median(each),
            min_s=min(each),
            piece=place.piece,
            bytes=moved,
            flops=flops,
            gbps=_rate(moved, seconds),
            gflops=_rate(flops, seconds),
            of_ceiling=_of_ceiling(moved, flops, seconds, ceilings),
        )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _rate(amount: int | None, seconds: float) -> float | None:
    return None if amount is None or not seconds else amount / seconds / 1e9


def _of_ceiling(moved: int | None, flops: int | None, seconds: float, ceilings: Ceilings | None) -> float | None:
    """Per cent: the least time that the nearer ceiling allows, of the time that it took."""
    if ceilings is None or moved is None or flops is None or not seconds:
        return None
    least = max(moved / ceilings.read_gbps, flops / ceilings.product_gflops) / 1e9
    return 100 * least / seconds


def _histogram(values: Iterable[int]) -> tuple[Bucket, ...]:
    """Those that are not empty; what is above the largest bound is counted there."""
    places = Counter(min(bisect_left(COUNTS, value), len(COUNTS) - 1) for value in values)
    return tuple(Bucket(at_most=COUNTS[place], steps=steps) for place, steps in sorted(places.items()))


def _ledger(values: Mapping[str, float]) -> dict[str, float]:
    """What takes memory: not what a step reads of it."""
    return {name: value for name, value in values.items() if name.endswith("_bytes") and name != "read_bytes"}


def _startup(values: Mapping[str, float]) -> dict[str, float]:
    stages = {name.removesuffix("_seconds"): value for name, value in values.items() if name.endswith("_seconds")}
    return {stage: seconds for stage, seconds in stages.items() if stage != "step"}


def _timeline(places: Sequence[Place], step: MeasuredStep) -> Timeline:
    spans = sorted(step.spans, key=lambda span: span.start)
    events = tuple(
        Event(
            name=places[span.place].name,
            kind=places[span.place].kind,
            start_s=span.start,
            seconds=span.seconds,
            piece=places[span.place].piece,
        )
        for span in spans
    )
    return Timeline(step=step.number, rows=step.rows, tokens=step.tokens, seconds=step.seconds, events=events)


def _piece(about: PieceAbout) -> Piece:
    work, seconds = about.work, about.seconds or {}
    pieces: Any = seconds.get("cxx_pieces")
    return Piece(
        key=about.key,
        name=re.sub(r"[\w.]+\.\d+: ", "", about.places[0]),
        places=about.places,
        bytes=None if work is None or work.bytes is None else str(work.bytes),
        flops=None if work is None else str(work.flops),
        uncounted=() if work is None else work.uncounted,
        kernels=tuple(Kernel(name=name, source=_cut(source)) for name, source in (about.kernels or {}).items()),
        graph=None if about.graph is None else _cut(about.graph),
        code=None if about.code is None else _cut(about.code),
        compile=Compile(
            cache="hit" if about.found else "miss",
            factor=about.missed,
            trace_s=seconds.get("trace"),
            lower_s=seconds.get("lower"),
            codegen_s=seconds.get("codegen"),
            cxx_s=seconds.get("cxx"),
            cxx_pieces=pieces,
        ),
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n… {len(text) - MAX_TEXT} more characters"
