"""Runs the scheduler over a trace with no model: the same arrivals, aborts and results, checked after each step.

The recorded lines are followed in their order; whatever is unfinished behind the last one is then run to its end.
Where no token ids were recorded, tokens are made up such that equal pages are equal again and each answer ends
where it ended.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from compiled.step import Logprob, Row, Step, StepResult
from streamengine.assembly import build_scheduler
from streamengine.errors import StartupError, StreamEngineError
from streamengine.request import Delta, Request
from streamengine.trace import VERSION, Aborted, Landed, Line, Opened, Planned, Submitted, rows_of

PATIENCE = 10_000
MADE_UP = 2**30
"""Made-up tokens begin here, above every vocabulary, and end below twice that."""


@dataclass
class Report:
    """What a replay of one session found. ``fault`` is why it was given up: a broken invariant, or no progress."""

    requests: int = 0
    steps: int = 0
    preemptions: float = 0
    longest_wait_s: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    unended: list[int] = field(default_factory=list)
    differences: int = 0
    first_difference: str = ""
    fault: str = ""

    def lines(self) -> Iterator[str]:
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(self.ended.items())) or "none"
        yield f"requests     {self.requests}, ended: {ends}"
        yield f"steps        {self.steps}, preemptions {self.preemptions:g}, longest wait {self.longest_wait_s:.3f} s"
        yield f"differences  {self.differences}{self.first_difference and f', the first: {self.first_difference}'}"
        if self.fault:
            yield f"FAULT        {self.fault}"
            yield f"unended      {', '.join(map(str, self.unended)) or 'none'}"


def command(
    path: Annotated[str, typer.Argument(metavar="FILE", help="What `serve --trace FILE` has written.")],
    patience: Annotated[
        int, typer.Option(min=1, help="Steps in which a request may get no token before that counts as a hang.")
    ] = PATIENCE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a session.")] = False,
) -> None:
    """Run the scheduler over a trace with a fake model and check it after each step; 1 if something is wrong."""
    reports = replay(path, patience)
    for report in reports:
        typer.echo(msgspec.json.encode(report).decode() if as_json else "\n".join(report.lines()))
    if any(report.fault for report in reports):
        raise typer.Exit(1)


def replay(path: str, patience: int = PATIENCE) -> list[Report]:
    """One report for each core that wrote to the trace at ``path``.

    Args:
        patience: steps in which a request may get no token before that counts as a hang.

    Raises:
        StartupError: the file cannot be read or is no trace.
    """
    return [_Replay(opened, lines, patience).run() for opened, lines in sessions(read(path))]


def read(path: str) -> list[Line]:
    """All lines; the last ones of sessions that were cut off in the middle of it are left out."""
    decode = msgspec.json.Decoder(Line).decode
    lines: list[Line] = []
    try:
        raw = Path(path).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise StartupError(f"cannot read the trace: {error}", param="trace") from error
    for number, line in enumerate(raw, 1):
        try:
            lines.append(decode(line))
        except msgspec.MsgspecError as error:
            if raw[number : number + 1] and raw[number].startswith(b'{"kind":"open"'):
                continue
            raise StartupError(f"line {number} of {path} is not of a trace: {error}", param="trace") from error
    if not lines or not isinstance(lines[0], Opened):
        raise StartupError(f"{path} does not begin like a trace", param="trace")
    return lines


def sessions(lines: Iterable[Line]) -> list[tuple[Opened, list[Line]]]:
    found: list[tuple[Opened, list[Line]]] = []
    for line in lines:
        if isinstance(line, Opened):
            if line.version != VERSION:
                raise StartupError(f"the trace has version {line.version}, this is {VERSION}", param="trace")
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found


class _Replay:
    def __init__(self, opened: Opened, lines: list[Line], patience: int) -> None:
        self._opened = opened
        self._lines = lines
        self._patience = patience
        self._scheduler = build_scheduler(opened.config, opened.model, opened.kv)
        self._runner = TableRunner(opened.kv.page_size, lines)
        self._in_flight: deque[Step] = deque()
        self._progress: dict[int, int] = {}
        self._now = 0.0
        self._report = Report()

    def run(self) -> Report:
        report = self._report
        try:
            for line in self._lines:
                self._follow(line)
            while self._scheduler.has_work and not report.fault:
                self._turn()
        except Exception as error:
            # A broken invariant, or a bug of any kind: that is what is looked for.
            report.fault = f"at step {report.steps}: {type(error).__name__}: {error}"
        report.preemptions = self._scheduler.statistics()["preemptions"]
        report.unended = list(self._progress)
        return report

    def _follow(self, line: Line) -> None:
        match line:
            case Submitted():
                self._now = line.at
                self._submit(self._runner.request(line))
            case Aborted():
                self._now = line.at
                self._note(self._scheduler.abort(line.request, line.cause, line.index))
            case Planned():
                self._now = line.at
                step = self._plan()
                self._compare(line, step)
            case Landed():
                self._now = line.at
                if self._in_flight:
                    self._land(line.seconds)

    def _turn(self) -> None:
        """As the core does it: fill the pipe, land the oldest."""
        while len(self._in_flight) < self._opened.depth and self._plan() is not None:
            pass
        if self._in_flight:
            self._land(0.001)
            self._now += 0.001
        else:
            self._report.fault = f"after step {self._report.steps} nothing can be planned, and requests are unfinished"

    def _submit(self, request: Request) -> None:
        self._report.requests += 1
        try:
            self._scheduler.submit(request, self._now)
        except StreamEngineError as error:
            self._report.ended[error.code] += 1
        else:
            self._progress[request.id] = self._report.steps

    def _plan(self) -> Step | None:
        step = self._scheduler.plan(self._now)
        if step is not None:
            self._in_flight.append(step)
            self._report.steps += 1
        self._scheduler.check()
        return step

    def _land(self, seconds: float | None) -> None:
        step = self._in_flight.popleft()
        if seconds is None:
            deltas = self._scheduler.fail(step, "engine_error", "it raised when it was recorded")
        else:
            deltas = self._scheduler.commit(step, self._runner.compute(step, seconds))
        self._note(deltas)
        self._scheduler.check()
        for request, step_number in self._progress.items():
            if self._report.steps - step_number > self._patience:
                raise TimeoutError(f"request {request} got no token in {self._patience} steps")

    def _note(self, deltas: Iterable[Delta]) -> None:
        report = self._report
        for delta in deltas:
            self._progress[delta.request] = report.steps
            report.longest_wait_s = max(report.longest_wait_s, delta.queued_s or 0.0)
            if delta.finish is not None:
                report.ended[delta.finish.reason] += 1
        unfinished = set(self._scheduler.unfinished)
        for request in {delta.request for delta in deltas} - unfinished:
            del self._progress[request]

    def _compare(self, recorded: Planned, step: Step | None) -> None:
        rows = () if step is None else rows_of(step)
        if rows == recorded.rows:
            return
        self._report.differences += 1
        if not self._report.first_difference:
            missing, new = set(recorded.rows) - set(rows), set(rows) - set(recorded.rows)
            self._report.first_difference = f"step {recorded.step}: {sorted(missing)} became {sorted(new)}"


@dataclass
class _Answer:
    """As it was recorded, or as far as it was."""

    count: int = 0
    pages: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str = ""


class TableRunner:
    """Gives every sequence the tokens that the trace says it had, or made-up ones in their place."""

    def __init__(self, page_size: int, lines: Iterable[Line]) -> None:
        self._page_size = page_size
        self._submitted: dict[int, Submitted] = {}
        self._answers: dict[tuple[int, int], _Answer] = {}
        for line in lines:
            match line:
                case Submitted():
                    self._submitted[line.request.id] = line
                case Landed():
                    for told in line.answers:
                        answer = self._answers.setdefault((told.request, told.index), _Answer())
                        answer.count += told.count
                        answer.pages += told.pages
                        answer.tokens += told.tokens
                        answer.finish = told.finish

    def request(self, line: Submitted) -> Request:
        """What was submitted, with a prompt."""
        prompt = line.tokens or tuple(self._token(line.request.id, 0, position) for position in range(line.length))
        return msgspec.structs.replace(line.request, prompt=prompt)

    def compute(self, step: Step, seconds: float) -> StepResult:
        tokens = [tuple(self._sampled(row)) for row in step.rows]
        logprobs = tuple(
            tuple(_logprob(token, row.sampling.logprobs) for token in sampled)
            if row.sampling is not None and row.sampling.logprobs is not None
            else ()
            for row, sampled in zip(step.rows, tokens, strict=True)
        )
        scores = tuple(tuple(_logprob(token, row.targets_top) for token in row.targets) for row in step.rows)
        return StepResult(
            step.number,
            tuple(tokens),
            seconds,
            logprobs=logprobs if any(logprobs) else (),
            scores=scores if any(scores) else (),
        )

    def _sampled(self, row: Row) -> Iterator[int]:
        if row.sampling is None:
            return
        # Answers of one request are told apart by their seeds: see `Request`.
        asked = self._submitted[row.request].request
        index = (row.sampling.seed - asked.sampling.seed) % 2**64
        end = row.start + len(row.tokens)
        for position in range(end - row.drafts, end + 1):
            yield self._token(row.request, index, position)

    def _token(self, request: int, index: int, position: int) -> int:
        line = self._submitted[request]
        answer = self._answers.get((request, index), _Answer())
        place = position - line.length
        if 0 <= place < len(answer.tokens):
            return answer.tokens[place]
        if place == answer.count - 1 and answer.finish == "stop" and line.request.stop_token_ids:
            return line.request.stop_token_ids[0]
        pages, page = (*line.pages, *answer.pages), position // self._page_size
        return _made_up(f"{pages[page]}:{position}" if page < len(pages) else f"{request}/{index}:{position}")


def _made_up(of: str) -> int:
    return MADE_UP + int.from_bytes(blake2b(of.encode(), digest_size=4).digest(), "big") % MADE_UP


def _logprob(token: int, top: int) -> Logprob:
    return Logprob(token, -1.0, 1, tuple((_made_up(f"{token}/{rank}"), -1.0 - rank) for rank in range(top)))
