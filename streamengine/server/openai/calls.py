"""One completion on its way: what is made of its streams for a client that waits and for one that streams."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from streamengine.bell import Bell
from streamengine.errors import SlowConsumer, StreamEngineError
from streamengine.server.http import error_body
from streamengine.server.openai.answers import (
    ChoiceReader,
    Echo,
    Shape,
    chunk_choice,
    finish_reason,
    first_choice,
    prompt_logprobs,
    usage,
    whole_choice,
)
from streamengine.server.openai.requests import Body, StreamOptions
from streamengine.server.openai.translate import in_words_of
from streamengine.server.sse import event
from streamengine.streams import Attachment, StreamRecord, Streams

DONE = b"data: [DONE]\n\n"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, as far as the form of the answer depends on it. ``id`` and ``created`` are in every part."""

    shape: Shape
    id: str
    created: int
    model: str
    body: Body
    logprobs: bool


class _Choice(NamedTuple):
    attachment: Attachment
    reader: ChoiceReader


class Call:
    """The streams of one call, read to their end or until `close`, which cancels what still runs.

    As `streamengine.server.sse.Events` it gives chunks, perhaps the usage, and ``[DONE]``; or, where a stream ends
    in an error, that and no more.
    """

    def __init__(self, asked: Asked, streams: Streams) -> None:
        self.bell = Bell()
        """Rings when there is more to read."""
        self._asked = asked
        self._streams = streams
        self._groups: list[list[_Choice]] = []
        self._options = asked.body.stream_options or StreamOptions()
        self._begun = asked.shape == "text"
        self._ended = False

    def add(self, records: Sequence[StreamRecord], echo: Echo | None) -> None:
        """The streams of the next prompt, and what is repeated in front of their answers."""
        first = len(self._groups) * self._n
        self._groups.append([])
        for index, record in enumerate(records, first):
            attachment = self._streams.attach(record, self.bell)
            reader = ChoiceReader(
                self._asked.shape,
                index,
                record.log,
                attachment.reader,
                logprobs=self._asked.logprobs,
                echo=echo,
            )
            self._groups[-1].append(_Choice(attachment, reader))

    def close(self) -> None:
        for choice in self._choices():
            self._streams.detach(choice.attachment, linger_s=0)

    @property
    def _n(self) -> int:
        return self._asked.body.n or 1

    def _choices(self) -> list[_Choice]:
        return [choice for group in self._groups for choice in group]

    def _usage(self) -> dict[str, Any]:
        return usage([[choice.reader.log for choice in group] for group in self._groups])

    def _read(self) -> None:
        for choice in self._choices():
            if choice.attachment.lapsed:
                raise SlowConsumer("the client reads so slowly that its log-probabilities cannot be kept")
            choice.reader.read()
            choice.attachment.acked = choice.attachment.reader.position

    # whole

    async def whole(self) -> bytes:
        """The response as JSON, once everything has ended.

        Raises:
            StreamEngineError: what the first stream ended in that did not end in an answer.
        """
        while True:
            self.bell.rearm()
            self._read()
            complete = [choice.reader for choice in self._choices() if choice.reader.complete]
            for reader in complete:
                finish_reason(reader.log)
            if len(complete) == len(self._choices()):
                break
            await self.bell.wait()
        if not self._asked.logprobs:
            return self._compose()
        # Twenty for each of thousands of tokens take a while; nobody else has these readers.
        return await anyio.to_thread.run_sync(self._compose)

    def _compose(self) -> bytes:
        choices = [self._whole_choice(index, reader) for index, reader in enumerate(self._chosen())]
        whole = {**self._head("text_completion", "chat.completion"), "choices": choices, "usage": self._usage()}
        if self._asked.body.prompt_logprobs is not None and self._asked.shape == "chat":
            whole["prompt_logprobs"] = prompt_logprobs(self._groups[0][0].reader.log)
        return msgspec.json.encode(whole)

    def _chosen(self) -> list[ChoiceReader]:
        """Where more were drawn than were asked for, the best."""
        chosen: list[ChoiceReader] = []
        for group in self._groups:
            readers = [choice.reader for choice in group]
            if len(readers) > self._n:
                readers.sort(key=lambda reader: reader.mean_logprob, reverse=True)
            chosen += readers[: self._n]
        return chosen

    def _whole_choice(self, index: int, reader: ChoiceReader) -> dict[str, Any]:
        piece = reader.take()
        assert piece is not None, "a log that has ended has a last piece"
        choice = whole_choice(self._asked.shape, index, piece)
        if self._asked.body.prompt_logprobs is not None and self._asked.shape == "text":
            choice["prompt_logprobs"] = prompt_logprobs(reader.log)
        return choice

    # in chunks

    async def settled(self, seconds: float) -> None:
        """Wait until nothing can be refused any more: a response that has begun has a good status. Not for longer than
        ``seconds``, since a client that hears nothing may give up.

        Raises:
            StreamEngineError: what the first stream ended in that did not end in an answer.
        """
        with anyio.move_on_after(seconds):
            for choice in self._choices():
                while not (choice.reader.log.started or choice.reader.log.ended):
                    self.bell.rearm()
                    await self.bell.wait()
        for choice in self._choices():
            if choice.reader.log.ended:
                finish_reason(choice.reader.log)

    @property
    def ended(self) -> bool:
        return self._ended

    def due(self) -> float:
        return inf

    def take(self) -> bytes:
        readers = [choice.reader for choice in self._choices()]
        data = b""
        if not self._begun:
            self._begun = True
            data = b"".join(self._chunk(first_choice(reader.index)) for reader in readers)
        try:
            self._read()
            for reader in readers:
                if (piece := reader.take()) is not None:
                    data += self._chunk(chunk_choice(self._asked.shape, reader.index, piece))
        except StreamEngineError as error:
            self._ended = True
            return data + event(msgspec.json.encode(error_body(in_words_of(self._asked.body, error))))
        if all(reader.ended for reader in readers):
            self._ended = True
            if self._options.include_usage:
                data += self._event([], {"usage": self._usage()})
            data += DONE
        return data

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        if self._options.continuous_usage_stats:
            return self._event([choice], {"usage": self._usage()})
        return self._event([choice], {"usage": None} if self._options.include_usage else {})

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        chunk = {**self._head("text_completion", "chat.completion.chunk"), "choices": choices, **more}
        return event(msgspec.json.encode(chunk))

    def _head(self, text: str, chat: str) -> dict[str, Any]:
        asked = self._asked
        kind = text if asked.shape == "text" else chat
        return {"id": asked.id, "object": kind, "created": asked.created, "model": asked.model}
