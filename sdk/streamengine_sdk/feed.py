"""One request: what arrived for it, checked, and what has to be said for it. No I/O; time is an argument.

The protocol puts messages in, a `TokenStream` takes events out. A feed outlives connections: whichever carries it
is its ``carrier``. It is held by its stream alone, so nothing is kept for a stream that nobody reads any more.

    tokens      1 … acked … taken … seq        taken by the application, received by the feed
                    └── window tokens ──┘      what the server may send before the next ack
"""

import secrets
import zlib
from collections import deque
from math import inf
from typing import Literal, Protocol, TypeVar

import anyio
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from streamengine_sdk import wire
from streamengine_sdk.errors import EngineError, ProtocolError, StreamLost, Timeout, from_wire
from streamengine_sdk.events import Event, Result, ToolCall
from streamengine_sdk.output import Output
from streamengine_sdk.settings import Timeouts

T = TypeVar("T")
FeedMessage = wire.Accepted | wire.Progress | wire.Delta | wire.Value | wire.Done | wire.Error
Kind = Literal["first_token", "between", "total"]


class Carrier(Protocol):
    def post(self, message: wire.ClientMessage) -> None:
        """To be sent soon; never fails and never waits."""


class Feed:
    """Checks that tokens come without gap or repeat, and that the text is the one the server counted.

    Args:
        request: what starts the stream, or shows one that exists.
        now: when it is sent; the event loop's clock, in seconds, as all times here.
        continuations: how often the rest of the answer may be asked of another server, when the one that has the
            stream is gone.
        cut_s: how long one that the server's shutdown cut is held back for another server to take it.
    """

    def __init__(
        self,
        request: wire.Generate | wire.Attach,
        timeouts: Timeouts,
        now: float,
        output: Output | None = None,
        *,
        continuations: int = 0,
        cut_s: float = 0,
    ) -> None:
        self._shows_ids = request.delivery.token_ids
        if continuations and isinstance(request, wire.Generate):  # another server will want them
            request = replace(request, delivery=replace(request.delivery, token_ids=True))
        self.request = request
        self._continuations = continuations
        self._continued = 0
        self._cut_s = cut_s
        self._cut: tuple[wire.Done, float] | None = None  # and until when another server may take it
        self._seed: int | UnsetType = UNSET
        self.id = request.id
        self.events: deque[Event] = deque()
        self.done: wire.Done | None = None
        self.error: EngineError | None = None
        self.carrier: Carrier | None = None
        self.cancelled = False
        self.held = False
        """It waits to be sent, because the server takes no more at once: nothing is late."""
        self.attached = isinstance(request, wire.Attach)
        self.seq = request.after if isinstance(request, wire.Attach) else 0
        self.stream_id: str | None = None
        self._epoch: str | None = None
        self._output = output
        self._timeouts = timeouts
        self._started = self._asked_at = now
        self._token_at: float | None = None
        self._acked = self.seq
        self._readers = 0
        self._slow = False
        # By channel, and those of tool calls by index.
        self._texts: dict[str | int, list[str]] = {}
        self._calls: dict[int, wire.Call] = {}
        self._paths: set[str] = set()
        self._tokens: list[int] = []
        wants_logprobs = isinstance(request, wire.Generate) and request.logprobs
        self._logprobs: list[wire.Logprob] | None = [] if wants_logprobs else None
        self._usage: wire.Usage | None = None
        # Of the text before ``after`` nothing is known, so such a stream cannot be held against the checksum.
        self._checked = self.seq == 0
        self._bytes = 0
        self._crc32 = 0
        self._change: anyio.Event | None = None

    @property
    def over(self) -> bool:
        return self.done is not None or self.error is not None

    # what has to be said

    def opening(self, epoch: str | None) -> wire.Generate | wire.Attach:
        """What shows this stream on a connection to the server of ``epoch``. Raises `StreamLost`."""
        self._slow = False
        if self.stream_id is not None and self._epoch not in (None, epoch):
            self._leave_server("the server has restarted, and the stream is gone")
        if self.stream_id is None:
            return self.request
        self._acked = self.seq
        return wire.Attach(id=self.id, stream=self.stream_id, after=self.seq, delivery=self.request.delivery)

    def _leave_server(self, why: str) -> None:
        """Make the request one for the rest of the answer: any server gives the same, as the draws are those of the
        seed. Raises `StreamLost` with the reason why not."""
        request = self.request
        if not isinstance(request, wire.Generate):
            raise StreamLost(f"{why}; what it was asked for is not known here")
        if self.seq:
            if self.cancelled or not self._continuations:
                raise StreamLost(why)
            if len(self._tokens) < self.seq or (self._seed is UNSET and request.temperature != 0):
                raise StreamLost(f"{why}; it told neither ids nor seed, without which no other can go on")
            self._continuations -= 1
            key = secrets.token_hex(16)
            self.request = replace(request, continues=self._tokens.copy(), seed=self._seed, key=key)
        self.stream_id = None
        self._acked = self.seq

    def go(self, now: float) -> None:
        """It is sent; if it was held, only now."""
        if self.held:
            self.held = False
            self._started = self._asked_at = now
            self._notify()  # whoever waits has another deadline

    def cancel(self) -> None:
        """Ask for the end. Safe in ``__del__`` and from any thread. While nothing carries it, it is said later."""
        if not self.over and not self.cancelled:
            self.cancelled = True
            self.go_on()
            self._post(wire.Cancel(id=self.id))

    def go_on(self) -> None:
        """If the server stopped showing the stream because nobody read it: somebody does again."""
        if self._slow and not self.over:
            self._post(self.opening(self._epoch))

    def take(self, now: float) -> Event:
        """The next event goes to the application; there is one."""
        event = self.events.popleft()
        self._asked_at = now
        if isinstance(event, wire.Delta):
            self._acknowledge(event.seq)
        return event

    def wait_for_end(self, now: float, waiting: int) -> None:
        """Somebody began (1) or ceased (-1) to wait for the whole answer: until then all that comes is taken."""
        self._readers += waiting
        self._asked_at = now
        if self._readers:
            self.go_on()
            self._acknowledge(self.seq)

    def _acknowledge(self, seq: int) -> None:
        window = self.request.delivery.window
        if window and seq - self._acked >= max(1, window // 2) and not (self.over or self._slow):
            self._acked = seq
            self._post(wire.Ack(id=self.id, seq=seq))

    def _post(self, message: wire.ClientMessage) -> None:
        if self.carrier is not None:
            self.carrier.post(message)

    # deadlines

    def deadline(self, *, waiting: bool = True) -> tuple[float, Kind]:
        """When it is too late, and for what. Nobody is late while events are there that nobody takes."""
        if self.held:
            return inf, "total"
        limits: list[tuple[Kind, float | None, float]] = [("total", self._timeouts.total, self._started)]
        if waiting and self._token_at is None:
            limits.append(("first_token", self._timeouts.first_token, self._started))
        elif waiting and self._token_at is not None:
            limits.append(("between", self._timeouts.between, max(self._token_at, self._asked_at)))
        if self._cut is not None:
            limits.append(("between", 0, self._started if self.cancelled else self._cut[1]))
        return min((inf if seconds is None else start + seconds, kind) for kind, seconds, start in limits)

    def expire(self, now: float, *, waiting: bool = True) -> None:
        """End it if a deadline has passed."""
        at, kind = self.deadline(waiting=waiting)
        if now >= at and not self.over:
            self.cancel()
            if self._cut is not None:
                self._end_as_cut()
                return
            error = Timeout(f"the deadline {kind} of {getattr(self._timeouts, kind)} s passed")
            error.kind = kind
            self.fail(error)
            self.events.clear()  # what was not taken is in the error's partial

    # what arrives

    async def changed(self) -> None:
        """Wait for the next message or the end. Any number of tasks may wait."""
        if self._change is None:
            self._change = anyio.Event()
        await self._change.wait()

    def receive(self, message: FeedMessage, now: float, epoch: str | None = None) -> bool:
        """Take one message in; is it over with that? What breaks the protocol ends it in a `ProtocolError`."""
        try:
            match message:
                case wire.Delta():
                    self._receive_delta(message, now)
                case wire.Done():
                    self._receive_done(message, now)
                case wire.Value():
                    if message.path not in self._paths:  # may come again after a reconnect
                        self._paths.add(message.path)
                        self.events.append(message)
                case wire.Progress():
                    self.events.append(message)
                case wire.Accepted():
                    self._receive_accepted(message, epoch)
                case wire.Error():
                    self._receive_error(message)
        except EngineError as error:
            if isinstance(error, ProtocolError):
                self.cancel()  # we refuse what came, and the server does not know yet
            self.fail(error)
        self._notify()
        return self.over

    def fail(self, error: EngineError) -> None:
        """End it, unless it has ended already; ``error`` gets what had arrived as its ``partial``.

        One that was cut ends so: that is what became of it, and the error is only why no other server went on.
        """
        if self._cut is not None and not self.over:
            self._end_as_cut()
        elif not self.over:
            error.partial = self.result()
            self.error = error
            self._notify()

    def result(self) -> Result:
        """What arrived so far; all of it once ``done`` is there. Raises `OutputInvalid`."""
        done = self.done
        result = Result(
            text="".join(self._texts.get("text", ())),
            seq=self.seq,
            reasoning="".join(self._texts.get("reasoning", ())),
            tool_calls=tuple(
                ToolCall(id=call.id or None, name=call.name or None, arguments="".join(self._texts[index]))
                for index, call in sorted(self._calls.items())
            ),
            token_ids=tuple(self._tokens) if self._shows_ids else None,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            usage=done.usage if done else self._usage,
            timing=done.timing or None if done else None,
            finish_reason=done.finish_reason if done else None,
            stop_sequence=None if done is None or done.stop_sequence is UNSET else done.stop_sequence,
            guided=done.guided or None if done else None,
            cause=done.cause or None if done else None,
            stream_id=self.stream_id,
            continued=self._continued,
        )
        if self._output is None or done is None or done.finish_reason != "stop":
            return result
        return self._output.parsed(result)

    def _receive_error(self, error: wire.Error) -> None:
        known = self.stream_id is not None
        if error.code == "slow_consumer" and known:
            self._slow = True
            if self._readers:
                self.go_on()
        elif error.code == "stream_not_found" and known and self._continuations:
            self._leave_server(error.message)
            self._post(self.request)
        else:
            self._usage = error.usage or None
            raise from_wire(error)

    def _receive_accepted(self, accepted: wire.Accepted, epoch: str | None) -> None:
        if accepted.after != self.seq:
            raise ProtocolError(f"the server goes on after token {accepted.after}, not {self.seq}")
        if accepted.stream != self.stream_id:
            self._cut = None
            self._continued += isinstance(self.request, wire.Generate) and bool(self.request.continues)
        self.stream_id, self._epoch, self._seed = accepted.stream, epoch, accepted.seed

    def _receive_delta(self, delta: wire.Delta, now: float) -> None:
        if delta.n < 1 or delta.seq - delta.n != self.seq:
            first = delta.seq - delta.n + 1
            raise ProtocolError(f"tokens {first} to {delta.seq} came after token {self.seq}")
        if self._shows_ids:
            self._tokens += _each(delta.tokens, delta.n, "ids")
        elif delta.tokens:
            self._tokens += delta.tokens
        if self._logprobs is not None:
            self._logprobs += _each(delta.logprobs, delta.n, "log-probabilities")
        data = delta.text.encode()
        self.seq = delta.seq
        self._bytes += len(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        self._token_at = now
        if delta.call:
            self._calls.setdefault(delta.call.index, delta.call)
        self._texts.setdefault(delta.call.index if delta.call else delta.channel, []).append(delta.text)
        self.events.append(delta if self._shows_ids or delta.tokens is UNSET else replace(delta, tokens=UNSET))
        if self._readers:
            self._acknowledge(self.seq)

    def _receive_done(self, done: wire.Done, now: float) -> None:
        if done.seq != self.seq + 1:
            raise ProtocolError(f"the stream ended at {done.seq - 1} tokens, but {self.seq} came")
        if self._checked and (done.check.bytes, done.check.crc32) != (self._bytes, self._crc32):
            raise ProtocolError(
                f"the text has {self._bytes} bytes with checksum {self._crc32}, "
                f"but the server counted {done.check.bytes} with {done.check.crc32}"
            )
        if done.cause == "shutdown" and self._continuations and not (self.cancelled or self.attached):
            self._cut = self._cut or (done, now + self._cut_s)  # its connection ends next
            return
        self._end(done)

    def _end_as_cut(self) -> None:
        assert self._cut is not None, "it was cut"
        self._end(self._cut[0])
        self._notify()

    def _end(self, done: wire.Done) -> None:
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
