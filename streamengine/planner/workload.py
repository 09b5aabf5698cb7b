"""Who asks for what and when: made up from a seed, recorded by a core of ours, or in the format of Mooncake's traces.

Tokens are numbers that nobody reads, but equal prefixes are equal, so that the prefix cache finds what it would find.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from compiled.step import Sampling, Step, StepResult
from streamengine.checks import MANY, settle
from streamengine.config import Count, Text
from streamengine.errors import ContextLengthExceeded, InvalidRequest, Overloaded, StartupError
from streamengine.replay import MADE_UP, TableRunner, read, sessions
from streamengine.request import Request
from streamengine.trace import Aborted, Line, Submitted

BLOCK = 512
"""Tokens of one of Mooncake's hashes."""

NO_CANCELLATIONS = {InvalidRequest.code, ContextLengthExceeded.code, Overloaded.code, "ended", "shutdown"}
"""What a trace calls an abort that was nobody's wish: a refusal, an answer that had ended elsewhere, the core's end."""

_GREEDY = Sampling()


class Job(NamedTuple):
    """``request`` comes at ``at``, in seconds; who asked goes away at ``cancel_at``, if it has not ended by then."""

    at: float
    request: Request
    cancel_at: float = math.inf


class Answers(Protocol):
    """Gives the tokens of a step."""

    def compute(self, step: Step, seconds: float) -> StepResult: ...


class Workload(NamedTuple):
    """``jobs`` in the order of their times. It is used up by one simulation."""

    about: str
    jobs: Iterator[Job]
    answers: Answers


class Distinct:
    """Every answer is as long as it may be, and like no other."""

    def compute(self, step: Step, seconds: float) -> StepResult:
        return StepResult(
            step.number,
            tuple(
                tuple(
                    MADE_UP + (row.request * 8191 + position) % MADE_UP
                    for position in range(row.start + len(row.tokens) - row.drafts, row.start + len(row.tokens) + 1)
                )
                if row.sampling is not None
                else ()
                for row in step.rows
            ),
            seconds,
        )


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who asks: a file, or Poisson arrivals.

    Args:
        workload: a trace of ours or a file in Mooncake's format; then none of the others but ``seed``.
        rate: requests per second, of the whole fleet.
        seconds: for so long requests come.
        prompt_tokens: mean length; ``prompt_cv`` is the coefficient of variation of a log-normal, 0 is always the mean.
        shared_tokens: of each prompt, the beginning that it shares with one in ``prefixes``.
        seed: of everything that is drawn.
    """

    workload: Text | None = None
    rate: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    seconds: Annotated[float, Meta(gt=0, le=1e7)] = 60.0
    prompt_tokens: Count = 512
    prompt_cv: Annotated[float, Meta(ge=0, le=10)] = 0.0
    answer_tokens: Count = 128
    answer_cv: Annotated[float, Meta(ge=0, le=10)] = 0.0
    shared_tokens: Annotated[int, Meta(ge=0, le=MANY)] = 0
    prefixes: Count = 1
    seed: Annotated[int, Meta(ge=0, le=MANY)] = 0

    def __post_init__(self) -> None:
        settle(self, StartupError)

    def check(self) -> None:
        """Raises StartupError where it does not say who asks, or says it twice."""
        if (self.workload is None) == (self.rate is None):
            raise StartupError("a plan takes either rate or workload, the name of a file", param="rate")
        for field in msgspec.structs.fields(self) if self.workload is not None else ():
            if field.name not in {"workload", "seed"} and getattr(self, field.name) != field.default:
                raise StartupError(f"{field.name} is for made-up requests, and workload names a file", param=field.name)

    def open(self) -> Workload:
        """What it says, from its beginning.

        Raises:
            StartupError: the file cannot be read, or is of another kind.
        """
        self.check()
        if self.workload is not None:
            return _of_file(self.workload)
        cv = f" (cv {self.prompt_cv:g}, {self.answer_cv:g})" if self.prompt_cv or self.answer_cv else ""
        shared = f", {self.shared_tokens} of them one of {self.prefixes} prefixes" if self.shared_tokens else ""
        about = (
            f"Poisson arrivals of {self.rate:g} requests/s for {self.seconds:g} s, prompts of {self.prompt_tokens} "
            f"tokens{shared}, answers of {self.answer_tokens}{cv}"
        )
        return Workload(about, self._jobs(Random(self.seed)), Distinct())

    def _jobs(self, random: Random) -> Iterator[Job]:
        at, fresh = 0.0, self.prefixes * self.shared_tokens
        assert self.rate is not None, "there is a file"
        for id in range(2**62):
            at += random.expovariate(self.rate)
            if at >= self.seconds:
                return
            length = _length(random, self.prompt_tokens, self.prompt_cv)
            begin = random.randrange(self.prefixes) * self.shared_tokens
            shared, own = min(self.shared_tokens, length), fresh
            fresh += length - shared
            prompt = (*range(begin, begin + shared), *range(own, fresh))
            answer = _length(random, self.answer_tokens, self.answer_cv)
            yield Job(at, Request(id=id, prompt=prompt, max_tokens=answer, sampling=_GREEDY))


def _length(random: Random, mean: float, variation: float) -> int:
    if not variation:
        return round(mean)
    square = math.log1p(variation**2)
    return max(1, round(random.lognormvariate(math.log(mean) - square / 2, math.sqrt(square))))


class _Row(msgspec.Struct, frozen=True):
    """One line; ``timestamp`` in milliseconds, ``hash_ids`` of blocks of `BLOCK` prompt tokens with all before them."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _of_file(path: str) -> Workload:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the workload cannot be read: {error}", param="workload") from error
    name = Path(path).name
    if text.startswith('{"kind":"open"'):
        opened, lines = sessions(read(path))[-1]
        return recorded(f"the arrivals in the trace {name}", opened.kv.page_size, lines)
    return mooncake(name, text)


def mooncake(name: str, text: str) -> Workload:
    """Lines of Mooncake's format; prompt tokens behind the last hash are like nobody's.

    Raises:
        StartupError: a line is of another one.
    """
    rows: list[tuple[float, int, _Row]] = []
    decode = msgspec.json.Decoder(_Row).decode
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = decode(line)
        except msgspec.MsgspecError as error:
            message = f"line {number} of {name} is not of Mooncake's format, and it is no trace of ours: {error}"
            raise StartupError(message, param="workload") from error
        if row.input_length < 1 or row.output_length < 1:
            raise StartupError(f"line {number} of {name} asks for nothing", param="workload")
        rows.append((row.timestamp / 1e3, number, row))
    if not rows:
        raise StartupError(f"{name} is empty", param="workload")
    rows.sort(key=lambda row: row[:2])
    first = rows[0][0]
    jobs = (Job(at - first, _request(number, row)) for at, number, row in rows)
    return Workload(f"{len(rows)} requests of {name}", jobs, Distinct())


def _request(id: int, row: _Row) -> Request:
    tokens = [hash * BLOCK + i for hash in row.hash_ids for i in range(BLOCK)][: row.input_length]
    missing = row.input_length - len(tokens)
    tokens += [2**62 + id * BLOCK * BLOCK + i for i in range(missing)]
    return Request(id=id, prompt=tuple(tokens), max_tokens=row.output_length, sampling=_GREEDY)


def recorded(about: str, page_size: int, lines: Iterable[Line]) -> Workload:
    """The clients' arrivals and cancellations of one session of a trace of ours, with the answers that were given then.

    What was refused is asked for again: whether there is room is for the simulation to say. What had not ended where
    the trace ends goes on. Prompts of other engines, whose ids are below 0, are left out.
    """
    lines = list(lines)
    answers = TableRunner(page_size, lines)
    cancels = {line.request: line.at for line in lines if isinstance(line, Aborted) and line.index is None}
    for line in lines:
        if isinstance(line, Aborted) and line.cause in NO_CANCELLATIONS:
            cancels.pop(line.request, None)
    submitted = [line for line in lines if isinstance(line, Submitted) and line.request.id >= 0]
    if not submitted:
        raise StartupError(f"no client asks for anything in {about}", param="workload")
    first = submitted[0].at
    jobs = (
        Job(line.at - first, answers.request(line), cancels.get(line.request.id, math.inf) - first)
        for line in submitted
    )
    return Workload(about, jobs, answers)
