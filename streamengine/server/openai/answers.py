"""From the engine's logs to OpenAI's words: whole answers, chunks, log-probabilities, usage. No I/O, no clock.

A `ChoiceReader` reads one log and gives `Piece`s; whole answers are one piece a choice, so that streamed and not
streamed answers cannot differ. Log-probabilities are one for each completion token, the one that ended the
answer and those of a stop string included; their ``text_offset`` counts characters of the returned text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from streamengine.errors import EngineFailure, ShuttingDown, StreamEngineError
from streamengine.log import Log, Reader, TokenLogprob
from streamengine.text import Entry

Shape = Literal["chat", "text"]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated in front of its answers: its tokens with the text of each, and what the first,
    which has no log-probability, writes."""

    entries: tuple[Entry, ...]
    first: bytes

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.entries)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice. ``logprobs`` are in the shape of its route, None where nobody asked."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChoiceReader:
    """One choice of a call, on ``reader`` of its log. ``logprobs`` says whether they were asked for."""

    def __init__(
        self, shape: Shape, index: int, log: Log, reader: Reader, *, logprobs: bool = False, echo: Echo | None = None
    ) -> None:
        self.log = log
        self.index = index
        self.ended = False
        """The finish reason was taken."""
        self._reader = reader
        self._echo = echo
        self._logprobs = _SHAPES[shape]() if logprobs else None
        self._texts: list[str] = []
        self._total, self._count = 0.0, 0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens read; minus infinity without any."""
        return self._total / self._count if self._count else -inf

    @property
    def complete(self) -> bool:
        """Everything that will ever be there has been read."""
        return self._reader.ended

    def read(self) -> None:
        """Take what is new from the log."""
        self._read_echo()
        one_by_one = 1 if self._logprobs is not None else 0  # to know which text is whose
        while (delta := self._reader.take(one_by_one)) is not None:
            self._texts.append(delta.text)
            for item in delta.logprobs:
                self._total, self._count = self._total + item.logprob, self._count + 1
                if self._logprobs is not None:
                    self._logprobs.add(item, delta.text)

    def take(self) -> Piece | None:
        """What was read, if it is worth a chunk: text or the end.

        Raises:
            StreamEngineError: what the log ended in, if not in an answer.
        """
        text, finish = "".join(self._texts), None
        if self._reader.ended and not self.ended:
            finish = finish_reason(self.log)
            self.ended = True
        if not text and finish is None:
            return None
        self._texts = []
        return Piece(self.index, text, None if self._logprobs is None else self._logprobs.flush(), finish)

    def _read_echo(self) -> None:
        echo = self._echo
        if echo is None or not (len(self.log) or self.log.ended):  # its log-probabilities are there with the first
            return
        self._echo = None
        self._texts.append(echo.text)
        if self._logprobs is not None and self.log.prompt_logprobs:
            (_, text), *rest = echo.entries
            self._logprobs.add_first(echo.first, text)
            for (_, text), item in zip(rest, self.log.prompt_logprobs, strict=True):
                self._logprobs.add(item, text)


def finish_reason(log: Log) -> str:
    """``stop`` or ``length``, of a log that has ended. Raises the error of one that ended otherwise."""
    if log.error is not None:
        raise log.error
    assert log.outcome is not None, "a log that ended has a terminal"
    if log.outcome.finish_reason == "cancelled":
        cut = f"the answer was cut: {log.outcome.cause}"
        raise ShuttingDown(cut) if log.outcome.cause == "shutdown" else EngineFailure(cut)
    return log.outcome.finish_reason


def usage(groups: Sequence[Sequence[Log]]) -> dict[str, Any]:
    """Of all logs, grouped by prompt: each prompt counts once, and every answer drawn."""
    prompt = sum(logs[0].prompt_tokens for logs in groups)
    completion = sum(len(log) for logs in groups for log in logs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(logs[0].cached_tokens for logs in groups)},
    }


def whole_choice(shape: Shape, piece: Piece, index: int) -> dict[str, Any]:
    said = {"text": piece.text} if shape == "text" else {"message": {"role": "assistant", "content": piece.text}}
    return {"index": index, **said, "logprobs": piece.logprobs, "finish_reason": piece.finish_reason}


def chunk_choice(shape: Shape, piece: Piece) -> dict[str, Any]:
    said: dict[str, Any] = {"text": piece.text}
    if shape == "chat":
        said = {"delta": {"content": piece.text} if piece.text else {}}
    return {"index": piece.index, **said, "logprobs": piece.logprobs, "finish_reason": piece.finish_reason}


def first_choice(index: int) -> dict[str, Any]:
    """The chunk with which each choice of a chat begins."""
    return {
        "index": index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }


def prompt_logprobs(log: Log) -> list[dict[str, Any] | None]:
    """In vLLM's shape: for each prompt token but the first, by id."""
    return [None, *({str(one.token): _by_id(one) for one in (*item.top, item)} for item in log.prompt_logprobs)]


def _by_id(item: TokenLogprob) -> dict[str, Any]:
    return {"logprob": _finite(item.logprob), "rank": item.rank, "decoded_token": item.text}


class ChatLogprobs:
    """``content``: one object for each token."""

    def __init__(self) -> None:
        self._content: list[dict[str, Any]] = []

    def add(self, item: TokenLogprob, text: str) -> None:
        self._content.append({**_spelt(item), "top_logprobs": [_spelt(top) for top in item.top]})

    def add_first(self, data: bytes, text: str) -> None:
        raise StreamEngineError("a chat has no echo")

    def flush(self) -> dict[str, Any]:
        content, self._content = self._content, []
        return {"content": content, "refusal": None}


class TextLogprobs:
    """Four lists, of equal length."""

    def __init__(self) -> None:
        self._offset = 0
        self._clear()

    def add(self, item: TokenLogprob, text: str) -> None:
        top: dict[str, float] = {}
        for one in (*item.top, item):  # two tokens may write the same: the likelier one counts
            top.setdefault(written(one.bytes), _finite(one.logprob))
        self._add(item.bytes, text, _finite(item.logprob), top)

    def add_first(self, data: bytes, text: str) -> None:
        """The first token of a prompt: nothing comes before it, so nothing says how likely it is."""
        self._add(data, text, None, None)

    def flush(self) -> dict[str, Any]:
        lists = self._lists
        self._clear()
        return lists

    def _add(self, data: bytes, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        entry = {"tokens": written(data), "token_logprobs": logprob, "top_logprobs": top, "text_offset": self._offset}
        for name, value in entry.items():
            self._lists[name].append(value)
        self._offset += len(text)

    def _clear(self) -> None:
        self._lists: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }


_SHAPES: dict[Shape, type[ChatLogprobs] | type[TextLogprobs]] = {"chat": ChatLogprobs, "text": TextLogprobs}


def written(data: bytes) -> str:
    """A token as text, or as ``bytes:\\xe2\\x82`` where it is a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _spelt(item: TokenLogprob) -> dict[str, Any]:
    return {"token": written(item.bytes), "logprob": _finite(item.logprob), "bytes": list(item.bytes)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
