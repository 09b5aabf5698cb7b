"""Answers on their way through the core: what deltas and deadlines do to their logs.

Pure: time comes as an argument, and what the core is to be told is returned, for the engine to post.
"""

from collections import Counter
from collections.abc import Sequence
from logging import getLogger
from math import inf

from streamengine.choice import Choice
from streamengine.errors import EngineFailure, StreamEngineError
from streamengine.histogram import SECONDS, Histogram
from streamengine.link import Abort
from streamengine.log import Log
from streamengine.request import QUEUE_TIMEOUT, Delta
from streamengine.timing import Stopwatch, Timing

LATENCIES = ("ttft", "queue", "prefill", "decode", "total")
"""Of `Timing`, in seconds; between two tokens of an answer it is ``inter_token``."""

logger = getLogger(__name__)


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
        if delta.remote:
            for one in self.choices:
                one.stopwatch.remote_prefill = delta.remote
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
