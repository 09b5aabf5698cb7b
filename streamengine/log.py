"""The append-only log of one stream and its readers' positions.

Entry i (from 1) is one answer token: its id and the text that it completed, possibly empty. After the
last entry comes exactly one terminal: an `Outcome` or an error. Nothing is queued per reader: each
holds a position, takes a contiguous slice when it likes, and costs no memory while it is slow.
No I/O, no clock; waiting is done by whoever owns a `Wake`.
"""

import zlib
from collections.abc import Sequence
from typing import Protocol

import msgspec

from streamengine.calls.parser import CallHead, ToolCall
from streamengine.calls.runs import Runs
from streamengine.errors import InvalidRequest, ResumeGap, StreamEngineError
from streamengine.request import FinishReason
from streamengine.timing import Timing

ENTRY_BYTES, LOGPROB_BYTES = 100, 250
"""About what an entry costs beside its text, and what a log-probability does with its token's text."""


class Wake(Protocol):
    """Is told that there is something new to read. Must not block or raise."""

    def set(self) -> None: ...


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. ``completion_tokens`` includes the token that ended the answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Guided(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a schema that was not ``strict``: ``warnings`` say what of it was not enforced, ``valid`` whether
    the answer keeps to it all the same; None where that could not be told."""

    valid: bool | None
    warnings: tuple[str, ...] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream ended. ``cause`` says who cancelled (``client``, ``disconnect``, ``timeout``, ``shutdown``,
    ``operator``) and is None otherwise; ``stop_sequence`` is the stop string that hit."""

    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    cause: str | None = None
    stop_sequence: str | None = None
    guided: Guided | None = None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A natural logarithm of a probability that the model gave: before penalties, temperature and the rest.

    ``bytes`` are what the token writes by itself and ``text`` is that as text, with U+FFFD for parts of
    characters. ``rank`` is 1 for the likeliest. ``top`` are the likeliest tokens, best first.
    """

    token: int
    text: str
    bytes: bytes
    logprob: float
    rank: int
    top: tuple["TokenLogprob", ...] = ()


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous slice of a stream: entries ``seq - n + 1 .. seq``. ``logprobs`` are empty unless asked for.

    With ``call`` the text belongs to the arguments of that one, and no other slice has its id and name but the first.
    """

    seq: int
    n: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    call: CallHead | None = None


def _size(item: TokenLogprob) -> int:
    return LOGPROB_BYTES * (1 + len(item.top))


class Log:
    """One stream. Written by the engine, read by any number of `Reader`."""

    def __init__(self, id: str, prompt_tokens: int = 0, *, json: bool = False) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.seed: int | None = None
        """What its tokens are drawn with."""
        self.continued = 0
        """So many of its first entries are of tokens that came with the request. Some may be held back yet."""
        self.json = json
        """Its text is JSON, or the beginning of it: a grammar sees to that."""
        self.computed = 0
        """Prompt tokens whose KV is there; `started` says whether any step has run."""
        self.started = False
        self.queue_position: int | None = None
        """Requests of this engine that are to start before this one; None once it has started."""
        self.outcome: Outcome | None = None
        self.error: StreamEngineError | None = None
        self.error_usage: Usage | None = None
        self.cached_tokens = 0
        """Prompt tokens that were found in the prefix cache."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's second token and so on; empty unless asked for."""
        self.beam_score: float | None = None
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.logprobs_after = 0
        """The log-probabilities of so many entries were dropped."""
        self.size = 0
        """About what the entries hold in memory, in bytes."""
        self._crc32 = 0
        self._bytes = 0
        self.runs = Runs()
        self._wakes: list[Wake] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def ended(self) -> bool:
        return self.outcome is not None or self.error is not None

    @property
    def begun(self) -> bool:
        """There are entries of tokens that were made here."""
        return len(self) > self.continued

    @property
    def text(self) -> str:
        """Without the arguments of calls."""
        return self.runs.text(self._texts)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """As far as they have come."""
        return self.runs.tool_calls(self._texts)

    def text_between(self, begin: int, end: int) -> str:
        """Of the entries ``begin + 1 .. end``."""
        return "".join(self._texts[begin:end])

    @property
    def token_ids(self) -> list[int]:
        return list(self._tokens)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """One for each token, but for the first `logprobs_after`; empty unless asked for."""
        return list(self._logprobs)

    @property
    def has_logprobs(self) -> bool:
        return bool(self._logprobs)

    @property
    def usage(self) -> Usage:
        """So far; final once the log has ended."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self._tokens),
            cached_tokens=self.cached_tokens,
        )

    @property
    def check(self) -> tuple[int, int]:
        """``(bytes, crc32)`` of the whole text in UTF-8: a reader proves with it that nothing was lost."""
        return self._bytes, self._crc32

    def append(self, entries: Sequence[tuple[int, str]], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add ``(token id, text)`` entries, with a log-probability for each or none. Wakes nobody: see `wake`."""
        assert not self.ended, "an entry after the terminal"
        self._logprobs += logprobs
        self.size += ENTRY_BYTES * len(entries) + sum(map(_size, logprobs))
        for token, text in entries:
            self._tokens.append(token)
            self._texts.append(text)
            data = text.encode()
            self._bytes += len(data)
            self.size += len(data)
            self._crc32 = zlib.crc32(data, self._crc32)

    def switch(self, after: int, call: CallHead | None) -> None:
        """The texts of entries behind the first ``after``, yet to come, are arguments of ``call``, or text."""
        self.runs.add(after, call)
        self.size += ENTRY_BYTES

    def drop_logprobs(self, until: int) -> None:
        """Forget the log-probabilities of the first ``until`` entries; the text stays whole."""
        dropped = self._logprobs[: max(until - self.logprobs_after, 0)]
        del self._logprobs[: len(dropped)]
        self.logprobs_after += len(dropped)
        self.size -= sum(map(_size, dropped))

    def end(self, outcome: Outcome) -> None:
        """The good terminal. Wakes nobody: see `wake`."""
        assert not self.ended, "two terminals"
        self.outcome = outcome

    def fail(self, error: StreamEngineError) -> None:
        """The bad terminal, with the usage so far. Wakes nobody: see `wake`."""
        assert not self.ended, "two terminals"
        self.error, self.error_usage = error, self.usage

    def wake(self) -> None:
        """Tell every reader, once for all that a step has changed."""
        for wake in tuple(self._wakes):
            wake.set()

    def reader(self, wake: Wake, after: int = 0) -> "Reader":
        """A reader of the entries from ``after + 1`` on. What is there already wakes nobody: take first.

        Raises:
            InvalidRequest: ``after`` lies outside of the log.
            ResumeGap: log-probabilities behind it were dropped.
        """
        most = max(len(self), self.continued)
        if not 0 <= after <= most:
            raise InvalidRequest(f"after must be 0 to {most}, not {after}", param="after")
        if after < self.logprobs_after:
            raise ResumeGap(
                f"log-probabilities are kept after token {self.logprobs_after}, not after {after}",
                param="after",
                available_from=self.logprobs_after,
            )
        self.follow(wake)
        return Reader(self, wake, after)

    def follow(self, wake: Wake) -> None:
        """Wake ``wake`` from now on, until `unfollow`."""
        self._wakes.append(wake)

    def unfollow(self, wake: Wake) -> None:
        self._wakes.remove(wake)

    def _reach(self, begin: int, end: int, characters: int) -> int:
        """Where a slice from ``begin`` ends that has ``characters``, or ``end`` if it comes first."""
        for position in range(begin, end):
            characters -= len(self._texts[position])
            if characters <= 0:
                return position + 1
        return end

    def _slice(self, begin: int, end: int) -> TextDelta:
        dropped = self.logprobs_after  # a reader of these is let go before they are
        return TextDelta(
            seq=end,
            n=end - begin,
            text="".join(self._texts[begin:end]),
            token_ids=tuple(self._tokens[begin:end]),
            logprobs=tuple(self._logprobs[max(begin - dropped, 0) : max(end - dropped, 0)]),
            call=self.runs.call(begin),
        )


class Reader:
    """A position in a `Log`. Close it, or the log keeps waking its owner."""

    def __init__(self, log: Log, wake: Wake, position: int) -> None:
        self.position = position
        """Entries taken so far, or skipped."""
        self._log = log
        self._wake: Wake | None = wake

    @property
    def ended(self) -> bool:
        """Everything is read and the log has its terminal."""
        return self._log.ended and self.position >= len(self._log)

    def take(self, limit: int = 0, characters: int = 0) -> TextDelta | None:
        """All new entries as one slice; None if there are none. Where they are not 0, at most ``limit`` of them and
        no more than one beyond so many ``characters``. A slice has text of one kind: it ends where that changes."""
        begin, end = self.position, len(self._log)
        if (change := self._log.runs.end(begin)) is not None:
            end = min(end, change)
        if limit:
            end = min(end, begin + limit)
        if characters and end > begin + 1:
            end = self._log._reach(begin, end, characters)
        if begin >= end:
            return None
        self.position = end
        return self._log._slice(begin, end)

    def close(self) -> None:
        """Be woken no more. Safe to repeat."""
        if self._wake is not None:
            self._log.unfollow(self._wake)
            self._wake = None
