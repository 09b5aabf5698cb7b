"""From the engine's logs to OpenAI's words: whole answers, chunks, log-probabilities, usage. No I/O, no clock.

A `ChoiceReader` reads one log and gives `Piece`s; whole answers are one piece a choice, so that streamed and not
streamed answers cannot differ. Log-probabilities are one for each completion token, the one that ended the
answer and those of a stop string included; their ``text_offset`` counts characters of the returned text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from streamengine.calls.parser import CallHead
from streamengine.errors import EngineFailure, ShuttingDown
from streamengine.log import Guided, Log, Reader, TokenLogprob
from streamengine.text import Entry

Shape = Literal["chat", "text"]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no number for."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token: what it writes, where its text begins in that of its choice, and its log-probability; the first
    token of a prompt has none."""

    data: bytes
    offset: int
    item: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated in front of its answers: each token with its text, and what the first writes."""

    entries: tuple[Entry, ...]
    first: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice. ``logprobs`` are in the shape of its route, None where nobody asked; ``guided`` comes
    with the end where a schema was not ``strict``."""

    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    guided: Guided | None = None
    calls: tuple[tuple[CallHead, str], ...] = ()
    """What is new of the arguments of each call."""


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
        self._shape = shape
        self._logprobs = logprobs
        self._echo = echo
        self._texts: list[str] = []
        self._calls: list[tuple[CallHead, str]] = []
        self._tokens: list[Scored] = []
        self._offset = 0
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
        if self._echo is not None and (len(self.log) or self.log.ended):  # its log-probabilities are there by then
            self._repeat(self._echo)
            self._echo = None
        one_by_one = 1 if self._logprobs else 0  # to know which text is whose
        while (delta := self._reader.take(one_by_one)) is not None:
            for item in delta.logprobs:
                self._total, self._count = self._total + item.logprob, self._count + 1
                self._add(item.bytes, item)
            if delta.call is None:
                self._say(delta.text)
            elif delta.text:
                self._calls.append((delta.call, delta.text))

    def take(self) -> Piece | None:
        """What was read, if it is worth a chunk: text or the end.

        Raises:
            StreamEngineError: what the log ended in, if not in an answer.
        """
        text, finish, guided = "".join(self._texts), None, None
        if self._reader.ended and not self.ended:
            finish = finish_reason(self.log)
            guided = None if self.log.outcome is None else self.log.outcome.guided
            self.ended = True
        if not text and not self._calls and finish is None:
            return None
        shape = chat_logprobs if self._shape == "chat" else text_logprobs
        calls = tuple(self._calls)
        piece = Piece(text, shape(self._tokens) if self._logprobs else None, finish, guided, calls)
        self._texts, self._tokens, self._calls = [], [], []
        return piece

    def _repeat(self, echo: Echo) -> None:
        items: list[TokenLogprob | None] = [None, *self.log.prompt_logprobs]
        for number, (_, text) in enumerate(echo.entries):
            if self._logprobs:
                item = items[number]
                self._add(echo.first if item is None else item.bytes, item)
            self._say(text)

    def _add(self, data: bytes, item: TokenLogprob | None) -> None:
        if self._logprobs:
            self._tokens.append(Scored(data, self._offset, item))

    def _say(self, text: str) -> None:
        self._texts.append(text)
        self._offset += len(text)


def finish_reason(log: Log) -> str:
    """``stop``, ``length`` or ``tool_calls``, of a log that has ended. Raises the error of one that ended otherwise."""
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


def whole_choice(shape: Shape, index: int, piece: Piece) -> dict[str, Any]:
    if shape == "text":
        return _choice(index, {"text": piece.text}, piece)
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.calls:
        message |= {"content": piece.text or None, "tool_calls": _whole_calls(piece.calls)}
    return _choice(index, {"message": message}, piece)


def chunk_choice(shape: Shape, index: int, piece: Piece) -> dict[str, Any]:
    content: dict[str, Any] = {"content": piece.text} if piece.text else {}
    if piece.calls:
        content["tool_calls"] = [_call(head, text) for head, text in piece.calls]
    return _choice(index, {"text": piece.text} if shape == "text" else {"delta": content}, piece)


def _whole_calls(pieces: Sequence[tuple[CallHead, str]]) -> list[dict[str, Any]]:
    whole: dict[int, dict[str, Any]] = {}
    for head, text in pieces:
        if head.id is None:
            whole[head.index]["function"]["arguments"] += text
        else:
            whole[head.index] = {"id": head.id, "type": "function", "function": {"name": head.name, "arguments": text}}
    return list(whole.values())


def _call(head: CallHead, text: str) -> dict[str, Any]:
    if head.id is None:
        return {"index": head.index, "function": {"arguments": text}}
    return {
        "index": head.index,
        "id": head.id,
        "type": "function",
        "function": {"name": head.name, "arguments": text},
    }


def _choice(index: int, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
    more = {} if piece.guided is None else {"guided": piece.guided}
    return {"index": index, **said, "logprobs": piece.logprobs, "finish_reason": piece.finish_reason, **more}


def first_choice(index: int) -> dict[str, Any]:
    """The chunk with which each choice of a chat begins."""
    return _choice(index, {"delta": {"role": "assistant", "content": ""}}, Piece("", None, None))


def prompt_logprobs(log: Log) -> list[dict[str, Any] | None]:
    """In vLLM's shape: for each prompt token but the first, by id."""
    return [None, *({str(one.token): _by_id(one) for one in (*item.top, item)} for item in log.prompt_logprobs)]


def _by_id(item: TokenLogprob) -> dict[str, Any]:
    return {"logprob": _finite(item.logprob), "rank": item.rank, "decoded_token": item.text}


def chat_logprobs(tokens: Sequence[Scored]) -> dict[str, Any]:
    items = [token.item for token in tokens if token.item is not None]
    content = [{**_spelt(item), "top_logprobs": [_spelt(top) for top in item.top]} for item in items]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[Scored]) -> dict[str, Any]:
    items = [token.item for token in tokens]
    return {
        "tokens": [written(token.data) for token in tokens],
        "token_logprobs": [None if item is None else _finite(item.logprob) for item in items],
        "top_logprobs": [None if item is None else _top(item) for item in items],
        "text_offset": [token.offset for token in tokens],
    }


def _top(item: TokenLogprob) -> dict[str, float]:
    top: dict[str, float] = {}
    for one in (*item.top, item):  # two tokens may write the same: the likelier one counts
        top.setdefault(written(one.bytes), _finite(one.logprob))
    return top


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
