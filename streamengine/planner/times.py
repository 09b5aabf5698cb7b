"""How long a step takes, as a line fitted to steps that were measured. Pure but for `read`.

A step computes prompt tokens and decoding rows, and its attention reads what lies before them: ``base + a · prompt
tokens + b · pairs of a prompt's query and key + c · decoding tokens + d · keys that those read``, no part of it
negative. The line goes through the middle of what was measured (least absolute relative error); how far single steps
lie from it is kept as quantiles, from which a simulation draws.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple, Self

import msgspec

from compiled.step import KVSpec, Step
from streamengine.errors import StartupError
from streamengine.replay import read as read_trace
from streamengine.trace import Aborted, Landed, Line, Opened, Planned, Submitted

ROUNDS = 20
SWEEPS = 2_000
QUANTILES = 41
FEWEST = 4
"""Steps of which a line is made."""


class Shape(NamedTuple):
    """What a step computes: see the module."""

    prompt_tokens: int = 0
    prompt_pairs: int = 0
    decode_tokens: int = 0
    decode_keys: int = 0

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> Self:
        """``rows`` are ``(start, tokens, sampled)`` as in `streamengine.trace.Planned`."""
        prompt = pairs = decode = keys = 0
        for start, tokens, sampled in rows:
            if tokens == sampled:
                decode += tokens
                keys += start + tokens
            else:
                prompt += tokens
                pairs += tokens * start + tokens * (tokens + 1) // 2
        return cls(prompt, pairs, decode, keys)

    @classmethod
    def of_step(cls, step: Step) -> Self:
        return cls.of((row.start, len(row.tokens), 0 if row.sampling is None else 1 + row.drafts) for row in step.rows)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step by its `Shape`.

    ``host_s`` lies between two steps of a core whose runner takes one at a time. ``spread`` are quantiles, from the
    least to the greatest, of what a step took over what the line says; empty: each takes what the line says.
    ``depth``, ``kv`` and ``max_model_len`` are of the engine that was measured, as far as they are known.
    """

    source: str
    base_s: float
    prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0
    decode_token_s: float = 0.0
    decode_key_s: float = 0.0
    host_s: float = 0.0
    spread: tuple[float, ...] = ()
    depth: int = 1
    kv: KVSpec | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        values = (self.host_s, self.prompt_token_s, self.prompt_pair_s, self.decode_token_s, self.decode_key_s)
        if min(*values, *self.spread, self.base_s) < 0 or self.base_s + sum(values[1:]) <= 0:
            raise StartupError("step times must not be negative, and not all of them 0", param="times")

    def middle(self, shape: Shape) -> float:
        """Seconds, by the line."""
        return (
            self.base_s
            + self.prompt_token_s * shape.prompt_tokens
            + self.prompt_pair_s * shape.prompt_pairs
            + self.decode_token_s * shape.decode_tokens
            + self.decode_key_s * shape.decode_keys
        )

    def draw(self, shape: Shape, random: Random) -> float:
        """Seconds, of one step."""
        seconds = self.middle(shape)
        if not self.spread:
            return seconds
        place = random.random() * (len(self.spread) - 1)
        below = int(place)
        above = min(below + 1, len(self.spread) - 1)
        return seconds * (self.spread[below] + (place - below) * (self.spread[above] - self.spread[below]))


def fit(source: str, steps: Sequence[tuple[Shape, float]], host_s: float = 0.0, *, spread: bool = True) -> StepTimes:
    """The line through ``steps`` and their seconds.

    Raises:
        StartupError: too few of them.
    """
    steps = [(shape, seconds) for shape, seconds in steps if seconds > 0]
    if len(steps) < FEWEST:
        raise StartupError(f"{source} has {len(steps)} steps; step times take {FEWEST}", param="times")
    features = [(1.0, *map(float, shape)) for shape, _ in steps]
    scales = [max(column) or 1.0 for column in zip(*features, strict=True)]
    # Relative: each row is divided by its seconds, and the right side is 1.
    rows = [
        [value / scale / seconds for value, scale in zip(feature, scales, strict=True)]
        for feature, (_, seconds) in zip(features, steps, strict=True)
    ]
    line = [0.0] * len(scales)
    weights = [1.0] * len(rows)
    for _ in range(ROUNDS):
        line = _least_squares(rows, weights, line)
        errors = [abs(1 - sum(a * x for a, x in zip(row, line, strict=True))) for row in rows]
        weights = [1 / max(error, 1e-3) for error in errors]
    base, token, pair, decode, key = (x / scale for x, scale in zip(line, scales, strict=True))
    times = StepTimes(
        source=source,
        base_s=base,
        prompt_token_s=token,
        prompt_pair_s=pair,
        decode_token_s=decode,
        decode_key_s=key,
        host_s=host_s,
    )
    if not spread:
        return times
    ratios = sorted(seconds / max(times.middle(shape), 1e-9) for shape, seconds in steps)
    places = [round(i * (len(ratios) - 1) / (QUANTILES - 1)) for i in range(QUANTILES)]
    return msgspec.structs.replace(times, spread=tuple(ratios[place] for place in places))


def _least_squares(rows: Sequence[Sequence[float]], weights: Sequence[float], line: Sequence[float]) -> list[float]:
    """The ``line`` without negative parts that minimises ``Σ weight · (1 - row · line)²``, part by part in turn."""
    size = len(line)
    square = [
        [sum(w * row[i] * row[j] for w, row in zip(weights, rows, strict=True)) for j in range(size)]
        for i in range(size)
    ]
    side = [sum(w * row[i] for w, row in zip(weights, rows, strict=True)) for i in range(size)]
    line = list(line)
    for _ in range(SWEEPS):
        moved = 0.0
        for i in range(size):
            if square[i][i] == 0:
                continue
            rest = side[i] - sum(square[i][j] * line[j] for j in range(size) if j != i)
            value = max(0.0, rest / square[i][i])
            moved = max(moved, abs(value - line[i]))
            line[i] = value
        if moved < 1e-12:
            break
    return line


# where they come from


def read(path: str) -> StepTimes:
    """Step times out of a trace, of the JSON of ``streamengine bench steps``, or as they were written down.

    Raises:
        StartupError: the file cannot be read or is none of these.
    """
    try:
        text = Path(path).read_text()
        if text.startswith('{"kind":"open"'):
            return of_trace(f"the trace {Path(path).name}", read_trace(path))
        if '"scenario"' in text:
            return of_bench(f"bench steps in {Path(path).name}", msgspec.json.decode(text.strip().splitlines()[-1]))
        return msgspec.json.decode(text, type=StepTimes)
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"step times cannot be read: {error}", param="times") from error
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        message = f"{path} is no trace, no JSON of `bench steps` and no step times: {error}"
        raise StartupError(message, param="times") from error


def of_bench(source: str, found: Any) -> StepTimes:
    """Its decoding steps all have the same context, so what longer ones cost is not in it."""
    context = 128
    steps = [
        (Shape(0, 0, row["batch"], 0), row["ms"] / 1e3) for row in found["decode"]
    ]  # at one context, keys are but a multiple of the rows
    for row in found["prefill"]:
        tokens = row["tokens"]
        steps.append((Shape(tokens, tokens * (tokens + 1) // 2), row["ms"] / 1e3))
    return fit(f"{source} (decoding at a context of {context})", steps, spread=False)


def of_trace(source: str, lines: Sequence[Line]) -> StepTimes:
    """Of all steps in it that did not raise."""
    planned: dict[int, Planned] = {}
    steps: list[tuple[Shape, float]] = []
    gaps: list[float] = []
    unfinished: set[int] = set()
    last = None
    opened = lines[0]
    assert isinstance(opened, Opened), "a trace begins with what was opened"
    for line in lines:
        match line:
            case Opened():
                opened, last = line, None
                planned.clear()
                unfinished.clear()
            case Submitted():
                unfinished.add(line.request.id)
            case Aborted(index=None):
                unfinished.discard(line.request)
            case Planned():
                planned[line.step] = line
                if last is not None:
                    gaps.append(line.at - last)
                    last = None
            case Landed() if line.step in planned:
                plan = planned.pop(line.step)
                unfinished.difference_update(told.request for told in line.answers if told.finish)
                if line.seconds is not None:
                    steps.append((Shape.of(row[1:] for row in plan.rows), line.seconds))
                    ended = plan.at + line.seconds if opened.depth == 1 else line.at
                    last = ended if unfinished else None
    times = fit(source, steps, max(0.0, median(gaps)) if gaps else 0.0)
    longest = opened.model.max_model_len
    return msgspec.structs.replace(times, depth=opened.depth, kv=opened.kv, max_model_len=longest)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least of ``ordered`` that at least ``share`` of them are not above; nan of none."""
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, max(0, bisect_left(range(1, len(ordered) + 1), share * len(ordered))))]
