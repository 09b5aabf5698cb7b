"""Answers on their way through the core: what deltas and deadlines do to their logs.

Pure: time comes as an argument, and what the core is to be told is returned, for the engine to post.
"""

from collections import Counter
from collections.abc import Sequence
from logging import getLogger
from math import inf

from streamengine.errors import EngineFailure, QueueTimeout, StreamEngineError, from_code
from streamengine.link import Abort
from streamengine.log import Log, Outcome, Stopwatch
from streamengine.request import Delta, Finish, FinishReason
from streamengine.text import Detokenizer

STOP_TOKEN_CAUSES = ("eos", "stop_token")
QUEUE_TIMEOUT = "queue_timeout"
"""An abort's cause that ends an answer in `QueueTimeout`; with any other it is cancelled."""


logger = getLogger(__name__)


class Answer:
    """One request's. Give it every delta of request ``number`` until its log has ended, then none.

    Args:
        submitted: when the request came, in seconds like every other time here; deadlines count from there.
    """

    def __init__(
        self,
        number: int,
        log: Log,
        detokenizer: Detokenizer,
        submitted: float,
        queue_s: float | None = None,
        total_s: float | None = None,
    ) -> None:
        self.number = number
        self.log = log
        self._detokenizer = detokenizer
        self._stopwatch = Stopwatch(submitted)
        self._queue_s = queue_s
        self._start_by = inf if queue_s is None else submitted + queue_s
        self._end_by = inf if total_s is None else submitted + total_s

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

    def apply(self, delta: Delta, now: float) -> None:
        """What one step did. The log has ended afterwards if ``delta`` has a finish or completes a stop string."""
        log, finish = self.log, delta.finish
        if delta.queued_s is not None:
            log.started, log.queue_position = True, None
            self._start_by = inf
            self._stopwatch.start(delta.queued_s)
        log.computed = delta.computed
        self._stopwatch.tokens(len(delta.tokens), now)
        tokens, end_token = delta.tokens, None
        if finish is not None and finish.cause in STOP_TOKEN_CAUSES and tokens:
            tokens, end_token = tokens[:-1], tokens[-1]
        log.append(self._detokenizer.push(tokens))
        if finish is not None:
            log.append(self._detokenizer.finish(end_token))
        # A stop string that the last allowed token completes comes before the length.
        if self._detokenizer.stop_sequence is not None:
            self._end("stop", now)
        elif finish is not None:
            self._finish(finish, now)
        log.wake()

    def fail(self, error: StreamEngineError) -> None:
        """End it in ``error``, after the text that was held."""
        self.log.append(self._detokenizer.finish())
        self.log.fail(error)
        self.log.wake()

    def _finish(self, finish: Finish, now: float) -> None:
        if finish.reason == "error":
            self.log.fail(from_code(finish.cause, finish.message))
        elif finish.reason == "cancelled" and finish.cause == QUEUE_TIMEOUT:
            self.log.fail(QueueTimeout(f"no step for it within {self._queue_s} s", param="queue_s"))
        else:
            self._end(finish.reason, now, finish.cause if finish.reason == "cancelled" else None)

    def _end(self, reason: FinishReason, now: float, cause: str | None = None) -> None:
        self.log.end(
            Outcome(
                finish_reason=reason,
                cause=cause,
                stop_sequence=self._detokenizer.stop_sequence,
                usage=self.log.usage,
                timing=self._stopwatch.timing(now),
            )
        )


class Answers:
    """All that are under way. One leaves when its log has ended."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """How many ended, by finish reason."""
        self._by_number: dict[int, Answer] = {}
        self._by_stream: dict[str, Answer] = {}
        self._waiting: dict[int, Log] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, answer: Answer) -> None:
        """Take in the newest one; it starts after all that wait."""
        answer.log.queue_position = len(self._waiting)
        self._by_number[answer.number] = answer
        self._by_stream[answer.log.id] = answer
        self._waiting[answer.number] = answer.log

    def abort(self, log: Log, cause: str) -> list[Abort]:
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
                continue  # it was such an answer, and the core did not know yet
            try:
                answer.apply(delta, now)
            except Exception:
                logger.exception("a delta could not be applied")
                answer.log.fail(EngineFailure("internal error"))
                answer.log.wake()
            if answer.log.started:
                self._waiting.pop(delta.request, None)
            if answer.log.ended:
                self._remove(answer)
                if delta.finish is None:
                    aborts.append(Abort(delta.request, "stop"))
        if len(self._waiting) != waiting:
            self._move_up()
        return aborts

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
        outcome = answer.log.outcome
        self.ended["error" if outcome is None else outcome.finish_reason] += 1
        del self._by_number[answer.number]
        del self._by_stream[answer.log.id]
        self._waiting.pop(answer.number, None)

    def _move_up(self) -> None:
        for position, log in enumerate(self._waiting.values()):
            if log.queue_position != position:
                log.queue_position = position
                log.wake()
