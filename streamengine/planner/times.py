"""How long a step takes, as a line fitted to steps that were measured. Pure but for `read`.

A step computes prompt tokens and decoding rows, and its attention reads what lies before them: ``base + a · prompt
tokens + b · pairs of a prompt's query and key + c · decoding tokens + d · keys that those read``, no part of it
negative, with the least squares of errors relative to the line. How far single steps of a trace lie from it is kept
as a speed with its time: a machine that is slow at one moment is slow at the next, and for a long step as for the many
short ones in its place. A simulated engine lives through these times from a moment of its own on, and then again.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import msgspec

from compiled.step import KVSpec, Step
from streamengine.config import EngineConfig
from streamengine.errors import StartupError
from streamengine.replay import read as read_trace
from streamengine.replay import sessions
from streamengine.trace import Aborted, Landed, Line, Opened, Planned, Submitted

ROUNDS = 20
SWEEPS = 2_000
GAP_S = 0.1
"""A core that plans nothing for longer had nothing to do."""

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

    ``host_s`` lies between two steps of a core whose runner takes one at a time. ``speeds`` are ``(since when, how
    much of a step by the line is done in a second)``, by time since the first request, and over again; none: always 1.
    ``depth``, ``config``, ``kv`` and ``max_model_len`` are of the engine that was measured, as far as they are known.
    """

    source: str
    base_s: float
    prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0
    decode_token_s: float = 0.0
    decode_key_s: float = 0.0
    host_s: float = 0.0
    speeds: tuple[tuple[float, float], ...] = ()
    depth: int = 1
    config: EngineConfig | None = None
    kv: KVSpec | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        values = (self.host_s, self.prompt_token_s, self.prompt_pair_s, self.decode_token_s, self.decode_key_s)
        if min(*values, self.base_s) < 0 or self.base_s + sum(values[1:]) <= 0:
            raise StartupError("step times must not be negative, and not all of them 0", param="times")
        if not all(at >= 0 and speed > 0 for at, speed in self.speeds) or list(self.speeds) != sorted(self.speeds):
            raise StartupError("speeds must be above 0, with times from 0 on in their order", param="times")

    def middle(self, shape: Shape) -> float:
        """Seconds, by the line."""
        return (
            self.base_s
            + self.prompt_token_s * shape.prompt_tokens
            + self.prompt_pair_s * shape.prompt_pairs
            + self.decode_token_s * shape.decode_tokens
            + self.decode_key_s * shape.decode_keys
        )

    def seconds(self, shape: Shape, at: float) -> float:
        """Of a step that begins at ``at``: until its work by the line is done, at the speeds of these times."""
        work = self.middle(shape)
        if not self.speeds or not (period := self.speeds[-1][0]):
            return work
        now = at % period
        place, spent = max(0, bisect_right(self.speeds, (now, math.inf)) - 1), 0.0
        while True:
            speed = self.speeds[place][1]
            until = self.speeds[place + 1][0] if place + 1 < len(self.speeds) else period
            left = max(0.0, until - now)
            if work <= left * speed:
                return spent + work / speed
            work, spent = work - left * speed, spent + left
            place, now = (place + 1, until) if place + 1 < len(self.speeds) else (0, 0.0)


def fit(source: str, steps: Iterable[tuple[Shape, float]], host_s: float = 0.0) -> StepTimes:
    """The line through ``steps`` and their seconds.

    Raises:
        StartupError: too few of them.
    """
    steps = [(shape, seconds) for shape, seconds in steps if seconds > 0]
    if len(steps) < FEWEST:
        raise StartupError(f"{source} has {len(steps)} steps; step times take {FEWEST}", param="times")
    features = [(1.0, *map(float, shape)) for shape, _ in steps]
    scales = [max(column) or 1.0 for column in zip(*features, strict=True)]
    rows = [[value / scale for value, scale in zip(feature, scales, strict=True)] for feature in features]
    measured = [seconds for _, seconds in steps]
    line, guesses = [0.0] * len(scales), measured
    for _ in range(ROUNDS):
        # Relative to the line, and not to what was measured: what it says of many steps together is then right.
        weights = [1 / g**2 for g in guesses]
        line = _least_squares(rows, measured, weights, line)
        guesses = [sum(a * x for a, x in zip(row, line, strict=True)) or 1e-9 for row in rows]
    base, token, pair, decode, key = (x / scale for x, scale in zip(line, scales, strict=True))
    return StepTimes(
        source=source,
        base_s=base,
        prompt_token_s=token,
        prompt_pair_s=pair,
        decode_token_s=decode,
        decode_key_s=key,
        host_s=host_s,
    )


def _least_squares(
    rows: Sequence[Sequence[float]], measured: Sequence[float], weights: Sequence[float], line: Sequence[float]
) -> list[float]:
    """The line without negative parts that minimises ``Σ weight · (measured - row · line)²``, part by part in turn."""
    size = range(len(line))
    square = [[sum(w * row[i] * row[j] for w, row in zip(weights, rows, strict=True)) for j in size] for i in size]
    side = [sum(w * s * row[i] for w, s, row in zip(weights, measured, rows, strict=True)) for i in size]
    line = list(line)
    for _ in range(SWEEPS):
        moved = 0.0
        for i in size:
            if square[i][i] == 0:
                continue
            rest = side[i] - sum(square[i][j] * line[j] for j in size if j != i)
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
            return of_trace(f"the trace {Path(path).name}", *sessions(read_trace(path))[-1])
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
    # So its keys, but a multiple of the rows, are left out.
    steps = [(Shape(decode_tokens=row["batch"]), row["ms"] / 1e3) for row in found["decode"]]
    for row in found["prefill"]:
        tokens = row["tokens"]
        steps.append((Shape(tokens, tokens * (tokens + 1) // 2), row["ms"] / 1e3))
    return fit(f"{source} (decoding at one context)", steps)


def of_trace(source: str, opened: Opened, lines: Sequence[Line]) -> StepTimes:
    """Of all steps of a session that did not raise."""
    planned: dict[int, Planned] = {}
    steps: list[tuple[float, Shape, float]] = []
    gaps: list[float] = []
    unfinished: set[int] = set()
    last = None
    for line in lines:
        match line:
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
                    steps.append((plan.at, Shape.of(row[1:] for row in plan.rows), line.seconds))
                    ended = plan.at + line.seconds if opened.depth == 1 else line.at
                    last = ended if unfinished else None
    times = fit(source, [step[1:] for step in steps], max(0.0, median(gaps)) if gaps else 0.0)
    begin = min(line.at for line in lines if isinstance(line, Submitted))
    speeds: list[tuple[float, float]] = []
    for (at, shape, seconds), following in zip(steps, [*steps[1:], None], strict=True):
        # What lies between two steps beyond the usual is a part of the first one's.
        turn = math.inf if following is None else following[0] - at - times.host_s
        taken = turn if seconds < turn < seconds + GAP_S else seconds
        speeds.append((at - begin, times.middle(shape) / taken))
        if turn > seconds + GAP_S:
            speeds.append((at - begin + seconds, 1.0))  # nothing was computed
    return msgspec.structs.replace(
        times,
        speeds=tuple(sorted(speeds)),
        depth=opened.depth,
        config=opened.config,
        kv=opened.kv,
        max_model_len=opened.model.max_model_len,
    )
