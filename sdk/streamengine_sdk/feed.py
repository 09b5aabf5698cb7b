"""What arrived for one request, checked: the receiving end of a stream, without I/O.

The connection puts messages in, a `TokenStream` takes events out. A feed is held by its stream alone:
the connection knows it weakly, so nothing is kept for a stream that nobody reads any more.
"""

import zlib
from collections import deque
from typing import TypeVar

import anyio
from msgspec import UNSET, UnsetType

from streamengine_sdk import wire
from streamengine_sdk.errors import EngineError, ProtocolError, from_wire
from streamengine_sdk.events import Event, Result

T = TypeVar("T")
FeedMessage = wire.Accepted | wire.Progress | wire.Delta | wire.Done | wire.Error


class Feed:
    """Checks that tokens come without gap or repeat, and that the text is the one the server counted.

    Times are those of the event loop's clock, in seconds.
    """

    def __init__(self, id: str, started: float, *, with_tokens: bool = False, with_logprobs: bool = False) -> None:
        self.id = id
        self.started = started
        self.token_at: float | None = None
        self.events: deque[Event] = deque()
        self.texts: list[str] = []
        self.done: wire.Done | None = None
        self.error: EngineError | None = None
        self.stream_id: str | None = None
        self._tokens: list[int] | None = [] if with_tokens else None
        self._logprobs: list[wire.Logprob] | None = [] if with_logprobs else None
        self._usage: wire.Usage | None = None
        self._seq = 0
        self._bytes = 0
        self._crc32 = 0
        self._change: anyio.Event | None = None

    @property
    def over(self) -> bool:
        return self.done is not None or self.error is not None

    async def changed(self) -> None:
        """Wait for the next message or the end. Any number of tasks may wait."""
        if self._change is None:
            self._change = anyio.Event()
        await self._change.wait()

    def receive(self, message: FeedMessage, now: float) -> bool:
        """Take one message in; is it over with that? What breaks the protocol ends it in a `ProtocolError`."""
        assert not self.over, "the connection forgets a feed that is over"
        try:
            match message:
                case wire.Delta():
                    self._receive_delta(message, now)
                case wire.Done():
                    self._receive_done(message)
                case wire.Progress():
                    self.events.append(message)
                case wire.Accepted():
                    self.stream_id = message.stream
                case wire.Error():
                    self._usage = message.usage or None
                    raise from_wire(message)
        except EngineError as error:
            self.fail(error)
        self._notify()
        return self.over

    def fail(self, error: EngineError) -> None:
        """End it, unless it has ended already; ``error`` gets what had arrived as its ``partial``."""
        if not self.over:
            error.partial = self.result()
            self.error = error
            self._notify()

    def result(self) -> Result:
        """What arrived so far; all of it once ``done`` is there."""
        done = self.done
        return Result(
            text="".join(self.texts),
            token_ids=None if self._tokens is None else tuple(self._tokens),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            usage=done.usage if done else self._usage,
            timing=done.timing or None if done else None,
            finish_reason=done.finish_reason if done else None,
            stop_sequence=None if done is None or done.stop_sequence is UNSET else done.stop_sequence,
            cause=done.cause or None if done else None,
            stream_id=self.stream_id,
        )

    def _receive_delta(self, delta: wire.Delta, now: float) -> None:
        if delta.n < 1 or delta.seq - delta.n != self._seq:
            first = delta.seq - delta.n + 1
            raise ProtocolError(f"tokens {first} to {delta.seq} came after token {self._seq}")
        if self._tokens is not None:
            self._tokens += _each(delta.tokens, delta.n, "ids")
        if self._logprobs is not None:
            self._logprobs += _each(delta.logprobs, delta.n, "log-probabilities")
        data = delta.text.encode()
        self._seq = delta.seq
        self._bytes += len(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        self.token_at = now
        self.texts.append(delta.text)
        self.events.append(delta)

    def _receive_done(self, done: wire.Done) -> None:
        if done.seq != self._seq + 1:
            raise ProtocolError(f"the stream ended at {done.seq - 1} tokens, but {self._seq} came")
        if (done.check.bytes, done.check.crc32) != (self._bytes, self._crc32):
            raise ProtocolError(
                f"the text has {self._bytes} bytes with checksum {self._crc32}, "
                f"but the server counted {done.check.bytes} with {done.check.crc32}"
            )
        self.done = done
        self.events.append(done)

    def _notify(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None


def _each(items: list[T] | UnsetType, n: int, what: str) -> list[T]:
    found = items or []
    if len(found) != n:
        raise ProtocolError(f"a delta of {n} tokens holds {len(found)} {what}")
    return found
