"""Answers on their way through the core: what deltas and deadlines do to their logs.

Pure: time comes as an argument, and what the core is to be told is returned, for the engine to post.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from logging import getLogger
from math import inf

from msgspec import structs

from compiled.step import Logprob
from streamengine.errors import EngineFailure, QueueTimeout, StreamEngineError, from_code
from streamengine.histogram import SECONDS, Histogram
from streamengine.link import Abort
from streamengine.log import Guided, Log, Outcome, Stopwatch, Timing, TokenLogprob
from streamengine.request import QUEUE_TIMEOUT, Delta, Finish, FinishReason, Request
from streamengine.sampling import SamplingParams
from streamengine.text import Detokenizer, Entry
from streamengine.tokenizer import Tokenizer

STOP_TOKEN_CAUSES = ("eos", "stop_token")
LATENCIES = ("ttft", "queue", "prefill", "decode", "total")
"""Of `Timing`, in seconds; between two tokens of an answer it is ``inter_token``."""

logger = getLogger(__name__)


class Choice:
    """One of a request's answers: its tokens become text, log-probabilities and timing in ``log``.

    Args:
        submitted: when the request came, in seconds like every other time here.
        token_bytes: what one token writes.
        keeps_stop: the token that ends the answer is part of its text.
        schema: that its text is to be held against; what it is not certain to keep to, for ``warnings``.
    """

    def __init__(
        self,
        log: Log,
        detokenizer: Detokenizer,
        submitted: float,
        token_bytes: Callable[[int], bytes],
        keeps_stop: bool = False,
        schema: str | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.log = log
        self.schema = schema
        self.unjudged: Outcome | None = None
        """It has ended, but for `judge`."""
        self.stopwatch = Stopwatch(submitted)
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._keeps_stop = keeps_stop
        self._warnings = warnings
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose entries are held back."""

    @property
    def over(self) -> bool:
        """Nothing more can come."""
        return self.log.ended or self.unjudged is not None

    def apply(self, delta: Delta, now: float, queue_s: float | None) -> None:
        """What one step did. It is `over` afterwards if ``delta`` has a finish or completes a stop string."""
        finish = delta.finish
        self.stopwatch.tokens(len(delta.tokens), now, delta.forced)
        assert len(delta.logprobs) in (0, len(delta.tokens)), "a token without a log-probability"
        self._logprobs += self.spell(delta.logprobs)
        self.log.beam_score = delta.beam_score
        tokens, end_token = delta.tokens, None
        if finish is not None and finish.cause in STOP_TOKEN_CAUSES and tokens and not self._keeps_stop:
            tokens, end_token = tokens[:-1], tokens[-1]
        self._append(self._detokenizer.push(tokens))
        if finish is not None:
            self._append(self._detokenizer.finish(end_token))
        # A stop string that the last allowed token completes comes before the length.
        if self._detokenizer.stop_sequence is not None:
            self._end("stop", now)
        elif finish is not None:
            self._finish(finish, now, queue_s)

    def finish(self, finish: Finish, now: float, queue_s: float | None) -> None:
        """End it with what there is."""
        self._append(self._detokenizer.finish())
        self._finish(finish, now, queue_s)

    def fail(self, error: StreamEngineError) -> None:
        """End it in ``error``, after the text that was held."""
        if not self.over:
            self._append(self._detokenizer.finish())
        self.log.fail(error)

    def spell(self, logprobs: Sequence[Logprob]) -> list[TokenLogprob]:
        """With the tokens' text beside their ids."""
        return [
            self._spell(
                item.token,
                item.logprob,
                item.rank,
                tuple(self._spell(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top, 1)),
            )
            for item in logprobs
        ]

    def _spell(self, token: int, logprob: float, rank: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self._token_bytes(token)
        text = data.decode(errors="replace")
        # Rounding may lift a certain token's above 0, which is no logarithm of a probability.
        return TokenLogprob(token=token, text=text, bytes=data, logprob=min(logprob, 0.0), rank=rank, top=top)

    def _append(self, entries: list[Entry]) -> None:
        self.log.append(entries, self._logprobs[: len(entries)])
        del self._logprobs[: len(entries)]

    def _finish(self, finish: Finish, now: float, queue_s: float | None) -> None:
        if finish.reason == "error":
            self.log.fail(from_code(finish.cause, finish.message))
        elif finish.reason == "cancelled" and finish.cause == QUEUE_TIMEOUT:
            self.log.fail(QueueTimeout(f"no step for it within {queue_s} s", param="queue_s"))
        else:
            self._end(finish.reason, now, finish.cause if finish.reason == "cancelled" else None)

    def _end(self, reason: FinishReason, now: float, cause: str | None = None) -> None:
        outcome = Outcome(
            finish_reason=reason,
            cause=cause,
            stop_sequence=self._detokenizer.stop_sequence,
            usage=self.log.usage,
            timing=self.stopwatch.timing(now),
        )
        if self.schema is None:
            self.log.end(outcome)
            return
        self.unjudged = outcome
        if reason != "stop":
            self.judge(valid=False)

    def judge(self, *, valid: bool | None) -> None:
        """Whether an answer that is `unjudged` keeps to its schema ends it."""
        assert self.unjudged is not None, "judged twice, or too soon"
        self.log.end(structs.replace(self.unjudged, guided=Guided(valid=valid, warnings=self._warnings)))
        self.unjudged = None


def open_choices(
    request: Request,
    params: SamplingParams,
    tokenizer: Tokenizer,
    submitted: float,
    warnings: tuple[str, ...] = (),
) -> list[Choice]:
    """One for each answer that ``request`` draws, with an empty log; ``warnings`` are about its grammar."""
    keeps_stop = params.include_stop_str_in_output
    grammar = request.grammar
    json = grammar is not None and grammar.kind == "json_schema"
    schema = grammar.text if grammar is not None and grammar.lenient else None
    return [
        Choice(
            Log("st_" + secrets.token_urlsafe(16), len(request.prompt), json=json),
            Detokenizer(
                tokenizer.decode,
                request.prompt,
                params.stop,
                min_tokens=params.min_tokens,
                include_stop=keeps_stop,
            ),
            submitted,
            tokenizer.token_bytes,
            keeps_stop,
            schema,
            warnings,
        )
        for _ in range(request.n)
    ]


class Answer:
    """One request's, told apart by `Delta.index`. Give it every delta of request ``number`` until it has ended.

    Whoever cancels or fails one of its choices means the request: all that are under way end with it.

    Args:
        submitted: when the request came; deadlines count from there.
    """

    def __init__(
        self, number: int, choices: Sequence[Choice], submitted: float, queue_s: float | None, total_s: float | None
    ) -> None:
        self.number = number
        self.choices = choices
        self.logs = [choice.log for choice in choices]
        self._queue_s = queue_s
        self._start_by = inf if queue_s is None else submitted + queue_s
        self._end_by = inf if total_s is None else submitted + total_s

    @property
    def ended(self) -> bool:
        return all(log.ended for log in self.logs)

    @property
    def started(self) -> bool:
        return self.logs[0].started

    @property
    def deadline(self) -> float:
        """When `expire` is to be called next."""
        return min(self._end_by, self._start_by)

    def expire(self, now: float) -> str | None:
        """The cause to abort it for, once per deadline that has passed."""
        if self._end_by <= now:
            self._end_by = self._start_by = inf
            return "timeout"
        if self._start_by <= now:
            self._start_by = inf
            return QUEUE_TIMEOUT
        return None

    def apply(self, delta: Delta, now: float) -> list[Abort]:
        """What one step did. Gives aborts for what ended here before it did in the core."""
        choice, finish = self.choices[delta.index], delta.finish
        if delta.queued_s is not None:
            self._start(delta.queued_s, delta.cached)
        if delta.prompt_logprobs:
            spelt = choice.spell(delta.prompt_logprobs)
            for log in self.logs:
                log.prompt_logprobs += spelt
        choice.log.computed = delta.computed
        aborts = []
        if was_open := not choice.over:
            choice.apply(delta, now, self._queue_s)
        open_ones = [other for other in self.choices if not other.over]
        if was_open and finish is None and choice.over:
            aborts.append(Abort(self.number, "stop", delta.index if open_ones else None))
        if was_open and finish is not None and finish.reason in ("cancelled", "error") and open_ones:
            for other in open_ones:
                other.finish(finish, now, self._queue_s)
            aborts.append(Abort(self.number, finish.cause))
        self.wake()
        return aborts

    def fail(self, error: StreamEngineError) -> None:
        """End what is under way in ``error``, after the text that was held."""
        for choice in self.choices:
            if not choice.log.ended:
                choice.fail(error)
        self.wake()

    def drop(self, error: StreamEngineError) -> None:
        """End what is under way in ``error``, as it stands."""
        for log in self.logs:
            if not log.ended:
                log.fail(error)
        self.wake()

    def wake(self) -> None:
        for log in self.logs:
            log.wake()

    def _start(self, queued_s: float, cached: int) -> None:
        self._start_by = inf
        for choice in self.choices:
            choice.log.started, choice.log.queue_position, choice.log.cached_tokens = True, None, cached
            choice.stopwatch.start(queued_s)


class Answers:
    """All that are under way. One leaves when its logs have ended."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """How many logs ended, by finish reason."""
        self._latencies = {name: Histogram(SECONDS) for name in (*LATENCIES, "inter_token")}
        self._by_number: dict[int, Answer] = {}
        self._by_stream: dict[str, Answer] = {}
        self._waiting: dict[int, Answer] = {}
        self._unjudged: list[tuple[Answer, Choice]] = []

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, answer: Answer) -> None:
        """Take in the newest one; it starts after all that wait."""
        for log in answer.logs:
            log.queue_position = len(self._waiting)
            self._by_stream[log.id] = answer
        self._by_number[answer.number] = answer
        self._waiting[answer.number] = answer

    def abort(self, log: Log, cause: str) -> list[Abort]:
        """The whole request of ``log``: its other answers too."""
        answer = self._by_stream.get(log.id)
        return [] if answer is None else [Abort(answer.number, cause)]

    def abort_all(self, cause: str) -> list[Abort]:
        return [Abort(number, cause) for number in self._by_number]

    def apply(self, deltas: Sequence[Delta], now: float) -> list[Abort]:
        """What one step did. Gives aborts for answers that ended here before they did in the core."""
        aborts = []
        waiting = len(self._waiting)
        for delta in deltas:
            answer = self._by_number.get(delta.request)
            if answer is None:
                continue  # it ended here, and the core did not know yet
            choice = answer.choices[delta.index]
            was_over = choice.over
            try:
                aborts += answer.apply(delta, now)
            except Exception:
                logger.exception("a delta could not be applied")
                answer.drop(EngineFailure("internal error"))
                aborts.append(Abort(delta.request, "stop"))
            if answer.started:
                self._waiting.pop(delta.request, None)
            if answer.ended:
                self._remove(answer)
            elif choice.unjudged is not None and not was_over:
                self._unjudged.append((answer, choice))
        if len(self._waiting) != waiting:
            self._move_up()
        return aborts

    def take_unjudged(self) -> list[tuple[Answer, Choice]]:
        """Those that have come to wait for `judge` since the last call."""
        unjudged, self._unjudged = self._unjudged, []
        return unjudged

    def judge(self, answer: Answer, choice: Choice, *, valid: bool | None) -> None:
        """See `Choice.judge`; what has failed meanwhile stays so."""
        if choice.log.ended:
            return
        choice.judge(valid=valid)
        answer.wake()
        if answer.ended:
            self._remove(answer)

    def expire(self, now: float) -> list[Abort]:
        """Aborts for those whose deadline has passed."""
        causes = [(answer.number, answer.expire(now)) for answer in self._by_number.values()]
        return [Abort(number, cause) for number, cause in causes if cause is not None]

    @property
    def deadline(self) -> float:
        """When `expire` is to be called next; ``inf`` is never."""
        return min((answer.deadline for answer in self._by_number.values()), default=inf)

    def fail_all(self, error: StreamEngineError) -> None:
        for answer in tuple(self._by_number.values()):
            answer.fail(error)
            self._remove(answer)

    def _remove(self, answer: Answer) -> None:
        for choice in answer.choices:
            outcome = choice.log.outcome
            self.ended["error" if outcome is None else outcome.finish_reason] += 1
            if outcome is not None:
                self._observe(outcome.timing, choice.stopwatch)
            del self._by_stream[choice.log.id]
        del self._by_number[answer.number]
        self._waiting.pop(answer.number, None)

    def _observe(self, timing: Timing, stopwatch: Stopwatch) -> None:
        for name in LATENCIES:
            ms = getattr(timing, f"{name}_ms")
            if ms is not None:
                self._latencies[name].observe(ms / 1000)
        for seconds, count in stopwatch.gaps():
            self._latencies["inter_token"].observe(seconds, count)

    def statistics(self) -> dict[str, float]:
        """Answers that ended, by finish reason, and their latencies as histograms in seconds."""
        found: dict[str, float] = {f"ended_{reason}": count for reason, count in self.ended.items()}
        for name, histogram in self._latencies.items():
            found |= histogram.statistics(f"{name}_s")
        return found

    def _move_up(self) -> None:
        for position, answer in enumerate(self._waiting.values()):
            for log in answer.logs:
                if log.queue_position != position:
                    log.queue_position = position
                    log.wake()
